"""Comparison of several runs: differences of their recipes, results, and overlaid curves."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bessemer.common.console import amount, counted, duration, interval, size, step_time
from bessemer.common.console import score as shown_score
from bessemer.guard.incidents import RECIPE_CHANGED, RECORDED
from bessemer.recipe.load import leaves
from bessemer.report import curves, parts, summary
from bessemer.report.curves import POINTS, metric_figure, thin_figure
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0, read
from bessemer.report.metrics import LOSS, METRICS, SCORES, Metric, auxiliary_loss, baselines
from bessemer.report.parts import Figure, known
from bessemer.report.template import render_page, write_page
from bessemer.run.directory import RunDirectory

NO_DIFFERENCE = ("run.name", "run.dir")

Runs = Mapping[str, RunData]
"""Compared runs by their names on the page."""
Table = tuple[list[str], list[list[str]]]
"""Column titles in the form that templates/parts.html reads, and rows of cells."""


def write(path: Path, runs: Sequence[RunDirectory], answers: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Write the HTML page that compares several runs to `path` atomically, with `answers`, sentences by topic, at its top.

    Without a verdict among them, a sentence names the run with the best score. Raises InputError for a folder without files of
    a run.
    """
    named = name_runs([read(run) for run in runs], [run.path for run in runs])
    values = page_values(named)
    notes = [f"{name}: {note}" for name, data in named.items() for note in data.notes]
    title, line = " and ".join(named) if len(named) < 4 else counted(len(named), "run"), values.pop("headline")
    more = ". ".join(f"{topic.capitalize()}: {sentence}" for topic, sentence in answers.items() if topic != "verdict")
    page = render_page(
        "compare.html", title, "comparison", answers.get("verdict", line), values, origin=more, notes=notes
    )
    return write_page(path, page)


def page_values(runs: Runs, points: int = POINTS) -> Json:
    """Return what the templates show of a comparison: headline, tables, figures and number of steps, by name.

    Curves are reduced to at most `points` points.
    """
    tables = {"headline": headline(runs), "differences": differences(runs), "outcome": results(runs)}
    num_steps = max(len(data.train) for data in runs.values())
    return {**tables, "figures": overlay_figures(runs, points), "num_steps": num_steps}


def name_runs(datas: Sequence[RunData], paths: Sequence[Path]) -> dict[str, RunData]:
    """Return the runs by a unique name: their own name, or the path of the run directory if two runs have the same name."""
    seen = Counter(data.name for data in datas)
    return {data.name if seen[data.name] == 1 else str(path): data for data, path in zip(datas, paths, strict=True)}


def headline(runs: Runs) -> str:
    """Return a sentence that names the best run by the first held-out score that all runs have.

    The sentence only lists the scores if the held-out texts differ, and only counts the runs if they share no score.
    """
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
    """Return the score `name` of each run, and the note that these scores are from validations, "" otherwise.

    The scores are those of the final evaluations. If a run has none, they are those of the last validation of each run,
    which may cover only part of the held-out text.
    """
    final = [as_number(data.evaluation, name) for data in runs.values()]
    validations = [data.validation.last(name) for data in runs.values()]
    if None in final and None not in validations:
        return list(validations), ", by the last validation" if any(value is not None for value in final) else ""
    return [summary.score(data, name) for data in runs.values()], ""


def _held_out(data: RunData) -> tuple[Any, ...]:
    """Return a value that is equal for two runs if they seem to have the same held-out text.

    It contains a phrase for the text that is scored, and the number of documents and bytes of each source.
    """
    sources = as_object(data.manifest, "sources")
    texts = (as_object(sources, name, "heldout") for name in sources)
    return data.scored_text, *sorted((number_or_0(one, "documents"), number_or_0(one, "bytes")) for one in texts)


def differences(runs: Runs) -> Table:
    """Return a table of the recipe keys whose values differ between the runs.

    A recipe that cannot be read is shown with question marks.
    """
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
    """Return True if a key is in a list entry, such as a source of the corpus, that one of the recipes lacks.

    The comparison lists only the names of such entries, not their other keys.
    """
    entry, closed, leaf = key.rpartition("].")
    is_everywhere = all(any(other.startswith(f"{entry}].") for other in one) for one in recipes)
    return bool(closed) and leaf != "name" and not is_everywhere


def results(runs: Runs) -> Table:
    """Return a table of the results of each run, with a row for each value that at least one run has."""
    rows: list[list[str]] = []
    datas = runs.values()

    def row(title: str, values: list[Any], shown: Any) -> None:
        if any(value is not None for value in values):
            rows.append([title, *(known(value, shown) for value in values)])

    row("Steps", [float(data.train.step[-1]) if len(data.train) else None for data in datas], "{:,.0f}".format)
    row("Tokens", [data.train.last("tokens") for data in datas], amount)
    row("Model", [data.model_size or None for data in datas], str)
    own = ", each on its own text" * (len({_held_out(data) for data in datas}) > 1)
    units = dict.fromkeys(data.loss_unit for data in datas)
    for unit in units:  # losses of different objectives are not comparable
        some, suffix = _of_unit(runs, unit), f", {unit}" * (len(units) > 1)
        row(f"Training loss, the last{own}{suffix}", [data.train.last("loss") for data in some.values()], LOSS.shown)
        for metric in SCORES:
            values, by = scores(some, metric.key)
            row(f"{metric.title}{by}{own}{suffix}", values, metric.shown)
    group = "bits_per_byte_by_source"
    sources = [list(as_object(data.evaluation, group) or data.validation.groups.get(group, {})) for data in datas]
    if max(map(len, sources)) > 1:  # the score of a single source equals the total
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
    """Yield the title of each task score and the formatted score of each run, None for a run without it.

    Tasks with the same name but different content get the name of their data in the title.
    """
    tables = [
        {(as_text(row, "name"), as_text(row, "content")): row for row in as_objects(data.evaluation, "tasks")}
        for data in datas
    ]
    tasks = {task: row for one in tables for task, row in one.items()}
    seen = Counter(name for name, _ in tasks)
    for (name, content), row in tasks.items():
        data = f" of {Path(as_text(row, 'data')).name} ({counted(int(number_or_0(row, 'items')), 'item')})"
        title = name + data * (seen[name] > 1)
        of_runs = [as_object(one.get((name, content)), "scores") for one in tables]
        for score in dict.fromkeys(score for scores in of_runs for score in scores):
            yield f"{title}, {parts.words(score)}", [_shown_score(as_object(scores, score)) for scores in of_runs]


def _shown_score(score: Json) -> str | None:
    """Format a score, with its 95% interval if known."""
    value, ends = as_number(score, "value"), interval(as_number(score, "low"), as_number(score, "high"))
    return None if value is None else shown_score(value) + (f" ({ends})" if ends else "")


def overlay_figures(runs: Runs, points: int = POINTS) -> list[Figure]:
    """Return a figure for each metric that shows the curves of all runs, with at most `points` points per curve.

    Runs whose losses have different units get separate figures of the loss.
    """
    units = list(dict.fromkeys(data.loss_unit for data in runs.values()))
    figures = []
    for number, unit in enumerate(units):  # losses of different objectives are not comparable
        mark, suffix = f"-{number + 1}" * (number > 0), f", {unit}" * (len(units) > 1)
        for metric in (LOSS, *SCORES):
            title = metric.title if metric.key == "bits_per_byte" else f"{metric.title}{suffix}"
            shown = unit if metric.key == "loss" else metric.unit
            named = replace(metric, id=f"{metric.id}{mark}", title=title, unit=shown)
            figures.append(metric_figure(named, _of_unit(runs, unit)))
    metrics = (*METRICS, auxiliary_loss(runs.values()), *_task_metrics(runs.values()))
    figures += [metric_figure(metric, runs) for metric in metrics]
    return [thin_figure(figure, points) for figure in figures if figure is not None]


def _of_unit(runs: Runs, unit: str) -> Runs:
    """Return the runs, with each run whose loss is in another unit replaced by an empty one of the same name."""
    return {name: data if data.loss_unit == unit else RunData(name) for name, data in runs.items()}


def _task_metrics(datas: Collection[RunData]) -> Iterator[Metric]:
    """Yield a metric for each score of each task that was measured during training.

    A task is left out if its data differs between the runs or changed during one.
    """
    for score in dict.fromkeys(score for data in datas for score in curves.task_scores(data)):
        for task in dict.fromkeys(task for data in datas for task in data.tasks.groups.get(score, {})):
            contents = np.concatenate([data.tasks.groups.get("content", {}).get(task, np.empty(0)) for data in datas])
            if len(set(contents[np.isfinite(contents)].tolist())) == 1:
                words = parts.words(score)
                yield Metric(f"tasks-{score}-{task}", f"{task}, {words}", words, task, lines="tasks", group=score)


def _flattened(value: Any) -> dict[str, str]:
    """Return the values of a recipe as text by dotted key."""
    values = leaves(value, entry=lambda index, inner: f"[{as_text(inner, 'name') or index + 1}]")
    return {key: _written(one) or json.dumps(one, ensure_ascii=False, default=str) for key, one in values}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else ""
