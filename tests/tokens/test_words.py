import re
from pathlib import Path

import numpy as np
import pytest

from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.words import WordEdges


def test_the_table_by_hand() -> None:
    pieces = [b"", b" the", b"re", b"(", b"x1", b"_case", b"\n\n", "ß".encode(), b" ", b"a."]
    edges = WordEdges.of(pieces)
    assert edges.opens.tolist() == [True, True, False, True, False, True, True, False, True, False]
    assert edges.closes.tolist() == [True, False, False, True, False, False, True, False, True, True]
    # " the|re" "(" "x1" "_case|ß" "\n\n" " " "re" "" "a." "a.": what follows a sign, a space or a special token begins anew
    ids = np.array([1, 2, 3, 4, 5, 7, 6, 8, 2, 0, 9, 9])
    starts = [True, False, True, True, True, False, True, True, True, True, True, True]
    assert edges.starts(ids).tolist() == starts


def test_a_sequence_that_begins_within_a_word_begins_one() -> None:
    assert WordEdges.of([b"a"]).starts(np.array([0, 0])).tolist() == [True, False]


def test_words_of_real_text_are_runs_of_letters_and_digits() -> None:
    """On text of ASCII, word starts lie exactly where a regular expression over the characters puts them."""
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    tokenizer = Tokenizer.train([text], 400, "<|endoftext|>")
    sample = "".join(character for character in text if character.isascii())[:4000]
    ids = np.array(tokenizer.encode(sample))
    pieces = tokenizer.token_pieces()
    starts = WordEdges.of(pieces).starts(ids)
    ends = np.cumsum([len(pieces[token]) for token in ids])
    inside = {
        place for found in re.finditer(r"[A-Za-z0-9]+", sample) for place in range(found.start() + 1, found.end())
    }
    for start, first in zip([0, *ends[:-1]], starts, strict=True):
        assert first == (start not in inside)
