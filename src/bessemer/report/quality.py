"""The report's section about the quality classifier: how well it tells documents apart, what it goes by, what it decided."""

from __future__ import annotations

from typing import Any

from bessemer.report import parts
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Block, Figure, bar, known

Json = dict[str, Any]

SHOWN_WORDS = 20  # of each side; quality.json has more
SHOWN_NEAR, SHOWN_ENDS = 8, 4  # documents shown around the limit, and at either end of the scores
USES = {
    "report": "The scores decide nothing; they are for the reader.",
    "filter": "Documents below {limit:.3f} were rejected.",
    "pareto": "Documents were kept by a Pareto draw with shape {alpha:g}; by the law, {expected:,.0f} were to stay.",
    "weight": "Documents stand in bands of quality, and each band has a weight of its own in the mixture.",
}


def section(data: RunData) -> Block:
    """The section; nothing when the corpus had no classifier."""
    found = data.quality
    if not as_object(found.get("scores")):
        return {}
    used, tested = as_object(found.get("use")), as_object(found.get("held_out"))
    limit, model = as_number(used.get("threshold")), as_object(found.get("model"))
    kind = "A fastText model" if model.get("kind") == "fasttext" else "A linear model of statistics and words"
    reads = as_number(model.get("read_bytes"))
    numbers = [as_number(used.get(key)) or 0.0 for key in ("threshold", "alpha", "expected_kept")]
    use = USES.get(as_text(used.get("kind")), "").format(
        **dict(zip(("limit", "alpha", "expected"), numbers, strict=True))
    )
    sources = as_objects(used.get("sources"))
    return parts.section(
        "quality", "Quality",
        parts.finding(_finding(tested), f"{kind}{f', over the first {reads:,.0f} bytes of a document' if reads else ''}.",
                      _labelled(as_object(found.get("labelled")))),
        parts.facts(_scores_of(tested)),
        parts.plots(_reliability(data), _histogram(data)),
        parts.titled("What the scores decided", parts.finding(use), _sources(sources)),
        parts.titled("Bands", _bands(sources)),
        _evidence(as_object(found.get("telling"))),
        _examples(as_objects(found.get("examples")), limit if limit is not None else 0.5),
    )  # fmt: skip


def _finding(tested: Json) -> str:
    names = ("accuracy", "roc_auc", "calibration_error", "documents")
    right, auc, error, count = (as_number(tested.get(key)) for key in names)
    if right is None or count is None:
        return "The model was not tested here: the recipe names no labelled documents."
    said = f"{right:.1%} of {count:,.0f} held-out documents are on the right side of 0.5"
    said += f", ROC AUC {auc:.3f}" if auc is not None else ""
    return said + (f"; scores are off by {100 * error:.1f} points on the average." if error is not None else ".")


def _labelled(labelled: Json) -> str:
    if not labelled:
        return ""
    high, low = (" and ".join(map(str, as_object(labelled.get(side)))) for side in ("high", "low"))
    counts = [as_number(labelled.get(split)) or 0.0 for split in ("train", "calibrate", "test")]
    said = f"High is {high}, low is {low}: {counts[0]:,.0f} documents to learn from, {counts[1]:,.0f} to "
    said += f"calibrate, {counts[2]:,.0f} to test"
    left = as_number(labelled.get("duplicates_left_out")) or 0.0
    return said + (f"; {left:,.0f} copies left out." if left else ".")


def _scores_of(tested: Json) -> list[tuple[str, str]]:
    shown = {"Precision of high": ("precision", "{:.1%}"), "Recall of high": ("recall", "{:.1%}"), "F1": ("f1", "{:.1%}"),
             "Log loss, nats": ("log_loss", "{:.3f}"), "Brier score": ("brier", "{:.3f}"),
             "Calibration error": ("calibration_error", "{:.3f}")}  # fmt: skip
    found = ((label, form, as_number(tested.get(key))) for label, (key, form) in shown.items())
    return [(label, form.format(value)) for label, form, value in found if value is not None]


def _sources(sources: list[Json]) -> Block:
    rows = []
    for one in sources:
        count, kept, mean = (as_number(one.get(key)) for key in ("documents", "kept", "mean_score"))
        share = 100 * kept / count if count and kept is not None else None
        name = parts.cell(as_text(one.get("source")), soft="" if one.get("judged") is True else "not judged")
        rows.append([name, parts.count(count), known(mean, "{:.3f}".format), parts.count(kept), known(share, "{:.1f}%".format),
                     bar(share or 0.0)])  # fmt: skip
    return parts.table(["Source", "n|Documents", "n|Mean score", "n|Kept", "n|Share", "bar|"], rows)


def _bands(sources: list[Json]) -> Block:
    rows = []
    for band in (band for one in sources for band in as_objects(one.get("bands"))):
        count, score, weight = (as_number(band.get(key)) for key in ("documents", "from_score", "weight"))
        rows.append(
            [as_text(band.get("name")), parts.count(count), known(score, "{:.3f}".format), known(weight, "{:g}".format)]
        )
    return parts.table(["Band", "n|Documents", "n|Score from", "n|Weight of a token"], rows)


def _evidence(found: Json) -> list[Block]:
    """Words of both sides, and the statistics; bars in proportion to the largest effect of their kind."""

    def effect(row: Json) -> float:
        return as_number(row.get("effect")) or 0.0

    sides = {side: as_objects(found.get(side))[:SHOWN_WORDS] for side in ("high", "low")}
    statistics = as_objects(found.get("statistics"))
    largest = max([abs(effect(row)) for rows in sides.values() for row in rows] + [1e-12])
    most = max([abs(effect(row)) for row in statistics] + [1e-12])
    folded = []
    for side, rows in sides.items():
        cells = [
            [as_text(row.get("words")),
             *(f"{100 * (as_number(row.get(key)) or 0.0):.0f}%" for key in ("high_share", "low_share")),
             bar(100 * abs(effect(row)) / largest, "kept" if side == "high" else "lost")]
            for row in rows
        ]  # fmt: skip
        folded.append(
            parts.folded(f"Words that speak for {side}", parts.table(["Words", "n|In high", "n|In low", "bar|"], cells))
        )
    cells = [
        [parts.words(as_text(row.get("feature"))), f"{effect(row):+.2f}".replace("-", "−"),
         *(f"{as_number(row.get(key)) or 0.0:.3g}" for key in ("high_mean", "low_mean")),
         bar(100 * abs(effect(row)) / most, "kept" if effect(row) >= 0 else "lost")]
        for row in statistics
    ]  # fmt: skip
    columns = ["Statistic", "n|Effect", "n|Mean of high", "n|Mean of low", "bar|"]
    if not cells:
        return []
    said = "Effects on the logit: of a statistic, one standard deviation of it; words by their weight and how often they occur."
    return parts.titled("What it goes by", parts.finding(said), folded,
                        parts.folded("Statistics of the text", parts.table(columns, cells)))  # fmt: skip


def _examples(rows: list[Json], limit: float) -> list[Block]:
    """Documents around the limit, then the best and the worst of those kept for the report."""
    scored = [(score, row) for row in rows if (score := as_number(row.get("score"))) is not None]
    near = sorted(sorted(scored, key=lambda item: abs(item[0] - limit))[:SHOWN_NEAR], key=lambda item: item[0])
    groups = {
        "nearest to the limit": near,
        "scored highest": scored[::-1][:SHOWN_ENDS],
        "scored lowest": scored[:SHOWN_ENDS],
    }
    return parts.titled("Documents by score", *(
        parts.folded(title, *(parts.example(f"{score:.3f}", as_text(row.get("excerpt")), more=as_text(row.get("source")))
                              for score, row in chosen))
        for title, chosen in groups.items()
    ))  # fmt: skip


def _reliability(data: RunData) -> Figure | None:
    points = [
        (score, share, count)
        for row in as_objects(as_object(data.quality.get("held_out")).get("reliability"))
        if (count := as_number(row.get("documents"))) and (score := as_number(row.get("mean_score"))) is not None
        and (share := as_number(row.get("high_share"))) is not None
    ]  # fmt: skip
    if not points:
        return None
    x, y, counts = zip(*points, strict=True)
    traces = [
        parts.trace("calibrated", [0, 1], [0, 1], "reference", width=1.5, dash="dash", hoverinfo="skip"),
        parts.trace("held-out documents", x, y, "accent", marks=6, cliponaxis=False, hover="%{y:.3f} of %{text}",
                    text=[f"{count:,.0f} documents" for count in counts]),
    ]  # fmt: skip
    axes = (parts.axis(title, range=[0, 1], dtick=0.2) for title in ("mean score", "share that is high"))
    return parts.figure("reliability", "Reliability of the scores", traces, *axes)


def _histogram(data: RunData) -> Figure | None:
    traces = []
    for name, raw in as_object(data.quality.get("scores")).items():
        counts: list[float] = [as_number(count) or 0.0 for count in raw] if isinstance(raw, list) else []
        if name in data.source_names and any(counts):
            x, y = (
                [round((place + 0.5) / len(counts), 4) for place in range(len(counts))],
                [count / sum(counts) for count in counts],
            )
            traces.append(parts.bars(name, x, y, data.ink(name), "%{y:.1%}, %{text} documents", textposition="none",
                                     text=[f"{count:,.0f}" for count in counts]))  # fmt: skip
    if not traces:
        return None
    limit = as_number(as_object(data.quality.get("use")).get("threshold"))
    x_axis = parts.axis("score", range=[0, 1], dtick=0.1)
    y_axis = parts.axis("share of the source's documents", tickformat=".0%")
    return parts.figure(
        "scores", "Scores by source", traces, x_axis, y_axis, note="Dotted line: the limit." if limit is not None else "",
        shapes=[parts.vertical(limit)] if limit is not None else [], barmode="group", bargap=0.1,
    )  # fmt: skip
