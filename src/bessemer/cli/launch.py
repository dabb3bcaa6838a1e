"""`bessemer launch`: the files that start a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    launch_ = commands.add("launch", "write the files that start a run on a cluster", launch)
    options.add_recipe(launch_)
    launch_.add_argument("--on", choices=["slurm", "kubernetes"], required=True, help="the cluster's scheduler")
    launch_.add_argument("--out", metavar="DIR", help="folder for the files (default: launch/ in the run folder)")


def launch(args: argparse.Namespace) -> Any:
    from bessemer.launch import files

    session = runs.open_recipe(args)
    folder = Path(args.out) if args.out else session.run.path / "launch"
    written = files.write(session.recipe, args.on, folder)
    if not args.json:
        for path in written:
            print(path)
    return {"on": args.on, "files": written}
