"""`bessemer ladder`: small runs that predict a large one, or a better mixture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs
from bessemer.errors import InputError
from bessemer.terminal import say

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    ladder_ = commands.add("ladder", "small runs that predict a large one: a scaling law on your own tokens", ladder)
    options.add_recipe(ladder_)
    ladder_.add_argument("--design", metavar="NAME", help="ratio (default): a fixed number of tokens a "
        "parameter; isoflop: several sizes at each of several amounts of compute")  # fmt: skip
    ladder_.add_argument("--rungs", type=int, metavar="N", help="small runs (default: 6 of ratio, 12 of isoflop)")
    ladder_.add_argument("--budget", metavar="B", help="of all together: 5min, 2h, or FLOPs as 1e15 (default 5min)")
    ladder_.add_argument("--ratio", type=float, metavar="R", help="tokens a parameter (default: the planned run's)")
    ladder_.add_argument("--mixture", action="store_true", help="search better shares of the sources instead")
    ladder_.add_argument(
        "--target", metavar="SOURCE", help="whose held-out loss to lower (with --mixture; default mean)"
    )
    ladder_.add_argument("--verify", action="store_true", help="train a proxy on the proposed mixture (with --mixture)")
    ladder_.add_argument(
        "--folder", metavar="DIR", help="of its runs (default: ladder/, or mixture/, in the run folder)"
    )
    ladder_.add_argument("--restart", action="store_true", help="start over; the earlier training is set aside")


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
