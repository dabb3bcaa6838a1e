"""What each token stands for: its bytes, by the kind of its vocabulary; and what a tokenizer does to text before.

byte-level BPE      a character of the token is a byte (GPT-2's alphabet): exact
BPE, Unigram with ▁ ▁ is a space, <0x0A> a byte where the model falls back on bytes, the rest is UTF-8; a ▁ that is put before
                    every text is one byte more than the text has
WordPiece           ##x goes on with a word, anything else begins one and stands for a space more, though white space itself is
                    not kept
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, reversed (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters: dict[str, int] = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    characters.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return characters


def kind_of(description: dict[str, Any]) -> str:
    """byte-level, bpe, unigram, wordpiece or wordlevel."""
    if any(step.get("type") == "ByteLevel" for step in _steps(description.get("pre_tokenizer"), "pretokenizers")):
        return "byte-level"
    return str(description["model"].get("type", "BPE")).lower()


def token_pieces(description: dict[str, Any], vocabulary: dict[str, int], special: set[int]) -> list[bytes]:
    """The bytes each id stands for; none for special tokens. vocabulary: every token with its id, added ones too."""
    kind, model = kind_of(description), description["model"]
    pieces = [b""] * (max(vocabulary.values()) + 1)
    added = {token["id"] for token in description["added_tokens"]}
    alphabet = byte_alphabet()
    prefix = model.get("continuing_subword_prefix") or "##"
    unknown = model.get("unk_token")
    for token, number in vocabulary.items():
        if number in special or token == unknown:
            continue
        if number in added:  # stands for its own letters
            pieces[number] = token.encode()
        elif kind == "byte-level":
            known = [alphabet.get(character) for character in token]
            pieces[number] = bytes(byte for byte in known if byte is not None) if None not in known else token.encode()
        elif kind == "wordpiece":
            goes_on = token.startswith(prefix)
            pieces[number] = token[len(prefix) :].encode() if goes_on else b" " + token.encode()
        elif model.get("byte_fallback") and (found := BYTE_TOKEN.fullmatch(token)):
            pieces[number] = bytes([int(found[1], 16)])
        else:
            pieces[number] = token.replace(SPACE_MARK, " ").encode()
    return pieces


def changes(description: dict[str, Any]) -> list[str]:
    """What the normalizer does to text, as short names: nfc, lowercase, strip accents, ...; empty: nothing."""
    found = []
    for step in _steps(description.get("normalizer"), "normalizers"):
        kind = str(step.get("type"))
        if kind == "Prepend":
            found.append(f"puts {step.get('prepend')!r} before every text")
        elif kind == "Replace":
            pattern = step.get("pattern", {})
            found.append(f"replaces {next(iter(pattern.values()), '')!r} by {step.get('content')!r}")
        elif kind == "BertNormalizer":
            names = {
                "clean_text": "clean control characters",
                "lowercase": "lowercase",
                "strip_accents": "strip accents",
            }
            found += [name for key, name in names.items() if step.get(key)]
            if step.get("lowercase") and step.get("strip_accents") is None:  # follows lowercase where it is not said
                found.append("strip accents")
        else:
            found.append(
                {"Precompiled": "SentencePiece's character map", "StripAccents": "strip accents"}.get(
                    kind, kind.lower()
                )
            )
    return found


def prefix_of(description: dict[str, Any]) -> bytes:
    """What the tokenizer puts before every text and its first token is counted with: a space, or nothing."""
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
    """A normalizer or pre-tokenizer as the list of its steps, sequences within sequences laid flat."""
    if not part:
        return []
    if part.get("type") == "Sequence":
        return [step for child in part.get(inner, []) for step in _steps(child, inner)]
    return [part]
