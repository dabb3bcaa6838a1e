"""The compiled way through a byte-level BPE: built from a tokenizer.json's description, one per tokenizer.

Which characters are letters, numbers and white space is asked of the regex engine that a tokenizer.json runs under, not of
Python's tables: the two may be of different Unicode versions, and the ids would differ with them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.tokens import patterns
from bessemer.tokens.pieces import byte_alphabet

if TYPE_CHECKING:
    from bessemer.tokens.bytepair import Tables

# Letters, numbers and spaces are all in the first four planes and the tags of plane 14; what lies between and above is
# unassigned or for private use.
PROBED = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE0200))
CODE_POINTS = 0x110000
CONTRACTIONS = {"none": 0, "lower": 1, "any": 2}
WHITE_SPACE = {"runs": 0, "lines": 1, "indentation": 2, "single": 3}


@dataclass(frozen=True)
class Shape:
    """How a byte-level BPE cuts text: by which pattern, and whether digits stand alone before the pattern is applied."""

    split: patterns.Split | None
    regex: str
    digits_first: bool = False
    prefix_space: bool = False  # a space before every text


def shape_of(description: dict[str, Any]) -> Shape | None:
    """How a tokenizer.json cuts text, if it is a byte-level BPE that merges bytes alone; else None.

    An added token that is not special is found in every text before anything is cut: such a tokenizer is left to the
    library, as is one with another normalizer than a space put before the text.
    """
    model = description["model"]
    bare = model.get("type", "BPE") == "BPE" and not any(
        model.get(key)
        for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    )
    if not bare or any(not token["special"] for token in description["added_tokens"]):
        return None
    normalizer = description.get("normalizer")
    prefix = normalizer == {"type": "Prepend", "prepend": " "}
    if normalizer is not None and not prefix:
        return None
    first = description.get("pre_tokenizer") or {}
    steps = list(first.get("pretokenizers", [first]))
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    digits_first = steps[0] == {"type": "Digits", "individual_digits": True}
    if digits_first:
        steps = steps[1:]
    if len(steps) == 1 and steps[0].get("use_regex", True):
        return Shape(patterns.GPT2, patterns.GPT2.regex, digits_first, prefix)
    if digits_first or len(steps) != 2 or steps[1].get("use_regex", True):
        return None
    split = steps[0]
    plain = split.get("type") == "Split" and split.get("behavior") == "Isolated" and not split.get("invert")
    regex = split.get("pattern", {}).get("Regex") if plain else None
    return None if regex is None else Shape(patterns.known(regex), regex, False, prefix)


class Engine:
    """Encodes byte strings; safe to call from several threads, each of which keeps its own memory."""

    def __init__(self, description: dict[str, Any], shape: Shape) -> None:
        """shape.split must be known; raises KeyError where the vocabulary lacks a byte or a merge's parts."""
        self._tables = _tables(description, shape)
        self._prefix = b" " if shape.prefix_space else b""
        self._local = threading.local()

    def encode(self, texts: Sequence[bytes], end_of_text: int = -1) -> list[npt.NDArray[np.int32]]:
        """Ids of each UTF-8 text, `end_of_text` appended unless it is -1."""
        from bessemer.tokens import bytepair

        if self._prefix:
            texts = [self._prefix + text if text else text for text in texts]
        return self._encoded(texts, lambda *rest: bytepair.encode(rest[0], rest[1], end_of_text, *rest[2:]))

    def merge_alone(self, pieces: Sequence[bytes]) -> list[npt.NDArray[np.int32]]:
        """Ids of byte strings, whole characters or not, that are each one piece, whatever the pattern says."""
        from bessemer.tokens import bytepair

        return self._encoded(pieces, bytepair.merge_pieces)

    def _encoded(self, texts: Sequence[bytes], compiled: Callable[..., int]) -> list[npt.NDArray[np.int32]]:
        from bessemer.tokens import bytepair

        joined = np.frombuffer(b"".join(texts) or b"\0", dtype=np.uint8)
        starts = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(text) for text in texts], out=starts[1:])
        out = np.empty(int(starts[-1]) + len(texts) + bytepair.SHORT, dtype=np.int32)
        ends = np.empty(len(texts) + 1, dtype=np.int64)
        if not hasattr(self._local, "scratch"):
            self._local.scratch = bytepair.scratch()
        done = compiled(joined, starts, self._tables, self._local.scratch, out, ends)
        if done < 0:
            raise ValueError("a piece longer than a window cannot be merged in windows by this vocabulary")
        return [out[low:high].copy() for low, high in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def build(description: dict[str, Any], shape: Shape) -> Engine | None:
    """The engine of a tokenizer.json; None where the vocabulary is not one that bytes and merges alone give."""
    if shape.split is None:
        return None
    try:
        engine = Engine(description, shape)
    except KeyError:
        return None
    if description["model"].get("ignore_merges") and not _merges_reach_all(description, engine, shape):
        return None
    return engine


def _merges_reach_all(description: dict[str, Any], engine: Engine, shape: Shape) -> bool:
    """Whether each token is what its own bytes merge to; looking a piece up before merging then changes nothing."""
    special = {token["content"] for token in description["added_tokens"]}
    of, tokens = byte_alphabet(), description["model"]["vocab"]
    whole = {name: number for name, number in tokens.items() if name not in special and all(c in of for c in name)}
    merged = engine.merge_alone([bytes(of[character] for character in name) for name in whole])
    return all(ids.tolist() == [number] for ids, number in zip(merged, whole.values(), strict=True))


def _tables(description: dict[str, Any], shape: Shape) -> Tables:
    from bessemer.tokens.bytepair import Tables

    vocabulary, split = description["model"]["vocab"], shape.split
    assert split is not None
    byte_ids = np.empty(256, dtype=np.int32)
    for character, byte in byte_alphabet().items():
        byte_ids[byte] = vocabulary[character]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in description["model"]["merges"]]
    size = 1 << max((2 * len(merges)).bit_length(), 4)
    keys, ranks = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    ids = np.zeros(size, dtype=np.int32)
    for rank, (left, right) in enumerate(merges):
        key = vocabulary[left] << 32 | vocabulary[right]
        slot = (((key * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF) >> 20) & (size - 1)
        while keys[slot] >= 0 and keys[slot] != key:
            slot = (slot + 1) & (size - 1)
        keys[slot], ranks[slot], ids[slot] = key, rank, vocabulary[left + right]
    choices = np.array(
        [
            CONTRACTIONS[split.contractions], split.any_prefix, split.digits, split.digits_space, split.line_ends,
            WHITE_SPACE[split.white_space], shape.digits_first,
        ],
        dtype=np.int64,
    )  # fmt: skip
    return Tables(classes(), byte_ids, keys, ranks, ids, choices)


@cache
def classes() -> npt.NDArray[np.uint8]:
    """The class of every code point (bits of `bytepair`), as the library that runs a tokenizer.json sees it."""
    from tokenizers import Regex, pre_tokenizers

    from bessemer.tokens.bytepair import DIGIT, LETTER, LINE_END, NUMBER, SPACE

    table = np.zeros(CODE_POINTS, dtype=np.uint8)
    for span in PROBED:
        text = "".join(map(chr, span))
        for bit, regex in ((LETTER, r"\P{L}+"), (NUMBER, r"\P{N}+"), (SPACE, r"\S+")):
            for _, (low, high) in pre_tokenizers.Split(Regex(regex), "removed").pre_tokenize_str(text):
                table[span.start + low : span.start + high] |= bit
        for piece, (low, high) in pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(text):
            # A character alone between two others is a digit, or a lone one between two digits: ask for it alone.
            if high - low == 1 and _is_digit(piece):
                table[span.start + low] |= DIGIT
    table[[10, 13]] |= LINE_END
    return table


def _is_digit(character: str) -> bool:
    from tokenizers import pre_tokenizers

    return len(pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(character + "a")) == 2
