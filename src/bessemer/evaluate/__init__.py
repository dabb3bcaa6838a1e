"""Held-out loss and bits per byte, the byte 5-gram and PPMd for comparison, and generated text."""
