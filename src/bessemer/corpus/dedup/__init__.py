"""Deduplication of whole documents (exact, near), paragraphs, and long spans; see docs/dedup.md.

`search.find_duplicates` finds duplicate documents; `paragraphs.remove_paragraphs` and `substrings.remove_substrings` edit the
others. `verdicts` is light; the other modules load NumPy.
"""
