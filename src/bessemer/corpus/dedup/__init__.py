"""Deduplication: whole documents (exact, near), paragraphs, and long spans.

`find_duplicates` judges whole documents; `remove_paragraphs` and `remove_substrings` cut parts out of those that
stay. What each does, which keys it has, and what it takes: docs/dedup.md.
"""

from bessemer.corpus.dedup.edits import Edit, EditStatistics
from bessemer.corpus.dedup.find import find_duplicates, judge
from bessemer.corpus.dedup.paragraphs import filter_bytes, insert_paragraphs, paragraph_filter, remove_paragraphs
from bessemer.corpus.dedup.reading import earlier_files, parquet_tables
from bessemer.corpus.dedup.substrings import remove_substrings
from bessemer.corpus.dedup.verdicts import EXACT, KEPT, NEAR, DedupStatistics, Verdicts, packed

__all__ = [
    "EXACT", "KEPT", "NEAR", "DedupStatistics", "Edit", "EditStatistics", "Verdicts", "earlier_files", "filter_bytes",
    "find_duplicates", "insert_paragraphs", "judge", "packed", "paragraph_filter", "parquet_tables", "remove_paragraphs",
    "remove_substrings",
]  # fmt: skip
