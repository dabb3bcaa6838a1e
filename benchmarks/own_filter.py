"""Overhead of a custom Python filter in a recipe, alone and among all other steps.

The filter keeps everything; the documents are source files of the standard library. Each round measures in turn the filter called
in a loop, the steps without it and the steps with it. The overhead is the difference of the last two.

    python benchmarks/own_filter.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from pathlib import Path
from statistics import median
from time import process_time

from machine import describe

from bessemer.common.extensions import trust
from bessemer.corpus.document import Document
from bessemer.corpus.filters.chain import Chain, Tally, filters_of
from bessemer.recipe import Corpus
from bessemer.recipe.uses import make

FILTER = """
from bessemer import Document, Filter, Reject


class LongWords(Filter):
    max_share: float = 2.0

    def judge(self, document: Document) -> Reject | str | None:
        words = document.text.split()
        share = sum(len(word) > 20 for word in words) / max(len(words), 1)
        return Reject("share", f"{share:.2f}") if share > self.max_share else None
"""
MEGABYTES = 12


def seconds(chain: Chain, texts: list[str]) -> float:
    """Return the CPU time of cleaning the texts."""
    documents, tally = [Document("", len(text), text) for text in texts], Tally()
    start = process_time()
    for document in documents:
        chain.clean(document, tally)
    return process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    texts, size = list[str](), 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size < MEGABYTES << 20:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(texts[-1])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "mine.py").write_text(FILTER)
        name = f"{folder}/mine.py:LongWords"
        trust([name])
        own = make("filters", name, {})
        alone, none = Chain(Corpus(), (own,)), Chain(Corpus(), ())
        steps = filters_of(Corpus())
        among, without = Chain(Corpus(), (*steps[:5], own, *steps[5:])), Chain(Corpus(), steps)
        rows: dict[str, list[float]] = {key: [] for key in ("own", "none", "alone", "without", "among")}
        seconds(among, texts)
        for _ in range(given.rounds):
            documents = [Document("", len(text), text) for text in texts]
            start = process_time()
            for document in documents:
                own.judge(document)
            rows["own"].append(process_time() - start)
            for key, chain in (("none", none), ("alone", alone), ("without", without), ("among", among)):
                rows[key].append(seconds(chain, texts))
    middle = {key: median(values) for key, values in rows.items()}
    costs = [(b - a) / own for a, b, own in zip(rows["none"], rows["alone"], rows["own"], strict=True)]
    print(f"{len(texts)} documents of {size / 1e6:.1f} million characters; medians of {given.rounds} rounds")
    for key, value in middle.items():
        print(f"{key:8} {1e6 * value / len(texts):9.1f} µs per document")
    print(f"cost over own time: {median(costs):.3f} (at most 1.15)")
    print(f"among all steps: {(middle['among'] - middle['without']) / middle['own']:.3f}")
    if given.json:
        result = {"machine": describe(), "documents": len(texts), "seconds": middle, "cost_over_own": median(costs)}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
