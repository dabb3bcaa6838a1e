"""Deduplication of documents (exact, near) and lines; see docs/dedup.md.

`search.DuplicateStep` finds duplicate documents, `lines.LineStep` repeated lines in the others.
"""
