"""The degenerate-text gate (tokens.gate): ignore the targets of degenerate segments before the loss.

A segment is the part of a document that is in one sequence. The gate judges it by its tokens alone, so the result does
not depend on the parallel layout or on a resume. Segments shorter than MIN_TOKENS pass. The limits leave a margin to
all healthy text that was tried (docs/how-to/packing.md#degenerate-text): prose, code, tables, lists of names,
minified scripts, Chinese.

    repetition     low share of distinct 4-grams of tokens. Repeated n-grams caused loss spikes in OLMo 2, which removes
                   sequences with 32 or more repetitions (OLMo et al. 2024, section 3.1).
    low entropy    few bits in the distribution of tokens: rulers, padding, zeros.
    base64         recognised by its letters: no spaces, mixed cases and digits.
    hexadecimal    only hexadecimal digits, also written as 0x1f.
    noise          control characters or replacement characters: binary data read as text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.console import counted
from bessemer.common.log_file import append_entry, json_line
from bessemer.recipe import Recipe
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch, Bools, IgnoredSegment, Loader
from bessemer.tokens.packing import Ints
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer

MIN_TOKENS, NGRAM = 64, 4
MIN_DISTINCT = 0.2  # share of distinct 4-grams
MIN_BITS = 2.0
MAX_SPACE, MIN_LETTERS = 0.03, 0.97  # base64: share of white space; share of its alphabet in the rest
CASE, DIGITS = (0.2, 0.65), (0.05, 0.35)  # base64: range of each case's share, range of the digits' share
HEX_SHARE, HEX_DIGITS, HEX_LETTERS = 0.97, 0.4, 0.1  # shares of the bytes except space: hex digits, 0 to 9, a to f
CONTROL_SHARE, UNREADABLE_SHARE = 0.05, 0.3  # noise: share of control characters; of U+FFFD
REASONS = ("repetition", "low entropy", "base64", "hexadecimal", "noise")

Floats = npt.NDArray[np.float64]
_KINDS = (  # kinds of bytes that are counted for each token
    bytes(range(256)), b" \t\r\n\v\f", bytes(range(65, 91)), bytes(range(97, 123)), b"0123456789", b"+/=-_", b"abcdefABCDEF",
    b"xX,\\", bytes({*range(32), 127} - {*b" \t\r\n\v\f\b"}), b"\xef", b"\xbf", b"\xbd",
)  # fmt: skip


class DegenerateTextFilter:
    """A filter that excludes degenerate segments of a batch from the loss.

    A segment is the part of a document that is in one sequence.

    Attributes:
        _kinds_VK: For each token id, the number of its bytes of each kind in _KINDS, (vocabulary, kinds).
    """

    def __init__(self, segments: list[bytes], end_of_text: int) -> None:
        """Build the filter for a tokenizer.

        Args:
            segments: Bytes of each token id; empty for special tokens.
            end_of_text: Id of the end-of-text token.
        """
        table = [[sum(byte in kind for byte in segment) for kind in _KINDS] for segment in segments]
        self._kinds_VK, self._end_of_text = np.array(table, dtype=np.int64), end_of_text

    @classmethod
    def for_store(cls, recipe: Recipe, store: TokenStore) -> DegenerateTextFilter:
        """Build the filter for the tokenizer of a token store."""
        tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
        return cls(tokenizer.token_byte_values(), store.end_of_text)

    def apply(self, batch: Batch) -> Batch:
        """Return the batch with the targets of degenerate segments set to -1 and those segments listed in `ignored`."""
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
        """Return for each of `count` segments the index in REASONS of why it is degenerate, or -1 if it is not.

        `tokens_N` are the tokens of all segments, and `segment_N` the segment number of each. The tokens of a segment must be
        contiguous.
        """
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
        reasons = np.full(count, -1, dtype=np.int64)
        for reason, holds in reversed(list(enumerate(rules))):
            reasons[holds & (size >= MIN_TOKENS)] = reason
        return reasons

    def _distinct(self, tokens_N: npt.NDArray[Any], segment_N: Ints, count: int) -> Floats:
        """Return for each segment the share of its token 4-grams that are distinct. The arguments are those of `_reasons`."""
        size = max(len(tokens_N) - NGRAM + 1, 0)
        key = np.zeros(size, dtype=np.uint64)
        for part in (segment_N, *(tokens_N[shift:] for shift in range(NGRAM))):
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
    """A log of the segments that the degenerate-text gate excluded from the loss, with their documents.

    Each data-parallel rank has a file with one JSON line per segment. A step that is repeated writes its lines again.
    """

    def __init__(self, folder: Path, loader: Loader, end_of_text: int, writes: bool) -> None:
        self._loader, self._end_of_text = loader, end_of_text
        self._path = folder / ("gated.jsonl" if loader.rank == 0 else f"gated-{loader.rank}.jsonl")
        self._writes = writes

    def write(self, step: int, batch: Batch) -> None:
        """Log the ignored segments of the batch of a step."""
        if not self._writes or not batch.ignored:
            return
        for one in batch.ignored:
            sample: dict[str, Any] = self._loader.documents(int(batch.samples[one.row]), 1)[0]
            # The first token of a sequence is only an input. If it ends a document, that document has no target here.
            ahead = batch.starts is None and int(batch.inputs[one.row, 0]) == self._end_of_text
            names, index = sample["documents"], one.segment + ahead
            document = names[index] if index < len(names) else names[-1]
            row = {"step": step, "sample": sample["sample"], "source": sample["source"], "document": document}
            append_entry(self._path, json_line({**row, "tokens": one.tokens, "reason": one.reason}))


def list_logs(folder: Path) -> list[Path]:
    """Return the log files of the degenerate-text gate in a run directory, one per data-parallel rank."""
    return sorted(folder.glob("gated*.jsonl"))


def describe(folder: Path) -> str:
    """Return a sentence on what the degenerate-text gate excluded from a run's loss; empty if it excluded nothing."""
    segments = {(row["sample"], row["document"]): row for path in list_logs(folder) for row in read_json_lines(path)}
    if not segments:
        return ""
    counts = {reason: sum(row["reason"] == reason for row in segments.values()) for reason in REASONS}
    parts = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    documents = len({row["document"] for row in segments.values()})
    targets = sum(row["tokens"] for row in segments.values())
    where = f"{counted(len(segments), 'piece')} of {counted(documents, 'document')}"
    return f"{counted(targets, 'target')} in {where} did not count ({parts}; gated.jsonl)"
