"""Checklist rows from small trainings of the recipe: learning, exact resume, logs, checkpoint and memory."""

from __future__ import annotations

import math
from statistics import fmean

from bessemer.check.rows import CheckRow, judge
from bessemer.check.trial import TrialResult
from bessemer.checkpoint import latest
from bessemer.common.console import size
from bessemer.model.scaling_rules import USUAL_RATES
from bessemer.recipe import ResolvedRecipe
from bessemer.tokens.loader import Batch
from bessemer.train.trainer import Trainer

LEARNING, RESUME, LOGS, SAVED, MEMORY = "learning", "exact resume", "logs", "checkpoint", "memory"
BEGINS = "starts below a uniform guess"  # for trained weights
LEARNS, LOGGED, PLANNED = "falls below a uniform guess", "validation and throughput apart", "plan against a micro-run"
HOLDS, CONTINUES = "holds all that a resume needs", "a new process continues bit for bit"
MARGIN = 0.1  # nats below the uniform guess
OVERFIT_SHARE, OVERFIT_STEPS = 0.5, 100
OVERFIT_RATE = 1e-3  # least learning rate, to overfit a single batch in seconds
PLAN_TOLERANCE = (0.7, 1.15)  # measured memory / planned
PARTS = ("model", "optimizer", "rng")  # required parts of a checkpoint
FACTS = ("samples", "guard", "given", "data", "recipe")  # required facts of a checkpoint: position, schedule and guard


def learns(recipe: ResolvedRecipe, trial: TrialResult, num_classes: int) -> CheckRow:
    """Check that the loss falls below that of a uniform guess, or starts there if the weights are trained.

    `num_classes` is the size of the vocabulary, or the number of labels.
    """
    losses, guess = [trial.losses[step] for step in sorted(trial.losses)], math.log(num_classes)
    tail = max(len(losses) // 6, 1)
    first, last = fmean(losses[:tail]), fmean(losses[-tail:])
    text = f"mean loss of the first {tail} steps {first:.3f}, of the last {last:.3f}; of a uniform guess {guess:.3f}"
    if recipe.is_continued and recipe.train.objective != "classify":  # a classifier's head is new
        holds, falls = first < guess and last < first + MARGIN, last < first - MARGIN
        return judge(LEARNING, BEGINS, holds, text, otherwise="warn" if falls else "FAIL")
    if holds := last < min(first, guess - MARGIN):
        return CheckRow(LEARNING, LEARNS, "ok", text)
    text += f"; the learning rate is {recipe.train.optimizer.learning_rate:g}, {USUAL_RATES}"
    return judge(LEARNING, LEARNS, holds, text, otherwise="warn" if recipe.train.objective == "classify" else "FAIL")


def overfits(trainer: Trainer, batch: Batch) -> CheckRow:
    """Check that the model overfits a single sequence, so that gradients reach the weights and targets are scored."""
    optimizer = trainer.settings.optimizer
    own = optimizer.learning_rate
    rate = max(own, OVERFIT_RATE)
    trainer.settings = trainer.settings.changed(
        schedule={"kind": "constant", "warmup_steps": 0}, optimizer={"learning_rate": rate}
    )
    losses = list[float]()
    for number in range(OVERFIT_STEPS):
        gradients = trainer.forward_backward(batch)
        losses.append(float(gradients.loss))
        if not math.isfinite(losses[-1]) or losses[-1] < OVERFIT_SHARE * losses[0]:
            break
        trainer.update(number, gradients.grad_norm)
    text = f"loss of one sequence {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses) - 1} updates at rate {rate:g}"
    return judge(LEARNING, "overfits a single sequence", losses[-1] < OVERFIT_SHARE * losses[0], text)


def same(straight: TrialResult, other: TrialResult, how: str) -> CheckRow:
    """Check that two trainings have bitwise equal losses and weights; `how` describes the second one's interruption."""
    differ, text = [step for step, loss in straight.losses.items() if loss != other.losses.get(step)], ""
    if differ:
        text = (
            f"the loss of step {differ[0]} is {other.losses.get(differ[0])!r} instead of {straight.losses[differ[0]]!r}"
        )
    elif other.weights != straight.weights:
        text = f"losses equal, but weights {other.weights[:12]} instead of {straight.weights[:12]}"
    equal = f"{len(other.losses)} losses and weights {other.weights[:12]} equal"
    return judge(RESUME, CONTINUES, not text, f"{how}: {text or equal}")


def logged(trial: TrialResult) -> CheckRow:
    """Check that validations and throughput are logged in separate rows."""
    train, validation = trial.of_kind("train"), trial.of_kind("validation")
    rates = [row for row in train if row.get("tokens_per_second")]
    mixed = [row for row in train if "bits_per_byte" in row]
    text = f"{len(rates)} training lines with tokens/s, {len(validation)} validations on lines of their own"
    return judge(LOGS, LOGGED, bool(rates and validation) and not mixed, text)


def saved(trial: TrialResult) -> CheckRow:
    """Check that the last checkpoint has everything that a resume needs."""
    checkpoint = latest(trial.run.checkpoints)
    assert checkpoint is not None, "the trial has ended"
    missing = [part for part in PARTS if part not in checkpoint] + [key for key in FACTS if key not in checkpoint.facts]
    text = f"step {checkpoint.step}: {', '.join((*PARTS, *FACTS))}" if not missing else f"lacks {', '.join(missing)}"
    return judge(SAVED, HOLDS, not missing, text)


def memory_row(trial: TrialResult) -> CheckRow:
    """Compare the planned memory of the trial with the measured memory."""
    if not (lines := trial.of_kind("memory")):
        return CheckRow(MEMORY, PLANNED, "not here", "the trial measured no memory")
    planned, measured = lines[-1]["planned"], lines[-1]["measured"]
    ratio, (low, high) = measured / planned, PLAN_TOLERANCE
    text = f"measured {size(measured)}, planned {size(planned)}: ratio {ratio:.2f}"
    return judge(MEMORY, PLANNED, low <= ratio <= high, text, otherwise="warn" if ratio < 1.5 else "FAIL")
