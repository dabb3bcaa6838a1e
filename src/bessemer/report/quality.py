"""The documents that stand for the quality classifier's scores, and the scores as a figure."""

from __future__ import annotations

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, number_or_0
from bessemer.report.parts import Figure

NUM_NEAR, NUM_ENDS = 8, 4  # documents shown around the limit, and at either end of the scores


def examples(data: RunData) -> dict[str, list[tuple[float, Json]]]:
    """Documents with their scores around the limit, then the best and the worst of those kept for the report."""
    limit = as_number(data.quality, "use", "threshold")
    rows = as_objects(data.quality, "examples")
    scored = [(score, row) for row in rows if (score := as_number(row, "score")) is not None]
    near = sorted(scored, key=lambda item: abs(item[0] - (0.5 if limit is None else limit)))[:NUM_NEAR]
    return {
        "nearest to the limit": sorted(near, key=lambda item: item[0]), "scored highest": scored[::-1][:NUM_ENDS],
        "scored lowest": scored[:NUM_ENDS],
    }  # fmt: skip


def histogram(data: RunData) -> Figure | None:
    """Draw a histogram of the scores of each source."""
    traces = []
    for name, raw in as_object(data.quality, "scores").items():
        counts = [number_or_0(value) for value in raw] if isinstance(raw, list) else []
        if name in data.source_names and any(counts):
            x = [round((place + 0.5) / len(counts), 4) for place in range(len(counts))]
            traces.append(parts.bars(
                name, x, [value / sum(counts) for value in counts], parts.source_style(data, name)["ink"], "%{y:.1%}, %{text} documents",
                textposition="none", text=[f"{value:,.0f}" for value in counts],
            ))  # fmt: skip
    if not traces:
        return None
    limit = as_number(data.quality, "use", "threshold")
    x_axis = parts.axis("score", range=[0, 1], dtick=0.1)
    y_axis = parts.axis("share of the source's documents", tickformat=".0%")
    return parts.figure(
        "scores", "Scores by source", traces, x_axis, y_axis, note="Dotted line: the limit." if limit is not None else "",
        shapes=[parts.vertical(limit)] if limit is not None else [], barmode="group", bargap=0.1,
    )  # fmt: skip
