"""Quality and time of `bessemer run TEXT` with every value derived, compared with a byte 5-gram.

Each text is a folder or a file. Prints the announced minutes (the derived train.minutes), the minutes that training took, and the
held-out bits per byte of the model and of a byte 5-gram fitted on the same text.

    python benchmarks/first_run.py TEXT [TEXT ...] --json results/first_run.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from machine import describe, wait_until_idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine, rows = describe(idle=wait_until_idle(60), sets=given.sets), []
    for text in given.texts:
        with tempfile.TemporaryDirectory() as place:
            rows.append(row := run(text.resolve(), Path(place), given.sets))
        print(f"{text.name}: {'better' if row['ahead'] else 'WORSE'} than the 5-gram, {row}", flush=True)
        if given.json:
            given.json.write_text(json.dumps({"machine": machine, "runs": rows}, indent=1) + "\n")


def run(text: Path, place: Path, sets: list[str]) -> dict[str, Any]:
    """Train on the text in an empty folder and return its row: wall-clock seconds, and bits per byte of held-out text."""
    command = [sys.executable, "-m", "bessemer", "run", str(text)]
    for value in (f"run.dir={place}", *sets):
        command += ["--set", value]
    subprocess.run(command, cwd=place, check=True)
    (folder,) = (path.parent for path in place.glob("*/evaluation.json"))
    basis, plan, scores, stages = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("basis", "plan", "evaluation", "stages")
    )
    train = tomllib.loads((folder / "recipe.toml").read_text())["train"]
    seconds = {stage["name"]: round(stage["seconds"], 1) for stage in stages["stages"]}
    return {
        "text": text.name,
        "clean_bytes": basis["basis"]["text_bytes"],
        "parameters": plan["parameters"],
        "announced_minutes": train.get("minutes"),
        "trained_minutes": round(seconds["train"] / 60, 2),
        "seconds": seconds,
        "bits_per_byte": round(scores["bits_per_byte"], 4),
        "ngram_bits_per_byte": round(scores["ngram"]["bits_per_byte"], 4),
        "held_out_bytes": scores["held_out_bytes"],
        "ahead": scores["bits_per_byte"] < scores["ngram"]["bits_per_byte"],
        "optimizer": train["optimizer"],
    }


if __name__ == "__main__":
    main()
