"""Several runs side by side: how their recipes differ, what came of them, and their curves in one figure each."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common.console import amount, counted, duration, interval, size, step_time
from bessemer.common.console import score as shown_score
from bessemer.guard.incidents import RECIPE_CHANGED, RECORDED
from bessemer.recipe import keys as schema_keys
from bessemer.report import curves, parts, summary
from bessemer.report import data as run_data
from bessemer.report.curves import DEFAULT_WINDOW, POINTS, smoothing_labels, thin_figure
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.metrics import LOSS, METRICS, SCORES, Metric
from bessemer.report.parts import Figure, known
from bessemer.report.template import render_page, write_page
from bessemer.run.directory import RunDirectory

NO_DIFFERENCE = ("run.name", "run.dir")

Table = tuple[list[str], list[list[str]]]
"""Titles of the columns as templates/parts.html reads them, and rows of cells."""


def write(path: Path, runs: Sequence[RunDirectory]) -> Path:
    """Write the page of several runs, atomically. Raises InputError for a folder that holds nothing of a run."""
    datas = [run_data.read(run) for run in runs]
    names = name_runs(datas, [run.path for run in runs])
    values = {
        **tables(datas, names), "drawn": overlay_figures(datas, names), "default_window": DEFAULT_WINDOW,
        "smoothing": smoothing_labels(max(len(data.train) for data in datas)),
    }  # fmt: skip
    notes = [f"{name}: {note}" for data, name in zip(datas, names, strict=True) for note in data.notes]
    title = " and ".join(names) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
    return write_page(
        path, render_page("compare.html", title, "comparison", values.pop("headline"), values, notes=notes)
    )


def tables(datas: Sequence[RunData], names: Sequence[str]) -> Json:
    """Compute the headline and the tables of a comparison, by their names in the templates."""
    return {
        "headline": headline(datas, names), "differences": differences(datas, names), "outcome": results(datas, names),
    }  # fmt: skip


def name_runs(datas: Sequence[RunData], places: Sequence[Path]) -> list[str]:
    """Return a name for each run: its own, or its folder's path where two have the same."""
    seen = Counter(data.name for data in datas)
    return [data.name if seen[data.name] == 1 else str(path) for data, path in zip(datas, places, strict=True)]


def headline(datas: Sequence[RunData], names: Sequence[str]) -> str:
    """Name the run that is ahead by the held-out score that all have."""
    for score in SCORES:
        values, by = scores(datas, score.metric.key)
        known_scores = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        if len(known_scores) < len(datas) or len({data.objective for data in datas}) > 1:
            continue
        shown = {name: score.form.format(value) for name, value in known_scores.items()}
        if len({_held_out(data) for data in datas}) > 1 or not all(data.manifest for data in datas):
            each = ", ".join(f"{name} {value}" for name, value in shown.items())
            return f"{each} ({score.unit}): not of the same held-out text, as far as is known, so these do not compare."
        best = names[values.index(score.best(known_scores.values()))]
        if len(set(shown.values())) == 1:
            return f"{' and '.join(shown)} are equal on their held-out text{by}: {shown[best]} {score.unit}."
        others = ", ".join(f"{name} {value}" for name, value in shown.items() if name != best)
        return f"{best} is ahead on its held-out text with {shown[best]} {score.unit}{by}; {others}."
    return f"{counted(len(datas), 'run')} side by side."


def scores(datas: Sequence[RunData], name: str) -> tuple[list[float | None], str]:
    """A score of each run that is of the same text: of the final evaluations where all have one, else of the last validations,
    which may read a part of the held-out text; and which, in words, where they might be taken for the other."""
    final = [as_number(data.evaluation, name) for data in datas]
    validations = [data.validation.last(name) for data in datas]
    if None in final and None not in validations:
        return list(validations), ", by the last validation" if any(value is not None for value in final) else ""
    return [summary.score(data, name) for data in datas], ""


def _held_out(data: RunData) -> tuple[Any, ...]:
    """Identify the text of a score: the held-out text of each source, of conversations the answers alone."""
    sources = as_object(data.manifest, "sources")
    texts = (as_object(sources, name, "heldout") for name in sources)
    return data.scored_text, *sorted((number_or_0(one, "documents"), number_or_0(one, "bytes")) for one in texts)


def differences(datas: Sequence[RunData], names: Sequence[str]) -> Table:
    """The keys of the recipes that differ, with the value of each run; a recipe that is missing or damaged differs in nothing."""
    flat = [dict(_flattened(data.recipe)) for data in datas]
    read = [one for one in flat if one]
    keys = dict.fromkeys(key for one in read for key in one if not key.startswith(NO_DIFFERENCE))
    differ = [key for key in keys if not _of_missing_entry(key, read) and len({one.get(key, "–") for one in read}) > 1]
    rows = [[key, *(one.get(key, "–") if one else "?" for one in flat)] for key in differ]
    if len(read) < len(flat):
        rows.insert(0, ["recipe.toml", *("read" if one else "cannot be read" for one in flat)])
    return ["Key", *names], rows


def _of_missing_entry(key: str, recipes: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a key is of a table, such as a source, that one recipe lacks as a whole, and has its default in the others.

    Such a key tells no difference.
    """
    entry, closed, _ = key.rpartition("].")
    if not closed or all(any(other.startswith(f"{entry}].") for other in one) for one in recipes):
        return False
    info = schema_keys().get(re.sub(r"\[[^\]]*\]", "", key))
    return info is not None and {one[key] for one in recipes if key in one} <= {
        text for _, text in _flattened(info.default)
    }


def results(datas: Sequence[RunData], names: Sequence[str]) -> Table:
    """Return the results of each run, a row for each figure that at least one of them has."""
    rows: list[list[str]] = []

    def row(title: str, values: list[Any], shown: Any) -> None:
        if any(value is not None for value in values):
            rows.append([title, *(known(value, shown) for value in values)])

    row("Steps", [float(data.train.step[-1]) if len(data.train) else None for data in datas], "{:,.0f}".format)
    row("Tokens", [data.train.last("tokens") for data in datas], amount)
    row("Parameters", [as_number(data.plan, "parameters") for data in datas], amount)
    own = ", each on its own text" * (len({_held_out(data) for data in datas}) > 1)
    units = dict.fromkeys(data.loss_unit for data in datas)
    for unit in units:  # losses of different objectives do not compare
        some, of = _of_unit(datas, unit), f", {unit}" * (len(units) > 1)
        row(f"Training loss, the last{own}{of}", [data.train.last("loss") for data in some], "{:.4f}".format)
        for score in SCORES:
            values, by = scores(some, score.metric.key)
            row(f"{score.metric.title}{by}{own}{of}", values, score.digits.format)
    for source in _sources_of_all(datas):
        row(f"Held-out bits per byte of {source}{own}", [_of_source(data, source) for data in datas], "{:.4f}".format)
    for name, title in (("ngram", "a byte 5-gram"), ("ppmd", "PPMd order 10")):
        values = [as_number(data.evaluation, name, "bits_per_byte") for data in datas]
        row(f"Bits per byte of {title}{own or ' on the same text'}", values, "{:.4f}".format)
    for title, of_task in _tasks(datas):
        row(title, [score if as_number(score, "value") is not None else None for score in of_task], _shown_score)
    row("Time in training steps", [summary.training_seconds(data) for data in datas], duration)
    row("Productive share of the wall time", [as_number(data.times, "effective") for data in datas], "{:.1%}".format)
    row("Time of a step (median)", [data.train.median("step_seconds") for data in datas], step_time)
    row("Tokens per second (median)", [data.train.median("tokens_per_second") for data in datas], "{:,.0f}".format)
    again = any(number_or_0(data.times, "sessions") > 1 for data in datas)
    row(f"Memory at the peak{', since the last start' * again}", [data.peak_memory for data in datas], size)
    incidents = [[one for one in data.incidents if one.get("what") != RECIPE_CHANGED.name] for data in datas]
    acted = [sum(as_text(one, "action") not in (RECORDED, "") for one in of_run) for of_run in incidents]
    row("Incidents that were acted on", acted, "{:,.0f}".format)
    return ["", *(f"n|{name}" for name in names)], rows


def _sources_of_all(datas: Sequence[RunData]) -> list[str]:
    """The sources that any evaluation has a score of; none where each has only one, whose score is the whole's."""
    key = "bits_per_byte_by_source"
    found = [list(as_object(data.evaluation, key) or data.validation.groups.get(key, {})) for data in datas]
    return list(dict.fromkeys(name for names in found for name in names)) if max(map(len, found)) > 1 else []


def _of_source(data: RunData, source: str) -> float | None:
    """Bits per byte of a source by the final evaluation, else by the last validation."""
    key = "bits_per_byte_by_source"
    return as_number(data.evaluation, key, source) or data.validation.last(source, key)


def _tasks(datas: Sequence[RunData]) -> Iterator[tuple[str, list[Json]]]:
    """The scores of the tasks that any of the runs was scored on: what each is called, and the score of each run, {} for none.

    Two tasks of one name that ask for different things are told apart by their data.
    """
    found = [
        {(as_text(row, "name"), as_text(row, "content")): row for row in as_objects(data.evaluation, "tasks")}
        for data in datas
    ]
    asked = {task: row for one in found for task, row in one.items()}
    seen = Counter(name for name, _ in asked)
    for (name, content), row in asked.items():
        data = f" of {Path(as_text(row, 'data')).name} ({counted(int(number_or_0(row, 'items')), 'item')})"
        title = name + data * (seen[name] > 1)
        of_runs = [as_object(one.get((name, content)), "scores") for one in found]
        for score in dict.fromkeys(score for scores in of_runs for score in scores):
            yield f"{title}, {parts.words(score)}", [as_object(scores, score) for scores in of_runs]


def _shown_score(score: Json) -> str:
    """A score, with its 95% interval where it has one."""
    ends = interval(as_number(score, "low"), as_number(score, "high"))
    return shown_score(score["value"]) + (f" ({ends})" if ends else "")


def overlay_figures(datas: Sequence[RunData], names: Sequence[str], points: int = POINTS) -> list[Figure]:
    """The curves of all runs, one figure for each number."""
    units = list(dict.fromkeys(data.loss_unit for data in datas))
    figures = []
    for number, unit in enumerate(units):  # losses of different objectives do not compare
        mark, of = f"-{number + 1}" * (number > 0), f", {unit}" * (len(units) > 1)
        for metric in (LOSS, *(score.metric for score in SCORES)):
            title = metric.title if metric.key == "bits_per_byte" else f"{metric.title}{of}"
            unit_shown = unit if metric.key == "loss" else metric.unit
            named = replace(metric, id=f"{metric.id}{mark}", title=title, unit=unit_shown)
            figures.append(_overlay(_of_unit(datas, unit), names, named))
    figures += [_overlay(datas, names, metric) for metric in (*METRICS, *_task_metrics(datas))]
    return [thin_figure(figure, points) for figure in figures if figure is not None]


def _of_unit(datas: Sequence[RunData], unit: str) -> list[RunData]:
    """The runs, without the numbers of those whose loss is counted by something else: these do not compare."""
    return [data if data.loss_unit == unit else RunData(data.name) for data in datas]


def _task_metrics(datas: Sequence[RunData]) -> Iterator[Metric]:
    """A task's scores while the runs train, without those whose data differ, or changed on the way."""
    for score in dict.fromkeys(score for data in datas for score in curves.task_scores(data)):
        for task in dict.fromkeys(task for data in datas for task in data.tasks.groups.get(score, {})):
            contents = np.concatenate([data.tasks.groups.get("content", {}).get(task, np.empty(0)) for data in datas])
            if len(set(contents[np.isfinite(contents)].tolist())) == 1:
                words = parts.words(score)
                yield Metric(f"tasks-{score}-{task}", f"{task}, {words}", words, task, lines="tasks", group=score)


def _overlay(datas: Sequence[RunData], names: Sequence[str], metric: Metric) -> Figure | None:
    """One number of all runs over the steps."""
    traces = []
    for place, (data, name) in enumerate(zip(datas, names, strict=True)):
        values, step = metric.values(data), getattr(data, metric.lines).step
        if values is not None:
            ink, dash = parts.series_ink(place), ("solid", "dash", "dot")[place // 6 % 3]
            made = curves.curve(name, step, values, ink, metric.hover, dash, marked=metric.lines != "train")
            traces.append({**made, "smoothed": True} if metric.key == "loss" and metric.lines == "train" else made)
    return curves.step_figure(metric.id, metric.title, metric.unit, traces, metric.axis)


def _flattened(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a recipe as text, by their dotted keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flattened(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value):
            name = as_text(inner, "name") or str(number + 1)
            yield from _flattened(inner, f"{prefix}[{name}]")
    else:
        text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else ""
        yield prefix, text or json.dumps(value, ensure_ascii=False, default=str)
