"""The runs of a ladder: ordinary runs in FOLDER/runs/NAME that read the same tokens, trained one after another.

A run that is done is not opened again; one that was stopped goes on from its checkpoint, as any run does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from bessemer import interrupt, stages
from bessemer.errors import BessemerError
from bessemer.ladder.design import Rung
from bessemer.recipe import Parallel, Recipe, dump, parse
from bessemer.run import RunFolder, read_json_lines
from bessemer.stages import Session
from bessemer.terminal import amount, say

MEASURE_SECONDS = 0.5  # of each run's steps, for its own plan


@dataclass(frozen=True)
class Score:
    """Held-out loss of a run that is done, in nats a token: of all text, and by source. seconds: of its steps."""

    loss: float
    by_source: dict[str, float]
    seconds: float


def recipe_of(planned: Recipe, rung: Rung, folder: Path) -> Recipe:
    """The recipe of one run. planned: resolved; all that is not the run's own size, length, batch and rate is as there,
    but that it runs in one process, without a batch ramp, and is saved and scored only as often as it needs."""
    train, steps = planned.train, rung.steps
    assert train.steps is not None and train.schedule.warmup_steps is not None, "the recipe is resolved"
    warmup = min(max(round(train.schedule.warmup_steps / train.steps * steps), 1), steps)
    schedule = train.schedule.model_copy(update={"warmup_steps": warmup})
    changed = {
        "steps": steps, "tokens": None, "minutes": None, "global_batch_tokens": rung.batch, "micro_batch": None,
        "batch_ramp": None, "schedule": schedule, "validate_every": steps,
        "optimizer": train.optimizer.model_copy(update={"learning_rate": rung.learning_rate}),
    }  # fmt: skip
    parts = {
        "run": planned.run.model_copy(update={"name": rung.name, "dir": str(folder / "runs")}),
        "model": rung.size.model,
        "train": train.model_copy(update=changed),
        "parallel": Parallel(),
        "checkpoint": planned.checkpoint.model_copy(update={"every": max(steps // 4, 1), "keep": 1}),
        "export": planned.export.model_copy(update={"hf": False}),
    }
    return parse(dump(planned.model_copy(update=parts)), f"rung {rung.name}")


def score(run: RunFolder, steps: int) -> Score | None:
    """What a run's last validation found; None while it is not done."""
    from bessemer.checkpoint.protocol import published

    if steps not in published(run.checkpoints):
        return None
    rows = read_json_lines(run.metrics)
    last = next((row for row in reversed(rows) if row.get("kind") == "validation" and row["step"] == steps), None)
    if last is None:
        return None
    steps_told = [row for row in rows if row.get("kind") == "train"]
    seconds = sum(row["step_seconds"] for row in steps_told) * steps / max(len(steps_told), 1)
    return Score(last["loss"], last["loss_by_source"], seconds)


def train_all(
    made: list[tuple[str, Recipe]], tokens: Path, told: Callable[[str, Score], str] | None = None
) -> dict[str, Score]:
    """Train what is not done yet, in order. tokens: the folder they all read. Returns each run's score by its name.

    Raises Stopped after a stop signal, with everything saved, and BessemerError for a run without a finite loss.
    """
    found: dict[str, Score] = {}
    for number, (name, recipe) in enumerate(made, 1):
        interrupt.check()
        run, steps = RunFolder(recipe.run.folder), recipe.train.steps
        assert steps is not None
        done = score(run, steps)
        if done is None:
            what = f"{recipe.model.layers} layers, width {recipe.model.width}, {amount(_tokens(recipe))} tokens"
            say(f"[bold]{number} of {len(made)}[/] {name}: {what}")
            done = _trained(recipe, run, tokens, steps)
        if not isfinite(done.loss):
            raise BessemerError(
                f"{run.path}: its held-out loss is {done.loss}; lower train.optimizer.learning_rate, and start the ladder "
                "over with --restart"
            )
        found[name] = done
        say(f"[dim]{number} of {len(made)}[/] {told(name, done) if told else f'{name}: {done.loss:.4f} nats a token'}")
    return found


def _trained(recipe: Recipe, run: RunFolder, tokens: Path, steps: int) -> Score:
    session = Session(recipe, run)
    with run.writing():
        link(run.tokens, tokens)
        stages.train(session, stages.prepare(session, MEASURE_SECONDS))
    done = score(run, steps)
    if done is None:
        raise BessemerError(f"{run.path}: trained, but {run.metrics.name} has no validation of step {steps}")
    return done


def link(place: Path, tokens: Path) -> None:
    """Let a run read tokens that lie elsewhere; relative, so that the folder above both can be moved."""
    target = Path(os.path.relpath(tokens.resolve(), place.parent.resolve()))
    if place.is_symlink() and Path(os.readlink(place)) == target:
        return
    if place.is_symlink():
        place.unlink()
    place.symlink_to(target, target_is_directory=True)


def _tokens(recipe: Recipe) -> int:
    return (recipe.train.steps or 0) * (recipe.train.global_batch_tokens or 0)


def plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, throughout."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value
