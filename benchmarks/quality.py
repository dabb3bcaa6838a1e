"""Rates of the quality classifier in MB of text per CPU-second, on Python source code.

Rates count whole documents, however much of each is read; `read` is the rate of the bytes read. With a supervised fastText model
(--fasttext FILE --label LABEL), fastText is measured on the same bytes.

    python benchmarks/quality.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from machine import describe

from bessemer.corpus.filters.quality.classify import train
from bessemer.corpus.filters.quality.model import FastTextModel, extract, prefix
from bessemer.corpus.filters.quality.sample import Labelled
from bessemer.recipe import Quality


def texts_of(megabytes: int) -> list[str]:
    """Return whole Python files of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    files = sorted(path for place in ("stdlib", "purelib") for path in Path(paths[place]).rglob("*.py"))
    order = np.random.default_rng(0).permutation(len(files))
    found, size = [], 0
    for number in order.tolist():
        raw = files[number].read_bytes()
        try:
            found.append(raw.decode())
        except UnicodeDecodeError:
            continue
        size += len(raw)
        if size >= megabytes * 1_000_000:
            break
    return found


def seconds(work: Callable[[], object]) -> float:
    started = process_time()
    work()
    return process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fasttext", type=Path)
    parser.add_argument("--label", default="__label__hq")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    raw = texts_of(given.megabytes)
    sizes = np.array([len(text.encode()) for text in raw])
    size = float(sizes.sum()) / 1e6

    # The labels do not affect the rate: files are labelled by the parity of their index.
    settings = Quality(high=("a",), low=("b",))
    few = raw[:2000]
    places = np.arange(len(few))
    sample = Labelled([prefix(text, settings.read_bytes) for text in few], places % 2 == 0, places % 10 >= 8, {}, 0)
    train(settings, sample)  # compiles
    learnt = seconds(lambda: train(settings, sample))
    model = train(settings, sample)
    rows = [{"what": "train", "documents": len(few), "seconds": learnt}]
    print(f"training on {len(few)} documents: {learnt:.1f} CPU-seconds")
    for limit in (settings.read_bytes, 1 << 30):
        read = float(np.minimum(sizes, limit).sum()) / 1e6
        reader = type(model)(**{**vars(model), "read_bytes": limit})
        sides: dict[str, Callable[[], object]] = {
            "score": lambda reader=reader: reader.score(raw),
            "features": lambda limit=limit: extract(raw, limit, settings.hash_bits),
        }
        if given.fasttext:
            peer = FastTextModel.load(given.fasttext, given.label, limit)
            sides["fasttext"] = lambda peer=peer: peer.score(raw)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.rounds):
            for name, work in sides.items():
                times[name].append(seconds(work))
        print(f"\n{len(raw)} documents, {size:.0f} MB, of which {read:.0f} MB are read")
        for name, found in times.items():
            print(
                f"  {name:<10} {size / median(found):7.1f} MB per CPU-second; of bytes read {read / median(found):7.1f}"
            )
            rows.append({"what": name, "megabytes": size, "read_megabytes": read, "cpu_seconds": found})
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
