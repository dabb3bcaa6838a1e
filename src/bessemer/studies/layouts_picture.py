"""The study `layouts` as a picture: how far each layout's losses are from one process, on a logarithmic axis."""

from __future__ import annotations

from math import log10
from typing import Any
from xml.sax.saxutils import escape

INK, PALE, RULE = "#15191d", "#56616b", "#dde2e6"
COLOURS = {"fp64": "#1f6feb", "fp32": "#0f8a5f", "bf16": "#c2570c"}
FIRST, LAST = -17, -1  # powers of ten of the axis
LEFT, TOP, WIDTH, ROW = 176, 74, 620, 21


def picture(found: dict[str, Any]) -> str:
    """SVG. Each point is the larger of the two cases; bit-for-bit equal losses stand at the left edge."""
    names = list(dict.fromkeys(row["layout"] for row in found["rows"]))
    precisions = list(dict.fromkeys(row["precision"] for row in found["rows"]))
    floor, settings = TOP + ROW * len(names), found["settings"]
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
    for precision, target in found["targets"].items():
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
            out += _point(found, name, precision, y)
    x = LEFT
    for precision in precisions:
        out.append(f'<circle cx="{x + 5}" cy="{floor + 40}" r="5" fill="{COLOURS.get(precision, INK)}"/>')
        out.append(f'<text x="{x + 16}" y="{floor + 44}" fill="{PALE}">{precision}</text>')
        x += 80
    return "\n".join([*out, "</svg>", ""])


def _point(found: dict[str, Any], name: str, precision: str, y: float) -> list[str]:
    losses = [
        float(row["loss"])
        for row in found["rows"]
        if row["layout"] == name and row["precision"] == precision and "why" not in row
    ]
    if not losses:
        return []
    worst = max(losses)
    told = f"{name}, {precision}: {worst:.1e}" if worst else f"{name}, {precision}: equal bit for bit"
    colour = COLOURS.get(precision, INK)
    return [f'<circle cx="{_x(worst):.1f}" cy="{y:g}" r="5" fill="{colour}"><title>{escape(told)}</title></circle>']


def _x(difference: float) -> float:
    power = log10(difference) if difference > 0 else FIRST
    return LEFT + WIDTH * (min(max(power, FIRST), LAST) - FIRST) / (LAST - FIRST)
