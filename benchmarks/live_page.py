"""Cost of watching a run: `bessemer watch` next to a training with a page that polls it, and a report of 100,000 steps.

The training and the server are separate processes. The server is polled as the page polls it, with the same wait between
requests. CPU seconds are those of the two processes over the same stretch of wall time. First paint is Chromium's
first-contentful-paint of the page during training; it is left out if Chromium is not installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

import numpy as np
from machine import describe

sys.path.insert(0, str(Path(__file__).parent.parent))
from bessemer.report import page
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines
from tests import chromium

RECIPE = """
[run]
name = "watched"
dir = "{place}"
[[corpus.sources]]
name = "text"
paths = ["{text}"]
[model]
depth = {depth}
[train]
steps = 100000
"""


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def watched(place: Path, text: Path, depth: int, seconds: float) -> dict[str, Any]:
    """Return the server's CPU time as a share of the training's, and how far the page lags behind the run."""
    recipe = place / "watched.toml"
    recipe.write_text(RECIPE.format(place=place, text=text, depth=depth))
    command = [sys.executable, "-m", "bessemer"]
    training = subprocess.Popen([*command, "run", str(recipe)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = RunDirectory(place / "watched")
    while len(read_json_lines(run.metrics)) < 5:
        assert training.poll() is None, "the training ended"
        sleep(0.5)
    server = subprocess.Popen(
        [*command, "watch", str(run.path), "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    base, token = address.split("?")
    first = perf_counter()
    urllib.request.urlopen(address).read()
    first_html = perf_counter() - first
    paint = first_paint(address, place / "profile")
    version, delays, answers = "", [], 0
    before, begun = (cpu_seconds(training.pid), cpu_seconds(server.pid)), perf_counter()
    while perf_counter() - begun < seconds:
        with urllib.request.urlopen(f"{base}state?{token}&since={version}") as answer:
            state = json.loads(answer.read())
        if "figures" in state:
            answers += 1
            newest = read_json_lines(run.metrics)[-1]
            shown = state["figures"]["loss"]["traces"][0]["x"][-1]
            delays.append(max(newest["step"] - shown, 0))
        version = state["version"]
        sleep(1.8)  # the interval of live.js
    wall = perf_counter() - begun
    trained, served = cpu_seconds(training.pid) - before[0], cpu_seconds(server.pid) - before[1]
    for process in (training, server):
        process.terminate()
        process.wait()
    return {
        "depth": depth, "wall_seconds": wall, "training_cpu_seconds": trained, "server_cpu_seconds": served,
        "share": served / trained, "updates": answers, "seconds_between_updates": wall / max(answers, 1),
        "steps_behind": median(delays) if delays else None, "first_html_seconds": first_html,
        "first_paint_seconds": paint,
    }  # fmt: skip


def first_paint(address: str, profile: Path) -> float | None:
    """Return the seconds from navigation to the first content on the screen."""
    if chromium.PROGRAM is None:
        return None
    with chromium.Chromium(profile) as browser:
        browser.open(address)
        entry = "performance.getEntriesByName('first-contentful-paint')[0]"
        browser.until(f"{entry} !== undefined")
        return float(browser.run(f"{entry}.startTime")) / 1000


def long_report(place: Path, steps: int) -> dict[str, Any]:
    """Return the seconds and bytes of the report of a long run with validations, layer statistics and two sources."""
    run = RunDirectory(place / "long")
    run.path.mkdir()
    run.recipe.write_text(f'[run]\nname = "long"\n[train]\nsteps = {steps}\n')
    noise = np.random.default_rng(0).normal(size=steps)
    with open(run.metrics, "w") as file:
        for step in range(1, steps + 1):
            loss = 2 + 8 * step**-0.3 + 0.05 * noise[step - 1]
            row = {"kind": "train", "step": step, "tokens": 4096 * step, "loss": loss, "grad_norm": 1 + abs(noise[step - 1]),
                   "loss_by_source": {"a": loss - 0.1, "b": loss + 0.1}, "learning_rate": 1e-3, "step_seconds": 0.3,
                   "tokens_per_second": 13650.0, "mfu": 0.4, "data_wait": 0.001, "memory_bytes": 1e9,
                   "time": "2026-01-01T00:00:00+00:00"}  # fmt: skip
            file.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"kind": "validation", "step": step, "tokens": 4096 * step, "loss": loss,
                                       "bits_per_byte": loss / 2}) + "\n")  # fmt: skip
            if step % 50 == 0:
                blocks = {str(block): 1.0 + block for block in range(24)}
                file.write(json.dumps({"kind": "inside", "step": step, "activation_rms": blocks,
                                       "attention_logit_max": blocks}) + "\n")  # fmt: skip
    begun = perf_counter()
    written = page.write(run)
    return {"steps": steps, "seconds": perf_counter() - begun, "bytes": written.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, help="folder of text to train on")
    parser.add_argument("--depth", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with TemporaryDirectory() as place:
        rows = []
        for depth in args.depth:
            folder = Path(place) / str(depth)
            folder.mkdir()
            rows.append(watched(folder, args.text.resolve(), depth, args.seconds))
            print(f"depth {depth}: server {rows[-1]['share']:.2%} of the training's CPU time, an update every "
                  f"{rows[-1]['seconds_between_updates']:.2f} s")  # fmt: skip
        report = long_report(Path(place), 100_000)
        print(f"report of {report['steps']:,} steps: {report['seconds']:.1f} s, {report['bytes'] / 1e6:.1f} MB")
    found = {"machine": describe(), "watched": rows, "report": report}
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
