"""`bessemer report`: the page of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs
from bessemer.cli.run import planned_against_measured

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    options.add_run(commands.add("report", "write report.html of a run", report))


def report(args: argparse.Namespace) -> Any:
    from bessemer.report import page

    session = runs.open_run(args)
    written = page.write(session.run)
    if not args.json:
        print(written)
        if compared := planned_against_measured(session.run):
            print(compared)
    return {"report": written}
