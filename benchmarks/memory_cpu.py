"""Planned and measured memory of whole trainings on a CPU, for models of many shapes, in fp32 and bf16.

Each training is a few steps of `bessemer train`, which writes both values to planned_against_measured.json. The plan is made
before the model is built; the measured value is the peak of resident memory.

    python benchmarks/memory_cpu.py --json results/memory_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from machine import describe

LIMIT = 0.05  # largest accepted error


class Shape(NamedTuple):
    """Shape of a model and its step.

    Attributes:
        sequences: Sequences per step.
        micro_batch: Sequences per micro-batch.
        more: Further keys of `[model]`.
        kind: "documents" for texts of many lengths with a document mask, "classifier" for classification, "" otherwise.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocabulary: int
    length: int
    sequences: int
    micro_batch: int
    more: str = ""
    kind: str = ""


SHAPES = {
    "that of step_cpu.py": Shape(6, 384, 6, 6, 1024, 8192, 256, 16, 4, "tie_embeddings = true"),
    "small": Shape(2, 128, 4, 4, 384, 2048, 128, 32, 4),
    "narrow and deep": Shape(12, 256, 4, 2, 768, 2048, 256, 16, 4),
    "wide": Shape(3, 768, 12, 4, 2048, 8192, 256, 8, 2),
    "large vocabulary": Shape(4, 384, 6, 6, 1024, 32768, 256, 8, 4),
    "long sequences": Shape(4, 256, 4, 4, 768, 8192, 1024, 4, 1),
    "one micro-batch": Shape(6, 384, 6, 2, 1024, 8192, 512, 4, 4),
    "large micro-batch": Shape(4, 256, 8, 8, 1024, 8192, 256, 32, 16),
    "GPT-2": Shape(4, 384, 6, 6, 1536, 8192, 256, 16, 8, 'family = "gpt2"'),
    "100M parameters": Shape(10, 768, 12, 12, 2048, 8192, 256, 4, 2),
    # Shapes that the formula was not fitted to:
    "validation, shallow": Shape(3, 512, 8, 2, 1536, 8192, 256, 8, 2),
    "validation, deep": Shape(10, 320, 5, 5, 896, 2048, 512, 6, 2),
    "validation, wide": Shape(4, 640, 10, 2, 1792, 4096, 256, 16, 2),
    "validation, one micro-batch": Shape(6, 512, 8, 8, 1408, 8192, 256, 4, 2),
    "validation, documents": Shape(4, 256, 4, 4, 768, 4096, 512, 16, 4, kind="documents"),
    "validation, documents, wide": Shape(3, 640, 10, 2, 1792, 8192, 1024, 8, 2, kind="documents"),
    "validation, documents, one micro-batch": Shape(6, 384, 6, 6, 1024, 8192, 512, 4, 4, kind="documents"),
    "validation, classifier": Shape(4, 256, 4, 4, 768, 4096, 256, 32, 8, kind="classifier"),
    "validation, classifier, wide": Shape(4, 512, 8, 8, 1408, 8192, 512, 16, 4, kind="classifier"),
}
KINDS = {
    "": {"tokens": "", "train": "", "sources": ""},
    "documents": {"tokens": ", document_mask = true", "train": "", "sources": ""},
    "classifier": {"tokens": "", "train": 'objective = "classify"', "sources": 'label = "a"\n[[corpus.sources]]\nname = "more"\n'
                   'paths = ["more"]\nformat = "text"\nlabel = "b"'},
}  # fmt: skip
RECIPE = """
run = {{ name = "{name}", dir = "." }}
tokenizer.vocabulary = {vocabulary}
tokens = {{ sequence_length = {length}, held_out = 0.01{kind[tokens]} }}
evaluate.max_tokens = 4096
[model]
layers = {layers}
width = {width}
heads = {heads}
kv_heads = {kv_heads}
mlp_width = {mlp_width}
{more}
[train]
steps = {steps}
global_batch_tokens = {batch_tokens}
micro_batch = {micro_batch}
device = "cpu"
precision = "{precision}"
compile = "{compile}"
recompute = "{recompute}"
{kind[train]}
[[corpus.sources]]
name = "text"
paths = ["text"]
format = "text"
{kind[sources]}
"""


def write_text(folder: Path, kind: str) -> None:
    """Write texts from 60,000 words, enough for every vocabulary. `kind` is that of `Shape`."""
    draw = random.Random(len(folder.name))
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(60_000)]
    folder.mkdir()
    for number in range(600):
        length = draw.randint(4, 250) if kind else 500
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(words, k=length)).capitalize() + ".\n")


def trained(
    folder: Path, name: str, precision: str, threads: int, recompute: str, layout: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Train a shape for some steps and return its plan and its measured peak."""
    shape, run = SHAPES[name], "trained"
    together = shape.micro_batch * (1 if layout == "alone" else 2)  # sequences per micro-batch of all processes
    sequences = -(-shape.sequences // together) * together
    text = RECIPE.format(
        **{**shape._asdict(), "kind": KINDS[shape.kind]},
        name=run, steps=given.steps, batch_tokens=sequences * shape.length, precision=precision,
        compile="on" if given.compile else "off", recompute=recompute,
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(given.source.resolve()), "OMP_NUM_THREADS": str(threads)}
    shutil.rmtree(folder / run, ignore_errors=True)
    for made in ("text-only", run):  # the second run reuses the corpus and tokens of the first
        (folder / f"{made}.toml").write_text(text.replace(f'"{run}"', f'"{made}"'))
        for stage in ("corpus", "tokens", *(["train"] if made == run else [])):
            command = [sys.executable, "-m", "bessemer", stage, f"{made}.toml"]
            command += ["--set", f"parallel.{layout}=2"] if layout != "alone" else []
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name}: {' '.join(command)}: {done.stderr}")
    compared = json.loads((folder / run / "planned_against_measured.json").read_text())["memory_bytes"]
    plan = json.loads((folder / run / "plan.json").read_text())["memory_bytes"]
    return {
        "sequences": sequences, "processes": 1 if layout == "alone" else 2, "before_model": plan["before_model"],
        "plan": plan, "measured_bytes": compared["measured"], "error": compared["error"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--recompute", nargs="+", choices=("none", "selective", "full"), default=["none"])
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=("alone", "shard", "replicate"),
        default=["alone"],
        help="one process, or two that shard or replicate the state",
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--source",
        type=Path,
        default=Path(__file__).parent.parent / "src",
        help="source folder of the version to measure",
    )
    parser.add_argument("--folder", type=Path, help="folder that keeps corpus and tokens (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = given.folder or Path(temporary)
        every = product(given.layouts, given.recompute, given.threads, given.precisions, given.shapes)
        for layout, recompute, threads, precision, name in every:
            kind = SHAPES[name].kind
            folder = place / f"{SHAPES[name].vocabulary}{kind}"
            if not folder.exists():
                folder.mkdir(parents=True)
                for source in ("text", "more"):
                    write_text(folder / source, kind)
            row = trained(folder, name, precision, threads, recompute, layout, given)
            rows.append({"shape": name, **SHAPES[name]._asdict(), "precision": precision, "threads": threads,
                         "recompute": recompute, "layout": layout, **row})  # fmt: skip
            print(
                f"{name:<20} {precision} {threads} {recompute:<9} {layout:<9} {row['plan']['total'] / 1e6:>7.0f} MB planned "
                f"{row['measured_bytes'] / 1e6:>7.0f} measured {row['error']:>+7.1%}", flush=True,
            )  # fmt: skip
            if given.json:
                result = {"machine": describe(compiled=given.compile, steps=given.steps), "rows": rows}
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= LIMIT for error in errors)
    print(f"{within} of {len(rows)} within {LIMIT:.0%}, mean error {fmean(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
