"""Helpers that run commands in a subprocess or in this process and read the results of a training."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bessemer.cli import run_command
from tests.newest import Result, training_result, wait_for_step


def bessemer(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bessemer", *map(str, arguments)]
    variables = os.environ | (environment or {})
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=400)


def start(recipe_file: Path, runs: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bessemer", "train", str(recipe_file), "--set", f"run.dir={runs}", *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def interrupted(recipe_file: Path, runs: Path, step: int, number: signal.Signals, *more: str) -> tuple[int, str]:
    """Start a training, send it a signal after a step, and return its exit code and messages."""
    process = start(recipe_file, runs, *more)
    wait_for_step(runs / "small", step, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def resumed(recipe_file: Path, runs: Path, *more: str) -> Result:
    """Start a training again and return its results; it resumes from its newest checkpoint if there is one."""
    has_saved = (runs / "small" / "checkpoints" / "latest").exists()
    done = bessemer("train", recipe_file, "--set", f"run.dir={runs}", *more)
    assert done.returncode == 0 and ("continuing from step" in done.stderr) == has_saved, done.stderr
    return training_result(runs / "small")


def command(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text
