"""Deduplication of whole documents (exact, near), paragraphs, and long spans; see docs/dedup.md.

`judging.judge` finds duplicate documents; `paragraphs.remove_paragraphs` and `substrings.remove_substrings` edit the
others. The names imported here are light; the other modules load NumPy.
"""

from bessemer.corpus.dedup.verdicts import (
    EXACT,
    KEPT,
    NEAR,
    DedupStatistics,
    Edit,
    EditStatistics,
    Tables,
    Verdicts,
    earlier_files,
    packed,
    parquet_tables,
)

__all__ = [
    "EXACT", "KEPT", "NEAR", "DedupStatistics", "Edit", "EditStatistics", "Tables", "Verdicts", "earlier_files",
    "packed", "parquet_tables",
]  # fmt: skip
