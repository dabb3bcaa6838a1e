"""Deduplication of documents (exact, near) and lines; see docs/dedup.md.

`search.find_duplicates` finds duplicate documents, `lines.find_lines` repeated lines in the others.
"""
