"""Documents per minute of best-fit-decreasing packing, utilisation of its sequences, and speed of reading them.

Reading packed sequences is compared with reading concatenated text. Times are CPU seconds of one thread. Document lengths are
log-normal (median 400 tokens, sigma 1.2), about the spread of web text.

    python benchmarks/packing.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from machine import describe

from bessemer.tokens.loader import ConcatenatedSplit, Loader, PackedSplit, SampleSource
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.packing import pack
from bessemer.tokens.shards.shard import Shard, SplitTokens

TOKENS = 100_000_000


def lengths(count: int) -> np.ndarray:
    drawn = np.exp(np.random.default_rng(0).normal(np.log(400.0), 1.2, count))
    return np.maximum(drawn.astype(np.int64), 2)


def packing_rows(documents: int) -> list[dict[str, object]]:
    sizes = lengths(documents)
    starts, rows = np.cumsum(sizes) - sizes, []
    pack(starts[:10], sizes[:10], 1024, "best-fit")  # compiles once
    for length in (512, 2048, 8192):
        began = process_time()
        found = pack(starts, sizes, length, "best-fit")
        seconds = process_time() - began
        row = {
            "length": length,
            "documents_per_minute": documents / seconds * 60,
            "utilisation": float(sizes.sum() / (len(found) * length)),
            "cut_best_fit": float((sizes > length).mean()),
            "cut_concatenate": float((starts // length < (starts + sizes - 1) // length).mean()),
        }
        rows.append(row)
        print(
            f"best-fit, sequences of {length}: {row['documents_per_minute'] / 1e6:.0f} M documents per CPU-minute, "
            f"{row['utilisation']:.2%} full, {row['cut_best_fit']:.1%} of the documents cut ({row['cut_concatenate']:.1%} when "
            "concatenated)"
        )
    return rows


def reading_rows(folder: Path, rounds: int, seconds: float) -> list[dict[str, object]]:
    sizes = lengths(TOKENS // 500)
    sizes = sizes[np.cumsum(sizes) < TOKENS]
    tokens = np.random.default_rng(0).integers(1, 50_000, int(sizes.sum()), dtype=np.uint16)
    tokens[np.cumsum(sizes) - 1] = 0
    path = folder / "tokens.bin"
    tokens.tofile(path)
    split, rows = SplitTokens([Shard(path, np.dtype("<u2"))]), []
    for length, batch in ((256, 16), (1024, 16), (2048, 64), (4096, 128)):
        packed = PackedSplit(split, pack(np.cumsum(sizes) - sizes, sizes, length, "best-fit"), 0)
        sources: dict[str, SampleSource] = {"best-fit": packed, "concatenate": ConcatenatedSplit(split, length)}
        loaders = {
            name: Loader([source], Mixture.from_weights(("a",), (len(source),), (1.0,), 0))
            for name, source in sources.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(rounds):
            for name, loader in loaders.items():
                first, began = turn * 100_000, process_time()
                count = 0
                while process_time() - began < seconds:
                    loader.batch(first + count * batch, batch)
                    count += 1
                rates[name].append(count * batch * length / (process_time() - began))
        for name, found in rates.items():
            print(f"{batch} sequences of {length}, {name:<12} {median(found) / 1e6:8.1f} M tokens/CPU-second")
            rows.append({"length": length, "batch": batch, "side": name, "tokens_per_second": found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per side and round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    packing = packing_rows(given.documents)
    with tempfile.TemporaryDirectory() as folder:
        reading = reading_rows(Path(folder), given.rounds, given.seconds)
    if given.json:
        given.json.write_text(
            json.dumps({"machine": describe(), "packing": packing, "reading": reading}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
