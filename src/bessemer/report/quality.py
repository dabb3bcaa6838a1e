"""The report's section about the quality classifier: how well it tells documents apart, what it goes by, what it decided."""

from __future__ import annotations

from collections.abc import Callable

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Block, Figure, bar, count, known

SHOWN_WORDS = 20  # of each side; quality.json has more
SHOWN_NEAR, SHOWN_ENDS = 8, 4  # documents shown around the limit, and at either end of the scores
USES = {
    "report": "The scores decide nothing; they are for the reader.",
    "filter": "Documents below {threshold:.3f} were rejected.",
    "pareto": "Documents were kept by a Pareto draw with shape {alpha:g}; by the law, {expected_kept:,.0f} were to stay.",
    "weight": "Documents stand in bands of quality, and each band has a weight of its own in the mixture.",
}
SCORES = {
    "Precision of high": ("precision", "{:.1%}"), "Recall of high": ("recall", "{:.1%}"), "F1": ("f1", "{:.1%}"),
    "Log loss, nats": ("log_loss", "{:.3f}"), "Brier score": ("brier", "{:.3f}"),
    "Calibration error": ("calibration_error", "{:.3f}"),
}  # fmt: skip


def section(data: RunData) -> Block:
    """The section; nothing when the corpus had no classifier."""
    found = data.quality
    if not as_object(found, "scores"):
        return {}
    used, tested, model = (as_object(found, key) for key in ("use", "held_out", "model"))
    kind = "A fastText model" if model.get("kind") == "fasttext" else "A linear model of statistics and words"
    reads, sources = as_number(model, "read_bytes"), as_objects(used, "sources")
    numbers = {key: number_or_0(used, key) for key in ("threshold", "alpha", "expected_kept")}
    scores = [(label, as_number(tested, key), form) for label, (key, form) in SCORES.items()]
    limit = as_number(used, "threshold")
    return parts.section(
        "quality", "Quality",
        parts.finding(_finding(tested), f"{kind}{f', over the first {reads:,.0f} bytes of a document' if reads else ''}.",
                      _labelled(as_object(found, "labelled"))),
        parts.facts((label, form.format(value)) for label, value, form in scores if value is not None),
        parts.plots(_reliability(data), _histogram(data)),
        parts.titled("What the scores decided", parts.finding(USES.get(as_text(used, "kind"), "").format(**numbers)),
                     _sources(sources)),
        parts.titled("Bands", parts.records([
            ("Band", "name"), ("n|Documents", "documents", count), ("n|Score from", "from_score", "{:.3f}".format),
            ("n|Weight of a token", "weight", "{:g}".format),
        ], [band for one in sources for band in as_objects(one, "bands")])),
        _evidence(as_object(found, "telling")),
        _examples(as_objects(found, "examples"), limit if limit is not None else 0.5),
    )  # fmt: skip


def _finding(tested: Json) -> str:
    names = ("accuracy", "roc_auc", "calibration_error", "documents")
    right, auc, error, documents = (as_number(tested, key) for key in names)
    if right is None or documents is None:
        return "The model was not tested here: the recipe names no labelled documents."
    said = f"{right:.1%} of {documents:,.0f} held-out documents are on the right side of 0.5"
    said += f", ROC AUC {auc:.3f}" if auc is not None else ""
    return said + (f"; scores are off by {100 * error:.1f} points on the average." if error is not None else ".")


def _labelled(labelled: Json) -> str:
    if not labelled:
        return ""
    high, low = (" and ".join(map(str, as_object(labelled, side))) for side in ("high", "low"))
    train, calibrate, test = (f"{number_or_0(labelled, split):,.0f}" for split in ("train", "calibrate", "test"))
    left = number_or_0(labelled, "duplicates_left_out")
    return (
        f"High is {high}, low is {low}: {train} documents to learn from, {calibrate} to calibrate, {test} to test"
        f"{f'; {left:,.0f} copies left out.' if left else '.'}"
    )


def _sources(sources: list[Json]) -> Block:
    def kept(one: Json) -> float | None:
        documents, stayed = as_number(one, "documents"), as_number(one, "kept")
        return 100 * stayed / documents if documents and stayed is not None else None

    return parts.records([
        ("Source", lambda one: parts.cell(as_text(one, "source"), soft="" if one.get("judged") is True else "not judged")),
        ("n|Documents", "documents", count), ("n|Mean score", "mean_score", "{:.3f}".format), ("n|Kept", "kept", count),
        ("n|Share", lambda one: known(kept(one), "{:.1f}%".format)), ("bar|", lambda one: bar(kept(one) or 0.0)),
    ], sources)  # fmt: skip


def _evidence(found: Json) -> list[Block]:
    """Words of both sides, and the statistics; bars in proportion to the largest effect of their kind."""
    statistics = as_objects(found, "statistics")
    if not statistics:
        return []
    sides = {side: as_objects(found, side)[:SHOWN_WORDS] for side in ("high", "low")}

    every_word = [{**row, "side": side} for side, rows in sides.items() for row in rows]

    def effect_bar(rows: list[Json]) -> Callable[[Json], Block]:
        largest = max([abs(number_or_0(row, "effect")) for row in rows] + [1e-12])

        def shown(row: Json) -> Block:
            speaks_high = row.get("side") == "high" if "side" in row else number_or_0(row, "effect") >= 0
            return bar(100 * abs(number_or_0(row, "effect")) / largest, "kept" if speaks_high else "lost")

        return shown

    words = [
        parts.folded(f"Words that speak for {side}", parts.records([
            ("Words", "words"), ("n|In high", lambda row: f"{100 * number_or_0(row, 'high_share'):.0f}%"),
            ("n|In low", lambda row: f"{100 * number_or_0(row, 'low_share'):.0f}%"), ("bar|", effect_bar(every_word)),
        ], [row for row in every_word if row["side"] == side]))
        for side in sides
    ]  # fmt: skip
    listed = parts.records([
        ("Statistic", lambda row: parts.words(as_text(row, "feature"))),
        ("n|Effect", lambda row: f"{number_or_0(row, 'effect'):+.2f}".replace("-", "−")),
        ("n|Mean of high", lambda row: f"{number_or_0(row, 'high_mean'):.3g}"),
        ("n|Mean of low", lambda row: f"{number_or_0(row, 'low_mean'):.3g}"), ("bar|", effect_bar(statistics)),
    ], statistics)  # fmt: skip
    said = "Effects on the logit: of a statistic, one standard deviation of it; words by their weight and how often they occur."
    return parts.titled("What it goes by", parts.finding(said), words, parts.folded("Statistics of the text", listed))


def _examples(rows: list[Json], limit: float) -> list[Block]:
    """Documents around the limit, then the best and the worst of those kept for the report."""
    scored = [(score, row) for row in rows if (score := as_number(row, "score")) is not None]
    near = sorted(sorted(scored, key=lambda item: abs(item[0] - limit))[:SHOWN_NEAR], key=lambda item: item[0])
    groups = {
        "nearest to the limit": near,
        "scored highest": scored[::-1][:SHOWN_ENDS],
        "scored lowest": scored[:SHOWN_ENDS],
    }
    return parts.titled("Documents by score", *(
        parts.folded(title, *(parts.example(f"{score:.3f}", as_text(row, "excerpt"), more=as_text(row, "source"))
                              for score, row in chosen))
        for title, chosen in groups.items()
    ))  # fmt: skip


def _reliability(data: RunData) -> Figure | None:
    points = [
        (score, share, documents)
        for row in as_objects(data.quality, "held_out", "reliability")
        if (documents := as_number(row, "documents")) and (score := as_number(row, "mean_score")) is not None
        and (share := as_number(row, "high_share")) is not None
    ]  # fmt: skip
    if not points:
        return None
    x, y, counts = zip(*points, strict=True)
    traces = [
        parts.trace("calibrated", [0, 1], [0, 1], "reference", width=1.5, dash="dash", hoverinfo="skip"),
        parts.trace("held-out documents", x, y, "accent", marks=6, cliponaxis=False, hover="%{y:.3f} of %{text}",
                    text=[f"{documents:,.0f} documents" for documents in counts]),
    ]  # fmt: skip
    axes = (parts.axis(title, range=[0, 1], dtick=0.2) for title in ("mean score", "share that is high"))
    return parts.figure("reliability", "Reliability of the scores", traces, *axes)


def _histogram(data: RunData) -> Figure | None:
    traces = []
    for name, raw in as_object(data.quality, "scores").items():
        counts = [number_or_0(value) for value in raw] if isinstance(raw, list) else []
        if name in data.source_names and any(counts):
            x = [round((place + 0.5) / len(counts), 4) for place in range(len(counts))]
            traces.append(parts.bars(
                name, x, [value / sum(counts) for value in counts], parts.source_ink(data, name), "%{y:.1%}, %{text} documents",
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
