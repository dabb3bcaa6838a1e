"""Text to token ids and back: training, loading, encoding, chat templates."""

from bessemer.tokens.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
