"""Where words begin in a sequence of tokens, for hiding whole words.

A word byte is an ASCII letter or digit, or any byte of a character outside ASCII. A token goes on with the word of the
token before it when it begins with a word byte and the one before ends with one; else it begins a word. So the space or
sign that a byte-level BPE puts before letters belongs to the word, digits in a row are one word however they are cut,
`snake_case` is two words, and text without spaces, as Chinese is written, is one word up to its next sign of ASCII.
Special tokens are words of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class WordEdges:
    """By token id: whether it begins with something that is no word byte, and whether it ends with such."""

    opens: Bools
    closes: Bools

    @classmethod
    def of(cls, pieces: list[bytes]) -> WordEdges:
        """The table of a vocabulary. pieces: the bytes of each id, none for special tokens."""
        return cls(
            np.array([not piece or not _is_word_byte(piece[0]) for piece in pieces]),
            np.array([not piece or not _is_word_byte(piece[-1]) for piece in pieces]),
        )

    def starts(self, ids_T: npt.NDArray[Any]) -> Bools:
        """Whether each token of a sequence begins a word; the first one does."""
        starts_T: Bools = self.opens[ids_T]
        starts_T[1:] |= self.closes[ids_T[:-1]]
        starts_T[:1] = True
        return starts_T


def _is_word_byte(byte: int) -> bool:
    return byte >= 0x80 or chr(byte).isalnum()
