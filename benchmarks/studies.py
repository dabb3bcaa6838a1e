"""Every study once: its numbers, its findings in sentences and the processor time that it took.

python benchmarks/studies.py --json results/studies.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from machine import describe

from bessemer.studies import STUDIES

MANY = 12  # curves and grids with more values are left out of the results file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(STUDIES), metavar="STUDY")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    machine, rows = describe(threads=1), dict[str, Any]()
    for name in given.names:
        rows[name] = row = run(name)
        print(
            f"{name}: {row['processor_seconds']:.0f} s\n{row.get('error') or ' '.join(row['results']['shows'])}\n",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps({"machine": machine, "studies": rows}, indent=1) + "\n")


def run(name: str) -> dict[str, Any]:
    """One study, long ones in short."""
    command = [sys.executable, "-m", "bessemer", "study", name, *(["--short"] if STUDIES[name].long else [])]
    before = _seconds()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    row: dict[str, Any] = {"processor_seconds": round(_seconds() - before, 1)}
    if done.returncode:
        return {**row, "error": done.stderr.strip()}
    return {**row, "results": _short(json.loads(done.stdout))}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items() if not isinstance(one, list) or len(one) <= MANY}
    return [_short(one) for one in value] if isinstance(value, list) else value


def _seconds() -> float:
    spent = getrusage(RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


if __name__ == "__main__":
    main()
