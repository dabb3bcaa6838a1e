"""Tokens/s of the loader on one core, compared with NumPy, nanoGPT and a map-style DataLoader.

Three lines of NumPy are the fair baseline. They draw offsets like nanoGPT but slice `np.asarray` of the memory map: each slice of
an `np.memmap` creates an object of that class, which costs more than copying a short sequence. nanoGPT (train.py, get_batch)
draws random offsets into the memory map, takes one slice per sequence, stacks and casts to int64, twice, for inputs and targets.
Both draw with replacement. Bessemer's loader does more: it visits every sequence once per epoch, in an order that can be resumed.

    python benchmarks/loader.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from machine import describe
from torch.utils.data import DataLoader, Dataset

from bessemer.tokens.loader import ConcatenatedSplit, Loader
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.shards.shard import Shard, SplitTokens

TOKENS = 100_000_000


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A map-style dataset over a memory map."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(path, dtype=np.uint16, mode="r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.length
        window = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return window[:-1], window[1:]


def ours(path: Path, length: int, batch: int) -> Callable[[], object]:
    split = SplitTokens([Shard(path, np.dtype("<u2"))])
    mixture = Mixture.from_weights(("a", "b"), (split.num_sequences(length),) * 2, (0.7, 0.3), 0)
    loader = Loader([ConcatenatedSplit(split, length)] * 2, mixture)
    state = {"first": 0}

    def read() -> object:
        found = loader.batch(state["first"], batch)
        state["first"] += batch
        return torch.from_numpy(found.inputs)

    return read


def numpy_lines(path: Path, length: int, batch: int) -> Callable[[], object]:
    data, draw = np.asarray(np.memmap(path, dtype=np.uint16, mode="r")), np.random.default_rng(0)

    def read() -> object:
        starts = draw.integers(0, len(data) - length - 1, batch)
        rows = np.stack([data[start : start + length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))

    return read


def nanogpt(path: Path, length: int, batch: int) -> Callable[[], object]:
    def read() -> object:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - length, (batch,))
        x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
        return x, y

    return read


def map_style(path: Path, length: int, batch: int, workers: int) -> Callable[[], object]:
    def epochs() -> Iterator[object]:
        while True:
            yield from DataLoader(Windows(path, length), batch_size=batch, shuffle=True, num_workers=workers)

    items = epochs()
    return lambda: next(items)


def rate(read: Callable[[], object], tokens: int, seconds: float) -> float:
    read()
    count, started = 0, perf_counter()
    while perf_counter() - started < seconds:
        read()
        count += 1
    return count * tokens / (perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="seconds per side and round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, TOKENS, dtype=np.uint16).tofile(path)
        for length, batch in ((256, 16), (1024, 16), (2048, 64), (1024, 512), (4096, 128)):
            sides = {
                "bessemer": ours(path, length, batch),
                "three lines of NumPy": numpy_lines(path, length, batch),
                "nanoGPT's way": nanogpt(path, length, batch),
                "map-style, 0 workers": map_style(path, length, batch, 0),
                "map-style, 1 worker": map_style(path, length, batch, 1),
            }
            rates: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(given.rounds):
                for name, read in sides.items():
                    rates[name].append(rate(read, length * batch, given.seconds))
            print(f"\n{batch} sequences of {length} tokens")
            for name, found in rates.items():
                ratio = median(a / b for a, b in zip(rates["bessemer"], found, strict=True))
                print(f"  {name:<22} {median(found) / 1e6:8.1f} M tokens/s   Bessemer / side {ratio:.2f}")
                rows.append(
                    {"length": length, "batch": batch, "side": name, "tokens_per_second": found, "ratio": ratio}
                )
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
