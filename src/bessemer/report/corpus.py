"""What the page shows of the corpus besides the funnel: the steps, kept beside rejected, languages, duplicates, counts."""

from __future__ import annotations

from typing import Any

from bessemer.report.data import RunData, number, table, tables, text
from bessemer.terminal import duration, size

Row = dict[str, Any]

SHOWN_PAIRS = 12
"""Rejected documents shown with kept ones beside them; more stand in statistics.json and in rejected/."""

SHOWN_LANGUAGES = 12

SHOWN_ENDINGS = 12  # of files not read, of a source; all stand in statistics.json
TITLES = {
    "personal_data": "Personal data found",
    "edited_characters": "Characters edited out, by rule",
    "edited_documents": "Documents edited, by rule",
}
"""Names of the steps' tables; another table's name is shown as it is."""


def parts(data: RunData) -> Row:
    """The parts of the Corpus section below the funnel; empty where the statistics have nothing for them."""
    sources = tables(data.statistics.get("sources"))
    totals = table(data.statistics.get("totals"))
    return {
        "steps": _steps(sources),
        "not_read": _not_read(sources),
        "pairs": _pairs(sources),
        "languages": _bars(table(totals.get("languages")), SHOWN_LANGUAGES),
        "tables": [
            {"title": TITLES.get(name, _words(name).capitalize()), "rows": bars}
            for name, counts in table(totals.get("tables")).items()
            if (bars := _bars(table(counts), SHOWN_LANGUAGES))
        ],
        "clusters": _clusters(table(data.statistics.get("duplicates"))),
        "evaluation_sets": _evaluation_sets(data),
        "repeats": _repeats(data),
        "lengths": _lengths(sources),
        "seconds": _seconds(data),
    }


def _seconds(data: RunData) -> str:
    """How long the stage took: the statistics say nothing of time, so that equal inputs give equal files."""
    for row in data.stages:
        if row.get("name") == "corpus" and (taken := number(row.get("seconds"))) is not None:
            return duration(taken)
    return "–"


def _steps(sources: list[Row]) -> list[Row]:
    """Documents that came to each step and those that it rejected, over all sources, with the stretch for the chart."""
    came: dict[str, float] = {}
    rejected: dict[str, float] = {}
    for source in sources:
        for row in tables(source.get("steps")):
            name = text(row.get("step"))
            came[name] = came.get(name, 0.0) + (number(row.get("documents_in")) or 0.0)
            rejected[name] = rejected.get(name, 0.0) + (number(row.get("rejected")) or 0.0)
    whole = max(came.values(), default=0.0)
    if not whole:
        return []
    return [
        {
            "name": _words(name),
            "came": f"{came[name]:,.0f}",
            "rejected": f"{rejected[name]:,.0f}",
            "width": 100.0 * (came[name] - rejected[name]) / whole,
            "lost": 100.0 * rejected[name] / whole,
        }
        for name in came
    ]


def _not_read(sources: list[Row]) -> list[Row]:
    """Files of the sources' folders that no source reads, by ending, most first within a source."""
    return [
        {
            "source": text(source.get("source")),
            "ending": name,
            "files": f"{number(table(entry).get('files')) or 0:,.0f}",
            "size": size(number(table(entry).get("bytes")) or 0),
            "example": text(table(entry).get("example")),
        }
        for source in sources
        for name, entry in list(table(source.get("not_read")).items())[:SHOWN_ENDINGS]
    ]


def _pairs(sources: list[Row]) -> list[Row]:
    """Rejected documents, each beside a kept one of the same source: every reason once, then again, until enough."""
    rows: list[Row] = []
    for turn in range(SHOWN_PAIRS):
        for source in sources:
            kept = tables(source.get("kept_examples"))
            for number_, (reason, entry) in enumerate(table(source.get("rejected")).items()):
                examples = tables(table(entry).get("examples"))
                if turn >= len(examples) or len(rows) == SHOWN_PAIRS:
                    continue
                beside = kept[(number_ + turn) % len(kept)] if kept else {}
                rows.append(
                    {
                        "source": text(source.get("source")),
                        "reason": _words(reason),
                        "rejected": {name: text(examples[turn].get(name)) for name in ("path", "excerpt", "detail")},
                        "kept": {name: text(beside.get(name)) for name in ("path", "excerpt")},
                    }
                )
    return rows


def _bars(counts: Row, shown: int) -> list[Row]:
    """Counts as bars, the largest first; what is not shown is summed up in the last one."""
    found = {str(name): value for name, raw in counts.items() if (value := number(raw)) is not None and value > 0}
    order = sorted(found, key=lambda name: (-found[name], name))
    rows = [(name, found[name]) for name in order[:shown]]
    if len(order) > shown:
        rows.append((f"{len(order) - shown} more", sum(found[name] for name in order[shown:])))
    largest = max((value for _, value in rows), default=1.0)
    return [{"name": name, "count": f"{value:,.0f}", "width": 100.0 * value / largest} for name, value in rows]


def _clusters(duplicates: Row) -> list[Row]:
    """Groups of duplicates by size, in powers of two from 2 on."""
    groups: dict[int, float] = {}
    for row in tables(duplicates.get("clusters")):
        size, count = number(row.get("documents")), number(row.get("clusters"))
        if size is not None and count is not None and size >= 2:
            low = 1 << (int(size).bit_length() - 1)
            groups[low] = groups.get(low, 0.0) + count
    largest = max(groups.values(), default=1.0)
    return [
        {
            "name": f"{low:,} to {2 * low - 1:,} documents",
            "count": f"{groups[low]:,.0f}",
            "width": 100.0 * groups[low] / largest,
        }
        for low in sorted(groups)
    ]


def near_duplicates(data: RunData) -> Row | None:
    """A figure of the near duplicates by their Jaccard to what stays, with the one from which documents are linked."""
    duplicates = table(data.statistics.get("duplicates"))
    bins = {
        low: count
        for row in tables(duplicates.get("jaccard"))
        if (low := number(row.get("from"))) is not None and (count := number(row.get("documents"))) is not None
    }
    found = {low: count for low, count in sorted(bins.items()) if count}
    if not found:
        return None
    width = 1.0 / len(bins)
    limit = number(duplicates.get("min_jaccard")) or 0.0
    left, most = min([*found, limit or 1.0]), max(found.values())
    # Half a bin of room: "from" is rounded, and a limit need not lie between two bins.
    sides = {
        "like what stays": ("source-1", [low for low in found if low > limit - width / 2]),
        "linked to it through others": ("raw", [low for low in found if low <= limit - width / 2]),
    }
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": [round(low + width / 2, 4) for low in lows],
            "y": [found[low] for low in lows],
            "width": round(0.9 * width, 4),
            "text": [f"{low:g} to {low + width:g}" for low in lows],
            "textposition": "none",
            "ink": ink,
            "hovertemplate": "%{y:,} of %{text}",
        }
        for name, (ink, lows) in sides.items()
        if lows
    ]
    layout: Row = {
        "xaxis": {
            "title": {"text": f"{text(duplicates.get('jaccard_is'))} Jaccard to the document that stays".strip()},
            "range": [round(max(left - 2 * width, 0.0), 4), 1.01],
            "dtick": 0.05 if left >= 0.5 else 0.1,
            "tickformat": ".2f",
            "hoverformat": ".3f",
        },
        "yaxis": {
            "title": {"text": "near duplicates removed"},
            "range": [0.0, 1.18 * most],  # the line's name stands above the bars
            "tickformat": ".2~s" if most >= 10_000 else ",.0f",
            **({"dtick": 1} if most < 7 else {}),
        },
        "barmode": "overlay",
    }
    shapes = []
    if limit:
        line = {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper"}
        shapes = [{**line, "ink": "accent", "dash": "dot"}]
        place = {"x": limit, "y": 1, "yref": "paper", "xanchor": "right", "yanchor": "top", "xshift": -4}
        layout["annotations"] = [{**place, "showarrow": False, "text": f"min_jaccard {limit:g}"}]
    title = "Near duplicates, by their likeness to what stays"
    return {
        "id": "near-duplicates", "title": title, "group": "lengths", "traces": traces, "shapes": shapes, "note": "",
        "layout": layout,
    }  # fmt: skip


def _evaluation_sets(data: RunData) -> list[Row]:
    """The evaluation sets that were looked for, and how much of each stands in the corpus."""
    return [
        {
            "name": text(row.get("name")),
            **{key: f"{number(row.get(key)) or 0:,.0f}" for key in ("items", "searched", "items_touched", "documents")},
            "share": f"{number(row.get('share')) or 0:.1%}",
        }
        for row in tables(data.statistics.get("contamination"))
    ]


def _repeats(data: RunData) -> list[Row]:
    """What was cut out of the documents that stay: repeated paragraphs, repeated spans."""
    names = {"paragraphs": "repeated paragraphs", "substrings": "repeated spans"}
    return [
        {
            "name": names[kind],
            **{key: f"{number(counts.get(key)) or 0:,.0f}" for key in ("edited", "spans", "removed_characters")},
        }
        for kind in names
        if (counts := table(table(data.statistics.get("repeats")).get(kind)))
    ]


def _lengths(sources: list[Row]) -> list[Row]:
    """Kept and rejected documents by length in characters, as two bars a row."""
    kept, rejected = _summed(sources, "length_histogram"), _summed(sources, "length_histogram_rejected")
    steps = sorted({*kept, *rejected})
    if not rejected or not steps:
        return []
    largest = max([*kept.values(), *rejected.values(), 1.0])
    first, last = max(steps[0], 1), steps[-1]
    doublings = {first << power for power in range((last // first).bit_length())}  # empty ones too: an axis has no gaps
    steps = sorted({*steps, *doublings})
    return [
        {
            "name": f"{low:,}",
            "kept": f"{kept.get(low, 0.0):,.0f}",
            "rejected": f"{rejected.get(low, 0.0):,.0f}",
            "kept_width": 100.0 * kept.get(low, 0.0) / largest,
            "rejected_width": 100.0 * rejected.get(low, 0.0) / largest,
        }
        for low in steps
    ]


def _summed(sources: list[Row], name: str) -> dict[int, float]:
    sums: dict[int, float] = {}
    for source in sources:
        for row in tables(source.get(name)):
            low, count = number(row.get("from_characters")), number(row.get("documents"))
            if low is not None and count is not None:
                sums[int(low)] = sums.get(int(low), 0.0) + count
    return sums


def _words(name: str) -> str:
    return name.replace("_", " ")
