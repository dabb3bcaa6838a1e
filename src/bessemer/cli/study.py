"""`bessemer study`: experiments that teach and prove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import BessemerError

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    study_ = commands.add("study", "an experiment that teaches, run here and now; without NAME: list them", study)
    study_.add_argument("name", nargs="?", metavar="NAME", help="the study; left out: list them")
    study_.add_argument("--short", action="store_true", help="a small part of a long study, in a minute (layouts)")
    study_.add_argument("--folder", metavar="DIR", help="where a long study keeps its runs and writes its tables")


def study(args: argparse.Namespace) -> Any:
    from bessemer import studies

    if args.name is None:
        rows = {name: study.what for name, study in studies.STUDIES.items()}
        if not args.json:
            print("\n".join(f"{name:<26} {what}" for name, what in rows.items()))
        return rows
    result, table = studies.run(args.name, args.short, None if args.folder is None else Path(args.folder))
    if not args.json:
        print(table)
    if missed := result.get("missed"):
        more = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        raise BessemerError(f"study {args.name}: {missed[0]}{more}; all of it is in {result['folder']}")
    return result
