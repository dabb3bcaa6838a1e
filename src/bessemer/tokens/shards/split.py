"""The shards of one source and split, read as one stream of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from bessemer.storage.filesystem import Location
from bessemer.storage.path import in_parallel
from bessemer.tokens.shards.shard import Shard


class SplitTokens:
    """The tokens of one source and split: its shards, read as one stream."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self.num_tokens = int(self.starts[-1])

    def num_sequences(self, length: int) -> int:
        """Whole sequences of `length` inputs, each with the token that follows its last one."""
        return max(self.num_tokens - 1, 0) // length

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy tokens [start, start + len(out)) of the stream into `out`, across shards."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            offset = start + done - int(self.starts[number])
            part = self.shards[number].tokens[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            number += 1

    def sequences(self, numbers: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Training sequences by number, (len(numbers), length + 1) in the stored type: inputs and one token more."""
        out = np.empty((len(numbers), length + 1), dtype=self.shards[0].dtype)
        starts = numbers.astype(np.int64) * length
        if any(isinstance(shard.stored, Location) for shard in self.shards):
            in_parallel(self.read, starts.tolist(), out)
            return out
        of_shard = np.searchsorted(self.starts, starts, side="right") - 1
        whole = starts + length < self.starts[of_shard + 1]
        for number in np.unique(of_shard[whole]).tolist():
            here = whole & (of_shard == number)
            windows = sliding_window_view(self.shards[number].tokens, length + 1)
            out[here] = windows[starts[here] - self.starts[number]]
        for row in np.flatnonzero(~whole):  # sequences that cross a shard's border
            self.read(int(starts[row]), out[row])
        return out

    def document_spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each document starts in the stream, and its size, in tokens."""
        bounds = [base + shard.offsets.astype(np.int64) for shard, base in zip(self.shards, self.starts, strict=False)]
        none = np.zeros(0, dtype=np.int64)
        starts = np.concatenate([none, *(part[:-1] for part in bounds)])
        return starts, np.concatenate([none, *(part[1:] for part in bounds)]) - starts

    def documents(self, start: int, end: int) -> list[str]:
        """Identities of the documents that have a token in [start, end) of the stream."""
        names: list[str] = []
        first = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        for shard, base in zip(self.shards[first:], self.starts[first:].tolist(), strict=False):
            if base >= end:
                break
            low = int(np.searchsorted(shard.offsets, max(start - base, 0), side="right")) - 1
            high = int(np.searchsorted(shard.offsets[:-1], end - base, side="left"))
            names += [identity.tobytes().hex() for identity in shard.identities[low:high]]
        return names
