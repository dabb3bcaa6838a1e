"""The report's sections about what a run made and how it went: wall time, samples, classes, incidents, export, stages."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from bessemer.guard.goodput import KINDS
from bessemer.report import parts
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Block, cell, clock, count, known, percent, words
from bessemer.terminal import duration, size

SHOWN_DOCUMENTS = 8  # of an incident
SHOWN_INCIDENTS = 200
SHOWN_CLASSES = 20  # a wider confusion matrix is left to evaluation.json
AXES = {
    "replicate": "copies of the model",
    "shard": "processes that share one copy's state",
    "tensor": "processes that share every matrix",
    "pipeline": "stages of blocks",
    "context": "processes that share every sequence",
}
WALL_TIME_INKS = {
    "productive": "good", "data_wait": "part-2", "validation": "part-3", "saving": "part-4", "start": "part-5",
    "recovery": "accent", "redone": "lost", "stopped": "raw", "other": "reference",
}  # fmt: skip


def wall_time(data: RunData) -> Block:
    """Where the wall time of the training went: one bar, and its pieces in a table."""
    total, sessions = number_or_0(data.times, "total"), number_or_0(data.times, "sessions")
    if not total:
        return {}
    shown = {kind: value for kind in KINDS if (value := number_or_0(data.times, kind)) >= 0.0005 * total}
    pieces, left = [], 0.0
    for kind, value in shown.items():
        width = 100.0 * value / total
        pieces.append((WALL_TIME_INKS[kind], left, width, f"{KINDS[kind]} {duration(value)}"))
        left += width
    rows = [
        [cell(KINDS[kind], ink=WALL_TIME_INKS[kind]), duration(value), f"{value / total:.1%}"]
        for kind, value in shown.items()
    ]
    times = "" if sessions == 1 else f" in {sessions:.0f} sessions, with the time between them"
    said = f"{number_or_0(data.times, 'productive') / total:.1%} of {duration(total)}{times} were productive steps."
    bar = {"name": "", "end": "", "far": False, "own": False, "cut": False, "pieces": pieces}
    return parts.section("wall-time", "Where the time went", parts.finding(said), parts.lanes([bar]),
                         parts.table(["", "n|Time", "n|Share"], rows))  # fmt: skip


def processes(data: RunData) -> Block:
    """How a run of several processes was split, and what they sent each other."""
    layout = as_object(data.recipe, "parallel")
    sizes = {axis: max(int(as_number(layout, axis) or 1), 1) for axis in AXES}
    world = prod(sizes.values())
    if world == 1:
        return {}
    rows: list[list[Any]] = [[axis, size_, AXES[axis]] for axis, size_ in sizes.items() if size_ > 1]
    if sizes["shard"] * sizes["context"] > 1:
        rows.append(["zero", int(as_number(layout, "zero") or 3), "what shard divides"])
    if sizes["pipeline"] > 1:
        rows.append(["schedule", as_text(layout, "schedule") or "1f1b", "of the micro-batches"])
    planned = {kind: as_number(value) for kind, value in as_object(data.plan, "communicated_bytes").items()}
    counted_bytes = data.train.groups.get("communicated_bytes", {})
    measured = {kind: float(np.nanmedian(values)) for kind, values in counted_bytes.items()}
    sent = []
    for kind in dict.fromkeys([*planned, *measured]):
        formula, counted = planned.get(kind), measured.get(kind)
        if formula or counted:
            ratio = f"{counted / formula:.3f}" if formula and counted is not None else "–"
            sent.append([kind.replace("_", "-"), known(formula, size), known(counted, size), ratio])
    total = sum(measured.values())
    named = " x ".join(f"{axis} {size_}" for axis, size_ in sizes.items() if size_ > 1)
    return parts.section(
        "processes", "Over several processes",
        parts.finding(f"{world:,} processes: {named}.",
                      f"In a step they sent each other {size(total)}, {size(total / world)} each." if total else ""),
        parts.table(["Axis", "n|Size", ""], rows),
        parts.titled("Sent in a step, all processes together", parts.table(["", "n|By formula", "n|Measured", "n|Ratio"], sent)),
    )  # fmt: skip


def samples(data: RunData) -> Block:
    """Prompts and what the model made of them."""
    quotes = []
    for sample in as_objects(data.evaluation, "samples"):
        heat = as_number(sample, "temperature")
        how = "" if heat is None else "greedy" if heat == 0 else f"temperature {heat:g}"
        prompt, written = as_text(sample, "prompt"), as_text(sample, "text")
        quotes.append({"before": "", "marked": prompt, "after": written, "caption": [(how, False)] if how else []})
    said = "Written by the trained model; the prompt is set apart from what it wrote."
    return parts.section("samples", "Samples", parts.finding(said) if quotes else {}, parts.quotes(quotes))


def fill_ins(data: RunData) -> Block:
    """Words hidden in held-out text and what the model put there."""
    quotes = []
    for found in as_objects(data.evaluation, "fill_ins"):
        word = as_text(found, "word")
        guesses = [(_visible(as_text(guess, "word")), as_number(guess, "probability"))
                   for guess in as_objects(found, "guesses")]  # fmt: skip
        right = bool(guesses) and guesses[0][0] == _visible(word)
        caption = [(f"{as_text(found.get('source'))} · {'right' if right else 'wrong'}:", False)]
        for guess, share in guesses:
            caption += [(" ", False), (guess, True), (f" {percent(share)}", False)]
        before, after = as_text(found, "before"), as_text(found, "after")
        quotes.append({"before": before, "marked": f"[{word}]", "after": after, "caption": caption})
    said = "Words of held-out text, hidden one at a time, and the likeliest tokens in their place."
    return parts.section("fill_ins", "Filled in", parts.finding(said) if quotes else {}, parts.quotes(quotes))


def _visible(word: str) -> str:
    """A token of white space alone, as signs a reader can see."""
    return word if word.strip() else word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")


def classes(data: RunData) -> Block:
    """Precision, recall and F1 of each class, and the confusion matrix."""
    found = as_objects(data.evaluation, "classes")
    names, raw = [as_text(row, "label") for row in found], data.evaluation.get("confusion")
    scores = parts.records([
        ("Class", "label"), ("n|Texts", "texts", count), ("n|Precision", "precision", percent), ("n|Recall", "recall", percent),
        ("n|F1", "f1", percent),
    ], found)  # fmt: skip
    listed = [row if isinstance(row, list) else [] for row in raw] if isinstance(raw, list) else []
    square = len(listed) == len(names) <= SHOWN_CLASSES and all(len(row) == len(names) for row in listed)
    confusion = []
    for name, counts in zip(names, listed if square else [], strict=False):
        values = [number_or_0(count) for count in counts]
        shares = [60.0 * value / (sum(values) or 1.0) for value in values]
        cells = (cell(f"{value:,.0f}", shade=shade) for value, shade in zip(values, shares, strict=True))
        confusion.append([name, *cells])
    right = as_number(data.evaluation, "accuracy")
    return parts.section(
        "classes", "Classes",
        parts.finding(f"{right:.1%} of the held-out texts are put in the right class." if scores and right is not None else ""),
        scores,
        parts.titled("What each was taken for", parts.table(["", *(cell(name, css="n") for name in names)], confusion)),
    )  # fmt: skip


def incidents(data: RunData) -> Block:
    """What went wrong and what was done, with the documents of the batch."""
    if not len(data.train) and not data.incidents:
        return {}
    rows = []
    for incident in data.incidents[:SHOWN_INCIDENTS]:
        documents = _document_names(incident.get("documents"))
        shown = documents[:SHOWN_DOCUMENTS]
        shown += [f"and {len(documents) - len(shown)} more"] if len(documents) > len(shown) else []
        cells = [
            count(as_number(incident, "step")), words(as_text(incident, "what")), as_text(incident, "cause"),
            as_text(incident, "action"), cell(clock(incident.get("time")), css="nowrap"),
        ]  # fmt: skip
        advice = as_text(incident, "advice")
        under: list[Block] = [parts.finding(advice)] if advice else []
        under += [{"kind": "list", "items": shown}] if shown else []
        listed = parts.folded("Documents and advice" if advice else "Documents of the batch", *under) if under else None
        rows.append(parts.row(cells, under=listed))
    table = parts.table(["n|Step", "What", "Cause", "Action", "wide-only|Time"], rows, css="texts")
    return parts.section("incidents", "Incidents", table or parts.finding("None."))


def _document_names(value: Any) -> list[str]:
    """Document names, whether they are listed plainly or by the sequence that held them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _document_names(value.get("documents"))
    names = (name for item in value for name in _document_names(item)) if isinstance(value, list) else ()
    return list(dict.fromkeys(names))


def export(data: RunData) -> Block:
    """The checks that the export passed, and its files."""
    record = data.export
    if not record:
        return {}
    keys = ("logits_max_difference", "tolerance", "greedy_tokens_equal", "tokenizer_documents_equal", "tensors")
    difference, tolerance, greedy, documents, tensors = (as_number(record, key) for key in keys)
    checks = []
    if difference is not None:
        limit = f"; {tolerance:.0e} is allowed" if tolerance is not None else ""
        is_within = tolerance is None or difference <= tolerance
        checks.append((is_within, f"Logits differ by at most {difference:.1e}{limit}"))
    if greedy:
        checks.append((greedy > 0, f"{greedy:,.0f} tokens of greedy generation are equal"))
    if documents is not None:
        checks.append((documents > 0, f"The tokenizer gives the same tokens for {documents:,.0f} documents"))
    library = f"transformers {as_text(record.get('transformers'))}".strip()
    name = as_text(record, "architecture") or "a model"
    said = f"Loaded back with {library} as {name} and compared with the trained model."
    if tensors is not None:  # streamed
        said = "Written tensor by tensor, and compared with the checkpoint."
        checks.append(
            (tensors > 0, f"{tensors:,.0f} tensors were read back and are equal; {as_text(record.get('logits'))}")
        )
    files = ((name, as_number(value)) for name, value in as_object(record, "files").items())
    listed = parts.key((("", name, size(value)) for name, value in files if value is not None), code=True)
    return parts.section("export", "Export", parts.finding(said), parts.checks(checks), listed)


def stages(data: RunData) -> Block:
    """The time of each stage."""
    times = [number_or_0(row, "seconds") for row in data.stages]
    longest, total = max(times, default=0.0), sum(times)
    rows = [
        [cell(as_text(row, "name"), soft="kept from before" if row.get("skipped") is True else ""), duration(seconds),
         percent(seconds / total if total else None), parts.bar(100.0 * seconds / longest if longest else 0.0)]
        for row, seconds in zip(data.stages, times, strict=True)
    ]  # fmt: skip
    table = parts.table(["Stage", "n|Time", "n|Share", "bar|"], rows)
    return parts.section("stages", "Stages", parts.finding(f"{duration(total)} in all.") if rows else {}, table)


def environment(data: RunData) -> Block:
    """The machine and the programs."""
    shown = []
    for name, value in data.environment.items():
        if name == "git":
            git = as_object(value)
            commit = as_text(git, "commit")
            value = (commit[:12] + (", with uncommitted changes" if git.get("dirty") else "")) if commit else ""
        elif name == "memory_bytes":
            value = known(as_number(value), size)
        elif name == "started":
            value = clock(value)
        if isinstance(value, str | int | float) and value != "":
            shown.append((words(name.removesuffix("_bytes")), str(value)))
    versions = as_object(data.environment, "packages").items()
    packages = parts.facts(sorted((name, str(version)) for name, version in versions if version))
    return parts.section("environment", "Environment", parts.facts(shown), parts.folded("Packages", packages))


def recipe(data: RunData) -> Block:
    """The resolved recipe as it stands."""
    lines = data.recipe_text.splitlines()
    block = {"kind": "recipe", "lines": lines} if lines else {}
    return parts.section("recipe", "Recipe", parts.folded("The whole recipe, every derived value filled in", block))
