"""Output of `bessemer plan --devices` and `--schedule`."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.errors import InputError

if TYPE_CHECKING:
    import argparse


def devices(args: argparse.Namespace) -> Any:
    """Print the catalogue of devices."""
    from bessemer.plan.devices import catalogue, devices_table

    entries = list(catalogue(Path(args.catalogue) if args.catalogue else None).values())
    if not args.json:
        print(devices_table(entries))
    return [asdict(device) for device in entries]


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Draw a pipeline schedule, with the recipe's model if a recipe is named."""
    from bessemer.model import recipe_defaults
    from bessemer.model.huggingface.config import model_config
    from bessemer.plan import schedule_table
    from bessemer.workflow.choose_layout import planned_sizes

    if (match := re.fullmatch(r"(\w+):(\d{1,6})x(\d{1,6})(?:x(\d{1,6}))?", args.schedule)) is None:
        raise InputError(
            f"plan: --schedule {args.schedule}: not NAME:RANKSxMICROBATCHES; give 1f1b:4x8, or interleaved:4x8x2 for two "
            "stages a rank"
        )
    name, ranks, micro_batches, virtual = match.groups()
    model = None
    if args.recipe is not None:  # read, but nothing is measured
        recipe = runs.open_recipe(args, may_be_unnamed=True).recipe
        vocabulary, labels = planned_sizes(recipe)
        model = model_config(recipe_defaults.resolve(recipe, vocabulary, labels=labels), vocabulary, labels)
    planned = schedule_table.plan_schedule(
        name, int(ranks), int(micro_batches), None if virtual is None else int(virtual), model
    )
    if not args.json:
        print(schedule_table.table(planned, shutil.get_terminal_size((100, 24)).columns))
    return schedule_table.to_dict(planned)
