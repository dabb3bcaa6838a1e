"""The study `layouts` as text for a terminal, as a page of the docs, and as a picture."""

from __future__ import annotations

from math import log10
from pathlib import Path
from typing import Any

from bessemer.terminal import rendered, text_table

INK, PALE, RULE = "#15191d", "#56616b", "#dde2e6"
COLOURS = {"fp64": "#1f6feb", "fp32": "#0f8a5f", "bf16": "#c2570c"}
FIRST, LAST = -17, -1  # powers of ten of the axis
LEFT, TOP, WIDTH, ROW = 176, 74, 620, 21

CASE_MEANINGS = {
    "plain": "Sequences of one document each; embedding and head are two matrices; a process's part of the batch goes through in "
    "one micro-batch, with a pipeline in micro-batches of two sequences",
    "hard": "Packed documents of 1 to 40 tokens, attention within documents, the last token of each without a target, a third of "
    "the sequences padded; one matrix for embedding and head; gradients accumulated over two micro-batches, with a pipeline over "
    "micro-batches of one sequence",
    "dropout": "As hard, with a tenth of the embeddings, of the attention weights and of what attention and MLP give dropped",
    "clip": "As hard, without QK-norm, with train.optimizer.qk_clip at a logit that heads exceed from the first step",
}


def table(results: dict[str, Any]) -> str:
    rows = [
        (row["layout"], row["case"], row["precision"],
         *(("", row["why"]) if "why" in row else (f"{row['loss']:.1e}", f"{row['weight']:.1e}")))
        for row in results["rows"]
    ]  # fmt: skip
    titles = ("layout", "case", "", "loss", "weights")
    return "\n".join([_about(results), "", *text_table(titles, rows, "lllrr"), "", _verdict(results)])


def page(results: dict[str, Any]) -> str:
    """Markdown, with all that is needed to judge and to repeat it."""
    rows, cases = results["rows"], []
    for case in results["cases"]:
        of_case = [row for row in rows if row["case"] == case]
        names = dict.fromkeys(row["layout"] for row in of_case)
        lines = [_line([row for row in of_case if row["layout"] == name]) for name in names]
        cases.append((case.capitalize(), CASE_MEANINGS[case], lines))
    return rendered(
        Path(__file__).with_name("layouts.md.jinja"),
        made=results["made"], about=_about(results), verdict=_verdict(results), cases=cases,
        precisions=_precisions(results), missed=results["missed"],
    )  # fmt: skip


def _precisions(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["precision"] for row in results["rows"]))


def _about(results: dict[str, Any]) -> str:
    of = results["settings"]
    return (
        f"One model on every layout, against one process: {of['layers']} layers, width {of['width']}, {of['heads']} heads, "
        f"{of['kv_heads']} key/value heads; {of['steps']} steps of {of['sequences']} x {of['length']} tokens, AdamW at "
        f"{of['learning_rate']:g}, the same start and the same batches."
    )


def _verdict(results: dict[str, Any]) -> str:
    parts = []
    for precision in _precisions(results):
        done = [row for row in results["rows"] if row["precision"] == precision and "why" not in row]
        worst = max(done, key=lambda row: float(row["loss"]), default=None)
        if worst is None:
            continue
        target = results["targets"].get(precision)
        says = f"target {target:.0e}" if target is not None else "no target"
        parts.append(f"{precision} {worst['loss']:.1e} ({worst['layout']}, {worst['case']}; {says})")
    missed = results["missed"]
    end = "every target is met" if not missed else f"{len(missed)} of {len(results['rows'])} rows miss it or failed"
    return f"Largest difference of losses: {', '.join(parts)}: {end}."


def _line(rows: list[dict[str, Any]]) -> list[str]:
    cells = [rows[0]["layout"], str(rows[0]["processes"])]
    for row in rows:
        cells += [row["why"], "-"] if "why" in row else [f"{row['loss']:.1e}", f"{row['weight']:.1e}"]
    return cells


def picture(results: dict[str, Any]) -> str:
    """SVG. Each point is the larger of the two cases; bit-for-bit equal losses stand at the left edge."""
    names = list(dict.fromkeys(row["layout"] for row in results["rows"]))
    precisions, floor = _precisions(results), TOP + ROW * len(names)
    colours = {precision: COLOURS.get(precision, INK) for precision in precisions}
    return rendered(
        Path(__file__).with_name("layouts.svg.jinja"),
        width=LEFT + WIDTH + 30, height=floor + 62, left=LEFT, right=LEFT + WIDTH, top=TOP, floor=floor,
        ink=INK, pale=PALE, rule=RULE,
        title=f"The same losses however a run is split: {results['settings']['steps']} steps on {len(names)} layouts",
        ticks=[(f"1e{power}", _x(10.0**power)) for power in range(FIRST + 1, LAST + 1, 2)],
        targets=[(colours[name], _x(target)) for name, target in results["targets"].items() if name in precisions],
        rows=[(name, TOP + ROW * (number + 0.5), _points(results, name, colours)) for number, name in enumerate(names)],
        legend=colours.items(),
    )  # fmt: skip


def _points(results: dict[str, Any], name: str, colours: dict[str, str]) -> list[tuple[str, str, str]]:
    """Colour, place and tooltip of a layout's worst difference in each precision."""
    points = []
    for precision, colour in colours.items():
        rows = (row for row in results["rows"] if row["layout"] == name and row["precision"] == precision)
        losses = [float(row["loss"]) for row in rows if "why" not in row]
        if losses:
            worst = f"{max(losses):.1e}" if max(losses) else "equal bit for bit"
            points.append((colour, _x(max(losses)), f"{name}, {precision}: {worst}"))
    return points


def _x(difference: float) -> str:
    power = log10(difference) if difference > 0 else FIRST
    return f"{LEFT + WIDTH * (min(max(power, FIRST), LAST) - FIRST) / (LAST - FIRST):.1f}"
