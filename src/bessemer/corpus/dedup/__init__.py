"""Deduplication: whole documents (exact, near), paragraphs, and long spans.

`find_duplicates` judges whole documents; `paragraphs` and `substrings` cut parts out of those that stay. What each
does, which keys it has, and what it takes: docs/dedup.md.
"""

from bessemer.corpus.dedup.find import find_duplicates, judge
from bessemer.corpus.dedup.verdicts import EXACT, KEPT, NEAR, DedupStatistics, Verdicts, packed

__all__ = ["EXACT", "KEPT", "NEAR", "DedupStatistics", "Verdicts", "find_duplicates", "judge", "packed"]
