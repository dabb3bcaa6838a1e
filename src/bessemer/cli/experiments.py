"""`bessemer ladder` and `bessemer study`: small runs that predict a large one, or a better mixture; experiments that teach."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.errors import BessemerError, InputError
from bessemer.terminal import say

if TYPE_CHECKING:
    import argparse


def ladder(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.ladder import command, mixture, page

    session = runs.open_recipe(args)
    folder = Path(args.folder) if args.folder else None
    shared = {"rungs": args.rungs, "budget": args.budget, "folder": folder, "restart": args.restart}
    result: dict[str, Any]
    if args.mixture:
        if args.design is not None or args.ratio is not None:
            raise InputError("ladder: --mixture has proxies of one size; leave out --design and --ratio")
        result = mixture.mixture(
            session, mixture.MixtureOptions(target=args.target or mixture.MEAN, verify=args.verify, **shared)
        )
    elif args.target is not None or args.verify:
        raise InputError("ladder: --target and --verify belong to --mixture; add it, or leave them out")
    else:
        design = args.design or command.LadderOptions.design
        result = command.ladder(session, command.LadderOptions(design=design, ratio=args.ratio, **shared))
    if not args.json:
        print(page.table(result))
        say(page.ending(result))
    return result


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
