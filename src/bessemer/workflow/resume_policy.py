"""Decisions whether a run may resume under a recipe: its data and model keys must be unchanged."""

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

# Files that a training writes, and files derived from its weights
TRAINED = (
    "checkpoints", "recipe.toml", "plan.json", "*.jsonl", "tensorboard", "environment.json", "mixture.json", "evaluation*.json",
    "export", "report.html", "profile", "planned_against_measured.json",
)  # fmt: skip


class OtherRecipe(InputError):
    """An error for a run that was trained with another recipe than the one requested."""


def new_run(run: RunDirectory) -> str:
    """Return the advice with which an error ends if the run at `run` cannot resume under the requested recipe."""
    weights = f"train.start = {str(run.path)!r} takes over these weights"
    return f"to train another recipe, choose another run.name; {weights}; --restart starts over"


def stored_recipe(run: RunDirectory) -> ResolvedRecipe | None:
    """Return the recipe that a run was last planned with; None before the first plan.

    If the recipe file is missing or was edited, the recipe of the newest checkpoint counts, so that an edit is compared like
    any other change.
    """
    try:
        stored = load_resolved(run.recipe) if run.recipe.exists() else None
        if stored is not None and is_as_dumped(run.recipe.read_text(encoding="utf-8")):
            return stored
        for step in reversed(checkpoint_steps(run.checkpoints)):
            if (trained := _trained_recipe(run, step)) is not None:
                # The run may have been moved.
                keys = {} if stored is None else stored.run.model_dump(include={"name", "dir"})
                return trained.changed(run=keys)
        return stored
    except InputError as error:
        raise InputError(f"{error}; restore the run's recipe.toml, or start over with --restart") from None


def changes(stored: Recipe, requested: Recipe) -> list[str]:
    """Return a line "key: old -> new" for each changed key that prevents a run from resuming."""
    lines = differences(without_folders(stored), without_folders(requested))
    return [line for line in lines if not _is_among(line.partition(":")[0], (*MAY_CHANGE, *EXTENDS))]


def _is_among(key: str, keys: Sequence[str]) -> bool:
    """Return True if `keys` contain the dotted key or a table that it is in."""
    return f"{key}.".startswith(tuple(f"{one}." for one in keys))


# Digests of user code, always computed from the current files
CODES = ("model.code", "train.schedule.code", "train.optimizer.code", "train.objective_code")
HORIZON = ("train.steps", "train.tokens", "train.minutes", "train.max_epochs")


def resumed(requested: Recipe, stored: ResolvedRecipe) -> Recipe:
    """Return the requested recipe with the values of the stored one for the keys that the requested one leaves out.

    Exceptions are keys that may change between sessions and have a fixed default, which they return to, and digests of user
    code. If the requested recipe sets the training length or another limit on it, the stored length is not used.
    """
    train = requested.train
    has_limit = "max_epochs" in train.model_fields_set and train.max_epochs != stored.train.max_epochs
    unset = (*CODES, *HORIZON) if train.has_horizon or has_limit else CODES
    sequences = stored.train.global_batch_tokens // stored.tokens.sequence_length
    # Keep the micro-batch if it fits, because another one changes the rounding.
    if not requested.parallel.runs_batch(sequences, stored.train.micro_batch):
        unset = (*unset, "train.micro_batch")
    recipe = requested.changed(**_left_out(requested, stored, unset))
    if recipe.train.precision == "auto":  # keep the run's precision, because `auto` depends on the device
        recipe = recipe.changed(train={"precision": stored.train.precision})
    return recipe


def _left_out(requested: Section, stored: Section, unset: Sequence[str], table: str = "") -> dict[str, Any]:
    """Return the values of `stored` for the keys that `requested` does not set, as nested dicts.

    Both are the table `table` (a dotted name) of a recipe, with its subtables. Not included are the dotted keys in `unset`
    and those that may change between sessions and have a fixed default.
    """
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
    """Raise InputError if the recipe file was edited after the run was trained.

    Reports about its steps would otherwise describe another recipe.
    """
    stored = stored_recipe(run)
    if stored is not None and (changed := changes(stored, load(run.recipe))):
        raise InputError(f"{run.recipe}: it was edited after the run was trained ({_some(changed)}); restore it")


@dataclass(frozen=True)
class Extend:
    """The decision to continue a run to more steps than it was planned for.

    Attributes:
        latest: The last step whose checkpoint is also a checkpoint of the longer run.
    """

    latest: int


@dataclass(frozen=True)
class Refuse:
    """The decision that a run cannot continue under a recipe.

    Attributes:
        key: Key of the recipe that prevents it; empty if there are several.
        reason: Clause about the run for the error message.
    """

    key: str
    reason: str


def decide(
    stored: ResolvedRecipe | None, requested: ResolvedRecipe, checkpoints: list[int]
) -> Fresh | Resume | Extend | Refuse:
    """Decide if a run starts, resumes, is extended or cannot continue under a recipe.

    Args:
        stored: Resolved recipe that the run was last planned with.
        requested: Resolved recipe to train with.
        checkpoints: Steps of the run's checkpoints, ascending.
    """
    if not checkpoints:
        return Fresh()
    if stored is None:
        return Resume(checkpoints[-1])
    if changed := changes(stored, requested):
        return Refuse("", f"it was trained with another recipe ({_some(changed)})")
    planned, steps, schedule = stored.train.steps, requested.train.steps, stored.train.schedule
    if steps == planned:
        return Resume(checkpoints[-1])
    if steps > planned and schedule.rule.is_extendable:
        decay_start = schedule.decay_start(planned)
        return Extend(checkpoints[-1] if decay_start is None else decay_start)
    why = "a run cannot be shortened"
    if steps > planned:
        kinds = " and ".join(name for name, one in built_in_classes("schedules").items() if one.is_extendable)
        why = f"the rate of a {schedule.kind} schedule depends on the number of steps, so only {kinds} are extended"
    return Refuse("train.steps", f"it is planned for {planned:,} steps, and the recipe asks for {steps:,}: {why}")


def require_resumable(
    stored: ResolvedRecipe | None, requested: ResolvedRecipe, run: RunDirectory, checkpoints: list[int]
) -> Fresh | Resume | Extend:
    """Return the decision for a run, as `decide` does.

    Raises:
        OtherRecipe: The run cannot continue under the requested recipe.
        InputError: The newest checkpoint was saved under another recipe than the stored one.
    """
    trained = _trained_recipe(run, checkpoints[-1]) if checkpoints else None
    if stored is not None and trained is not None and (changed := changes(trained, stored)):
        raise InputError(
            f"{run.checkpoints}: the checkpoint of step {checkpoints[-1]:,} was saved by run {trained.run.name!r} of another "
            f"recipe than {run.recipe} ({_some(changed)}): restore the files of one run, or start over with --restart"
        )
    decision = decide(stored, requested, checkpoints)
    if isinstance(decision, Refuse):
        key = f"{decision.key}: " if decision.key else ""
        raise OtherRecipe(f"{key}{run.path}: {decision.reason}; {new_run(run)}")
    return decision


def _trained_recipe(run: RunDirectory, step: int) -> ResolvedRecipe | None:
    """Return the recipe that the checkpoint of a step was saved with.

    None if it cannot be read; loading the checkpoint reports the error.
    """
    from bessemer.checkpoint.format import load_manifest  # loads torch, which tokens do not need

    folder = run.checkpoints / checkpoint_name(step)
    with suppress(BessemerError):
        text = load_manifest(folder).facts.get("recipe_toml")
        return None if text is None else as_resolved(parse(text, f"recipe of {folder}"), ResolvedRecipe)
    return None


def _some(lines: list[str]) -> str:
    return f"{'; '.join(lines[:4])}{'; ...' if len(lines) > 4 else ''}"


def remove_training(run: RunDirectory) -> None:
    """Remove all outputs of the training, so that the run starts over from its corpus and tokens."""
    for path in [path for name in TRAINED for path in run.path.glob(name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
