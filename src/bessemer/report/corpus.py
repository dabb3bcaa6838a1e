"""The report's section about the corpus: what came in, what each rule took away and by example, duplicates, lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Block, Figure, bar, count, percent, words
from bessemer.terminal import duration, size

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
    totals = as_object(data.statistics, "totals")
    came, kept = number_or_0(totals, "documents_in"), number_or_0(totals, "documents_kept")
    if not came:
        return {}
    sources, reasons = as_objects(data.statistics, "sources"), _reasons(data)
    clean = as_number(totals, "bytes_kept")
    found = f"{kept:,.0f} of {came:,.0f} documents were kept{f', {size(clean)} of clean text' if clean else ''}."
    commonest = max(reasons.items(), key=lambda item: item[1]["count"], default=None)
    if commonest and commonest[1]["count"]:
        found += f" The commonest reason against one: {words(commonest[0])} ({commonest[1]['count']:,.0f})."
    seconds = (as_number(stage, "seconds") for stage in data.stages if stage.get("name") == "corpus")
    taken = next((value for value in seconds if value is not None), None)
    return parts.section(
        "corpus", "Corpus", parts.finding(found, f"Built in {duration(taken)}." if taken is not None else ""),
        _funnel(totals, reasons, came, kept), _by_source(sources), _not_read(sources),
        parts.titled("Rejected documents, by example", *(
            parts.folded(words(reason), *one["examples"], count=f"{one['count']:,.0f}") for reason, one in reasons.items())),
        _steps(sources), _pairs(sources),
        _counts("Languages of the kept documents", as_object(totals, "languages")),
        _clusters(data.statistics),
        parts.plots(near_duplicates(data), css="single", wide=True),
        *(_counts(TITLES.get(name, words(name).capitalize()), as_object(counts))
          for name, counts in as_object(totals, "tables").items()),
        _repeats(data), _evaluation_sets(data), _lengths(sources),
        parts.plots(lengths(data), css="single", wide=True),
    )  # fmt: skip


def _reasons(data: RunData) -> dict[str, Json]:
    """Documents and bytes that each reason rejected, over all sources, in the order of the tests; with examples."""
    reasons: dict[str, Json] = {}
    for reason in as_object(data.statistics, "totals", "rejected"):
        reasons[reason] = {"count": 0.0, "bytes": 0.0, "examples": []}
    for source in as_objects(data.statistics, "sources"):
        for reason, entry in as_object(source, "rejected").items():
            one = reasons.setdefault(reason, {"count": 0.0, "bytes": 0.0, "examples": []})
            one["count"] += number_or_0(entry, "documents")
            one["bytes"] += number_or_0(entry, "bytes")
            one["examples"] += [_example(each, as_text(source, "source")) for each in as_objects(entry, "examples")]
    return reasons


def _example(document: Json, name: str, more: str = "") -> Block:
    path, excerpt, detail = (as_text(document, key) for key in ("path", "excerpt", "detail"))
    return parts.example(name, excerpt, more=more, path=path, detail=detail)


def _funnel(totals: Json, reasons: dict[str, Json], came: float, kept: float) -> Block:
    """What came in, each reason as the stretch that it takes away, what stayed."""
    columns = ["", "n|Documents", "n|Share", "n wide-only|Bytes", "bar|"]
    sizes = [parts.known(as_number(totals, key), size) for key in ("bytes_in", "bytes_kept")]
    rows = [["read", f"{came:,.0f}", "100%", sizes[0], bar(100.0, "came")]]
    left = came
    for reason, one in reasons.items():
        left -= one["count"]
        stretch = bar(100.0 * one["count"] / came, "lost", 100.0 * left / came)
        name = parts.cell(words(reason), css="reason")
        rows.append([name, f"{one['count']:,.0f}", percent(one["count"] / came), size(one["bytes"]), stretch])
    total = ["kept", f"{kept:,.0f}", percent(kept / came), sizes[1], bar(100.0 * kept / came)]
    return parts.table(columns, rows, total=total, css="funnel")


def _by_source(sources: list[Json]) -> list[Block]:
    def kept_share(source: Json) -> str:
        came = number_or_0(source, "documents_in")
        return percent(number_or_0(source, "documents_kept") / came if came else None)

    return parts.titled("By source", parts.records([
        ("Source", "source"), ("wide-only|Format", "format"), ("n wide-only|Files", "files", count),
        ("n|Documents", lambda source: count(number_or_0(source, "documents_in"))),
        ("n|Kept", lambda source: count(number_or_0(source, "documents_kept"))), ("n|Share", kept_share),
        ("n wide-only|Bytes in", "bytes_in", size), ("n|Text kept", "bytes_kept", size),
    ], sources))  # fmt: skip


def _not_read(sources: list[Json]) -> list[Block]:
    """Files of the sources' folders that no source reads, by suffix, most first within a source."""
    rows = [
        {"source": source.get("source"), "suffix": suffix, **as_object(entry)}
        for source in sources
        for suffix, entry in list(as_object(source, "not_read").items())[:SHOWN_SUFFIXES]
    ]
    said = "Files of the sources' folders whose suffix is of no text format; the key suffixes of a source names those to read."
    shown = parts.records([
        ("Source", "source"), ("Suffix", "suffix"), ("n|Files", "files", count), ("n|Bytes", "bytes", size),
        ("For example", lambda entry: parts.cell(as_text(entry, "example"), path=True)),
    ], rows)  # fmt: skip
    return parts.titled("Files not read", parts.finding(said), shown) if shown else []


def _steps(sources: list[Json]) -> list[Block]:
    """Documents that came to each step and those that it rejected, over all sources."""
    came: defaultdict[str, float] = defaultdict(float)
    rejected: defaultdict[str, float] = defaultdict(float)
    for one in (one for source in sources for one in as_objects(source, "steps")):
        came[as_text(one, "step")] += number_or_0(one, "documents_in")
        rejected[as_text(one, "step")] += number_or_0(one, "rejected")
    whole = max(came.values(), default=0.0) or 1.0
    rows = []
    for name, documents in came.items():
        width, lost = 100.0 * (documents - rejected[name]) / whole, 100.0 * rejected[name] / whole
        stretches = parts.cell(bars=[["kept", 0.0, width], *([["lost", width, lost]] if lost else [])])
        rows.append([words(name), f"{documents:,.0f}", f"{rejected[name]:,.0f}", stretches])
    return parts.titled("Step by step", parts.table(["Step", "n|Came in", "n|Rejected", "bar|"], rows, css="funnel"))


def _pairs(sources: list[Json]) -> list[Block]:
    """Rejected documents, each beside a kept one of the same source: every reason once, then again, until enough."""
    pairs: list[Block] = []
    for turn in range(SHOWN_PAIRS):
        for source in sources:
            name, kept = as_text(source, "source"), as_objects(source, "kept_examples")
            for place, (reason, entry) in enumerate(as_object(source, "rejected").items()):
                examples = as_objects(entry, "examples")
                if turn >= len(examples) or len(pairs) == SHOWN_PAIRS:
                    continue
                pair = [_example(examples[turn], words(reason), name)]
                if kept and as_text(kept[(place + turn) % len(kept)], "path"):
                    pair.append(_example(kept[(place + turn) % len(kept)], "kept", name))
                pairs.append({"kind": "pair", "blocks": pair})
    summary = f"{len(pairs)} rejected documents, each beside one of its source that was kept"
    return parts.titled("Rejected beside kept", parts.folded(summary, *pairs))


def _counts(title: str, counts: Json) -> list[Block]:
    """Counts as bars, the largest first; what is not shown is summed up in the last one."""
    found = {str(name): value for name in counts if (value := number_or_0(counts, name)) > 0}
    order = sorted(found, key=lambda name: (-found[name], name))
    shown = [(name, found[name]) for name in order[:SHOWN_BARS]]
    if len(order) > SHOWN_BARS:
        shown.append((f"{len(order) - SHOWN_BARS} more", sum(found[name] for name in order[SHOWN_BARS:])))
    return _bars(title, shown)


def _bars(title: str, counts: list[tuple[str, float]]) -> list[Block]:
    largest = max((value for _, value in counts), default=1.0)
    rows = [[name, f"{value:,.0f}", bar(100.0 * value / largest)] for name, value in counts]
    return parts.titled(title, parts.table(["", "n|", "bar|"], rows, css="funnel"))


def _summed(rows: Iterable[Json], key: str, value: str) -> dict[int, float]:
    """Sums of a number by another one, which is whole; rows that lack one are left out."""
    sums: defaultdict[int, float] = defaultdict(float)
    for one in rows:
        place, number = as_number(one, key), as_number(one, value)
        if place is not None and number is not None:
            sums[int(place)] += number
    return dict(sums)


def _clusters(statistics: Json) -> list[Block]:
    """Groups of duplicates by size, in powers of two from 2 on."""
    groups: defaultdict[int, float] = defaultdict(float)
    for documents, clusters in _summed(
        as_objects(statistics, "duplicates", "clusters"), "documents", "clusters"
    ).items():
        if documents >= 2:
            groups[1 << (documents.bit_length() - 1)] += clusters
    counts = [(f"{low:,} to {2 * low - 1:,} documents", groups[low]) for low in sorted(groups)]
    return _bars("Groups of duplicates, by size", counts)


def near_duplicates(data: RunData) -> Figure | None:
    """Near duplicates by their Jaccard similarity to the document that stays, with the threshold that links documents."""
    duplicates = as_object(data.statistics, "duplicates")
    bins = {
        low: documents for one in as_objects(duplicates, "jaccard")
        if (low := as_number(one, "from")) is not None and (documents := as_number(one, "documents")) is not None
    }  # fmt: skip
    found = {low: documents for low, documents in sorted(bins.items()) if documents}
    if not found:
        return None
    width, limit = 1.0 / len(bins), number_or_0(duplicates, "min_jaccard")
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
        f"{as_text(duplicates, 'jaccard_is')} Jaccard to the document that stays".strip(), tickformat=".2f",
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
    names = {"paragraphs": "repeated paragraphs", "substrings": "repeated spans"}
    repeats = as_object(data.statistics, "repeats")
    rows = [{"name": names[kind], **as_object(repeats, kind)} for kind in names if as_object(repeats, kind)]
    columns = [("", "name"), ("n|Documents", "edited", count), ("n|Places", "spans", count),
               ("n|Characters", "removed_characters", count)]  # fmt: skip
    return parts.titled("Cut out of the kept documents", parts.records(columns, rows))


def _evaluation_sets(data: RunData) -> list[Block]:
    """The evaluation sets that were looked for, and how much of each stands in the corpus."""
    return parts.titled("Evaluation sets found in the corpus", parts.records([
        ("Set", "name"), ("n|Items", "items", count), ("n|Searched for", "searched", count),
        ("n|Found", "items_touched", count), ("n|Share", "share", "{:.1%}".format), ("n|Documents", "documents", count),
    ], as_objects(data.statistics, "contamination")))  # fmt: skip


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
        lines = [bar(100.0 * value / largest, css) for value, css in zip(counts, ("kept", "lost"), strict=True)]
        rows.append([f"{low:,}", f"{counts[0]:,.0f}", lines[0], f"{counts[1]:,.0f}", lines[1]])
    columns = ["Characters, from", "n|Kept", "bar|", "n|Rejected", "bar|"]
    return parts.titled("Length, kept and rejected", parts.table(columns, rows, css="funnel"))


def _histogram(sources: Iterable[Json], name: str) -> dict[int, float]:
    """Documents by the lower end of their length in characters, over the sources."""
    return _summed((one for source in sources for one in as_objects(source, name)), "from_characters", "documents")


def lengths(data: RunData) -> Figure | None:
    """How long the kept documents are, by source."""
    sources = {
        as_text(source, "source"): _histogram([source], "length_histogram")
        for source in as_objects(data.statistics, "sources")
    }
    steps = sorted({low for counts in sources.values() for low in counts})
    if not steps:
        return None
    steps = [steps[0] << power for power in range((steps[-1] // max(steps[0], 1)).bit_length())]
    labels = [f"{low >> 10}k" if low >= 1024 else f"{low}" for low in steps]
    traces = [
        parts.bars(name, labels, [counts.get(low, 0) for low in steps], parts.source_ink(data, name), "%{y:,}")
        for name, counts in sources.items()
    ]
    x = parts.axis("characters, from", type="category")
    return parts.figure("lengths", "Length of the kept documents", traces, x, "documents", barmode="stack", bargap=0.12,
                        hovermode="x unified")  # fmt: skip
