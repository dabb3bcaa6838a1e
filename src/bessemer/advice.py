"""What would improve a trained model that is not good, as its own curves say it: a sentence, with a command where one helps."""

from __future__ import annotations

from statistics import fmean

from bessemer.guard.incidents import RECIPE_CHANGED
from bessemer.plan.sizing import MAX_EPOCHS
from bessemer.recipe import Train, load
from bessemer.report import data, summary
from bessemer.run import RunFolder, checkpoint_name, published, read_steps
from bessemer.tokens.outlook import num_tokens

OVERFITTED = 1.02  # the last held-out loss as a share of the lowest
# The held-out loss as a share of that in training, and how often the text is read: of runs of 15 to 110 kB that were then trained
# two and four times as long (benchmarks/results/longer.json).
KNOWS_SOME, BY_HEART, OFTEN = 1.1, 1.25, 8


def longer_command(run: RunFolder, train: Train) -> str:
    """The command that trains a run four times as long, twice where it begins to know its text or would read it often."""
    trained, held_out = last_losses(run)
    is_new = held_out <= KNOWS_SOME * trained and 4 * (_epochs(run) or 0) <= OFTEN
    return f"train longer: bessemer run {run.path} --set {longer_by(4 if is_new else 2, train)}"


def longer_by(times: float, train: Train) -> str:
    """The recipe's key, with its value, of a training so many times as long."""
    key, now = ("minutes", train.minutes) if train.minutes is not None else ("steps", train.steps or 1)
    return f"train.{key}={times * now:g}"


def next_step(run: RunFolder, train: Train) -> str:
    """What would improve a model that is not good: a sentence."""
    return learned_nothing(run) or memorises(run) or longer_command(run, train)


def learned_nothing(run: RunFolder) -> str:
    """As `summary.learned_nothing`."""
    return summary.learned_nothing(data.read(run)) if run.metrics.exists() else ""


def has_risen(run: RunFolder) -> str:
    """A sentence where the held-out loss has been lower, in this training or before it went on, with the folder of the best model
    that is kept; else empty."""
    logs = {folder: read_steps(folder / run.metrics.name) for folder in [run.path, *run.path.glob("previous-*")]}
    begins = logs[run.path][:1]  # an earlier training of other data, set aside by --restart, begins otherwise
    validations = [
        (row["loss"], row.get("step", 0), folder)
        for folder, rows in logs.items() if rows[:1] == begins
        for row in rows if row.get("kind") == "validation" and row.get("loss") is not None
    ]  # fmt: skip
    last = next((loss for loss, _, folder in reversed(validations) if folder == run.path), None)
    if last is None or last <= OVERFITTED * min(validations)[0]:
        return ""
    lowest, step, _ = min(validations)
    kept = "; no better model was kept (checkpoint.keep_best keeps it)"
    for loss, its_step, folder in sorted(row for row in validations if row[0] < last):
        place = folder / "checkpoints" / checkpoint_name(its_step)
        if place.is_dir() and (folder / run.tokens.name).exists():
            kept = f"; the model of step {its_step:,}{'' if loss == lowest else f', with {loss:.3f},'} is in {place}"
            kept += f" (bessemer evaluate {folder} --step {its_step})"
            if folder != run.path and (folder / run.export.name).is_dir() and published(place.parent)[-1] == its_step:
                kept += f", exported in {folder / run.export.name}"
            break
    changes = [
        row for row in read_steps(run.incidents)
        if row.get("what") == RECIPE_CHANGED.name and row["step"] >= step and row.get("is_accepted", True)
    ]  # fmt: skip
    epochs = _epochs(run)
    advice = "give it more text"
    if epochs is not None and epochs < 1:
        advice = f"it has read {epochs:.0%} of the text, so there is enough of it; try a third of train.optimizer.learning_rate"
    if changes:
        advice = f"the recipe was changed after step {changes[-1]['step']:,} ({changes[-1]['cause']}); go back to it as it was"
    return f"its held-out loss has risen from {lowest:.3f} at step {step:,} to {last:.3f}: {advice}{kept}"


def _epochs(run: RunFolder) -> float | None:
    """How often the whole run reads its text; None where the tokens are gone."""
    train, unique = load(run.recipe).train, num_tokens(run.tokens).get("unique_tokens", 0)
    return (train.steps or 0) * (train.global_batch_tokens or 0) / unique if unique else None


def memorises(run: RunFolder) -> str:
    """A sentence where more training on the same text would not help, with the reason; empty where it may help."""
    if risen := has_risen(run):
        return risen
    epochs, (trained, held_out) = _epochs(run), last_losses(run)
    if epochs is not None and epochs > 1 and held_out > BY_HEART * trained:
        return (
            f"it begins to know its text by heart (a loss of {trained:.3f} in training, {held_out:.3f} held out): give it more "
            "text"
        )
    if epochs is not None and epochs >= 0.95 * (load(run.recipe).train.max_epochs or MAX_EPOCHS):
        return f"it has read the text {epochs:.3g} times: give it more text"
    return ""


def last_losses(run: RunFolder) -> tuple[float, float]:
    """The loss of the last tenth of the training, and the last held-out one; equal where one is not known."""
    rows = [row for row in read_steps(run.metrics) if isinstance(row.get("loss"), float)]
    trained = [row["loss"] for row in rows if row.get("kind") == "train"]
    held_out = [row["loss"] for row in rows if row.get("kind") == "validation"]
    if not trained or not held_out:
        return 1.0, 1.0
    return fmean(trained[-max(len(trained) // 10, 1) :]), held_out[-1]
