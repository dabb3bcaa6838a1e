"""Tokenizers: training, loading, encoding and decoding, chat templates."""

from bessemer.tokens.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
