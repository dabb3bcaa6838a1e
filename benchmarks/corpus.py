"""A corpus from JSONL to token shards, compared with datatrove, in MB of text per CPU-second.

The pipeline reads JSONL, applies one rule set, removes near duplicates with MinHash and encodes. The input is real documents with
exact and near copies planted (see dedup.py). Both sides run as commands in separate processes with one worker, and all their CPU
time counts, including start and imports. Compiled code comes from its cache and Python may keep its byte code, as for an
installed package. Without --tokenizer the script first trains one (32,000 ids, the pattern of GPT-4), which both sides use.

    python benchmarks/corpus.py [FOLDER ...] --datatrove-python VENV/bin/python --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from dedup import documents, planted
from machine import describe

END = "<|endoftext|>"
SAMPLE_DOCUMENTS = 1500
RECIPE = """
[run]
name = "benchmark"
dir = "{work}"
[[corpus.sources]]
name = "text"
format = "jsonl"
paths = ["{work}/input"]
[corpus]
workers = {workers}
[corpus.rules]
min_characters = 1
max_mean_line_length = 1e9
min_alphanumeric_share = 0
min_unique_line_share = 0
[corpus.rules.gopher_repetition]
[tokenizer]
path = "{tokenizer}"
end_of_text = "{end_of_text}"
[tokens]
workers = {workers}
sequence_length = 64
held_out = 0.05
[model]
depth = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--end-of-text", default=END)
    parser.add_argument("--datatrove-python")
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records = corpus_of(given.folders, given.megabytes)
    size = megabytes(records)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        recipe = prepared(work, records, given.tokenizer, given.end_of_text)
        bessemer = [sys.executable, "-m", "bessemer"]
        for name in ("corpus", "tokens"):  # compiles kernels once and writes byte code
            subprocess.run([*bessemer, name, recipe], check=True, env=environment, capture_output=True)
        subprocess.run(["rm", "-r", work / "benchmark"], check=True)
        parts = {name: timed([*bessemer, name, str(recipe)], environment) for name in ("corpus", "tokens")}
        manifest = json.loads((work / "benchmark" / "tokens" / "manifest.json").read_text())["sources"]["text"]
        sides["Bessemer"] = {
            "cpu_seconds": parts,
            "documents": sum(manifest[split]["documents"] for split in manifest),
            "tokens": sum(manifest[split]["tokens"] for split in manifest),
        }
        if given.datatrove_python:
            job = {
                "input": str(work / "input"),
                "work": str(work / "peer"),
                "tokenizer": str(tokenizer_of(work, given.tokenizer)),
            }
            (work / "job.json").write_text(json.dumps({**job, "end_of_text": given.end_of_text}))
            script = Path(__file__).with_name("corpus_peer.py")
            seconds = timed([given.datatrove_python, str(script), str(work / "job.json")], environment)
            facts = json.loads((work / "peer" / "answer.json").read_text())
            sides["datatrove"] = {"cpu_seconds": {"all": seconds}, **facts}
    print(f"{size:.1f} MB, {len(records)} documents, one worker per side")
    rates = {name: size / sum(side["cpu_seconds"].values()) for name, side in sides.items()}
    for name, side in sides.items():
        print(
            f"{name:<10} {rates[name]:6.2f} MB per CPU-second  {side['documents']:>7} documents  {side['tokens']:>10} tokens  "
            f"{side['cpu_seconds']}"
        )
    if "datatrove" in rates:
        print(f"{rates['Bessemer'] / rates['datatrove']:.1f} times as fast")
    if given.json:
        result = {"machine": describe(megabytes=size, documents=len(records)), "rates": rates, "sides": sides}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def corpus_of(folders: list[Path], size: float) -> list[dict[str, str]]:
    """Return about `size` MB of real documents, with planted copies among them."""
    found = folders or [Path(sysconfig.get_paths()[name]) for name in ("purelib", "stdlib")]
    records, _, _ = planted(documents(found, int(size * 1e6)), 0)
    return records


def megabytes(records: list[dict[str, str]]) -> float:
    """Return the size of the texts in units of 10^6 bytes."""
    return sum(len(record["text"].encode()) for record in records) / 1e6


def tokenizer_of(work: Path, given: Path | None) -> Path:
    return (given or work / "tokenizer.json").resolve()


def prepared(
    work: Path, records: list[dict[str, str]], tokenizer: Path | None, end_of_text: str = END, workers: int = 1
) -> Path:
    """Write the input, the tokenizer and the recipe, and return the recipe's path. Trains a tokenizer where none is given."""
    from bessemer.tokens.tokenizer import Tokenizer

    (work / "input").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (work / "input" / "a.jsonl").write_text(lines, encoding="utf-8")
    place = tokenizer_of(work, tokenizer)
    if tokenizer is None:
        sample = [record["text"] for record in records[:SAMPLE_DOCUMENTS]]
        place.write_text(Tokenizer.train(sample, 32_000, end_of_text).to_json())
    recipe = work / "recipe.toml"
    values = {"work": work, "tokenizer": place, "end_of_text": end_of_text, "workers": workers}
    recipe.write_text(RECIPE.format(**values))
    return recipe


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Return the CPU seconds of a command and its children."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"  {perf_counter() - started:.0f} s of wall time: {' '.join(command[-3:])}", file=sys.stderr)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


if __name__ == "__main__":
    main()
