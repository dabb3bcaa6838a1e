"""Errors, console output, logs, hashes and stop signals, used by every other package."""
