"""Deduplication of documents (exact, near) and lines; see docs/how-to/deduplicate.md.

`search.DuplicateStep` finds duplicate documents, `lines.LineStep` repeated lines in the others.
"""
