"""The quality classifier on the page: how well it tells documents apart, what it goes by, and what it decided."""

from __future__ import annotations

from typing import Any

from bessemer.report.data import RunData, number, table, tables, text

Row = dict[str, Any]
Figure = dict[str, Any]

WORDS = 20
"""Words shown for each side; quality.json has more."""

NEAR = 8
"""Documents shown around the limit."""

ENDS = 4
"""Documents shown at either end of the scores."""

USES = {
    "report": "The scores decide nothing; they are for the reader.",
    "filter": "Documents below {limit:.3f} were rejected.",
    "pareto": "Documents were kept by a Pareto draw with shape {alpha:g}; by the law, {expected:,.0f} were to stay.",
    "weight": "Documents stand in bands of quality, and each band has a weight of its own in the mixture.",
}


def section(data: RunData) -> Row:
    """The section's text and tables; empty when the corpus had no classifier."""
    found = data.quality
    if not table(found.get("scores")):
        return {}
    used, held = table(found.get("use")), table(found.get("held_out"))
    limit = number(used.get("threshold"))
    model = table(found.get("model"))
    kind = "A fastText model" if model.get("kind") == "fasttext" else "A linear model of statistics and words"
    reads = number(model.get("read_bytes"))
    return {
        "finding": _finding(held),
        "model": f"{kind}, over the first {reads:,.0f} bytes of a document." if reads else f"{kind}.",
        "learnt": _learnt(table(found.get("labelled"))),
        "figures": _figures_of(held),
        "use": _used(used, limit),
        "sources": [_source(row) for row in tables(used.get("sources"))],
        "bands": [band for row in tables(used.get("sources")) for band in map(_band, tables(row.get("bands")))],
        **_telling(table(found.get("telling"))),
        "examples": _examples(tables(found.get("examples")), limit if limit is not None else 0.5),
        "limit": f"{limit:.3f}" if limit is not None else "0.5",
    }


def figures(data: RunData) -> list[Figure]:
    """Reliability of the held-out scores, and how the scores of each source are distributed."""
    return [figure for figure in (_reliability(data), _histogram(data)) if figure is not None]


def _finding(held: Row) -> str:
    right, auc, error = (number(held.get(key)) for key in ("accuracy", "roc_auc", "calibration_error"))
    count = number(held.get("documents"))
    if right is None or count is None:
        return "The model was not tested here: the recipe names no labelled documents."
    said = f"{right:.1%} of {count:,.0f} held-out documents are on the right side of 0.5"
    said += f", ROC AUC {auc:.3f}" if auc is not None else ""
    return said + (f"; scores are off by {100 * error:.1f} points on the average." if error is not None else ".")


def _learnt(labelled: Row) -> str:
    if not labelled:
        return ""
    sides = [" and ".join(map(str, table(labelled.get(side)))) for side in ("high", "low")]
    counts = [number(labelled.get(part)) or 0.0 for part in ("train", "calibrate", "test")]
    said = f"High is {sides[0]}, low is {sides[1]}: {counts[0]:,.0f} documents to learn from, {counts[1]:,.0f} to "
    said += f"calibrate, {counts[2]:,.0f} to test"
    left = number(labelled.get("duplicates_left_out")) or 0.0
    return said + (f"; {left:,.0f} copies left out." if left else ".")


def _figures_of(held: Row) -> list[tuple[str, str]]:
    shares = {"Precision of high": "precision", "Recall of high": "recall", "F1": "f1"}
    plain = {"Log loss, nats": "log_loss", "Brier score": "brier", "Calibration error": "calibration_error"}
    found = [(label, f"{value:.1%}") for label, key in shares.items() if (value := number(held.get(key))) is not None]
    return found + [
        (label, f"{value:.3f}") for label, key in plain.items() if (value := number(held.get(key))) is not None
    ]


def _used(used: Row, limit: float | None) -> str:
    said = USES.get(text(used.get("kind")), "")
    alpha, expected = number(used.get("alpha")), number(used.get("expected_kept"))
    return said.format(limit=limit or 0.0, alpha=alpha or 0.0, expected=expected or 0.0)


def _source(row: Row) -> Row:
    count, kept, mean = (number(row.get(key)) for key in ("documents", "kept", "mean_score"))
    return {
        "name": text(row.get("source")),
        "judged": row.get("judged") is True,
        "documents": "–" if count is None else f"{count:,.0f}",
        "kept": "–" if kept is None else f"{kept:,.0f}",
        "share": f"{100 * kept / count:.1f}%" if count and kept is not None else "–",
        "width": 100 * kept / count if count and kept is not None else 0.0,
        "mean": "–" if mean is None else f"{mean:.3f}",
    }


def _band(row: Row) -> Row:
    count, score, weight = (number(row.get(key)) for key in ("documents", "from_score", "weight"))
    return {
        "name": text(row.get("name")),
        "documents": "–" if count is None else f"{count:,.0f}",
        "from": "–" if score is None else f"{score:.3f}",
        "weight": "–" if weight is None else f"{weight:g}",
    }


def _telling(found: Row) -> Row:
    """Words of both sides, and the statistics; bars in proportion to the largest effect of their kind."""
    words = {side: tables(found.get(side))[:WORDS] for side in ("high", "low")}
    statistics = tables(found.get("statistics"))
    largest = max([abs(number(row.get("effect")) or 0.0) for rows in words.values() for row in rows] + [1e-12])
    most = max([abs(number(row.get("effect")) or 0.0) for row in statistics] + [1e-12])
    return {
        "words": {
            side: [
                {
                    "words": text(row.get("words")),
                    "width": 100 * abs(number(row.get("effect")) or 0.0) / largest,
                    "high": f"{100 * (number(row.get('high_share')) or 0.0):.0f}%",
                    "low": f"{100 * (number(row.get('low_share')) or 0.0):.0f}%",
                }
                for row in rows
            ]
            for side, rows in words.items()
        },
        "statistics": [
            {
                "name": text(row.get("feature")).replace("_", " "),
                "effect": f"{number(row.get('effect')) or 0.0:+.2f}".replace("-", "−"),
                "width": 100 * abs(number(row.get("effect")) or 0.0) / most,
                "high": f"{number(row.get('high_mean')) or 0.0:.3g}",
                "low": f"{number(row.get('low_mean')) or 0.0:.3g}",
            }
            for row in statistics
        ],
    }


def _examples(rows: list[Row], limit: float) -> list[Row]:
    """Documents around the limit, then the best and the worst of those kept for the report."""
    scored = [(score, row) for row in rows if (score := number(row.get("score"))) is not None]
    near = sorted(sorted(scored, key=lambda item: abs(item[0] - limit))[:NEAR], key=lambda item: item[0])
    best, worst = scored[::-1][:ENDS], scored[:ENDS]
    return [
        {
            "title": title,
            "rows": [
                {"score": f"{score:.3f}", "source": text(row.get("source")), "excerpt": text(row.get("excerpt"))}
                for score, row in chosen
            ],
        }
        for title, chosen in (("nearest to the limit", near), ("scored highest", best), ("scored lowest", worst))
        if chosen
    ]


def _reliability(data: RunData) -> Figure | None:
    rows = tables(table(data.quality.get("held_out")).get("reliability"))
    points = [
        (score, share, count)
        for row in rows
        if (count := number(row.get("documents")))
        and (score := number(row.get("mean_score"))) is not None
        and (share := number(row.get("high_share"))) is not None
    ]
    if not points:
        return None
    traces: list[Row] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "calibrated",
            "x": [0.0, 1.0],
            "y": [0.0, 1.0],
            "ink": "reference",
            "line": {"width": 1.5, "dash": "dash"},
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "held-out documents",
            "x": [round(score, 4) for score, _, _ in points],
            "y": [round(share, 4) for _, share, _ in points],
            "text": [f"{count:,.0f} documents" for _, _, count in points],
            "ink": "accent",
            "line": {"width": 1.75},
            "marker": {"size": 6},
            "cliponaxis": False,
            "hovertemplate": "%{y:.3f} of %{text}",
        },
    ]
    whole = {"range": [0, 1], "dtick": 0.2}
    axes = ({"title": {"text": "mean score"}, **whole}, {"title": {"text": "share that is high"}, **whole})
    return _figure("reliability", "Reliability of the scores", traces, *axes, {})


def _histogram(data: RunData) -> Figure | None:
    names = data.source_names
    traces = []
    for name, raw in table(data.quality.get("scores")).items():
        counts: list[float] = [number(count) or 0.0 for count in raw] if isinstance(raw, list) else []
        if name in names and any(counts):
            share = 1.0 / len(counts)
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": [round((place + 0.5) * share, 4) for place in range(len(counts))],
                    "y": [round(count / sum(counts), 6) for count in counts],
                    "text": [f"{count:,.0f}" for count in counts],
                    "textposition": "none",
                    "ink": f"source-{names.index(name) % 6 + 1}",
                    "hovertemplate": "%{y:.1%}, %{text} documents",
                }
            )
    if not traces:
        return None
    limit = number(table(data.quality.get("use")).get("threshold"))
    line = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper", "ink": "accent", "dash": "dot"}
    axes = (
        {"title": {"text": "score"}, "range": [0, 1], "dtick": 0.1},
        {"title": {"text": "share of the source's documents"}, "tickformat": ".0%"},
    )
    note = "Dotted line: the limit." if limit is not None else ""
    figure = _figure("scores", "Scores by source", traces, *axes, {"barmode": "group", "bargap": 0.1}, note)
    figure["shapes"] = [line] if limit is not None else []
    return figure


def _figure(name: str, title: str, traces: list[Row], xaxis: Row, yaxis: Row, more: Row, note: str = "") -> Figure:
    """A figure whose horizontal axis is not the training's: it neither zooms with the curves nor turns logarithmic."""
    layout = {"xaxis": xaxis, "yaxis": yaxis, **more}
    return {
        "id": name, "title": title, "group": "lengths", "traces": traces, "shapes": [], "note": note, "layout": layout
    }  # fmt: skip
