"""Commands that train several models: `bessemer check`, `bessemer ladder` and `bessemer compare`.

`check` runs the launch checklist of a recipe, `ladder` predicts the loss of a large run, `compare` decides between two recipes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.console import say
from bessemer.run.directory import RunDirectory

if TYPE_CHECKING:
    from bessemer.recipe import Recipe

RUNG_SECONDS = 0.5  # seconds of timed training steps to plan a rung


def check(args: argparse.Namespace) -> Any:
    """Print the launch checklist, and return it as plain values. The exit code is 1 if a row fails."""
    from bessemer.check.command import run_checklist
    from bessemer.check.rows import is_go, table, to_dict, verdict
    from bessemer.workflow import estimate, stages
    from bessemer.workflow.session import Session

    session = runs.open_recipe(args, fill_derived=False)
    recipe, run = session.recipe, session.run
    rows = run_checklist(
        recipe, run, lambda: estimate.plan_unstarted(recipe, run, args.recipe),
        lambda small, folder: stages.build_data(Session(small, folder)),
    )  # fmt: skip
    if not args.json:
        print(f"{table(rows)}\n\n{verdict(rows)}")
    args.exit_code = 0 if is_go(rows) else 1
    return to_dict(rows)


def ladder(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.ladder import command, summary
    from bessemer.workflow import stages
    from bessemer.workflow.prepare import prepare
    from bessemer.workflow.session import Session

    session = runs.open_recipe(args)

    def train(recipe: Recipe, run: RunDirectory) -> None:
        rung = Session(recipe, run)
        stages.train(rung, prepare(rung, RUNG_SECONDS))

    result = command.ladder(
        session.recipe, session.run, lambda: stages.planned_recipe(session), train, design=args.design, rungs=args.rungs,
        budget=args.budget, ratio=args.ratio, seeds=args.seeds, folder=Path(args.folder) if args.folder else None,
        restart=args.restart,
    )  # fmt: skip
    if not args.json:
        print(summary.table(result))
        say(summary.ending(result))
    return result


def compare(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.ladder import paired
    from bessemer.workflow.compare import compare as train_pairs

    opened = (argparse.Namespace(**{**vars(args), "recipe": reference}) for reference in args.recipes)
    recipes = [runs.open_recipe(one, fill_derived=False).recipe for one in opened]
    result = train_pairs(recipes, args.recipes, args.seeds)
    if not args.json:
        print(paired.table(result))
        say(f"\n  page     {result['page']}")
    return result
