"""Measures what this machine does: products, attention, passes over memory, the host, collectives and the disk."""
