"""A run from end to end: prepare it, do its stages, reuse, resume or extend what exists."""
