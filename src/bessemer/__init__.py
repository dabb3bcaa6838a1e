"""Bessemer trains language models, from raw text to a verified, exported model."""

__version__ = "0.1.0"
