"""Corpus statistics for the report: sums over sources, shares, histograms and quality scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Figure

MAX_BARS = 12
REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
NUM_NEAR, NUM_ENDS = 8, 4  # documents shown near the score threshold, and at each end of the scores


def reasons(data: RunData) -> list[Json]:
    """Return one dict per rejection reason, summed over all sources, in the order of the filters.

    Its keys are `name`, `count` (documents), `bytes` and `examples`, a list of (example, source name).
    """
    sources = as_objects(data.statistics, "sources")
    names = dict.fromkeys(as_object(data.statistics, "totals", "rejected"))  # in the order of the filters
    for source in sources:
        names |= dict.fromkeys(as_object(source, "rejected"))
    rows = []
    for name in names:
        entries = [(as_object(source, "rejected", name), as_text(source, "source")) for source in sources]
        examples = [(example, source) for entry, source in entries for example in as_objects(entry, "examples")]
        count, num_bytes = (sum(number_or_0(one, key) for one, _ in entries) for key in ("documents", "bytes"))
        rows.append({"name": name, "count": count, "bytes": num_bytes, "examples": examples})
    return rows


def steps(sources: list[Json]) -> list[tuple[str, float, float]]:
    """Return (filter name, documents in, documents rejected) for each filter, summed over the given sources."""
    rows = [row for source in sources for row in as_objects(source, "steps")]
    rejected = _sums(rows, "step", "rejected")
    return [(name, came, rejected[name]) for name, came in _sums(rows, "step", "documents_in").items()]


def largest(counts: Json) -> list[tuple[str, float]]:
    """Return (name, count) of the largest counts in descending order, with the remaining ones summed in a last entry."""
    values = {str(name): value for name in counts if (value := number_or_0(counts, name)) > 0}
    order = sorted(values, key=lambda name: (-values[name], name))
    shown = [(name, values[name]) for name in order[:MAX_BARS]]
    if len(order) > MAX_BARS:
        shown.append((f"{len(order) - MAX_BARS} more", sum(values[name] for name in order[MAX_BARS:])))
    return shown


def _sums(rows: Iterable[Json], key: str, value: str) -> dict[Any, float]:
    """Return the sums of the numbers in the field `value` of some rows, by the name or integer in their field `key`.

    Rows without a usable key are ignored.
    """
    sums: defaultdict[Any, float] = defaultdict(float)
    for row in rows:
        if isinstance(entry := row.get(key), str | int):
            sums[entry] += number_or_0(row, value)
    return sums


def clusters(statistics: Json) -> list[tuple[str, float]]:
    """Return (size range as text, number of clusters) of the clusters of duplicate documents.

    The size of a cluster is its number of documents. The ranges are 2 to 3, 4 to 7, 8 to 15 and so on.
    """
    groups: defaultdict[int, float] = defaultdict(float)
    rows = as_objects(statistics, "duplicates", "clusters")
    for documents, number in _sums(rows, "documents", "clusters").items():
        groups[1 << (documents.bit_length() - 1)] += number
    return [(f"{low:,} to {2 * low - 1:,} documents", groups[low]) for low in sorted(groups) if low >= 2]


def near_duplicates(statistics: Json) -> list[tuple[str, float]]:
    """Return (similarity range as text, number of near-duplicates) for each range that has any.

    It is the Jaccard similarity of the rejected document to the one that is kept.
    """
    bins = as_objects(statistics, "duplicates", "jaccard")
    points = [(number_or_0(one, "from"), number_or_0(one, "documents")) for one in bins]
    return [(f"{low:g} to {low + 1 / len(bins):g}", documents) for low, documents in points if documents > 0]


def length_rows(sources: list[Json]) -> list[tuple[int, float, float]]:
    """Return (minimum length in characters, documents kept, documents rejected) for each range of document lengths.

    The list is empty if no document was rejected.
    """
    kept, rejected = (
        _sums((row for source in sources for row in as_objects(source, name)), "from_characters", "documents")
        for name in ("length_histogram", "length_histogram_rejected")
    )
    lows = sorted({*kept, *rejected})
    if not rejected or not lows:
        return []
    first = max(lows[0], 1)
    doublings = {first << power for power in range((lows[-1] // first).bit_length())}  # also empty ones
    return [(low, kept.get(low, 0.0), rejected.get(low, 0.0)) for low in sorted({*lows, *doublings})]


# --- Scores of the quality classifier -------------------------------------------------------------------------------


def scored_examples(data: RunData) -> dict[str, list[tuple[float, Json]]]:
    """Return (quality score, example document) of a few documents in three groups, by the title of the group.

    The groups are the documents nearest to the threshold, those with the highest and those with the lowest scores.
    """
    limit = as_number(data.quality, "use", "threshold")
    rows = as_objects(data.quality, "examples")
    scored = [(score, row) for row in rows if (score := as_number(row, "score")) is not None]
    near = sorted(scored, key=lambda item: abs(item[0] - (0.5 if limit is None else limit)))[:NUM_NEAR]
    return {
        "nearest to the limit": sorted(near, key=lambda item: item[0]), "scored highest": scored[::-1][:NUM_ENDS],
        "scored lowest": scored[:NUM_ENDS],
    }  # fmt: skip


def score_histogram(data: RunData) -> Figure | None:
    """Return a histogram of the quality scores of each source."""
    traces = []
    for name, raw in as_object(data.quality, "scores").items():
        counts = [number_or_0(value) for value in raw] if isinstance(raw, list) else []
        if name in data.source_names and (total := sum(counts)):
            x = [round((index + 0.5) / len(counts), 4) for index in range(len(counts))]
            ink, text = parts.source_style(data, name)["ink"], [f"{value:,.0f}" for value in counts]
            hover, shares = "%{y:.1%}, %{text} documents", [value / total for value in counts]
            traces.append(parts.bars(name, x, shares, ink, hover, textposition="none", text=text))
    if not traces:
        return None
    limit = as_number(data.quality, "use", "threshold")
    x_axis = parts.axis("score", range=[0, 1], dtick=0.1)
    y_axis = parts.axis("share of the source's documents", tickformat=".0%")
    return parts.figure(
        "scores", "Scores by source", traces, x_axis, y_axis, note="Dotted line: the limit." if limit is not None else "",
        shapes=[parts.vertical(limit)] if limit is not None else [], barmode="group", bargap=0.1,
    )  # fmt: skip
