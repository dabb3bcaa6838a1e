"""Deduplication: whole documents (exact, near), paragraphs, and long spans.

`judging.judge` judges whole documents; `paragraphs.remove_paragraphs` and `substrings.remove_substrings` cut parts
out of those that stay. What is named here is light to import; the other modules load NumPy and are imported where they
are used. What each method does, which keys it has, and what it takes: docs/dedup.md.
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
