"""Extend a run to more steps than planned, and restore its checkpoints.

- A `constant` schedule continues from the newest checkpoint.
- A `wsd` schedule continues from the newest checkpoint at or before the start of the decay, which retention keeps (Hu et al.
  2024, MiniCPM). The decay is trained again.

Both then equal, bit for bit, a run planned for that many steps from the start. The learning rate of other schedules depends
on the total number of steps from the first step on, so they cannot be extended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

from bessemer.checkpoint.mirror import Mirror, refetch, restore_missing
from bessemer.checkpoint.protocol import drop_newer, iterate_verified
from bessemer.common.console import say
from bessemer.common.errors import InputError
from bessemer.guard.incidents import RECIPE_CHANGED, RESTORED, record
from bessemer.guard.journal import Journal
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_steps
from bessemer.tokens.loader import open_loader
from bessemer.tokens.shards import TokenStore
from bessemer.train.setup import record_damage, require_journal
from bessemer.train.state import require_same_tokens
from bessemer.workflow import derive
from bessemer.workflow.resume_policy import OtherRecipe, new_run, remove_training

PACE_ROWS = 200  # last steps of metrics.jsonl whose median time is the run's pace


def extension_start(
    stored: ResolvedRecipe, requested: ResolvedRecipe, run: RunDirectory, store: TokenStore, steps: list[int], last: int
) -> int:
    """Return the step of the checkpoint from which to extend a run.

    Args:
        stored: Resolved recipe of the run.
        requested: Resolved recipe to extend to.
        run: The run directory.
        store: Its tokens.
        steps: Steps of its checkpoints.
        last: Latest step to extend from.

    Raises:
        InputError: The run cannot be extended.
    """
    available = set(steps)
    if stored.train.schedule.decay_start(0) is not None and (mirror := Mirror.from_recipe(stored, run)) is not None:
        available |= set(mirror.steps())  # only the newest was fetched when local checkpoints were lost
    by_age = sorted((step for step in available if step <= last), reverse=True)

    on_damage, fetch = partial(record_damage, run), partial(refetch, stored, run)
    in_order = iterate_verified(run.checkpoints, by_age, on_damage, "trying the next older checkpoint", refetch=fetch)
    checkpoint = next(in_order, None)
    if checkpoint is None:
        raise InputError(f"train.steps: {run.checkpoints}: no undamaged checkpoint up to step {last:,}; {new_run(run)}")
    store.verify()
    require_same_tokens(checkpoint, store)
    require_journal(Journal.read_run(run), checkpoint)
    _require_same_order([stored, requested], run, store, checkpoint.step)
    return checkpoint.step


def _require_same_order(recipes: list[ResolvedRecipe], run: RunDirectory, store: TokenStore, start: int) -> None:
    """Raise InputError if the longer run would have read other samples up to step `start` than the shorter one did.

    `recipes` are the stored recipe of the run and the requested one with more steps.
    """
    samples = recipes[0].batches.without(Journal.read_run(run).omitted).after(start)
    phases = (open_loader(recipe, store).mixture.phases for recipe in recipes)
    before, after = ([phase for phase in planned if phase.first < samples] for planned in phases)
    if before != after:
        raise InputError(
            f"train.steps: {run.path}: max_epochs or tokens.schedule plan the shares of its sources over the whole run, so a run "
            f"of another length would have read other samples; {new_run(run)}"
        )


def extend(run: RunDirectory, planned: int, steps: int, start: int) -> None:
    """Remove the checkpoints after step `start`, and report and record the extension.

    Args:
        run: The run directory.
        planned: Number of steps that the run was planned for.
        steps: Number of steps that it is extended to.
        start: Step of the checkpoint from which it continues.
    """
    repeated = checkpoint_steps(run.checkpoints)[-1] - start
    drop_newer(run.checkpoints, start)
    again = f"; the {repeated:,} steps after it are trained again" if repeated > 0 else ""
    action = f"extended from the checkpoint of step {start:,}{again}"
    say(f"  {planned:,} planned steps become {steps:,}: {action}")
    record(run.incidents, RECIPE_CHANGED, step=start, cause=f"train.steps: {planned} -> {steps}", action=action)


@contextmanager
def restored_checkpoint(recipe: Recipe, run: RunDirectory) -> Iterator[None]:
    """Context manager that first restores the run's newest checkpoint from its mirror, if the run has no checkpoint.

    The restoration is recorded as an incident. If the `with` block raises OtherRecipe and the run had no recipe before, the
    mirror belongs to another run: the restored files are removed again and InputError is raised.
    """
    was_planned = run.recipe.exists()
    if (restored := restore_missing(recipe, run)) is None:
        yield
        return
    step, mirror = restored
    cause = f"no checkpoint in {run.checkpoints}"
    record(run.incidents, RESTORED, step=step, cause=cause, action=f"restored that of step {step} from {mirror}")
    try:
        yield
    except OtherRecipe as error:
        if was_planned:
            raise
        remove_training(run)
        raise InputError(
            f"checkpoint.mirror: {mirror} has the checkpoints of another run, and the restored copy was removed ({error}); "
            "choose another folder"
        ) from None


def checkpoints_of(run: RunDirectory) -> list[int]:
    """Return the steps of the run's checkpoints.

    Raises:
        InputError: The run was trained but has no checkpoint; it would start again at step 0.
    """
    done = checkpoint_steps(run.checkpoints)
    if not done and run.was_saved:
        raise InputError(f"{run.checkpoints}: its checkpoints are missing; restore them, or start over with --restart")
    return done


def resolve(
    recipe: Recipe,
    stored: ResolvedRecipe | None,
    run: RunDirectory,
    vocabulary: int,
    labels: int,
    known: dict[str, int],
) -> ResolvedRecipe:
    """Fill in the values of a run's recipe like `derive.resolve`, with `train.minutes` of a trained run turned into steps.

    Args:
        recipe: The recipe as the user gave it.
        stored: Resolved recipe of a trained run; None for an untrained run.
        run: The run directory.
        vocabulary: Vocabulary size of the tokenizer.
        labels: Number of classes of a classifier; 0 for other models.
        known: The numbers of training tokens (`unique_tokens`) and held-out tokens (`held_out_tokens`); empty if unknown.
    """
    steps = None if stored is None else _steps_of_minutes(recipe, stored, run, known.get("held_out_tokens", 0))
    return derive.resolve(recipe, vocabulary, labels, steps, **known)


def _steps_of_minutes(requested: Recipe, stored: ResolvedRecipe, run: RunDirectory, held_out_tokens: int) -> int | None:
    """Return the number of steps that `train.minutes` allows for a run that was trained before.

    If the minutes are unchanged, it is the planned number. Otherwise it follows from the median time of the last steps and
    the time for validation and saving. None if the recipe sets steps or no minutes, or if no step has been timed yet.
    """
    minutes = requested.train.minutes
    if minutes is None or requested.train.steps is not None:
        return None
    if stored.train.minutes == minutes:
        return stored.train.steps
    trained = (row for row in read_steps(run.metrics) if row.get("kind") == "train")
    times = [row["step_seconds"] for row in trained if "step_seconds" in row]
    if not times:
        return None
    return derive.steps_of_minutes(stored, minutes, median(times[-PACE_ROWS:]), held_out_tokens)
