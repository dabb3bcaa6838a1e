"""Coverage of the intervals of `bessemer ladder`: how often they contain the measured loss, on several kinds of text.

    python benchmarks/ladder_coverage.py TEXTS --work DIR --json benchmarks/results/ladder_coverage.json

TEXTS has a folder for each kind of text. For each one the script trains a ladder and then its planned run, with the commands that
a user calls. Every rung from the fifth on and the planned run are predicted from the smallest four rungs, from five, and so on.
The rules of the prediction must be fixed beforehand: a kind of text that was used to choose a rule does not belong in TEXTS. Run
the command again to resume it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from bessemer.cli import run_command
from bessemer.common.console import text_table
from bessemer.ladder.law import WITHIN, Point, fit_law

FEWEST = 4  # fewest rungs of a prediction
RUNGS = 6
BUDGET = "6e11"  # FLOPs of the rungs: the largest ladder below a quarter of the planned compute
STEPS = 370
KEPT = ("name", "group", "parameters", "tokens", "flops", "loss", "batch_excess")  # keys of a rung that make a Point
RECIPE = """
[run]
name = "{name}"
dir = "{work}"

[[corpus.sources]]
name = "text"
format = "text"
paths = ["{text}"]

[tokenizer]
vocabulary = 512
sample_bytes = 4_000_000

[tokens]
sequence_length = 128
held_out = 0.05

[model]
layers = 3
width = 80
heads = 4
kv_heads = 4
mlp_width = 240

[train]
steps = {steps}
global_batch_tokens = 1024
precision = "fp32"

[train.optimizer]
learning_rate = 0.01
weight_decay = 0.1

[train.schedule]
kind = "wsd"
decay_share = 0.5
final_share = 0.0

[report]
tensorboard = false

[evaluate]
max_tokens = 60_000
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder with a subfolder for each kind of text")
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--kinds", nargs="*", help="use only these subfolders")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = args.kinds or sorted(path.name for path in args.texts.iterdir() if path.is_dir())
    if missing := [kind for kind in kinds if not (args.texts / kind).is_dir()]:
        parser.error(f"{args.texts}: no folder {', '.join(missing)}")
    machine, found = describe(threads=os.environ.get("OMP_NUM_THREADS")), []
    for kind in kinds:
        ladder = trained(args.texts / kind, args.work)
        found.append(scored(kind, ladder))
        result = {"machine": machine, "claimed": WITHIN, "summary": summary(found), "kinds": found}
        print(shown(result), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def trained(text: Path, work: Path) -> dict[str, Any]:
    """Train a ladder and its planned run on this text, and return its ladder.json."""
    work.mkdir(parents=True, exist_ok=True)
    recipe, folder = work / f"{text.name}.toml", work / text.name
    recipe.write_text(
        RECIPE.format(steps=STEPS, name=text.name, work=work.resolve(), text=text.resolve()), encoding="utf-8"
    )
    ladder = ["ladder", str(recipe), "--rungs", str(RUNGS), "--budget", BUDGET]
    for command in (ladder, ["train", str(recipe)], ladder):
        if code := run_command(command):
            sys.exit(code)
    found: dict[str, Any] = json.loads((folder / "ladder" / "ladder.json").read_text(encoding="utf-8"))
    assert found["planned"]["measured"] is not None, "the planned run is trained"
    return found


def scored(kind: str, ladder: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction of every larger run from smaller ones, with the measured loss.

    Args:
        kind: Name of the text.
        ladder: The contents of ladder.json, or an earlier result of this function.
    """
    runs = sorted(ladder["rungs"], key=lambda rung: rung["flops"])
    points = [Point(*(rung[key] for key in KEPT)) for rung in runs]
    amounts, planned = sorted({point.flops for point in points}), ladder["planned"]
    size = (planned["parameters"], planned["tokens"], planned["flops"])
    last = Point("planned", -1, *size, planned["measured"]["loss"])
    larger = [*points, last]
    predictions = []
    for count in range(FEWEST, len(amounts) + 1):
        law = fit_law("ratio", tuple(point for point in points if point.flops <= amounts[count - 1]))
        for target in larger:
            if target.flops <= amounts[count - 1]:
                continue
            interval = law.loss(target.parameters, target.tokens, target.flops, batch_excess=target.batch_excess)
            predictions.append({
                "run": target.name, "from_rungs": count, "beyond": target.flops / amounts[count - 1],
                "measured": target.loss, "predicted": interval.value, "low": interval.low, "high": interval.high,
                "error": interval.value / target.loss - 1, "width": (interval.high - interval.low) / interval.value,
                "inside": interval.covers(target.loss),
            })  # fmt: skip
    return {
        "kind": kind, "predictions": predictions, "rungs": [{key: run[key] for key in ("seed", *KEPT)} for run in runs],
        "planned": {key: planned[key] for key in ("parameters", "tokens", "flops", "measured")},
    }  # fmt: skip


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return coverage, errors and widths for all predictions, for left-out rungs, and for planned runs."""
    every = [row for kind in found for row in kind["predictions"]]
    sets = {
        "all": every,
        "left-out rungs": [row for row in every if row["run"] != "planned"],
        "planned runs": [row for row in every if row["run"] == "planned"],
    }
    return {
        name: {
            "predictions": len(rows), "inside": sum(row["inside"] for row in rows),
            "coverage": float(np.mean([row["inside"] for row in rows])),
            "below": sum(row["measured"] < row["low"] for row in rows),
            "above": sum(row["measured"] > row["high"] for row in rows),
            "median_width": float(np.median([row["width"] for row in rows])),
            "median_error": float(np.median([abs(row["error"]) for row in rows])),
            "mean_error": float(np.mean([row["error"] for row in rows])),
            "median_beyond": float(np.median([row["beyond"] for row in rows])),
        }
        for name, rows in sets.items()
    }  # fmt: skip


def shown(result: dict[str, Any]) -> str:
    titles = ("text", "run", "from", "beyond", "predicted", "low", "high", "measured", "error", "")
    rows = [
        [kind["kind"], row["run"], str(row["from_rungs"]), f"{row['beyond']:.1f}", f"{row['predicted']:.4f}", f"{row['low']:.4f}",
         f"{row['high']:.4f}", f"{row['measured']:.4f}", f"{row['error']:+.2%}", "inside" if row["inside"] else "OUTSIDE"]
        for kind in result["kinds"] for row in kind["predictions"]
    ]  # fmt: skip
    sets = [
        f"{name}: {one['inside']} of {one['predictions']} inside ({one['coverage']:.0%}), x{one['median_beyond']:.1f} beyond; "
        f"median width {one['median_width']:.1%}, median error {one['median_error']:.1%}, mean {one['mean_error']:+.1%}"
        for name, one in result["summary"].items()
    ]
    return "\n".join([*text_table(titles, rows, "r"), "", *sets])


if __name__ == "__main__":
    sys.exit(main())
