"""Whole runs: prepare a run, do its stages, and reuse, resume or extend what exists."""
