"""Count the source files that one command enters between `main()` and its first training step.

The recipe is that of benchmarks/digests.py (two layers, one process), with corpus and tokens already built. The script runs
`bessemer run` in this process and records with `sys.setprofile` each source file of the package in which a function is called,
and how often a call returns to a file that was entered before. Code that runs during imports does not count. It stops at the
first optimizer step of the training loop.

    PYTHONPATH=src python benchmarks/files_entered.py [--list]
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

import digests

import bessemer
from bessemer import cli

PACKAGE = Path(bessemer.__file__).parent


class _FirstStep(BaseException):
    """Raised when the first optimizer step begins."""


class Trace:
    """Profile function that records the files of the package that calls enter.

    Attributes:
        files: Files in the order of their first entry.
        returns: Number of calls that enter a file that was entered and left before.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.returns = 0
        self._current = ""
        self._imports = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            self._imports += 1 if event == "call" else -1
        if event != "call" or self._imports or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        name = str(Path(code.co_filename).relative_to(PACKAGE))
        if name.startswith("train/optimizer/") and code.co_name == "step" and "train/loop.py" in self.files:
            sys.setprofile(None)
            raise _FirstStep
        if name == self._current:
            return
        self._current = name
        if name in self.files:
            self.returns += 1
        else:
            self.files.append(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files in the order of their first entry")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        digests.write_text(Path(folder) / "text")
        recipe = Path(folder) / "small.toml"
        recipe.write_text(digests.RECIPE.format(folder=folder))
        for command in ("corpus", "tokens"):
            subprocess.run([sys.executable, "-m", "bessemer", command, str(recipe)], check=True, capture_output=True)
        trace = Trace()
        sys.setprofile(trace)
        with contextlib.suppress(_FirstStep):
            cli.run_command(["run", str(recipe)])
        sys.setprofile(None)
    if options.list:
        print("\n".join(trace.files))
    print(f"{len(trace.files)} files entered, {trace.returns} returns to an earlier file")


if __name__ == "__main__":
    main()
