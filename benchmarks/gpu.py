"""Run all checks that need a CUDA device within a time limit (`make gpu`): tests, losses, precisions, memory, steps.

    python benchmarks/gpu.py --out build/gpu                  within 9 minutes, the most important first
    python benchmarks/gpu.py --out build/gpu --parts tests losses
    python benchmarks/gpu.py --out build/gpu --tiny           the same code on any device, on tiny models

Each part is a separate process with a time limit. If one fails or times out, its log remains and the other parts still run. The
folder holds PART.log, PART.json for the parts that write one, and summary.json with the device, the versions and the outcome of
each part. The exit code is 1 if a part failed; a part that did not start for lack of time is listed and is no failure.

A machine that has torch but neither network nor the other packages needs these as wheels in build/gpu-wheels, which
benchmarks/gpu_wheels.py packs. They are unpacked into build/gpu-site.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_wheels import NEEDED, WHEELS, provide
from machine import describe

HERE = Path(__file__).parent
SITE = HERE.parent / "build" / "gpu-site"
GRACE = 5.0  # seconds reserved for the summary


@dataclass(frozen=True)
class Part:
    """A command for this Python, with placeholders such as {json} and {tiny} in its words.

    Attributes:
        limit: Seconds after which the part is stopped.
        least: Seconds that must be left for the part to start.
    """

    name: str
    words: tuple[str, ...]
    limit: float
    least: float = 20.0


def step_part(name: str, limit: float, *cases: str) -> Part:
    words = ("step_gpu.py", "--once", "--steps", "6", "--json", "{json}", "{tiny}", "--cases", *cases)
    return Part(name, words, limit, 40.0)


# The most important first: a wrong result matters more than a speed.
PARTS = (
    Part("tests", ("-m", "pytest", "-m", "gpu", "-q", "-rs", "{tests}"), 150.0),
    Part("losses", ("gpu_parts.py", "losses", "--out", "{json}", "{tiny}"), 90.0),
    Part("precisions", ("gpu_parts.py", "precisions", "--out", "{json}", "{tiny}"), 150.0),
    step_part("step_1b", 100.0, "1.3B", "1.3B plain", "1.3B fp8"),
    Part("waits", ("gpu_parts.py", "waits", "--out", "{json}", "{tiny}"), 60.0),
    Part("memory", ("gpu_parts.py", "memory", "--out", "{json}", "{tiny}"), 60.0),
    step_part("step_3b", 100.0, "3B", "3B fp8"),
    Part("checkpoint", ("checkpoint.py", "--layers", "{layers}", "--width", "{width}", "--tokens", "4096", "--rounds", "2",
                        "--wait", "0", "--json", "{json}"), 60.0),
    Part("profile", ("gpu_parts.py", "profile", "--out", "{json}", "{tiny}"), 60.0),
    step_part("step_8b", 150.0, "8B 8bit"),
    step_part("step_small", 100.0, "0.5B", "0.5B plain", "0.5B fp8"),
)  # fmt: skip


def command(part: Part, out: Path, tiny: bool) -> list[str]:
    """Return the command line of a part. A tiny run replaces the cases of the step by one case of a small model."""
    words = part.words[: part.words.index("--cases")] if tiny and "--cases" in part.words else part.words
    marked = sorted(str(path) for path in (HERE.parent / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    values = {
        "{json}": [str(out / f"{part.name}.json")],
        "{tiny}": ["--tiny"] if tiny else [],
        "{tests}": marked[-1:] if tiny else marked,
        "{layers}": ["2" if tiny else "24"],
        "{width}": ["64" if tiny else "1280"],
    }
    filled = [one for word in words for one in values.get(word, [word])]
    if filled[0].endswith(".py"):
        filled[0] = str(HERE / filled[0])
    return [sys.executable, *filled]


def run(part: Part, out: Path, tiny: bool, left: float) -> dict[str, Any]:
    """Run a part within the `left` seconds and return its outcome."""
    if left < (part.least if not tiny else 1.0):
        return {"part": part.name, "ended": "not started: no time left", "seconds": 0.0}
    began, limit = perf_counter(), min(part.limit, left)
    paths = [str(HERE.parent / "src"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")]), str(SITE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLD_PYTHON": "1"}
    with open(out / f"{part.name}.log", "w") as log:
        process = subprocess.Popen(
            command(part, out, tiny), stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=HERE.parent
        )
        try:
            code = process.wait(limit)
            ended = (
                "passed" if code == 0 else "no tests for this device" if code == 5 else f"FAILED with exit code {code}"
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"timed out after {limit:.0f} s"
    return {"part": part.name, "ended": ended, "seconds": round(perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any device")
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes must be greater than 0, not {given.minutes:g}")
    out = given.out.resolve()  # the parts run in another working directory
    if lacking := provide(("torch", *NEEDED), WHEELS, SITE):
        sys.exit(
            f"not installed: {', '.join(lacking)}. Run `make install`; without a network, copy {WHEELS} from another machine"
            " (benchmarks/gpu_wheels.py makes it)"
        )
    import torch

    if not given.tiny and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --tiny runs the same code on a CPU")
    out.mkdir(parents=True, exist_ok=True)
    deadline = perf_counter() + 60 * given.minutes - GRACE
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts = describe(device=device, cuda=torch.version.cuda, tiny=given.tiny)
    print(f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}; results in {out}", flush=True)
    rows, has_failed = earlier(out / "summary.json", facts), False
    for part in PARTS:
        if given.parts and part.name not in given.parts:
            continue
        row = run(part, out, given.tiny, deadline - perf_counter())
        rows[part.name], has_failed = row, has_failed or row["ended"].startswith("FAILED")
        print(f"{part.name:<12} {row['seconds']:>6.1f} s  {row['ended']}", flush=True)
        (out / "summary.json").write_text(json.dumps({"machine": facts, "parts": list(rows.values())}, indent=1) + "\n")
        log = out / f"{part.name}.log"
        if log.exists():
            print("\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    sys.exit(1 if has_failed else 0)


def earlier(summary: Path, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the outcomes of an earlier call by part name, if its device and versions were the same."""
    if not summary.exists():
        return {}
    found = json.loads(summary.read_text())
    same = all(found["machine"].get(key) == facts[key] for key in ("device", "torch", "python", "cuda", "tiny"))
    return {row["part"]: row for row in found["parts"]} if same else {}


if __name__ == "__main__":
    main()
