"""CPU time of `bessemer corpus` by stage of work, for the JSONL of corpus.py in one worker.

Wraps the functions of each stage where the pipeline calls them. The time of a stage excludes the stages called inside it; time
outside all stages is `the rest`. The first run compiles and is not counted. The result is the median of the rounds, each of which
is a separate process.

    python benchmarks/corpus_profile.py [FOLDER ...] [--megabytes MB] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

RESULTS = Path(__file__).parent / "results" / "corpus_profile.json"
STAGES = {
    "reading": "JSON, encodings, keys of records",
    "normalising": "NFC, line ends, control characters",
    "words": "splitting texts into words for the rules",
    "rules": "Gopher repetition and the basic rules, without the words",
    "folding and hashing": "identity, BLAKE2b of the folded text, columns",
    "signatures": "140 MinHash values over 5-word shingles",
    "tables and files": "Arrow tables and Parquet of partitions",
    "near duplicates": "the search: exact copies, LSH, verification",
    "publishing": "reading, filtering and writing buckets",
    "start": "until the first partition begins: Python, imports, recipe, listing",
}


class Profile:
    """Timer of CPU seconds per stage, without the stages nested in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._running: list[str] = ["start"]
        self._since = 0.0  # CPU seconds of the process at the last change of stage

    def enter(self, stage: str) -> None:
        self._charge()
        self._running.append(stage)

    def leave(self) -> None:
        self._charge()
        self._running.pop()

    def _charge(self) -> None:
        now = process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if self._running == ["start"]:
                self._charge()
                self._running[0] = "the rest"
            self.enter(stage)
            try:
                return work(*given, **named)
            finally:
                self.leave()

        return run

    def each(self, stage: str, work: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        """Wrap a function that yields, like `timed`."""

        def run(*given: Any) -> Iterator[Any]:
            found = work(*given)
            step = self.timed(stage, lambda: next(found, None))
            while (one := step()) is not None:
                yield one

        return run


def profile_run(recipe: str) -> dict[str, float]:
    """Run `bessemer corpus` in this process and return the seconds of each stage."""
    from bessemer.cli import run_command
    from bessemer.corpus import partition, publish
    from bessemer.corpus.dedup import search, signatures
    from bessemer.corpus.filters import chain
    from bessemer.text import statistics

    of = Profile()
    for module, name, stage in (
        (chain.NormaliseText, "judge", "normalising"), (chain.JudgeText, "judge", "rules"),
        (partition, "fold", "folding and hashing"),
        (partition, "rows_table", "tables and files"), (partition, "write_rows", "tables and files"),
        (signatures, "signatures", "signatures"), (search.DuplicateStep, "run", "near duplicates"),
        (publish.PublishBucket, "make", "publishing"), (publish, "assemble", "publishing"), (statistics, "split", "words"),
    ):  # fmt: skip
        setattr(module, name, of.timed(stage, getattr(module, name)))
    partition.read = of.each("reading", partition.read)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if run_command(["corpus", recipe]):
            raise SystemExit("the corpus could not be built")
    of._charge()
    return dict(of.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument(
        "--megabytes", type=float, default=60, help="MB of text before copies of a quarter of it are added"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # runs one profile in this process
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(profile_run(given.one)))
        return
    from corpus import corpus_of, megabytes, prepared
    from machine import describe

    records, rounds = corpus_of(given.folders, given.megabytes), []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        recipe = prepared(work, records, None)
        command = [sys.executable, __file__, "--one", str(recipe)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for _ in range(given.rounds + 1):
            subprocess.run(["rm", "-rf", work / "benchmark"], check=True)
            done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
            rounds.append(json.loads(done.stdout))
    rounds = rounds[1:]
    seconds = {stage: median(one.get(stage, 0.0) for one in rounds) for stage in (*STAGES, "the rest")}
    total = sum(seconds.values())
    shares = {stage: spent / total for stage, spent in sorted(seconds.items(), key=lambda row: -row[1])}
    for stage, share in shares.items():
        print(f"{stage:<20} {seconds[stage]:7.2f} s {share:6.1%}  {STAGES.get(stage, '')}")
    rate = megabytes(records) / total
    print(f"{megabytes(records):.0f} MB in {total:.1f} CPU-seconds: {rate:.1f} MB per CPU-second")
    facts = {"machine": describe(megabytes=megabytes(records)), "seconds": seconds, "shares": shares, "rate": rate}
    given.json.write_text(json.dumps({**facts, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
