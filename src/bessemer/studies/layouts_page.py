"""The study `layouts` as text for a terminal, as a page of the docs, and as a picture."""

from __future__ import annotations

from math import log10
from typing import Any
from xml.sax.saxutils import escape

COUNTED = "fp32"  # the precision whose bytes are shown
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
}


def table(results: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [_about(results), ""]
    lines.append(f"{'layout':<20}{'case':<9}{'':<6}{'loss':>9}{'weights':>10}  bytes a step (formula)")
    for row in results["rows"]:
        place = f"{row['layout']:<20}{row['case']:<9}{row['precision']:<6}"
        if "why" in row:
            lines.append(f"{place}  {row['why']}")
        else:
            lines.append(f"{place}{row['loss']:>9.1e}{row['weight']:>10.1e}  {_bytes(row)}")
    lines += ["", _verdict(results)]
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    """Markdown, with all that is needed to judge and to repeat it."""
    made = results["made"]
    lines = [
        "# The certificate of layouts",
        "",
        "Written by `bessemer study layouts`; not by hand.",
        "",
        f"{made['day']}, Bessemer {made['bessemer']}, torch {made['torch']}, Python {made['python']}, {made['machine']}.",
        "",
        _about(results),
        "",
        _verdict(results),
        "",
        "![Largest difference of the losses from one process, for each layout and precision](layouts.svg)",
    ]
    precisions = list(dict.fromkeys(row["precision"] for row in results["rows"]))
    for case in results["cases"]:
        rows = [row for row in results["rows"] if row["case"] == case]
        columns = "".join(f" {p}: loss | weights |" for p in precisions)
        lines += ["", f"## {case.capitalize()}", "", CASE_MEANINGS[case] + ".", ""]
        lines.append(f"| layout | processes |{columns} bytes a step | formula |")
        lines.append("|---|---|" + "---|" * (2 * len(precisions) + 2))
        for name in dict.fromkeys(row["layout"] for row in rows):
            lines.append(_line([row for row in rows if row["layout"] == name]))
    lines += [
        "",
        "loss: largest difference over the steps, nats a token. weights: largest difference of any weight at the end, both "
        f"read from checkpoints. bytes: what all processes together send in a step in {COUNTED}, as a ring would move it, "
        "counted at the collectives; formula: what the planner says (`layout/communication.py`), - where it has none: how "
        "often a sharded stage of a pipeline gathers its weights depends on the schedule.",
    ]
    if results["missed"]:
        lines += ["", "Missed or not run:", "", *(f"- {sentence}" for sentence in results["missed"])]
    return "\n".join(lines) + "\n"


def _about(results: dict[str, Any]) -> str:
    of = results["settings"]
    return (
        f"One model on every layout, against one process: {of['layers']} layers, width {of['width']}, {of['heads']} heads, "
        f"{of['kv_heads']} key/value heads; {of['steps']} steps of {of['sequences']} x {of['length']} tokens, AdamW at "
        f"{of['learning_rate']:g}, the same start and the same batches."
    )


def _verdict(results: dict[str, Any]) -> str:
    parts = []
    for precision in dict.fromkeys(row["precision"] for row in results["rows"]):
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


def _line(rows: list[dict[str, Any]]) -> str:
    why = next((row["why"] for row in rows if "why" in row), None)
    cells = [rows[0]["layout"], str(rows[0]["processes"])]
    for row in rows:
        cells += ["-", "-"] if "why" in row else [f"{row['loss']:.1e}", f"{row['weight']:.1e}"]
    counted = next((row for row in rows if row["precision"] == COUNTED and "why" not in row), None)
    if counted is None:
        cells += [why or "-", "-"]
    else:
        planned = counted["planned"]
        cells += [f"{sum(counted['sent'].values()):,}", "-" if planned is None else f"{sum(planned.values()):,}"]
    return f"| {' | '.join(cells)} |"


def _bytes(row: dict[str, Any]) -> str:
    planned = row["planned"]
    formula = "" if planned is None else f" ({sum(planned.values()):,})"
    return f"{sum(row['sent'].values()):,}{formula}"


def picture(results: dict[str, Any]) -> str:
    """SVG. Each point is the larger of the two cases; bit-for-bit equal losses stand at the left edge."""
    names = list(dict.fromkeys(row["layout"] for row in results["rows"]))
    precisions = list(dict.fromkeys(row["precision"] for row in results["rows"]))
    floor, settings = TOP + ROW * len(names), results["settings"]
    width, height = LEFT + WIDTH + 30, floor + 62
    title = f"The same losses however a run is split: {settings['steps']} steps on {len(names)} layouts"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="20" y="46" fill="{PALE}">largest difference of a step\'s loss from one process, nats a token; dashed: the '
        "target of each precision</text>",
    ]
    for power in range(FIRST + 1, LAST + 1, 2):
        x = _x(10.0**power)
        out.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="{RULE}"/>')
        out.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle" fill="{PALE}">1e{power}</text>')
    out.append(f'<text x="{LEFT}" y="{floor + 17}" text-anchor="middle" fill="{PALE}">0</text>')
    for precision, target in results["targets"].items():
        if precision in precisions:
            colour = COLOURS.get(precision, INK)
            out.append(
                f'<path d="M{_x(target):.1f} {TOP - 8}V{floor}" stroke="{colour}" stroke-width="1.5" '
                'stroke-dasharray="5 4"/>'
            )
    for number, name in enumerate(names):
        y = TOP + ROW * number + ROW / 2
        out.append(f'<text x="{LEFT - 12}" y="{y + 4:g}" text-anchor="end" fill="{INK}">{escape(name)}</text>')
        out.append(f'<path d="M{LEFT} {y:g}H{LEFT + WIDTH}" stroke="{RULE}" stroke-width="0.5"/>')
        for precision in precisions:
            out += _point(results, name, precision, y)
    x = LEFT
    for precision in precisions:
        out.append(f'<circle cx="{x + 5}" cy="{floor + 40}" r="5" fill="{COLOURS.get(precision, INK)}"/>')
        out.append(f'<text x="{x + 16}" y="{floor + 44}" fill="{PALE}">{precision}</text>')
        x += 80
    return "\n".join([*out, "</svg>", ""])


def _point(results: dict[str, Any], name: str, precision: str, y: float) -> list[str]:
    rows = (row for row in results["rows"] if row["layout"] == name and row["precision"] == precision)
    losses = [float(row["loss"]) for row in rows if "why" not in row]
    if not losses:
        return []
    worst = max(losses)
    told = f"{name}, {precision}: {f'{worst:.1e}' if worst else 'equal bit for bit'}"
    colour = COLOURS.get(precision, INK)
    return [f'<circle cx="{_x(worst):.1f}" cy="{y:g}" r="5" fill="{colour}"><title>{escape(told)}</title></circle>']


def _x(difference: float) -> float:
    power = log10(difference) if difference > 0 else FIRST
    return LEFT + WIDTH * (min(max(power, FIRST), LAST) - FIRST) / (LAST - FIRST)
