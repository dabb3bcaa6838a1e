"""The gate before the loss (tokens.gate): targets in degenerate segments of text are ignored.

A segment is what a sequence holds of one document. It is judged by itself, from its tokens alone, so that the result depends on
neither the layout nor a resume. Segments of less than MIN_TOKENS pass. The limits leave a margin to every healthy text that was
tried (docs/how-to/check-a-recipe.md#degenerate-text): prose, code, tables, lists of names, minified scripts, Chinese.

repetition     share of distinct 4-grams of tokens. Repeated n-grams caused OLMo 2's loss spikes, which removes sequences of 32
               and more of them (OLMo et al. 2024, section 3.1).
low entropy    of the distribution of tokens, in bits: rulers, padding, zeros.
encoded        base64 by its letters: no spaces, both cases and digits mixed; hexadecimal: nothing but its digits, also as 0x1f.
noise          control characters, or the signs that stand for bytes that are no text: binary data read as text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.console import counted
from bessemer.common.log_file import LogFile, json_line
from bessemer.recipe import Recipe
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch, Bools, IgnoredSegment, Loader
from bessemer.tokens.packing import Ints
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer

MIN_TOKENS, NGRAM = 64, 4
MIN_DISTINCT = 0.2  # share of 4-grams
MIN_BITS = 2.0
MAX_SPACE, MIN_LETTERS = 0.03, 0.97  # of base64's bytes: white space; of the rest: its alphabet
CASE, DIGITS = (0.2, 0.65), (0.05, 0.35)  # shares of base64's alphabet: of each case, of digits
HEX_SHARE, HEX_DIGITS, HEX_LETTERS = 0.97, 0.4, 0.1  # of the bytes but space: digits of hex, 0 to 9, a to f
CONTROL_SHARE, UNREADABLE_SHARE = 0.05, 0.3  # of noise's bytes: control characters; U+FFFD, what stands for bad bytes
REASONS = ("repetition", "low entropy", "base64", "hexadecimal", "noise")

Floats = npt.NDArray[np.float64]
_KINDS = (  # of bytes
    bytes(range(256)), b" \t\r\n\v\f", bytes(range(65, 91)), bytes(range(97, 123)), b"0123456789", b"+/=-_", b"abcdefABCDEF",
    b"xX,\\", bytes({*range(32), 127} - {*b" \t\r\n\v\f\b"}), b"\xef", b"\xbf", b"\xbd",
)  # fmt: skip


class DegenerateTextFilter:
    """Finds degenerate segments of a batch. kinds_VK: for each token id, its number of bytes of each of _KINDS."""

    def __init__(self, segments: list[bytes], end_of_text: int) -> None:
        """segments: the bytes of each id, none for special tokens."""
        table = [[sum(byte in kind for byte in segment) for kind in _KINDS] for segment in segments]
        self._kinds_VK, self._end_of_text = np.array(table, dtype=np.int64), end_of_text

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore) -> DegenerateTextFilter:
        """For the tokens of a store."""
        tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
        return cls(tokenizer.token_byte_values(), store.end_of_text)

    def apply(self, batch: Batch) -> Batch:
        """The batch with targets of degenerate segments ignored (-1), and which those are."""
        starts = batch.starts if batch.starts is not None else batch.inputs == self._end_of_text
        segment_BT = np.cumsum(starts, axis=1)
        segment_BT -= segment_BT[:, :1]
        where, length = np.nonzero(batch.targets >= 0), batch.targets.shape[1]
        number, first = np.unique(where[0] * length + segment_BT[where], return_inverse=True)
        reasons = self._reasons(batch.targets[where], first, len(number))
        bad = np.flatnonzero(reasons >= 0)
        if not len(bad):
            return batch
        targets, ignored = batch.targets.astype(np.int64), reasons[first] >= 0
        targets[where[0][ignored], where[1][ignored]] = -1
        sizes = np.bincount(first, minlength=len(number))
        ignored_segments = tuple(
            IgnoredSegment(int(number[i] // length), int(number[i] % length), int(sizes[i]), REASONS[reasons[i]])
            for i in bad
        )  # fmt: skip
        return replace(batch, targets=targets, ignored=ignored_segments)

    def _reasons(self, tokens_N: npt.NDArray[Any], segment_N: Ints, count: int) -> Ints:
        """By segment, the number of its reason, or -1. The tokens of a segment stand together."""
        size = np.bincount(segment_N, minlength=count)
        kinds = np.stack([np.bincount(segment_N, self._kinds_VK[tokens_N, k], count) for k in range(len(_KINDS))])
        num_bytes, space, upper, lower, digits, signs, hex_letters, marks, control, *unreadable = kinds
        # -sum p log2 p = log2 n - sum(c log2 c) / n
        counted = np.unique(segment_N * len(self._kinds_VK) + tokens_N, return_counts=True)
        owner, often = counted[0] // len(self._kinds_VK), counted[1]
        bits = np.log2(size) - np.bincount(owner, often * np.log2(often), count) / size
        solid = np.maximum(num_bytes - space, 1.0)
        letters = np.maximum(upper + lower + digits + signs, 1.0)
        rules = (
            self._distinct(tokens_N, segment_N, count) < MIN_DISTINCT,
            bits < MIN_BITS,
            (space <= MAX_SPACE * num_bytes) & (letters >= MIN_LETTERS * solid) & _within(upper / letters, CASE)
            & _within(lower / letters, CASE) & _within(digits / letters, DIGITS),
            (digits + hex_letters >= HEX_SHARE * (solid - marks)) & (digits >= HEX_DIGITS * (solid - marks))
            & (hex_letters >= HEX_LETTERS * (solid - marks)),
            (control >= CONTROL_SHARE * num_bytes) | (3 * np.minimum.reduce(unreadable) >= UNREADABLE_SHARE * num_bytes),
        )  # fmt: skip
        found = np.full(count, -1, dtype=np.int64)
        for reason, holds in reversed(list(enumerate(rules))):
            found[holds & (size >= MIN_TOKENS)] = reason
        return found

    def _distinct(self, tokens_N: npt.NDArray[Any], segment_N: Ints, count: int) -> Floats:
        """By segment, the share of its n-grams that are distinct."""
        size = max(len(tokens_N) - NGRAM + 1, 0)
        key = np.zeros(size, dtype=np.uint64)
        for part in (segment_N, *(tokens_N[place:] for place in range(NGRAM))):
            key = (key ^ part[:size].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            key ^= key >> np.uint64(29)
        inside = segment_N[:size] == segment_N[len(segment_N) - size :]
        owner = segment_N[:size][inside]
        grams, distinct = (
            np.bincount(some, minlength=count) for some in (owner, owner[np.unique(key[inside], return_index=True)[1]])
        )
        return np.where(grams > 0, distinct / np.maximum(grams, 1), 1.0)


def _within(share: Floats, limits: tuple[float, float]) -> Bools:
    return (share >= limits[0]) & (share <= limits[1])


class DegenerateTextLog:
    """Names the documents whose segments did not count: a line a segment, in a file of each data-parallel rank. Steps that are
    taken again write their lines again."""

    def __init__(self, folder: Path, loader: Loader, end_of_text: int, writes: bool) -> None:
        self._loader, self._end_of_text = loader, end_of_text
        path = folder / ("gated.jsonl" if loader.rank == 0 else f"gated-{loader.rank}.jsonl")
        self._log = LogFile(path) if writes else None

    def write(self, step: int, batch: Batch) -> None:
        """After each step."""
        if self._log is None or not batch.ignored:
            return
        for one in batch.ignored:
            found: dict[str, Any] = self._loader.documents(int(batch.samples[one.row]), 1)[0]
            # The first token of a sequence is an input alone; where it ends a document, that one has no target here.
            ahead = batch.starts is None and int(batch.inputs[one.row, 0]) == self._end_of_text
            names, place = found["documents"], one.segment + ahead
            document = names[place] if place < len(names) else names[-1]
            row = {"step": step, "sample": found["sample"], "source": found["source"], "document": document}
            self._log.append(json_line({**row, "tokens": one.tokens, "reason": one.reason}))


def list_logs(folder: Path) -> list[Path]:
    """The gate's logs in a run directory, one of each data-parallel rank."""
    return sorted(folder.glob("gated*.jsonl"))


def describe(folder: Path) -> str:
    """What the gate has done in a run, in words; empty for nothing."""
    segments = {(row["sample"], row["document"]): row for path in list_logs(folder) for row in read_json_lines(path)}
    if not segments:
        return ""
    counts = {reason: sum(row["reason"] == reason for row in segments.values()) for reason in REASONS}
    parts = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    documents = len({row["document"] for row in segments.values()})
    targets = sum(row["tokens"] for row in segments.values())
    where = f"{counted(len(segments), 'piece')} of {counted(documents, 'document')}"
    return f"{counted(targets, 'target')} in {where} did not count ({parts}; gated.jsonl)"
