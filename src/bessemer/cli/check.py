"""`bessemer check`: the launch checklist of a recipe, executed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs

if TYPE_CHECKING:
    import argparse

    from bessemer.check.rows import CheckRow


def check(args: argparse.Namespace) -> Any:
    """Print the checklist; the exit code is 1 where a row fails. Returns it as plain values."""
    from bessemer.check.rows import is_go, table, to_dict, verdict

    rows = _rows(args)
    if rows is None:
        return {}
    if not args.json:
        print(f"{table(rows)}\n\n{verdict(rows)}")
    args.exit_code = 0 if is_go(rows) else 1
    return to_dict(rows)


def _rows(args: argparse.Namespace) -> list[CheckRow] | None:
    """The rows; None on ranks that do not report."""
    session = runs.open_recipe(args, fill_derived=False)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _rows_as_member(session.recipe, session.run.path)
    if args.resume:
        from bessemer.check.resume import checked_resume

        return checked_resume(session.recipe, session.run, args.recipe)
    from bessemer.check.command import checked

    return checked(session.recipe, session.run, args.recipe)


def _rows_as_member(recipe: Any, run: Path) -> list[CheckRow] | None:
    """One process of those that a launcher has started: devices, links, clocks and file system of all nodes."""
    from bessemer.check.machine import examine_as_member, rows_of
    from bessemer.check.planned import existing
    from bessemer.train import device as devices

    facts = examine_as_member(recipe, existing(run))
    is_cuda = devices.choose(recipe.train).is_cuda
    return list(rows_of(facts, is_cuda)) if os.environ["RANK"] == "0" else None
