"""What small trainings of the recipe show: that it learns, that a stop changes nothing, what it logs, saves and takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from time import perf_counter

from bessemer.check.rows import CheckRow, judged
from bessemer.check.trial import TrialResult
from bessemer.checkpoint import latest
from bessemer.preflight import USUAL_RATES
from bessemer.recipe import Recipe
from bessemer.terminal import counted, duration, size
from bessemer.tokens.loader import Batch
from bessemer.train.trainer import Trainer

LEARNING, RESUME, LOGS, SAVED, MEMORY = "learning", "exact resume", "logs", "checkpoint", "memory"
BEGINS = "starts below a uniform guess"  # from weights that have read
LEARNS, LOGGED, PLANNED = "falls below a uniform guess", "validation and throughput apart", "plan against a micro-run"
HOLDS, TAKES, CONTINUES = "holds all that a resume needs", "size and time", "a new process continues bit for bit"
OF_A_TRIAL = (  # topic and name of the rows that a small training shows
    (LEARNING, LEARNS), (LOGS, LOGGED), (MEMORY, PLANNED), (SAVED, HOLDS), (SAVED, TAKES), (RESUME, CONTINUES),
)  # fmt: skip
MARGIN = 0.1  # nats below the uniform guess
OVERFIT_SHARE, OVERFIT_STEPS, OVERFIT_SECONDS = 0.5, 100, 20.0
OVERFIT_RATE = 1e-3  # at the least: a single batch is to be learnt in seconds
PLAN_TOLERANCE = (0.7, 1.15)  # measured memory / planned
PARTS = ("model", "optimizer", "rng")  # of a checkpoint
FACTS = ("samples", "guard", "given", "data", "recipe")  # of a checkpoint: position, schedule and guard


def not_tried(why: str) -> Iterator[CheckRow]:
    """The rows of a small training that there was none of."""
    for topic, name in OF_A_TRIAL:
        yield CheckRow(topic, name, "not here", why)


def learns(recipe: Recipe, trial: TrialResult, num_classes: int) -> CheckRow:
    """The loss falls below that of a uniform guess. num_classes: ids of the vocabulary, or labels."""
    losses, guess = [trial.losses[step] for step in sorted(trial.losses)], math.log(num_classes)
    tail = max(len(losses) // 6, 1)
    first, last = fmean(losses[:tail]), fmean(losses[-tail:])
    said = (
        f"loss {first:.3f} at first, {last:.3f} after {counted(len(losses), 'step')}; a uniform guess has {guess:.3f}"
    )
    if last >= guess - MARGIN:
        said += f"; the learning rate is {recipe.train.optimizer.learning_rate:g}, {USUAL_RATES}"
    if recipe.train.objective == "classify":  # whose head is new, also where the encoder is not
        return judged(LEARNING, LEARNS, last < guess, said, otherwise="warn")
    if recipe.is_continued:
        if first >= guess:
            said += "; weights that are hardly trained or of another tokenizer begin so"
        falls = last < first - MARGIN
        return judged(
            LEARNING, BEGINS, first < guess and last < first + MARGIN, said, otherwise="warn" if falls else "FAIL"
        )
    return judged(LEARNING, LEARNS, last < guess - MARGIN and last < first, said)


def overfits(trainer: Trainer, batch: Batch) -> CheckRow:
    """A single sequence is learnt by heart: the gradient reaches the weights, and the targets are what is scored."""
    optimizer = trainer.settings.optimizer
    own = optimizer.learning_rate or 0.0
    rate = max(own, OVERFIT_RATE)
    schedule = trainer.settings.schedule.model_copy(update={"kind": "constant", "warmup_steps": 0})
    trainer.settings = trainer.settings.model_copy(update={
        "schedule": schedule, "optimizer": optimizer.model_copy(update={"learning_rate": rate, "batch_scaling": "none"}),
    })  # fmt: skip
    began, losses = perf_counter(), list[float]()
    for number in range(OVERFIT_STEPS):
        gradients = trainer.forward_backward(batch)
        losses.append(gradients.loss)
        is_slow = perf_counter() - began > OVERFIT_SECONDS
        if not math.isfinite(gradients.loss) or losses[-1] < OVERFIT_SHARE * losses[0] or is_slow:
            break
        trainer.update(number, gradients.grad_norm)
    said = (
        f"loss of one sequence {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses) - 1} updates at a rate of {rate:g}"
    )
    said += "" if rate == own else f", in place of the recipe's {own:g}"
    return judged(LEARNING, "overfits a single sequence", losses[-1] < OVERFIT_SHARE * losses[0], said)


def same(name: str, straight: TrialResult, other: TrialResult, how: str) -> CheckRow:
    """Whether two trainings agree bit for bit in losses, samples and weights."""
    said, weights = first_difference(straight, other), other.weights[:12]
    if said is None and other.weights != straight.weights:
        said = f"losses equal, but weights {weights} instead of {straight.weights[:12]}"
    equal = f"{len(other.losses)} losses, samples and weights {weights} equal"
    return judged(RESUME, name, said is None, f"{how}: {said or equal}")


def first_difference(straight: TrialResult, other: TrialResult, *, tolerance: float = 0.0) -> str | None:
    """The first step whose samples or loss differ, in words; None: there is none."""
    if straight.losses.keys() != other.losses.keys():
        return f"steps {sorted(straight.losses.keys() ^ other.losses.keys())[:5]} are in one of the two only"
    for step in sorted(straight.losses):
        if straight.order.get(step) != other.order.get(step):
            return f"step {step} reads other samples"
        ours, theirs = other.losses[step], straight.losses[step]
        if ours != theirs and not (ours is not None and theirs is not None and abs(ours - theirs) <= tolerance):
            return f"the loss of step {step} is {ours!r} instead of {theirs!r}"
    return None


def logged(trial: TrialResult) -> CheckRow:
    """Validations and throughput have lines of their own."""
    train, validation = trial.of_kind("train"), trial.of_kind("validation")
    rates = [row for row in train if row.get("tokens_per_second")]
    mixed = [row for row in train if "bits_per_byte" in row]
    at = {row["step"]: row["seconds"] for row in validation if "seconds" in row}
    said = f"{len(rates)} training lines with tokens/s, {len(validation)} validations with seconds of their own"
    return judged(LOGS, LOGGED, bool(rates and at) and not mixed, said)


def saved(recipe: Recipe, trial: TrialResult, scale: float, num_saves: int, seconds: float) -> Iterator[CheckRow]:
    """What a checkpoint holds, and its size and time for the run's model, which has `scale` times the parameters.

    num_saves: of the run; seconds: of the run."""
    checkpoint = latest(trial.run.checkpoints)
    assert checkpoint is not None, "the trial has ended"
    missing = [part for part in PARTS if part not in checkpoint] + [key for key in FACTS if key not in checkpoint.facts]
    counts = ", ".join(
        f"{part} ({counted(len(checkpoint.contents[part]), 'tensor')})" for part in PARTS if part in checkpoint
    )
    facts = checkpoint.facts
    said = f"{counts}; step {checkpoint.step}, sample {facts.get('samples')}, guard, mixture, hashes of data and recipe"
    yield judged(SAVED, HOLDS, not missing, f"lacks {', '.join(missing)}" if missing else said)
    stored = checkpoint_bytes(checkpoint.folder)
    times = [row for row in trial.of_kind("time") if "saving" in row]
    took = times[-1]["saving"] if times else 0.0
    whole = f"{size(scale * stored)} and {duration(scale * took)} each, {num_saves:,} saves"
    share = scale * took * num_saves / seconds if seconds else 0.0
    measured = f"measured: {size(stored)} in {duration(took)}" + ("" if scale == 1 else f", scaled by {scale:.3g}")
    evidence = f"{whole}: {share:.1%} of the training's time if it does not overlap; {measured}"
    yield judged(SAVED, TAKES, share < 0.1, evidence, otherwise="warn")


def checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def memory_row(trial: TrialResult) -> CheckRow:
    """The memory plan of the trial against what it took."""
    lines = trial.of_kind("memory")
    if not lines:
        return CheckRow(MEMORY, PLANNED, "not here", "the trial measured no memory")
    planned, measured = lines[-1]["planned"], lines[-1]["measured"]
    ratio, (low, high) = measured / planned, PLAN_TOLERANCE
    said = f"measured {size(measured)}, planned {size(planned)}: ratio {ratio:.2f}"
    return CheckRow(MEMORY, PLANNED,
                    "ok" if low <= ratio <= high else "warn" if ratio < 1.5 else "FAIL", said)  # fmt: skip
