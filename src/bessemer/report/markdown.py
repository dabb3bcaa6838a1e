"""`bessemer report --markdown`: the outcome of one run or of several as Markdown for a README, with its figures as SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bessemer.report import compare, story, summary
from bessemer.report import data as run_data
from bessemer.report.curves import DEFAULT_WINDOW, curves
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Figure, words
from bessemer.report.static import svg
from bessemer.run import RunFolder, writable, write_atomic
from bessemer.terminal import interval
from bessemer.terminal import score as shown

MARK = "<!-- bessemer report -->"  # of files that may be written over
FIGURES = ("loss", "bits", "accuracy", "held-out")
"""Those that a README shows, of those that there are."""


def write(path: Path, runs: Sequence[RunFolder]) -> Path:
    """Write the Markdown file, and its figures next to it as NAME-FIGURE.svg. Raises InputError where it cannot be written or
    lies there already of others, or for a folder that holds nothing of a run."""
    writable(path, "--markdown", MARK)
    datas = [run_data.read(run) for run in runs]
    names = compare.names_of(datas, [run.path for run in runs])
    figures = curves(datas[0]) if len(datas) == 1 else compare.overlaid(datas, names)
    shown = []
    for figure in figures:
        if figure["id"] in FIGURES and (drawing := svg(figure, smoothing=DEFAULT_WINDOW)):
            place = writable(path.with_name(f"{path.stem}-{figure['id']}.svg"), "--markdown", "<svg")
            write_atomic(place, drawing.encode("utf-8", errors="replace"))
            shown.append((figure, place.name))
    text = _one(datas[0], shown) if len(datas) == 1 else _several(datas, names, shown)
    write_atomic(path, f"{MARK}\n\n{text}".encode("utf-8", errors="replace"))
    return path


def _one(data: RunData, figures: Sequence[tuple[Figure, str]]) -> str:
    parts = [f"## {escaped(data.name)}", escaped(summary.headline(data))]
    if origin := summary.origin(data):
        parts.append(f"*{escaped(origin)}*")
    tiles = [[tile["label"], tile["value"], tile["note"]] for tile in summary.tiles(data)]
    parts += [_table(["", "", ""], tiles), *_figures(figures)]
    compared = [[row["label"], row["planned"], row["measured"]] for row in summary.comparison(data)]
    if compared:
        parts += ["### Planned and measured", _table(["", "planned", "measured"], compared, numbers=True)]
    tasks = [
        [as_text(task, "name"), words(name), shown(number_or_0(score, "value")),
         interval(as_number(score, "low"), as_number(score, "high"))]
        for task in as_objects(data.evaluation, "tasks") for name, score in as_object(task, "scores").items()
    ]  # fmt: skip
    if tasks:
        parts += ["### Tasks", _table(["Task", "Score", "Value", "95% interval"], tasks)]
    if events := story.story(data):
        parts += ["### What happened", "\n".join(f"- **{escaped(when)}**: {escaped(what)}" for when, what in events)]
    for sample in data.evaluation.get("samples", [])[:1]:
        prompt, text = (str(sample.get(key, "")) for key in ("prompt", "text"))
        parts += ["### A sample", "\n".join(f"    {line}" for line in f"{prompt}{text}".splitlines())]
    return "\n\n".join(parts) + "\n"


def _several(datas: Sequence[RunData], names: Sequence[str], figures: Sequence[tuple[Figure, str]]) -> str:
    columns, rows = compare.differences(datas, names)
    outcome, results = compare.results(datas, names)
    differ = _table(columns, rows) if rows else compare.same(datas, names)
    titles = [title.rpartition("|")[2] for title in outcome]
    return "\n\n".join([
        f"## {escaped(', '.join(names))}", escaped(compare.headline(datas, names)), "### How the recipes differ", differ,
        "### What came of them", _table(titles, results, numbers=True), *_figures(figures),
    ]) + "\n"  # fmt: skip


def _figures(figures: Sequence[tuple[Figure, str]]) -> list[str]:
    return [f"![{escaped(figure['title'])}]({quote(file)})" for figure, file in figures]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]], *, numbers: bool = False) -> str:
    rule = ["---", *("---:" if numbers else "---" for _ in titles[1:])]
    lines = [titles, rule, *rows]
    return "\n".join(
        f"| {' | '.join(cell if line is rule else escaped(str(cell)) for cell in line)} |" for line in lines
    )


def escaped(text: str) -> str:
    """Text in which nothing is markup, on one line."""
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|!" else sign for sign in " ".join(text.split()))
