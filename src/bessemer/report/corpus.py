"""The report's section about the corpus: what came in, what each rule took away and by example, duplicates, lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bessemer.report import parts
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Block, Figure, bar, percent, words
from bessemer.terminal import duration, size

Json = dict[str, Any]

SHOWN_PAIRS = 12  # rejected documents beside kept ones; more stand in statistics.json and in rejected/
SHOWN_BARS = 12
SHOWN_SUFFIXES = 12  # of files not read, of a source; all stand in statistics.json
TITLES = {
    "personal_data": "Personal data found",
    "edited_characters": "Characters edited out, by rule",
    "edited_documents": "Documents edited, by rule",
}  # names of the steps' tables; another table's name is shown as it is


def section(data: RunData) -> Block:
    """The section; nothing where no document was read."""
    totals = as_object(data.statistics.get("totals"))
    came, kept = _number(totals, "documents_in"), _number(totals, "documents_kept")
    if not came:
        return {}
    sources, reasons = as_objects(data.statistics.get("sources")), _reasons(data)
    clean = as_number(totals.get("bytes_kept"))
    found = f"{kept:,.0f} of {came:,.0f} documents were kept{f', {size(clean)} of clean text' if clean else ''}."
    commonest = max(reasons.items(), key=lambda item: item[1]["count"], default=None)
    if commonest and commonest[1]["count"]:
        found += f" The commonest reason against one: {words(commonest[0])} ({commonest[1]['count']:,.0f})."
    seconds = (as_number(stage.get("seconds")) for stage in data.stages if stage.get("name") == "corpus")
    taken = next((value for value in seconds if value is not None), None)
    return parts.section(
        "corpus", "Corpus", parts.finding(found, f"Built in {duration(taken)}." if taken is not None else ""),
        _funnel(totals, reasons, came, kept), _by_source(sources), _not_read(sources),
        parts.titled("Rejected documents, by example", *(
            parts.folded(words(reason), *one["examples"], count=f"{one['count']:,.0f}") for reason, one in reasons.items())),
        _steps(sources), _pairs(sources),
        _counts("Languages of the kept documents", as_object(totals.get("languages"))),
        _clusters(as_object(data.statistics.get("duplicates"))),
        parts.plots(near_duplicates(data), css="single", wide=True),
        *(_counts(TITLES.get(name, words(name).capitalize()), as_object(counts))
          for name, counts in as_object(totals.get("tables")).items()),
        _repeats(data), _evaluation_sets(data), _lengths(sources),
        parts.plots(lengths(data), css="single", wide=True),
    )  # fmt: skip


def _number(row: Json, name: str) -> float:
    return as_number(row.get(name)) or 0.0


def _reasons(data: RunData) -> dict[str, Json]:
    """What each reason took away, over all sources, in the order in which documents are tested for them; with examples."""
    order = as_object(as_object(data.statistics.get("totals")).get("rejected"))
    reasons: dict[str, Json] = {reason: {"count": 0.0, "bytes": 0.0, "examples": []} for reason in order}
    for source in as_objects(data.statistics.get("sources")):
        for reason, entry in as_object(source.get("rejected")).items():
            one = reasons.setdefault(reason, {"count": 0.0, "bytes": 0.0, "examples": []})
            one["count"] += _number(as_object(entry), "documents")
            one["bytes"] += _number(as_object(entry), "bytes")
            name = as_text(source.get("source"))
            one["examples"] += [_example(example, name) for example in as_objects(as_object(entry).get("examples"))]
    return reasons


def _example(document: Json, name: str, more: str = "") -> Block:
    path, excerpt, detail = (as_text(document.get(key)) for key in ("path", "excerpt", "detail"))
    return parts.example(name, excerpt, more=more, path=path, detail=detail)


def _funnel(totals: Json, reasons: dict[str, Json], came: float, kept: float) -> Block:
    """What came in, each reason as the stretch that it takes away, what stayed."""
    columns = ["", "n|Documents", "n|Share", "n wide-only|Bytes", "bar|"]
    sizes = [parts.known(as_number(totals.get(key)), size) for key in ("bytes_in", "bytes_kept")]
    rows: list[Any] = [["read", f"{came:,.0f}", "100%", sizes[0], bar(100.0, "came")]]
    left = came
    for reason, one in reasons.items():
        left -= one["count"]
        stretch = bar(100.0 * one["count"] / came, "lost", 100.0 * left / came)
        name = parts.cell(words(reason), css="reason")
        rows.append([name, f"{one['count']:,.0f}", percent(one["count"] / came), size(one["bytes"]), stretch])
    total = ["kept", f"{kept:,.0f}", percent(kept / came), sizes[1], bar(100.0 * kept / came)]
    return parts.table(columns, rows, total=total, css="funnel")


def _by_source(sources: list[Json]) -> list[Block]:
    columns = ["Source", "wide-only|Format", "n wide-only|Files", "n|Documents", "n|Kept", "n|Share", "n wide-only|Bytes in",
               "n|Text kept"]  # fmt: skip
    rows = []
    for source in sources:
        came, kept = _number(source, "documents_in"), _number(source, "documents_kept")
        sizes = (parts.known(as_number(source.get(key)), size) for key in ("bytes_in", "bytes_kept"))
        files = parts.count(as_number(source.get("files")))
        rows.append([as_text(source.get("source")), as_text(source.get("format")), files, f"{came:,.0f}", f"{kept:,.0f}",
                     percent(kept / came if came else None), *sizes])  # fmt: skip
    return parts.titled("By source", parts.table(columns, rows))


def _not_read(sources: list[Json]) -> list[Block]:
    """Files of the sources' folders that no source reads, by suffix, most first within a source."""
    rows = [
        [as_text(source.get("source")), suffix, f"{_number(as_object(entry), 'files'):,.0f}",
         size(_number(as_object(entry), "bytes")), parts.cell(as_text(as_object(entry).get("example")), path=True)]
        for source in sources for suffix, entry in list(as_object(source.get("not_read")).items())[:SHOWN_SUFFIXES]
    ]  # fmt: skip
    said = "Files of the sources' folders whose suffix is of no text format; the key suffixes of a source names those to read."
    shown = parts.table(["Source", "Suffix", "n|Files", "n|Bytes", "For example"], rows)
    return parts.titled("Files not read", parts.finding(said), shown) if shown else []


def _steps(sources: list[Json]) -> list[Block]:
    """Documents that came to each step and those that it rejected, over all sources."""
    came: dict[str, float] = {}
    rejected: dict[str, float] = {}
    for one in (one for source in sources for one in as_objects(source.get("steps"))):
        name = as_text(one.get("step"))
        came[name] = came.get(name, 0.0) + _number(one, "documents_in")
        rejected[name] = rejected.get(name, 0.0) + _number(one, "rejected")
    whole = max(came.values(), default=0.0) or 1.0
    rows = []
    for name, count in came.items():
        width, lost = 100.0 * (count - rejected[name]) / whole, 100.0 * rejected[name] / whole
        stretches = parts.cell(bars=[["kept", 0.0, width], *([["lost", width, lost]] if lost else [])])
        rows.append([words(name), f"{count:,.0f}", f"{rejected[name]:,.0f}", stretches])
    return parts.titled("Step by step", parts.table(["Step", "n|Came in", "n|Rejected", "bar|"], rows, css="funnel"))


def _pairs(sources: list[Json]) -> list[Block]:
    """Rejected documents, each beside a kept one of the same source: every reason once, then again, until enough."""
    pairs: list[Block] = []
    for turn in range(SHOWN_PAIRS):
        for source in sources:
            name, kept = as_text(source.get("source")), as_objects(source.get("kept_examples"))
            for place, (reason, entry) in enumerate(as_object(source.get("rejected")).items()):
                examples = as_objects(as_object(entry).get("examples"))
                if turn >= len(examples) or len(pairs) == SHOWN_PAIRS:
                    continue
                pair = [_example(examples[turn], words(reason), name)]
                if kept and as_text(kept[(place + turn) % len(kept)].get("path")):
                    pair.append(_example(kept[(place + turn) % len(kept)], "kept", name))
                pairs.append({"kind": "pair", "blocks": pair})
    summary = f"{len(pairs)} rejected documents, each beside one of its source that was kept"
    return parts.titled("Rejected beside kept", parts.folded(summary, *pairs))


def _counts(title: str, counts: Json) -> list[Block]:
    """Counts as bars, the largest first; what is not shown is summed up in the last one."""
    found = {str(name): value for name, raw in counts.items() if (value := as_number(raw)) is not None and value > 0}
    order = sorted(found, key=lambda name: (-found[name], name))
    shown = [(name, found[name]) for name in order[:SHOWN_BARS]]
    if len(order) > SHOWN_BARS:
        shown.append((f"{len(order) - SHOWN_BARS} more", sum(found[name] for name in order[SHOWN_BARS:])))
    return _bars(title, shown)


def _bars(title: str, counts: list[tuple[str, float]]) -> list[Block]:
    largest = max((value for _, value in counts), default=1.0)
    rows = [[name, f"{value:,.0f}", bar(100.0 * value / largest)] for name, value in counts]
    return parts.titled(title, parts.table(["", "n|", "bar|"], rows, css="funnel"))


def _clusters(duplicates: Json) -> list[Block]:
    """Groups of duplicates by size, in powers of two from 2 on."""
    groups: dict[int, float] = {}
    for one in as_objects(duplicates.get("clusters")):
        documents, count = as_number(one.get("documents")), as_number(one.get("clusters"))
        if documents is not None and count is not None and documents >= 2:
            low = 1 << (int(documents).bit_length() - 1)
            groups[low] = groups.get(low, 0.0) + count
    counts = [(f"{low:,} to {2 * low - 1:,} documents", groups[low]) for low in sorted(groups)]
    return _bars("Groups of duplicates, by size", counts)


def near_duplicates(data: RunData) -> Figure | None:
    """A figure of the near duplicates by their Jaccard to what stays, with the one from which documents are linked."""
    duplicates = as_object(data.statistics.get("duplicates"))
    bins = {
        low: count for one in as_objects(duplicates.get("jaccard"))
        if (low := as_number(one.get("from"))) is not None and (count := as_number(one.get("documents"))) is not None
    }  # fmt: skip
    found = {low: count for low, count in sorted(bins.items()) if count}
    if not found:
        return None
    width, limit = 1.0 / len(bins), _number(duplicates, "min_jaccard")
    left, most = min([*found, limit or 1.0]), max(found.values())
    # Half a bin of room: "from" is rounded, and a limit need not lie between two bins.
    above = [low for low in found if low > limit - width / 2]
    sides = (("like what stays", "source-1", above),
             ("linked to it through others", "raw", [low for low in found if low not in above]))  # fmt: skip
    traces = [
        parts.bars(
            name, [round(low + width / 2, 4) for low in lows], [found[low] for low in lows], ink, "%{y:,} of %{text}",
            width=round(0.9 * width, 4), text=[f"{low:g} to {low + width:g}" for low in lows], textposition="none",
        )
        for name, ink, lows in sides if lows
    ]  # fmt: skip
    x = parts.axis(
        f"{as_text(duplicates.get('jaccard_is'))} Jaccard to the document that stays".strip(), tickformat=".2f",
        range=[round(max(left - 2 * width, 0.0), 4), 1.01], dtick=0.05 if left >= 0.5 else 0.1, hoverformat=".3f",
    )  # fmt: skip
    y = parts.axis("near duplicates removed", tickformat=".2~s" if most >= 10_000 else ",.0f")
    y |= {"range": [0.0, 1.18 * most], **({"dtick": 1} if most < 7 else {})}  # the limit's name stands above the bars
    label = {
        "x": limit,
        "y": 1,
        "yref": "paper",
        "xanchor": "right",
        "yanchor": "top",
        "xshift": -4,
        "showarrow": False,
    }
    return parts.figure(
        "near-duplicates", "Near duplicates, by their similarity to what stays", traces, x, y,
        shapes=[parts.vertical(limit)] if limit else [], barmode="overlay",
        annotations=[{**label, "text": f"min_jaccard {limit:g}"}] if limit else [],
    )  # fmt: skip


def _repeats(data: RunData) -> list[Block]:
    """What was cut out of the documents that stay: repeated paragraphs, repeated spans."""
    names, repeats = (
        {"paragraphs": "repeated paragraphs", "substrings": "repeated spans"},
        data.statistics.get("repeats"),
    )
    keys = ("edited", "spans", "removed_characters")
    rows = [
        [names[kind], *(f"{_number(counts, key):,.0f}" for key in keys)]
        for kind in names if (counts := as_object(as_object(repeats).get(kind)))
    ]  # fmt: skip
    table = parts.table(["", "n|Documents", "n|Places", "n|Characters"], rows)
    return parts.titled("Cut out of the kept documents", table)


def _evaluation_sets(data: RunData) -> list[Block]:
    """The evaluation sets that were looked for, and how much of each stands in the corpus."""
    rows = [
        [as_text(one.get("name")), *(f"{_number(one, key):,.0f}" for key in ("items", "searched", "items_touched")),
         f"{_number(one, 'share'):.1%}", f"{_number(one, 'documents'):,.0f}"]
        for one in as_objects(data.statistics.get("contamination"))
    ]  # fmt: skip
    columns = ["Set", "n|Items", "n|Searched for", "n|Found", "n|Share", "n|Documents"]
    return parts.titled("Evaluation sets found in the corpus", parts.table(columns, rows))


def _lengths(sources: list[Json]) -> list[Block]:
    """Kept and rejected documents by length in characters, as two bars a row."""
    kept, rejected = (_histogram(sources, f"length_histogram{end}") for end in ("", "_rejected"))
    steps = sorted({*kept, *rejected})
    if not rejected or not steps:
        return []
    largest, first = max([*kept.values(), *rejected.values(), 1.0]), max(steps[0], 1)
    doublings = {first << power for power in range((steps[-1] // first).bit_length())}  # empty ones too: no gaps
    rows = []
    for low in sorted({*steps, *doublings}):
        counts = kept.get(low, 0.0), rejected.get(low, 0.0)
        lines = [bar(100.0 * count / largest, css) for count, css in zip(counts, ("kept", "lost"), strict=True)]
        rows.append([f"{low:,}", f"{counts[0]:,.0f}", lines[0], f"{counts[1]:,.0f}", lines[1]])
    columns = ["Characters, from", "n|Kept", "bar|", "n|Rejected", "bar|"]
    return parts.titled("Length, kept and rejected", parts.table(columns, rows, css="funnel"))


def _histogram(sources: Iterable[Json], name: str) -> dict[int, float]:
    """Documents by the lower end of their length in characters, over the sources."""
    sums: dict[int, float] = {}
    for one in (one for source in sources for one in as_objects(source.get(name))):
        low, count = as_number(one.get("from_characters")), as_number(one.get("documents"))
        if low is not None and count is not None:
            sums[int(low)] = sums.get(int(low), 0.0) + count
    return sums


def lengths(data: RunData) -> Figure | None:
    """How long the kept documents are, by source."""
    sources = {
        as_text(source.get("source")): _histogram([source], "length_histogram")
        for source in as_objects(data.statistics.get("sources"))
    }
    steps = sorted({low for counts in sources.values() for low in counts})
    if not steps:
        return None
    steps = [steps[0] << power for power in range((steps[-1] // max(steps[0], 1)).bit_length())]
    labels = [f"{low >> 10}k" if low >= 1024 else f"{low}" for low in steps]
    traces = [
        parts.bars(name, labels, [counts.get(low, 0) for low in steps], data.ink(name), "%{y:,}")
        for name, counts in sources.items()
    ]
    x = parts.axis("characters, from", type="category")
    return parts.figure("lengths", "Length of the kept documents", traces, x, "documents", barmode="stack", bargap=0.12,
                        hovermode="x unified")  # fmt: skip
