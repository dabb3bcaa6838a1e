"""Several runs side by side: how their recipes differ, what came of them, and their curves in one figure each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common.console import amount, counted, duration, interval, size, step_time
from bessemer.common.console import score as shown_score
from bessemer.guard.incidents import RECIPE_CHANGED, RECORDED
from bessemer.recipe.load import leaves
from bessemer.report import curves, parts, summary
from bessemer.report.curves import POINTS, metric_figure, thin_figure
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0, read
from bessemer.report.metrics import LOSS, METRICS, SCORES, Metric, baselines
from bessemer.report.parts import Figure, known
from bessemer.report.template import render_page, write_page
from bessemer.run.directory import RunDirectory

NO_DIFFERENCE = ("run.name", "run.dir")

Runs = Mapping[str, RunData]
"""The runs that are compared, by their names on the page."""
Table = tuple[list[str], list[list[str]]]
"""Titles of the columns as templates/parts.html reads them, and rows of cells."""


def write(path: Path, runs: Sequence[RunDirectory]) -> Path:
    """Write the page of several runs, atomically. Raises InputError for a folder that holds nothing of a run."""
    named = name_runs([read(run) for run in runs], [run.path for run in runs])
    values = page_values(named)
    notes = [f"{name}: {note}" for name, data in named.items() for note in data.notes]
    title, line = " and ".join(named) if len(named) < 4 else counted(len(named), "run"), values.pop("headline")
    return write_page(path, render_page("compare.html", title, "comparison", line, values, notes=notes))


def page_values(runs: Runs, points: int = POINTS) -> Json:
    """Compute the headline, the tables and the figures of a comparison, by their names in the templates."""
    tables = {"headline": headline(runs), "differences": differences(runs), "outcome": results(runs)}
    num_steps = max(len(data.train) for data in runs.values())
    return {**tables, "figures": overlay_figures(runs, points), "num_steps": num_steps}


def name_runs(datas: Sequence[RunData], places: Sequence[Path]) -> dict[str, RunData]:
    """Name each run: by its own name, or by its folder's path where two have the same."""
    seen = Counter(data.name for data in datas)
    return {data.name if seen[data.name] == 1 else str(path): data for data, path in zip(datas, places, strict=True)}


def headline(runs: Runs) -> str:
    """Name the run that is ahead by the held-out score that all have."""
    datas = runs.values()
    for metric in SCORES:
        values, by = scores(runs, metric.key)
        known_scores = {name: value for name, value in zip(runs, values, strict=True) if value is not None}
        if len(known_scores) < len(runs) or len({data.objective for data in datas}) > 1:
            continue
        shown = {name: metric.shown(value) for name, value in known_scores.items()}
        if len({_held_out(data) for data in datas}) > 1 or not all(data.manifest for data in datas):
            each = ", ".join(f"{name} {value}" for name, value in shown.items())
            return f"{each} ({metric.unit}): of different held-out text, as far as is known, so these do not compare."
        best = metric.best(known_scores, key=known_scores.__getitem__)
        if len(set(shown.values())) == 1:
            return f"{' and '.join(shown)} are equal on their held-out text{by}: {shown[best]} {metric.unit}."
        others = ", ".join(f"{name} {value}" for name, value in shown.items() if name != best)
        return f"{best} is ahead on its held-out text with {shown[best]} {metric.unit}{by}; {others}."
    return f"{counted(len(runs), 'run')} side by side."


def scores(runs: Runs, name: str) -> tuple[list[float | None], str]:
    """Return a score of each run on the same text, and which evaluation it is of where that is not clear.

    Where some run has no final evaluation, the last validations of all, which may read a part of the held-out text.
    """
    final = [as_number(data.evaluation, name) for data in runs.values()]
    validations = [data.validation.last(name) for data in runs.values()]
    if None in final and None not in validations:
        return list(validations), ", by the last validation" if any(value is not None for value in final) else ""
    return [summary.score(data, name) for data in runs.values()], ""


def _held_out(data: RunData) -> tuple[Any, ...]:
    """Identify the text of a score: the held-out text of each source, of conversations the answers alone."""
    sources = as_object(data.manifest, "sources")
    texts = (as_object(sources, name, "heldout") for name in sources)
    return data.scored_text, *sorted((number_or_0(one, "documents"), number_or_0(one, "bytes")) for one in texts)


def differences(runs: Runs) -> Table:
    """Compare the recipes: the keys that differ, with the value of each run. One that cannot be read differs in nothing."""
    flat = [_flattened(data.recipe) for data in runs.values()]
    whole = [one for one in flat if one]
    keys = dict.fromkeys(key for one in whole for key in one if not key.startswith(NO_DIFFERENCE))
    shared = [key for key in keys if not _of_missing_entry(key, whole)]
    differ = [key for key in shared if len({one.get(key, "–") for one in whole}) > 1]
    rows = [[key, *(one.get(key, "–") if one else "?" for one in flat)] for key in differ]
    if len(whole) < len(flat):
        rows.insert(0, ["recipe.toml", *("read" if one else "cannot be read" for one in flat)])
    return ["Key", *runs], rows


def _of_missing_entry(key: str, recipes: Sequence[Mapping[str, str]]) -> bool:
    """Return whether a key is of a table, such as a source, that one recipe lacks as a whole: its name alone tells that."""
    entry, closed, leaf = key.rpartition("].")
    is_everywhere = all(any(other.startswith(f"{entry}].") for other in one) for one in recipes)
    return bool(closed) and leaf != "name" and not is_everywhere


def results(runs: Runs) -> Table:
    """Return the results of each run, a row for each figure that at least one of them has."""
    rows: list[list[str]] = []
    datas = runs.values()

    def row(title: str, values: list[Any], shown: Any) -> None:
        if any(value is not None for value in values):
            rows.append([title, *(known(value, shown) for value in values)])

    row("Steps", [float(data.train.step[-1]) if len(data.train) else None for data in datas], "{:,.0f}".format)
    row("Tokens", [data.train.last("tokens") for data in datas], amount)
    row("Parameters", [as_number(data.plan, "parameters") for data in datas], amount)
    own = ", each on its own text" * (len({_held_out(data) for data in datas}) > 1)
    units = dict.fromkeys(data.loss_unit for data in datas)
    for unit in units:  # losses of different objectives do not compare
        some, of = _of_unit(runs, unit), f", {unit}" * (len(units) > 1)
        row(f"Training loss, the last{own}{of}", [data.train.last("loss") for data in some.values()], LOSS.shown)
        for metric in SCORES:
            values, by = scores(some, metric.key)
            row(f"{metric.title}{by}{own}{of}", values, metric.shown)
    group = "bits_per_byte_by_source"
    sources = [list(as_object(data.evaluation, group) or data.validation.groups.get(group, {})) for data in datas]
    if max(map(len, sources)) > 1:  # the score of an only source is that of the whole
        for source in dict.fromkeys(name for names in sources for name in names):
            values = [summary.score(data, source, group) for data in datas]
            row(f"Held-out bits per byte of {source}{own}", values, "{:.4f}".format)
    levels = [baselines(data) for data in datas]
    for name in dict.fromkeys(name for one in levels for name in one):
        values = [one.get(name) for one in levels]
        row(f"Bits per byte of {name}{own or ' on the same text'}", values, "{:.4f}".format)
    for title, of_task in _tasks(datas):
        row(title, of_task, str)
    row("Time in training steps", [summary.training_seconds(data) for data in datas], duration)
    row("Productive share of the wall time", [as_number(data.times, "effective") for data in datas], "{:.1%}".format)
    row("Time of a step (median)", [data.train.median("step_seconds") for data in datas], step_time)
    row("Tokens per second (median)", [data.train.median("tokens_per_second") for data in datas], "{:,.0f}".format)
    again = any(number_or_0(data.times, "sessions") > 1 for data in datas)
    row(f"Memory at the peak{', since the last start' * again}", [data.peak_memory for data in datas], size)
    incidents = [[one for one in data.incidents if one.get("what") != RECIPE_CHANGED.name] for data in datas]
    acted = [sum(as_text(one, "action") not in (RECORDED, "") for one in of_run) for of_run in incidents]
    row("Incidents that were acted on", acted, "{:,.0f}".format)
    return ["", *(f"n|{name}" for name in runs)], rows


def _tasks(datas: Collection[RunData]) -> Iterator[tuple[str, list[str | None]]]:
    """Yield each score of the tasks of any run: its title, and the score of each run as text, None without one.

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
            yield f"{title}, {parts.words(score)}", [_shown_score(as_object(scores, score)) for scores in of_runs]


def _shown_score(score: Json) -> str | None:
    """Format a score, with its 95% interval where it has one."""
    value, ends = as_number(score, "value"), interval(as_number(score, "low"), as_number(score, "high"))
    return None if value is None else shown_score(value) + (f" ({ends})" if ends else "")


def overlay_figures(runs: Runs, points: int = POINTS) -> list[Figure]:
    """Return the curves of all runs, one figure for each number."""
    units = list(dict.fromkeys(data.loss_unit for data in runs.values()))
    figures = []
    for number, unit in enumerate(units):  # losses of different objectives do not compare
        mark, of = f"-{number + 1}" * (number > 0), f", {unit}" * (len(units) > 1)
        for metric in (LOSS, *SCORES):
            title = metric.title if metric.key == "bits_per_byte" else f"{metric.title}{of}"
            shown = unit if metric.key == "loss" else metric.unit
            named = replace(metric, id=f"{metric.id}{mark}", title=title, unit=shown)
            figures.append(metric_figure(named, _of_unit(runs, unit)))
    figures += [metric_figure(metric, runs) for metric in (*METRICS, *_task_metrics(runs.values()))]
    return [thin_figure(figure, points) for figure in figures if figure is not None]


def _of_unit(runs: Runs, unit: str) -> Runs:
    """Leave out the numbers of the runs whose loss is counted by something else: these do not compare."""
    return {name: data if data.loss_unit == unit else RunData(name) for name, data in runs.items()}


def _task_metrics(datas: Collection[RunData]) -> Iterator[Metric]:
    """Yield the tasks' scores while the runs train, without those whose data differ, or changed on the way."""
    for score in dict.fromkeys(score for data in datas for score in curves.task_scores(data)):
        for task in dict.fromkeys(task for data in datas for task in data.tasks.groups.get(score, {})):
            contents = np.concatenate([data.tasks.groups.get("content", {}).get(task, np.empty(0)) for data in datas])
            if len(set(contents[np.isfinite(contents)].tolist())) == 1:
                words = parts.words(score)
                yield Metric(f"tasks-{score}-{task}", f"{task}, {words}", words, task, lines="tasks", group=score)


def _flattened(value: Any) -> dict[str, str]:
    """Return the values of a recipe as text, by their dotted keys."""
    found = leaves(value, entry=lambda index, inner: f"[{as_text(inner, 'name') or index + 1}]")
    return {key: _written(one) or json.dumps(one, ensure_ascii=False, default=str) for key, one in found}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else ""
