"""The door to deduplication of whole documents; light to import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bessemer.corpus.dedup.reading import parquet_tables
from bessemer.corpus.dedup.verdicts import Verdicts
from bessemer.recipe import Dedup


def find_duplicates(cleaned: Sequence[Path], settings: Dedup, scratch: Path, sources: Sequence[str] = ()) -> Verdicts:
    """Judge all rows of the `cleaned` Parquet files that passed the rules.

    `scratch` is a folder for signatures, made and removed here; `sources` are the sources in the order of the recipe
    (keep = "first-source"). Raises InputError for an earlier corpus that is not there, for an identity that occurs
    twice, and for keep = "quality" without scores.
    """
    from bessemer.corpus.dedup.judging import judge

    return judge(parquet_tables(cleaned), settings, scratch, sources)
