"""Detect, decide, record: what the run does when its numbers go wrong."""
