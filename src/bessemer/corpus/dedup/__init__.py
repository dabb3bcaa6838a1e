"""Deduplication of documents (exact and near) and of lines. See docs/how-to/deduplicate.md.

`search.DuplicateStep` rejects duplicate documents, and `lines.LineStep` then cuts repeated lines out of the others.
"""
