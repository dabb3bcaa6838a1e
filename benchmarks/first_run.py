"""`bessemer run TEXT` and nothing else: does each text give a model that beats the byte 5-gram, in the time announced?

Each text is a folder or a file. The run derives everything; what it announced (the derived train.minutes), what the training
took by the clock, and the held-out bits per byte beside those of a byte 5-gram that has read the same text are printed.

--longer also trains copies of each run so many times as long, as the line at a run's end advises where the model may gain by it,
and sets that advice beside what came of it: whether a model that is trained longer has a lower held-out loss, by its held-out
loss as a share of that in training (advice.py has thresholds of that share).

    python benchmarks/first_run.py TEXT [TEXT ...] --json results/first_run.json
    python benchmarks/first_run.py TEXT [TEXT ...] --longer 2 4 --set train.steps=150 --json results/longer.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe, wait_until_idle

from bessemer import advice
from bessemer.recipe import load
from bessemer.run import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument(
        "--longer", nargs="+", default=[], type=float, metavar="TIMES", help="train copies so many times as long"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine, rows = describe(idle=wait_until_idle(60), sets=given.sets), []
    for text in given.texts:
        with tempfile.TemporaryDirectory() as place:
            rows.append(row := run(text.resolve(), Path(place), given.sets, given.longer))
        print(f"{text.name}: {'ahead of' if row['ahead'] else 'BEHIND'} the 5-gram, {row}", flush=True)
        if given.json:
            given.json.write_text(json.dumps({"machine": machine, "runs": rows}, indent=1) + "\n")


def run(text: Path, place: Path, sets: list[str], longer: list[float]) -> dict[str, Any]:
    """Train on the text in an empty folder. Seconds by the clock; scores in bits per byte of held-out text."""
    command = [sys.executable, "-m", "bessemer", "run", str(text)]
    for value in (f"run.dir={place}", *sets):
        command += ["--set", value]
    subprocess.run(command, cwd=place, check=True)
    (folder,) = (path.parent for path in place.glob("*/evaluation.json"))
    derived, plan, scores, stages = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("derived", "plan", "evaluation", "stages")
    )
    chosen = {
        f"{choice['table']}.{key}": value for choice in derived["choices"] for key, value in choice["values"].items()
    }
    seconds = {stage["name"]: round(stage["seconds"], 1) for stage in stages["stages"]}
    return {
        "text": text.name,
        "clean_bytes": derived["basis"]["text_bytes"],
        "parameters": plan["parameters"],
        "announced_minutes": chosen.get("train.minutes"),
        "trained_minutes": round(seconds["train"] / 60, 2),
        "seconds": seconds,
        "bits_per_byte": round(scores["bits_per_byte"], 4),
        "ngram_bits_per_byte": round(scores["ngram"]["bits_per_byte"], 4),
        "held_out_bytes": scores["held_out_bytes"],
        "ahead": scores["bits_per_byte"] < scores["ngram"]["bits_per_byte"],
        "derived": chosen,
        **(trained_longer(RunFolder(folder), longer) if longer else {}),
    }


def trained_longer(run: RunFolder, longer: list[float]) -> dict[str, Any]:
    """What the run's end advises, and the held-out loss (nats a token) of copies that are trained so many times as long."""
    train, (trained, held_out) = load(run.recipe).train, advice.last_losses(run)
    losses = {}
    for times in longer:
        copy = run.path.with_name(f"{run.path.name}-{times:g}")
        shutil.copytree(run.path, copy)
        command = [sys.executable, "-m", "bessemer", "run", str(copy), "--set", advice.longer_by(times, train)]
        subprocess.run(command, cwd=copy.parent, check=True)
        losses[f"{times:g}"] = round(advice.last_losses(RunFolder(copy))[1], 4)
    return {
        "trained_loss": round(trained, 4),
        "held_out_loss": round(held_out, 4),
        "ratio": round(held_out / trained, 3),
        "longer": losses,
        "advice": advice.next_step(run, train).replace(str(run.path), run.path.name),
    }


if __name__ == "__main__":
    main()
