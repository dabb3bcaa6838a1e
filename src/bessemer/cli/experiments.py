"""Commands that train small models: `bessemer check` runs the launch checklist of a recipe, `ladder` predicts a large run or a
better mixture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.console import say
from bessemer.common.errors import InputError

if TYPE_CHECKING:
    import argparse


def check(args: argparse.Namespace) -> Any:
    """Print the checklist; the exit code is 1 where a row fails. Returns it as plain values."""
    from bessemer.check.command import checked
    from bessemer.check.rows import is_go, table, to_dict, verdict

    session = runs.open_recipe(args, fill_derived=False)
    rows = checked(session.recipe, session.run, args.recipe)
    if not args.json:
        print(f"{table(rows)}\n\n{verdict(rows)}")
    args.exit_code = 0 if is_go(rows) else 1
    return to_dict(rows)


def ladder(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.ladder import command, mixture, summary

    session = runs.open_recipe(args)
    folder = Path(args.folder) if args.folder else None
    shared = {"rungs": args.rungs, "budget": args.budget, "folder": folder, "restart": args.restart}
    result: dict[str, Any]
    if args.mixture:
        if args.design is not None or args.ratio is not None or args.seeds is not None:
            raise InputError("ladder: --mixture has proxies of one size; leave out --design, --ratio and --seeds")
        result = mixture.mixture(session, target=args.target or mixture.MEAN, verify=args.verify, **shared)
    elif args.target is not None or args.verify:
        raise InputError("ladder: --target and --verify belong to --mixture; add it, or leave them out")
    else:
        result = command.ladder(session, design=args.design, ratio=args.ratio, seeds=args.seeds, **shared)
    if not args.json:
        print(summary.table(result))
        say(summary.ending(result))
    return result
