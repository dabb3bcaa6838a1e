"""Headline, key figures and findings of a run."""

from __future__ import annotations

import numpy as np

from bessemer.common.console import amount, counted, duration, size
from bessemer.report import parts
from bessemer.report.data import RunData, as_number, as_object, as_text, number_or_0
from bessemer.report.metrics import SCORES, baselines
from bessemer.report.parts import Tile

FEW_STEPS = 10  # a run with fewer steps gets no verdict
LEARNED = 0.9  # share of the loss of a uniform guess; below it, something was learned
UNLEARNED = 0.97  # share of the loss of a uniform guess; above it, not even token frequencies were learned


def headline(data: RunData) -> str:
    kind = {"masked": "encoder", "classify": "classifier"}.get(data.objective, "decoder")
    kind += f" with the objective {data.own_objective}" if data.own_objective else ""
    size = f" of {data.model_size}" + "," * ("active" in data.model_size) if data.model_size else ""
    subject = f"This {kind}{size}"
    if not len(data.train):
        read = as_number(data.plan, "tokens")
        return f"{subject} is planned to read {amount(read)} tokens." if read else "Nothing has been trained yet."
    tokens, done = data.train.last("tokens"), finished(data)
    verb = "read" if done else "has so far read"
    sentence = f"{subject} {verb} {amount(tokens)} tokens" if tokens else f"{subject} was trained"
    seconds, bits, right = training_seconds(data), score(data, "bits_per_byte"), score(data, "accuracy")
    if seconds is not None:
        sentence += f" in {duration(seconds)}"
    if bits is not None:
        verb = "reaches" if done else "stands at"
        sentence += f" and {verb} {bits:.3f} bits per byte on {data.scored_text}"
        sentence += f", {against}" if (against := _against_baselines(data)) else ""
    if right is not None:
        of_classes = f"puts {right:.1%} of the held-out texts in the right class"
        of_hidden = f"guesses {right:.1%} of the tokens hidden in held-out text"
        sentence += f" and {of_classes if data.objective == 'classify' else of_hidden}"
    nothing = learned_nothing(data)
    return f"{sentence}. {parts.capitalised(nothing)}." if nothing else f"{sentence}."


def verdict(data: RunData) -> str:
    """Return a warning if the model has learned nothing or is worse than a byte n-gram; empty otherwise."""
    bits, levels = as_number(data.evaluation, "bits_per_byte"), baselines(data)
    name = next((name for name in levels if name.endswith("gram")), "")
    if not learned_nothing(data) and bits is not None and name and bits > levels[name]:
        return f"{name} predicts the held-out text better than this model: train longer, or on more text"
    return learned_nothing(data)


def learned_nothing(data: RunData) -> str:
    """Return a warning with advice if the last held-out loss is that of a uniform guess; empty otherwise."""
    if not len(data.validation) or data.validation.step[-1] < FEW_STEPS:
        return ""
    loss, rate = data.validation.last("loss"), as_number(data.recipe, "train", "optimizer", "learning_rate")
    classes = len(data.manifest.get("labels") or ()) if data.objective == "classify" else 0
    guess = np.log(max(classes or number_or_0(data.manifest, "tokenizer", "vocabulary"), 1.0))
    if loss is None or not guess or loss < UNLEARNED * guess:
        return ""
    held_out = data.validation.column("loss")
    if held_out is not None and float(np.nanmin(held_out)) < LEARNED * guess:  # it had learned and then diverged
        return ""
    trained = data.train.median("loss")
    if trained is not None and trained < LEARNED * guess:
        return (
            f"the held-out text is unlike the text that it was trained on: its loss is {loss:.3f}, that of a uniform guess "
            f"{guess:.3f}; hold out more (tokens.held_out), or passages (tokens.held_out_from), and check labels"
        )
    at = f", at a learning rate of {rate:g}" if rate else ""
    return (
        f"the model has learned nothing: its held-out loss is {loss:.3f}, and a uniform guess has {guess:.3f}{at}; train "
        "longer, or leave train.optimizer.learning_rate out, under another run.name"
    )


def origin(data: RunData) -> str:
    """Return a sentence on when, on which device and with which versions the run was started."""
    known = data.environment
    facts = (
        ("started ", parts.clock(known.get("started"))), ("", as_text(known, "device")), ("", as_text(known, "precision")),
        ("commit ", as_text(known, "git", "commit")[:8]), ("Bessemer ", as_text(known, "bessemer")),
    )  # fmt: skip
    return " · ".join(prefix + text for prefix, text in facts if text)


def finished(data: RunData) -> bool:
    """Return True if the run's last step was trained. Without a recipe or plan, any trained step counts."""
    steps = data.planned_steps
    return len(data.train) > 0 and (steps is None or data.train.step[-1] >= steps)


def score(data: RunData, name: str, group: str = "") -> float | None:
    """Return a score of the final evaluation or, without one, of the last validation; None if neither has it.

    `group` is the key of the object that holds the score `name`, such as a score by source; "" for a score of all text.
    """
    value = as_number(data.evaluation, *filter(None, (group, name)))
    return data.validation.last(name, group) if value is None else value


def training_seconds(data: RunData) -> float | None:
    """Return the time spent in training steps, without validation and saving.

    A line covers all steps since the previous line. A line without a time is given the median time.
    """
    seconds = data.train.column("step_seconds")
    if seconds is None:
        return None
    steps = np.diff(data.train.step, prepend=0.0)
    return float(np.sum(steps * np.where(np.isfinite(seconds), seconds, np.nanmedian(seconds))))


def tiles(data: RunData) -> list[Tile]:
    """Return up to six key figures.

    A run in training shows its loss and memory, a finished one its export.
    """
    total = as_number(data.plan, "active_parameters") or as_number(data.plan, "parameters")
    parameters, _, active = data.model_size.partition(" parameters")
    inner = as_number(data.plan, "parameters_by_part", "non_embedding")
    without = f"{amount(inner)} without embeddings" if inner else ""
    tokens, seconds = data.train.last("tokens"), training_seconds(data)
    each = f"{tokens / total:.2g} per {'active ' * bool(active)}parameter" if tokens and total else ""
    to_train_on = sum(number_or_0(source, "train", "tokens") for source in as_object(data.manifest, "sources").values())
    loss, memory = None if finished(data) else data.train.last("loss"), data.peak_memory
    rate, mfu = data.train.median("tokens_per_second"), data.train.median("mfu")
    kept, came = (as_number(data.statistics, "totals", key) for key in ("documents_kept", "documents_in"))
    rows = [
        _score_tile(data),
        loss is not None and ("Training loss", f"{loss:.3f}", data.loss_unit),
        parameters and ("Parameters", parameters, active[2:] or without),
        tokens and ("Training tokens", amount(tokens), each),
        not tokens and to_train_on and ("Tokens to train on", amount(to_train_on), ""),
        seconds and ("Time in training steps", duration(seconds), f"{data.train.step[-1]:,.0f} steps"),
        rate and ("Tokens per second", amount(rate), f"{mfu:.0%} of peak FLOPs" if mfu else ""),
        data.export and ("Export", "verified", as_text(data.export, "architecture")),
        memory and ("Memory at the peak", size(memory), ""),
        kept and came and ("Documents kept", f"{kept / came:.0%}", f"{kept:,.0f} of {came:,.0f}"),
    ]
    return [tile for tile in rows if isinstance(tile, tuple)][:6]


def _score_tile(data: RunData) -> Tile | None:
    loss = as_number(data.evaluation, "loss") or data.validation.last("loss")
    bits, right = score(data, "bits_per_byte"), score(data, "accuracy")
    text = "" if loss is None else f"loss {loss:.3f} {data.loss_unit}"
    if bits is not None:
        return "Held-out bits per byte", f"{bits:.3f}", _against_baselines(data) or text
    label = "Held-out texts classed right" if data.objective == "classify" else "Hidden tokens guessed right"
    return None if right is None else (label, f"{right:.1%}", text)


def curve_finding(data: RunData) -> str:
    """Summarise the held-out curve in a sentence."""
    for metric in SCORES[:2]:
        values, step = metric.values(data), data.validation.step
        if values is not None:
            step, values = step[np.isfinite(values)], values[np.isfinite(values)]
            first, last, times = metric.shown(values[0]), metric.shown(values[-1]), counted(len(values), "validation")
            best = step[list(values).index(metric.best(values))]
            return f"{metric.title}: from {first} to {last} over {times}; the best at step {best:,.0f}."
    return ""


def _against_baselines(data: RunData) -> str:
    """Compare the model's bits per byte with those of the byte n-gram and of PPMd, if these were computed."""
    bits = as_number(data.evaluation, "bits_per_byte")
    if bits is None:
        return ""
    return ", ".join(
        f"{abs(value - bits):.3f} {'below' if bits < value else 'above'} {name}"
        for name, value in baselines(data).items()
    )
