"""The guard: detects a sick step or run, decides on an answer, and records it."""
