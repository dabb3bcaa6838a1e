"""What the numbers of a run come to: one sentence, key figures, and the plan compared with what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_text, number_or_0
from bessemer.terminal import amount, duration, size, step_time

MAX_VALIDATIONS = 25
FEW_STEPS = 10  # of so few nothing is said
LEARNED = 0.9  # likewise of the training loss: below it something was learned
UNLEARNED = 0.97  # of the loss of a uniform guess: what is above has not even learned which tokens are frequent


def headline(data: RunData) -> str:
    parameters = as_number(data.plan, "parameters") or as_number(data.export, "parameters")
    kind = {"masked": "encoder", "classify": "classifier"}.get(data.objective, "decoder")
    subject = f"{article(amount(parameters))} {amount(parameters)}-parameter {kind}" if parameters else f"A {kind}"
    if not len(data.train):
        return _untrained(data, subject)
    tokens, planned, done = data.train.last("tokens"), planned_tokens(data), finished(data)
    of = f" of {amount(planned)}" if planned and not done else ""
    verb = "read" if done else "has so far read"
    sentence = f"{subject} {verb} {amount(tokens)}{of} tokens" if tokens else f"{subject} was trained"
    seconds, bits, right = training_seconds(data), score(data, "bits_per_byte"), score(data, "accuracy")
    if seconds is not None:
        sentence += f" in {duration(seconds)}"
    if bits is not None:
        sentence += f" and {'reaches' if done else 'stands at'} {bits:.2f} bits per byte on {data.scored_text}"
        against = _against_baselines(data, digits=2)
        sentence += f", {against}" if against else ""
    if right is not None:
        of_classes = f"puts {right:.1%} of the held-out texts in the right class"
        of_hidden = f"guesses {right:.1%} of the tokens hidden in held-out text"
        sentence += f" and {of_classes if data.objective == 'classify' else of_hidden}"
    nothing = learned_nothing(data)
    return f"{sentence}. {parts.capitalised(nothing)}." if nothing else f"{sentence}."


def learned_nothing(data: RunData) -> str:
    """That a model whose last held-out loss is that of a uniform guess has learned nothing, at which learning rate, and what to
    try; empty for others."""
    if not len(data.validation) or data.validation.step[-1] < FEW_STEPS:  # it has hardly begun
        return ""
    loss, rate = data.validation.last("loss"), as_number(data.recipe, "train", "optimizer", "learning_rate")
    classes = len(data.manifest.get("labels") or ()) if data.objective == "classify" else 0
    guess = np.log(max(classes or number_or_0(data.manifest, "tokenizer", "vocabulary"), 1.0))
    if loss is None or not guess or loss < UNLEARNED * guess:
        return ""
    held_out = data.validation.column("loss")
    if held_out is not None and float(np.nanmin(held_out)) < LEARNED * guess:  # it had learned, and has lost it
        return ""
    trained = data.train.median("loss")
    if trained is not None and trained < LEARNED * guess:
        passages = ', or a passage of each document (tokens.held_out_from = "passages")'
        more = ", and whether labels are right: the scores by class and source show where" if classes else passages
        return (
            f"the held-out text is unlike the text that it was trained on: its loss is {loss:.3f}, where a uniform guess has "
            f"{guess:.3f}, and that of training {trained:.3f}; look at what is held out, hold out more "
            f"(tokens.held_out){more}"
        )
    at = f", at a learning rate of {rate:g}" if rate else ""
    return (
        f"the model has learned nothing: its held-out loss is {loss:.3f}, and a uniform guess has {guess:.3f}{at}; leave "
        "train.optimizer.learning_rate out, so that it is derived, or give one between 1e-5 and 2e-2, under another run.name; "
        "bessemer check RECIPE says whether it can learn"
    )


def origin(data: RunData) -> str:
    known = data.environment
    commit = as_text(known, "git", "commit")
    said = [
        f"started {parts.clock(known['started'])}" if known.get("started") else "", as_text(known, "device"),
        as_text(known, "precision"), f"commit {commit[:8]}" if commit else "",
        f"Bessemer {known['bessemer']}" if known.get("bessemer") else "",
    ]  # fmt: skip
    return " · ".join(filter(None, said))


def finished(data: RunData) -> bool:
    """Whether the run's last step was trained: that of its recipe, else of the plan; true when there is neither."""
    steps = as_number(data.recipe, "train", "steps") or as_number(data.plan, "steps")
    return len(data.train) > 0 and (steps is None or data.train.step[-1] >= steps)


def planned_tokens(data: RunData) -> float | None:
    """Tokens of the whole run: those of the plan, scaled to the number of steps of the recipe (train.minutes may change it)."""
    tokens, steps = as_number(data.plan, "tokens"), as_number(data.plan, "steps")
    now = as_number(data.recipe, "train", "steps")
    return tokens * now / steps if tokens and steps and now else tokens


def score(data: RunData, name: str) -> float | None:
    """A score of the final evaluation, else of the last validation; None for an objective that is not scored by it."""
    found = as_number(data.evaluation, name)
    return data.validation.last(name) if found is None else found


def training_seconds(data: RunData) -> float | None:
    """Time spent in training steps, validation and saving left out: what the plan speaks of.

    A line stands for all steps since the line before; a line without its time counts as the median one.
    """
    seconds = data.train.column("step_seconds")
    if seconds is None:
        return None
    steps = np.diff(data.train.step, prepend=0.0)
    return float(np.sum(steps * np.where(np.isfinite(seconds), seconds, np.nanmedian(seconds))))


def tiles(data: RunData) -> list[Json]:
    found = [_score_tile(data)]
    total, inner = as_number(data.plan, "parameters"), as_number(data.plan, "parameters_by_part", "non_embedding")
    if total is not None:
        found.append(parts.tile("Parameters", amount(total), f"{amount(inner)} without embeddings" if inner else ""))
    tokens, seconds = data.train.last("tokens"), training_seconds(data)
    to_train_on = sum(number_or_0(source, "train", "tokens") for source in as_object(data.manifest, "sources").values())
    if tokens is not None:
        found.append(
            parts.tile("Training tokens", amount(tokens), f"{tokens / total:.2g} per parameter" if total else "")
        )
    elif to_train_on:
        found.append(parts.tile("Tokens to train on", amount(to_train_on)))
    if seconds is not None:
        # A run that is given minutes takes as many steps as fit in them.
        is_timed = as_number(data.recipe, "train", "minutes") is not None
        planned = 0.0 if is_timed else number_or_0(data.plan, "step_seconds") * float(data.train.step[-1])
        said = f"{seconds / planned:.2f} of the plan" if planned else f"{data.train.step[-1]:,.0f} steps"
        found.append(parts.tile("Time in training steps", duration(seconds), said))
    rate, mfu = data.train.median("tokens_per_second"), data.train.median("mfu")
    if rate is not None:
        found.append(parts.tile("Tokens per second", amount(rate), f"{mfu:.0%} of peak FLOPs" if mfu else ""))
    if data.export:
        found.append(parts.tile("Export", "verified", str(data.export.get("architecture") or "")))
    kept, came = (as_number(data.statistics, "totals", key) for key in ("documents_kept", "documents_in"))
    if kept is not None and came:
        found.append(parts.tile("Documents kept", f"{kept / came:.0%}", f"{kept:,.0f} of {came:,.0f}"))
    return [tile for tile in found if tile is not None][:6]


def _score_tile(data: RunData) -> Json | None:
    loss = as_number(data.evaluation, "loss") or data.validation.last("loss")
    bits, right = score(data, "bits_per_byte"), score(data, "accuracy")
    if bits is not None:
        said = _against_baselines(data, digits=3) or (f"loss {loss:.3f} nats per token" if loss is not None else "")
        return parts.tile("Held-out bits per byte", f"{bits:.3f}", said)
    if right is None:
        return None
    label = "Held-out texts classed right" if data.objective == "classify" else "Hidden tokens guessed right"
    return parts.tile(label, f"{right:.1%}", f"loss {loss:.3f} {data.loss_unit}" if loss else "")


def comparison(data: RunData) -> list[Json]:
    """Planned and measured values: label, planned, measured, ratio; place: of it on the scale, in percent; far: it is far off."""
    plan, train = data.plan, data.train
    if not plan or not len(train):
        return []
    steps, seconds = float(train.step[-1]), as_number(plan, "step_seconds")
    total, is_timed = as_number(plan, "memory_bytes", "total"), as_number(data.recipe, "train", "minutes") is not None
    memory = f"Memory at the peak{', since the last start' if number_or_0(data.times, 'sessions') > 1 else ''}"
    time = f"Time in training steps{'' if finished(data) else ' so far'}"
    rows: list[tuple[str, float | None, float | None, Callable[[Any], str], bool]] = [
        ("Steps", as_number(plan, "steps"), steps, parts.count, False),
        ("Tokens", as_number(plan, "tokens"), train.last("tokens"), amount, False),
        (time, None if is_timed or not seconds else seconds * steps, training_seconds(data), duration, True),
        ("Time of a step (median)", seconds, train.median("step_seconds"), step_time, True),
        ("Tokens per second (median)", as_number(plan, "tokens_per_second"), train.median("tokens_per_second"),
         parts.count, True),
        ("Model FLOPs utilisation (median)", as_number(plan, "mfu"), train.median("mfu"), "{:.1%}".format, True),
        (memory, total, data.peak_memory, size, True),
    ]  # fmt: skip
    compared = []
    for label, planned, measured, shown, rated in rows:
        if planned is None or measured is None:
            continue
        ratio = measured / planned if planned else None
        # On a logarithmic scale from a half to twice, so that too high and too low look alike.
        place = 50.0 + 50.0 * float(np.clip(np.log2(ratio), -1.0, 1.0)) if rated and ratio and ratio > 0 else None
        far = rated and ratio is not None and not 0.8 <= ratio <= 1.25
        compared.append({"label": label, "planned": shown(planned), "measured": shown(measured), "ratio": ratio,
                         "far": far, "place": place})  # fmt: skip
    return compared


def planned_memory(data: RunData) -> list[tuple[str, str, float]]:
    found = [(parts.words(name), number_or_0(value)) for name, value in as_object(data.plan, "memory_bytes").items()
             if name != "total"]  # fmt: skip
    return [(f"part-{place % 6 + 1}", name, value) for place, (name, value) in enumerate(found) if value]


def curve_finding(data: RunData) -> str:
    """What the validation curve says."""
    bits, step = data.validation.column("bits_per_byte"), data.validation.step
    if bits is None:
        return _accuracy_finding(data)
    step, bits = step[np.isfinite(bits)], bits[np.isfinite(bits)]
    if len(bits) == 1:
        return f"One validation, at step {step[0]:,.0f}: {bits[0]:.3f} bits per byte."
    best = int(np.argmin(bits))
    is_last = best == len(bits) - 1
    lowest = "the last is the lowest" if is_last else f"the lowest was {bits[best]:.3f} at step {step[best]:,.0f}"
    way = f"from {bits[0]:.3f} to {bits[-1]:.3f} bits per byte over {len(bits)} validations"
    return f"Held-out text went {way}; {lowest}."


def validations(data: RunData) -> tuple[list[str], list[list[str]]]:
    """The validations as columns and rows of a table; every n-th of many, and the last."""
    curves, last = data.validation, len(data.validation) - 1
    every = max(len(curves) // MAX_VALIDATIONS, 1)
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "tokens": ("Tokens", "{:,.0f}".format), "loss": (f"Loss, {data.loss_unit}", "{:.4f}".format),
        "bits_per_byte": ("Bits per byte", "{:.4f}".format), "accuracy": ("Accuracy", "{:.2%}".format),
    }  # fmt: skip
    names = [name for name in shown if name in ("tokens", "loss") or curves.column(name) is not None]
    rows = []
    for place in (place for place in range(len(curves)) if place % every == 0 or place == last):
        values = [float(curves.columns[name][place]) if name in curves.columns else np.nan for name in names]
        pairs = zip(names, values, strict=True)
        cells = [shown[name][1](value) if np.isfinite(value) else "–" for name, value in pairs]
        rows.append([f"{curves.step[place]:,.0f}", *cells])
    return ["n|Step", *(f"n|{shown[name][0]}" for name in names)], rows


def article(shown: str) -> str:
    """An eight, an eleven and an eighteen; a hundred and ten."""
    return "An" if re.match(r"8|1[18](?!\d)", shown) else "A"


def _untrained(data: RunData, subject: str) -> str:
    totals = as_object(data.statistics, "totals")
    kept, found, clean = (as_number(totals, key) for key in ("documents_kept", "documents_in", "bytes_kept"))
    said = []
    if kept is not None and found:
        of_text = f", {size(clean)} of clean text" if clean is not None else ""
        said.append(f"The corpus keeps {kept:,.0f} of {found:,.0f} documents ({kept / found:.0%}){of_text}.")
    tokens, seconds = as_number(data.plan, "tokens"), as_number(data.plan, "seconds")
    if tokens:
        time = f" in about {duration(seconds)}" if seconds else ""
        said.append(f"{subject} is planned to read {amount(tokens)} tokens{time}.")
    return " ".join(said) or "Nothing has been trained yet."


def _against_baselines(data: RunData, digits: int) -> str:
    """How far the model's bits per byte are from those of the 5-gram and of PPMd, where these were computed."""
    bits, said = as_number(data.evaluation, "bits_per_byte"), []
    for name, shown in (("ngram", "a byte {:.0f}-gram"), ("ppmd", "PPMd order {:.0f}")):
        baseline = as_object(data.evaluation, name)
        if bits is not None and (theirs := as_number(baseline, "bits_per_byte")) is not None:
            where = "below" if bits < theirs else "above"
            said.append(f"{abs(theirs - bits):.{digits}f} {where} {shown.format(number_or_0(baseline, 'order'))}")
    return ", ".join(said)


def _accuracy_finding(data: RunData) -> str:
    right = data.validation.column("accuracy")
    if right is None:
        return ""
    right = right[np.isfinite(right)]
    what = "Texts put in the right class" if data.objective == "classify" else "Hidden tokens guessed right"
    if len(right) == 1:
        return f"{what}, at the one validation: {right[0]:.1%}."
    return f"{what} on held-out text: from {right[0]:.1%} to {right[-1]:.1%} over {len(right)} validations."


def plan_finding(data: RunData, rows: list[Json]) -> str:
    """The plan's error in time and memory, in words."""
    said = []
    for one in rows:
        if one["ratio"] and one["label"].startswith("Time in training steps"):
            said.append(f"the training steps took {_off(one['ratio'], 'longer')}")
        elif one["ratio"] and one["label"].startswith("Memory"):
            said.append(f"memory came to {_off(one['ratio'], 'more')}")
    source = as_text(data.plan, "step_seconds_from")
    basis = f" The plan's step time: {source}." if source else ""
    return f"{parts.capitalised(' and '.join(said))}.{basis}" if said else ""


def _off(ratio: float, above: str) -> str:
    percent = 100.0 * (ratio - 1.0)
    if abs(percent) < 1:
        return "what the plan said, to within 1%"
    if ratio >= 2:
        return f"{ratio:.1f} times what was planned"
    return f"{abs(percent):.0f}% {above if percent > 0 else 'less'} than planned"
