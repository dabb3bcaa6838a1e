"""What the numbers of a run come to: one sentence, key figures, the plan held against what happened."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from bessemer.plan.cost import parameters_of
from bessemer.report.data import RunData, number, table
from bessemer.terminal import amount, duration, size

Row = dict[str, Any]


def headline(data: RunData) -> str:
    """The run in one sentence."""
    parameters = parameters_of(data.plan)[0] or number(data.export.get("parameters"))
    kind = {"masked": "encoder", "classify": "classifier"}.get(data.objective, "decoder")
    subject = f"{_article(amount(parameters))} {amount(parameters)}-parameter {kind}" if parameters else f"A {kind}"
    if not len(data.train):
        return _untrained(data, subject)
    tokens = data.train.last("tokens")
    planned = number(data.plan.get("tokens"))
    verb = "read" if finished(data) else "has so far read"
    of = f" of {amount(planned)}" if planned and not finished(data) else ""
    sentence = f"{subject} {verb} {amount(tokens)}{of} tokens" if tokens else f"{subject} was trained"
    seconds = training_seconds(data)
    if seconds is not None:
        sentence += f" in {duration(seconds)}"
    bits = bits_per_byte(data)
    if bits is not None:
        sentence += f" and {'reaches' if finished(data) else 'stands at'} {bits:.2f} bits per byte on held-out text"
        against = _against_ngram(data, digits=2)
        sentence += f", {against}" if against else ""
    right = accuracy(data)
    if right is not None:
        what = (
            "puts {} of the held-out texts in the right class"
            if data.objective == "classify"
            else ("guesses {} of the tokens hidden in held-out text")
        )
        sentence += f" and {what.format(f'{right:.1%}')}"
    return sentence + "."


def finished(data: RunData) -> bool:
    """Whether the run's last step was trained: that of its recipe, which follows the pace of a run that is given minutes, else
    of the plan; true when there is neither."""
    steps = number(table(data.recipe.get("train")).get("steps")) or number(data.plan.get("steps"))
    return len(data.train) > 0 and (steps is None or data.train.step[-1] >= steps)


def bits_per_byte(data: RunData) -> float | None:
    """Of the final evaluation, else of the last validation."""
    found = number(data.evaluation.get("bits_per_byte"))
    return data.validation.last("bits_per_byte") if found is None else found


def accuracy(data: RunData) -> float | None:
    """Of the final evaluation, else of the last validation; None for an objective that is scored in bits."""
    found = number(data.evaluation.get("accuracy"))
    return data.validation.last("accuracy") if found is None else found


def training_seconds(data: RunData) -> float | None:
    """Time spent in training steps, validation and saving left out: what the plan speaks of.

    A line stands for all steps since the line before; a line without its time counts as the median one.
    """
    seconds = data.train.column("step_seconds")
    if seconds is None:
        return None
    steps = np.diff(data.train.step, prepend=0.0)
    return float(np.sum(steps * np.where(np.isfinite(seconds), seconds, np.nanmedian(seconds))))


def tiles(data: RunData) -> list[Row]:
    """Up to six key figures: label, value, what to hold it against."""
    found = [
        _bits_tile(data),
        _accuracy_tile(data),
        _parameters_tile(data),
        _tokens_tile(data),
        _time_tile(data),
        _throughput_tile(data),
        _export_tile(data),
        _corpus_tile(data),
    ]
    return [tile for tile in found if tile is not None][:6]


def comparison(data: RunData) -> list[Row]:
    """Planned and measured values side by side; empty when one of the two is missing altogether."""
    plan, train = data.plan, data.train
    if not plan or not len(train):
        return []
    done = float(train.step[-1])
    step_seconds = number(plan.get("step_seconds"))
    so_far = "" if finished(data) else " so far"
    rows = [
        _compared("Steps", number(plan.get("steps")), done, lambda value: f"{value:,.0f}", rated=False),
        _compared("Tokens", number(plan.get("tokens")), train.last("tokens"), amount, rated=False),
        _compared(
            f"Training time{so_far}",
            step_seconds * done if step_seconds else None,
            training_seconds(data),
            duration,
        ),
        _compared("Time of a step (median)", step_seconds, _median(data, "step_seconds"), _short_time),
        _compared(
            "Tokens per second (median)",
            number(plan.get("tokens_per_second")),
            _median(data, "tokens_per_second"),
            lambda value: f"{value:,.0f}",
        ),
        _compared(
            "Model FLOPs utilisation (median)",
            number(plan.get("mfu")),
            _median(data, "mfu"),
            lambda value: f"{100 * value:.1f}%",
        ),
        _compared(
            "Memory at the peak",
            number(table(plan.get("memory_bytes")).get("total")),
            _peak_memory(data),
            size,
        ),
    ]
    return [row for row in rows if row is not None]


def memory_parts(data: RunData) -> list[Row]:
    """The planned memory by part, in the order of the plan."""
    parts = {name: number(value) for name, value in table(data.plan.get("memory_bytes")).items() if name != "total"}
    total = sum(value for value in parts.values() if value)
    if not total:
        return []
    return [
        {"name": name, "size": size(value), "share": 100.0 * value / total, "ink": f"part-{index % 6 + 1}"}
        for index, (name, value) in enumerate(parts.items())
        if value
    ]


def curve_finding(data: RunData) -> str:
    """What the validation curve says."""
    bits = data.validation.column("bits_per_byte")
    if bits is None:
        return _accuracy_finding(data)
    step = data.validation.step[np.isfinite(bits)]
    bits = bits[np.isfinite(bits)]
    if len(bits) == 1:
        return f"One validation, at step {step[0]:,.0f}: {bits[0]:.3f} bits per byte."
    best = int(np.argmin(bits))
    lowest = (
        "the last is the lowest"
        if best == len(bits) - 1
        else f"the lowest was {bits[best]:.3f} at step {step[best]:,.0f}"
    )
    way = f"from {bits[0]:.3f} to {bits[-1]:.3f} bits per byte over {len(bits)} validations"
    return f"Held-out text went {way}; {lowest}."


def plan_finding(data: RunData, rows: list[Row]) -> str:
    """The plan's error in time and memory, in words."""
    ratios = {row["label"].split(" (")[0]: row["ratio"] for row in rows if row["ratio"]}
    said = []
    for label, ratio in ratios.items():
        if label.startswith("Training time"):
            said.append(f"training took {_off(ratio, 'longer', 'less')}")
        elif label.startswith("Memory"):
            said.append(f"memory came to {_off(ratio, 'more', 'less')}")
    sentence = " and ".join(said)
    source = data.plan.get("step_seconds_from")
    basis = f" The plan's step time: {source}." if isinstance(source, str) else ""
    return f"{sentence[:1].upper()}{sentence[1:]}.{basis}" if said else ""


def validations(data: RunData) -> list[Row]:
    """The validations as a table, to be read and copied; every n-th of many, and the last."""
    curves = data.validation
    every = max(len(curves) // 25, 1)
    names = [name for name in ("bits_per_byte", "accuracy") if curves.column(name) is not None]
    columns = {name: curves.columns[name] for name in ("tokens", "loss", *names) if name in curves.columns}
    chosen = [index for index in range(len(curves)) if index % every == 0 or index == len(curves) - 1]
    shown = {
        "tokens": lambda value: f"{value:,.0f}",
        "loss": "{:.4f}".format,
        "bits_per_byte": "{:.4f}".format,
        "accuracy": "{:.2%}".format,
    }
    return [
        {
            "step": f"{curves.step[index]:,.0f}",
            **{
                name: shown[name](float(values[index])) if np.isfinite(values[index]) else "–"
                for name, values in columns.items()
            },
        }
        for index in chosen
    ]


def _untrained(data: RunData, subject: str) -> str:
    totals = table(data.statistics.get("totals"))
    kept, found = number(totals.get("documents_kept")), number(totals.get("documents_in"))
    said = []
    if kept is not None and found:
        text = number(totals.get("bytes_kept"))
        of_text = f", {size(text)} of clean text" if text is not None else ""
        said.append(f"The corpus keeps {kept:,.0f} of {found:,.0f} documents ({kept / found:.0%}){of_text}.")
    tokens = number(data.plan.get("tokens"))
    seconds = number(data.plan.get("seconds"))
    if tokens:
        time = f" in about {duration(seconds)}" if seconds else ""
        said.append(f"{subject} is planned to read {amount(tokens)} tokens{time}.")
    return " ".join(said) or "Nothing has been trained yet."


def _article(shown: str) -> str:
    """An eight, an eleven and an eighteen; a hundred and ten."""
    return "An" if re.match(r"8|1[18](?!\d)", shown) else "A"


def _against_ngram(data: RunData, digits: int) -> str:
    ngram = table(data.evaluation.get("ngram"))
    bits, theirs = number(data.evaluation.get("bits_per_byte")), number(ngram.get("bits_per_byte"))
    if bits is None or theirs is None:
        return ""
    order = number(ngram.get("order")) or 5
    return f"{abs(theirs - bits):.{digits}f} {'below' if bits < theirs else 'above'} a byte {order:.0f}-gram"


def _bits_tile(data: RunData) -> Row | None:
    bits = bits_per_byte(data)
    if bits is None:
        return None
    loss = number(data.evaluation.get("loss")) or data.validation.last("loss")
    against = _against_ngram(data, digits=3) or (f"loss {loss:.3f} nats per token" if loss is not None else "")
    return {"label": "Held-out bits per byte", "value": f"{bits:.3f}", "note": against}


def _accuracy_tile(data: RunData) -> Row | None:
    right = accuracy(data)
    if right is None:
        return None
    loss = number(data.evaluation.get("loss")) or data.validation.last("loss")
    label = "Held-out texts classed right" if data.objective == "classify" else "Hidden tokens guessed right"
    return {"label": label, "value": f"{right:.1%}", "note": f"loss {loss:.3f} {data.loss_unit}" if loss else ""}


def _accuracy_finding(data: RunData) -> str:
    right = data.validation.column("accuracy")
    if right is None:
        return ""
    right = right[np.isfinite(right)]
    what = "Texts put in the right class" if data.objective == "classify" else "Hidden tokens guessed right"
    if len(right) == 1:
        return f"{what}, at the one validation: {right[0]:.1%}."
    return f"{what} on held-out text: from {right[0]:.1%} to {right[-1]:.1%} over {len(right)} validations."


def _parameters_tile(data: RunData) -> Row | None:
    total, inner = parameters_of(data.plan)
    if total is None:
        return None
    return {
        "label": "Parameters",
        "value": amount(total),
        "note": f"{amount(inner)} without embeddings" if inner else "",
    }


def _tokens_tile(data: RunData) -> Row | None:
    tokens = data.train.last("tokens")
    if tokens is None:
        sources = table(data.manifest.get("sources")).values()
        counts = [number(table(table(source).get("train")).get("tokens")) for source in sources]
        tokens = sum(count for count in counts if count)
        return {"label": "Tokens to train on", "value": amount(tokens), "note": ""} if tokens else None
    total, _ = parameters_of(data.plan)
    return {
        "label": "Training tokens",
        "value": amount(tokens),
        "note": f"{tokens / total:.2g} per parameter" if total else "",
    }


def _time_tile(data: RunData) -> Row | None:
    seconds = training_seconds(data)
    if seconds is None:
        return None
    step_seconds = number(data.plan.get("step_seconds"))
    planned = step_seconds * float(data.train.step[-1]) if step_seconds else None
    note = f"{seconds / planned:.2f} of the plan" if planned else f"{data.train.step[-1]:,.0f} steps"
    return {"label": "Training time", "value": duration(seconds), "note": note}


def _throughput_tile(data: RunData) -> Row | None:
    rate, mfu = _median(data, "tokens_per_second"), _median(data, "mfu")
    if rate is None:
        return None
    return {
        "label": "Tokens per second",
        "value": amount(rate),
        "note": f"{mfu:.0%} of peak FLOPs" if mfu else "",
    }


def _export_tile(data: RunData) -> Row | None:
    if not data.export:
        return None
    return {"label": "Export", "value": "verified", "note": str(data.export.get("architecture") or "")}


def _corpus_tile(data: RunData) -> Row | None:
    totals = table(data.statistics.get("totals"))
    kept, found = number(totals.get("documents_kept")), number(totals.get("documents_in"))
    if kept is None or not found:
        return None
    return {"label": "Documents kept", "value": f"{kept / found:.0%}", "note": f"{kept:,.0f} of {found:,.0f}"}


def _compared(label: str, planned: float | None, measured: float | None, shown: Any, rated: bool = True) -> Row | None:
    if planned is None or measured is None:
        return None
    ratio = measured / planned if planned else None
    # On a logarithmic scale from a half to twice, so that too high and too low look alike.
    place = 50.0 + 50.0 * float(np.clip(np.log2(ratio), -1.0, 1.0)) if ratio and ratio > 0 else None
    return {
        "label": label,
        "planned": shown(planned),
        "measured": shown(measured),
        "ratio": ratio,
        "place": place if rated else None,
        "far": rated and ratio is not None and not 0.8 <= ratio <= 1.25,
    }


def _median(data: RunData, name: str) -> float | None:
    values = data.train.column(name)
    return None if values is None else float(np.nanmedian(values))


def _peak_memory(data: RunData) -> float | None:
    values = data.train.column("memory_bytes")
    return None if values is None else float(np.nanmax(values))


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _off(ratio: float, above: str, below: str) -> str:
    percent = 100.0 * (ratio - 1.0)
    if abs(percent) < 1:
        return "what the plan said, to within 1%"
    if ratio >= 2:
        return f"{ratio:.1f} times what was planned"
    return f"{abs(percent):.0f}% {above if percent > 0 else below} than planned"
