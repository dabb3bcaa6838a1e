"""Whether a run may resume under a recipe: its data and model keys must be those that the run was trained with."""

from __future__ import annotations

import shutil
from contextlib import suppress

from bessemer.checkpoint.format import load_manifest
from bessemer.common.errors import BessemerError, InputError
from bessemer.recipe import Recipe, differences, is_as_dumped, load, parse, without_folders
from bessemer.recipe.keys import EXTENDS, MAY_CHANGE
from bessemer.run.directory import RunDirectory, checkpoint_name, published

EXTENDABLE = ("constant", "wsd")  # schedules whose rate before the decay does not depend on the number of steps
# What a training writes, and what follows from its weights.
TRAINED = (
    "checkpoints", "recipe.toml", "plan.json", "*.jsonl", "tensorboard", "environment.json", "mixture.json", "evaluation*.json",
    "export", "report.html", "profile", "planned_against_measured.json",
)  # fmt: skip


class OtherRecipe(InputError):
    """A run was trained with another recipe than the one that is to resume it."""


def new_run(run: RunDirectory) -> str:
    """Return the end of an error about a run that cannot resume under a recipe."""
    return (
        f"for another recipe train a new run from these weights: another run.name, with train.start = {str(run.path)!r}"
    )


def stored_recipe(run: RunDirectory) -> Recipe | None:
    """The recipe that a run was last planned by; None before the first plan. Where its file is gone or was edited, that of the
    newest checkpoint: a change by hand is judged as any other change."""
    try:
        stored = load(run.recipe) if run.recipe.exists() else None
        if stored is not None and is_as_dumped(run.recipe.read_text(encoding="utf-8")):
            return stored
        for step in reversed(published(run.checkpoints)):
            if (trained := _trained_recipe(run, step)) is not None:
                place = (
                    {} if stored is None else stored.run.model_dump(include={"name", "dir"})
                )  # it may have been moved
                return trained.changed(run=place)
        return stored
    except InputError as error:
        raise InputError(f"{error}; put the run's recipe back, or start over with --restart") from None


def changes(stored: Recipe, requested: Recipe) -> list[str]:
    """A line for each key in which two recipes differ and that a run cannot resume with."""
    lines = differences(without_folders(stored), without_folders(requested))
    allowed = (*MAY_CHANGE, *EXTENDS)
    return [line for line in lines if not line.startswith(tuple(f"{key}{end}" for key in allowed for end in ":."))]


def require_unedited(run: RunDirectory) -> None:
    """Raise InputError where the recipe in a run folder is not the one that the run was trained with: what is reported of its
    steps would be of others."""
    stored = stored_recipe(run)
    if stored is not None and (changed := changes(stored, load(run.recipe))):
        raise InputError(
            f"{run.recipe}: was changed since the run was trained ({_some(changed)}); put it back as it was"
        )


def require_same_recipe(stored: Recipe, requested: Recipe, run: RunDirectory, newest: int) -> None:
    """Raise InputError where a run cannot resume under a resolved recipe, or has the checkpoints of another recipe. newest: step
    of the newest checkpoint."""
    trained = _trained_recipe(run, newest)
    if trained is not None and (changed := changes(trained, stored)):
        raise InputError(
            f"{run.checkpoints}: the checkpoint of step {newest:,} was saved by run {trained.run.name!r} of another recipe than "
            f"{run.recipe} ({_some(changed)}): put back what belongs together, or start over with --restart"
        )
    if changed := changes(stored, requested):
        raise OtherRecipe(f"{run.path}: holds a run of another recipe ({_some(changed)}); {new_run(run)}")
    planned, steps, kind = stored.train.steps or 0, requested.train.steps or 0, stored.train.schedule.kind
    if steps < planned or (steps > planned and kind not in EXTENDABLE):
        why = "a run does not become shorter"
        if steps > planned:
            why = f"the rate of a {kind} schedule depends on the number of steps, so only {' and '.join(EXTENDABLE)} are extended"
        raise OtherRecipe(
            f"train.steps: {run.path} is planned for {planned:,} steps, and the recipe asks for {steps:,}: {why}; {new_run(run)}"
        )


def _trained_recipe(run: RunDirectory, step: int) -> Recipe | None:
    """The recipe that a checkpoint was saved with; None where it cannot be read, which is reported when it is loaded."""
    place = run.checkpoints / checkpoint_name(step)
    with suppress(BessemerError):
        text = load_manifest(place).facts.get("recipe_toml")
        return None if text is None else parse(text, f"recipe of {place}")
    return None


def _some(lines: list[str]) -> str:
    return f"{'; '.join(lines[:4])}{'; ...' if len(lines) > 4 else ''}"


def remove_training(run: RunDirectory) -> None:
    """Remove what a training made, so that the run starts over from its corpus and tokens."""
    for path in [path for name in TRAINED for path in run.path.glob(name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
