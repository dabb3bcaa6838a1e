"""Held-out loss and bits per byte, the byte 5-gram for comparison, and generated text."""
