"""Held-out loss and bits per byte, the byte 5-gram beside it, and generated text."""
