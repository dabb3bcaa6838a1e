"""The decision whether a run may resume under a recipe: data and model keys must be those that it was trained with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bessemer.common.errors import BessemerError, InputError
from bessemer.recipe import Recipe, differences, is_as_dumped, load, parse, without_folders
from bessemer.recipe.keys import EXTENDS, MAY_CHANGE
from bessemer.recipe.resolved import ResolvedRecipe, as_resolved, load_resolved
from bessemer.recipe.section import Section
from bessemer.recipe.uses import built_in_classes
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.train.run_spec import Fresh, Resume

# What a training writes, and what follows from its weights.
TRAINED = (
    "checkpoints", "recipe.toml", "plan.json", "*.jsonl", "tensorboard", "environment.json", "mixture.json", "evaluation*.json",
    "export", "report.html", "profile", "planned_against_measured.json",
)  # fmt: skip


class OtherRecipe(InputError):
    """A run was trained with another recipe than the one that is to resume it."""


def new_run(run: RunDirectory) -> str:
    """Return the end of an error about a run that cannot resume under a recipe."""
    return f"for another recipe train a new run: another run.name, with train.start = {str(run.path)!r}"


def stored_recipe(run: RunDirectory) -> ResolvedRecipe | None:
    """The recipe that a run was last planned by; None before the first plan. Where its file is gone or was edited, that of the
    newest checkpoint: a change by hand is judged as any other change."""
    try:
        stored = load_resolved(run.recipe) if run.recipe.exists() else None
        if stored is not None and is_as_dumped(run.recipe.read_text(encoding="utf-8")):
            return stored
        for step in reversed(checkpoint_steps(run.checkpoints)):
            if (trained := _trained_recipe(run, step)) is not None:
                # The run may have been moved.
                place = {} if stored is None else stored.run.model_dump(include={"name", "dir"})
                return trained.changed(run=place)
        return stored
    except InputError as error:
        raise InputError(f"{error}; put the run's recipe back, or start over with --restart") from None


def changes(stored: Recipe, requested: Recipe) -> list[str]:
    """A line for each key in which two recipes differ and that a run cannot resume with."""
    lines = differences(without_folders(stored), without_folders(requested))
    return [line for line in lines if not _is_among(line.partition(":")[0], (*MAY_CHANGE, *EXTENDS))]


def _is_among(key: str, keys: Sequence[str]) -> bool:
    """Return True if the keys have this one, or a table that it is in."""
    return f"{key}.".startswith(tuple(f"{one}." for one in keys))


# Of the files as they are now
CODES = ("model.code", "train.schedule.code", "train.optimizer.code", "train.objective_code")
HORIZON = ("train.steps", "train.tokens", "train.minutes", "train.max_epochs")


def resumed(requested: Recipe, stored: ResolvedRecipe) -> Recipe:
    """Return the recipe of a trained run under a requested one: the keys that this gives, and the run's for the others.

    Of the keys that a run may change, it has only those that a recipe derives: what is left out of the others is turned off.
    """
    train = requested.train
    unset = (*CODES, *HORIZON) if train.has_horizon else CODES
    sequences = stored.train.global_batch_tokens // stored.tokens.sequence_length
    # Where it fits the micro-batch stays: another one rounds otherwise.
    if not requested.parallel.runs_batch(sequences, stored.train.micro_batch):
        unset = (*unset, "train.micro_batch")
    recipe = requested.changed(**_left_out(requested, stored, unset))
    if recipe.train.precision == "auto":  # another moment, or device, would choose another
        recipe = recipe.changed(train={"precision": stored.train.precision})
    return recipe


def _left_out(requested: Section, stored: Section, unset: Sequence[str], table: str = "") -> dict[str, Any]:
    """The stored values of keys that a table, with the tables in it, leaves out; unset: keys that stay left out."""
    values: dict[str, Any] = {}
    for key, info in type(stored).model_fields.items():
        name, own, old = f"{table}{info.alias or key}", getattr(requested, key), getattr(stored, key)
        if isinstance(own, Section) and isinstance(old, Section):
            values[key] = _left_out(own, old, unset, f"{name}.")
        elif key in requested.model_fields_set or name in unset:
            continue
        elif info.is_required() or not _is_among(name, MAY_CHANGE):
            values[key] = old
    return values


def require_unedited(run: RunDirectory) -> None:
    """Raise InputError where the recipe in a run directory is not the one that the run was trained with: what is reported of its
    steps would be of others."""
    stored = stored_recipe(run)
    if stored is not None and (changed := changes(stored, load(run.recipe))):
        raise InputError(f"{run.recipe}: was changed since the run was trained ({_some(changed)}); put it back")


@dataclass(frozen=True)
class Extend:
    """A run that continues to more steps than it was planned for.

    Attributes:
        latest: The last step whose checkpoint is also one of the longer run.
    """

    latest: int


@dataclass(frozen=True)
class Refuse:
    """A recipe under which a run cannot continue.

    Attributes:
        key: Key of the recipe that prevents it; "" for several.
        reason: Clause for the error, about the run.
    """

    key: str
    reason: str


def decide(
    stored: ResolvedRecipe | None, requested: ResolvedRecipe, checkpoints: list[int]
) -> Fresh | Resume | Extend | Refuse:
    """Decide how a run continues under a recipe.

    Args:
        stored: Resolved recipe that the run was last planned by.
        requested: Resolved recipe to train by.
        checkpoints: Steps of the run's checkpoints, in order.
    """
    if not checkpoints:
        return Fresh()
    if stored is None:
        return Resume(checkpoints[-1])
    if changed := changes(stored, requested):
        return Refuse("", f"holds a run of another recipe ({_some(changed)})")
    planned, steps, schedule = stored.train.steps, requested.train.steps, stored.train.schedule
    if steps == planned:
        return Resume(checkpoints[-1])
    if steps > planned and schedule.rule.is_extendable:
        decay_start = schedule.decay_start(planned)
        return Extend(checkpoints[-1] if decay_start is None else decay_start)
    why = "a run does not become shorter"
    if steps > planned:
        kinds = " and ".join(name for name, one in built_in_classes("schedules").items() if one.is_extendable)
        why = f"the rate of a {schedule.kind} schedule depends on the number of steps, so only {kinds} are extended"
    return Refuse("train.steps", f"is planned for {planned:,} steps, and the recipe asks for {steps:,}: {why}")


def require_resumable(
    stored: ResolvedRecipe | None, requested: ResolvedRecipe, run: RunDirectory, checkpoints: list[int]
) -> Fresh | Resume | Extend:
    """Return the decision for a run (see `decide`).

    Raises:
        OtherRecipe: When the run cannot continue under the requested recipe.
        InputError: When its newest checkpoint was saved under another recipe than the stored one.
    """
    trained = _trained_recipe(run, checkpoints[-1]) if checkpoints else None
    if stored is not None and trained is not None and (changed := changes(trained, stored)):
        raise InputError(
            f"{run.checkpoints}: the checkpoint of step {checkpoints[-1]:,} was saved by run {trained.run.name!r} of another "
            f"recipe than {run.recipe} ({_some(changed)}): put back what belongs together, or start over with --restart"
        )
    decision = decide(stored, requested, checkpoints)
    if isinstance(decision, Refuse):
        key = f"{decision.key}: " if decision.key else ""
        raise OtherRecipe(f"{key}{run.path}: {decision.reason}; {new_run(run)}")
    return decision


def _trained_recipe(run: RunDirectory, step: int) -> ResolvedRecipe | None:
    """The recipe that a checkpoint was saved with; None where it cannot be read, which is reported when it is loaded."""
    from bessemer.checkpoint.format import load_manifest  # loads torch, which tokens do not need

    place = run.checkpoints / checkpoint_name(step)
    with suppress(BessemerError):
        text = load_manifest(place).facts.get("recipe_toml")
        return None if text is None else as_resolved(parse(text, f"recipe of {place}"), ResolvedRecipe)
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
