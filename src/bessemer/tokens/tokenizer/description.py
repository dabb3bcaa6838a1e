"""Facts read from a tokenizer.json: the bytes of each token, where words begin, and which ids are put around a text.

byte-level BPE      a character of the token is a byte (GPT-2's alphabet): exact
BPE, Unigram with ▁ ▁ is a space, <0x0A> a byte where the model falls back on bytes, the rest is UTF-8; a ▁ put before every
                    text is one byte more than the text has
WordPiece           ##x continues a word; any other token begins one and includes a space, though white space is not kept
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Bools = npt.NDArray[np.bool_]


@cache
def byte_alphabet() -> dict[str, int]:
    """Return a dict from each character that stands for a byte in GPT-2's tokens to the byte (openai/gpt-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def kind_of(description: dict[str, Any]) -> str:
    """Return the kind of a tokenizer.json's content: byte-level, bpe, unigram, wordpiece or wordlevel."""
    if any(step.get("type") == "ByteLevel" for step in _steps(description.get("pre_tokenizer"), "pretokenizers")):
        return "byte-level"
    return str(description["model"].get("type", "BPE")).lower()


def token_byte_values(description: dict[str, Any], vocabulary: dict[str, int], special: set[int]) -> list[bytes]:
    """Return the bytes of text that each id stands for; empty for special tokens.

    Args:
        description: The content of the tokenizer.json.
        vocabulary: The id of every token, added tokens included.
        special: The ids of special tokens.
    """
    kind, model = kind_of(description), description["model"]
    pieces = [b""] * (max(vocabulary.values()) + 1)
    added = {token["id"] for token in description["added_tokens"]}
    alphabet = byte_alphabet()
    continuation = model.get("continuing_subword_prefix") or "##"
    for token, number in vocabulary.items():
        if number in special or token == model.get("unk_token"):
            continue
        if number in added:
            pieces[number] = token.encode()
        elif kind == "byte-level":
            known = all(character in alphabet for character in token)
            pieces[number] = bytes(alphabet[character] for character in token) if known else token.encode()
        elif kind == "wordpiece":
            continues = token.startswith(continuation)
            pieces[number] = token[len(continuation) :].encode() if continues else b" " + token.encode()
        elif model.get("byte_fallback") and (byte := BYTE_TOKEN.fullmatch(token)):
            pieces[number] = bytes([int(byte[1], 16)])
        else:
            pieces[number] = token.replace(SPACE_MARK, " ").encode()
    return pieces


def without_special(description: dict[str, Any], tokens: Iterable[str]) -> dict[str, Any]:
    """Return a tokenizer.json's content in which no text is encoded as one of `tokens`.

    These tokens get random names, and merges that produce them are left out. All ids are kept.
    """
    nonce = secrets.token_hex(8)
    new = {name: f"\ufdd0{nonce}{number}" for number, name in enumerate(tokens)}
    model, added = dict(description["model"]), description["added_tokens"]
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: (token, score) in the order of the ids
        model["vocab"] = [(new.get(token, token), score) for token, score in vocabulary]
    else:
        model["vocab"] = {new.get(token, token): number for token, number in vocabulary.items()}
    if "merges" in model:
        pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if a not in new and b not in new and a + b not in new]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = new.get(unknown, unknown)
    added = [{**token, "content": new.get(token["content"], token["content"])} for token in added]
    return {**description, "model": model, "added_tokens": added, "post_processor": None}


def changes(description: dict[str, Any]) -> list[str]:
    """Return the types of a tokenizer.json's normalizer steps in lower case, such as nfc or prepend."""
    return [str(step.get("type")).lower() for step in _steps(description.get("normalizer"), "normalizers")]


def prefix_of(description: dict[str, Any]) -> bytes:
    """Return the bytes that the tokenizer puts before every text: a space, or nothing."""
    for step in _steps(description.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            return str(step.get("prepend")).replace(SPACE_MARK, " ").encode()
    for step in _steps(description.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            return b" "
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return b" "
    return b""


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer of a tokenizer.json as a flat list; empty for None.

    `inner` is the key under which a part of type "Sequence" has its steps.
    """
    if not part:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(inner, []) for step in _steps(child, inner)]
    return [part]


@dataclass(frozen=True)
class WordEdges:
    """Word boundaries of tokens, for whole-word masking.

    Word bytes are ASCII letters and digits, and bytes of characters outside ASCII. A token continues the word of the
    previous token when the bytes on both sides of the border are word bytes. So the space that a byte-level BPE puts
    before letters belongs to the word, `snake_case` is two words, and text without spaces is one word up to its next
    ASCII sign. Special tokens are words.

    Attributes:
        opens: For each id, True if its first byte is not a word byte, (vocabulary,).
        closes: For each id, True if its last byte is not a word byte, (vocabulary,).
    """

    opens: Bools
    closes: Bools

    @classmethod
    def from_pieces(cls, pieces: list[bytes]) -> WordEdges:
        """Find the boundaries from `pieces`, the bytes of each id (empty for special tokens)."""
        word = [byte >= 0x80 or chr(byte).isalnum() for byte in range(256)]
        first, last = ([not piece or not word[piece[end]] for piece in pieces] for end in (0, -1))
        return cls(np.array(first), np.array(last))

    def starts(self, ids_T: npt.NDArray[Any]) -> Bools:
        """Return a mask of the tokens of a sequence that begin a word, (tokens,); it is True for the first token."""
        starts_T: Bools = self.opens[ids_T]
        starts_T[1:] |= self.closes[ids_T[:-1]]
        starts_T[:1] = True
        return starts_T


@dataclass(frozen=True)
class Framing:
    """The ids that are put before and after every text, in generation, evaluation and the exported tokenizer.

    A model trained here has end-of-text before each document; an imported model has the ids that its tokenizer adds.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text with the ids before and after it."""
        return [*self.before, *ids, *self.after]


def framing_between(plain: Sequence[int], whole: Sequence[int]) -> Framing | None:
    """Return the ids of `whole` before and after the run of ids `plain`; None if `whole` does not contain it."""
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if list(whole[start : start + size]) == list(plain):
            return Framing(tuple(whole[:start]), tuple(whole[start + size :]))
    return None


def with_framing(description: dict[str, Any], framing: Framing) -> dict[str, Any]:
    """Return a tokenizer.json's content that puts the ids of `framing` around a text; unchanged if it already does.

    In a pair of texts, the second has token type 1. It has the ids before and after it too, as in `transformers` with
    `add_bos_token`; but none before it if there are some after, as in [CLS] A [SEP] B [SEP].
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(description))
    if framing_of(tokenizer) == framing:
        return description
    names = {number: tokenizer.id_to_token(number) for number in (*framing.before, *framing.after)}

    def part(letter: str, kind: int) -> list[dict[str, Any]]:
        def special(number: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": names[number], "type_id": kind}}

        before = framing.before if kind == 0 or not framing.after else ()
        return [*map(special, before), {"Sequence": {"id": letter, "type_id": kind}}, *map(special, framing.after)]

    template = {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in names.items()},
    }
    return {**description, "post_processor": template}


def framing_of(tokenizer: HuggingFaceTokenizer) -> Framing | None:
    """Return the ids that a tokenizer puts before and after a text; None if its post-processor changes the text's ids."""
    encoded = ((tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.encode(text).ids) for text in "a1.")
    return next((framing_between(plain, whole) for plain, whole in encoded if plain), None)
