"""Sums, shares and histograms of a corpus and its tokens, over the sources."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import count

MAX_BARS = 12
MAX_SUFFIXES = 12  # of files not read, of a source; all stand in statistics.json
REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
SHARES = ("target_share", "drawn_share")


def reasons(data: RunData) -> list[Json]:
    """Documents and bytes that each reason rejected, over all sources, in the order of the tests; examples: with their source."""
    sources = as_objects(data.statistics, "sources")
    every = (as_object(data.statistics, "totals", "rejected"), *(as_object(source, "rejected") for source in sources))
    found: dict[str, Json] = {
        name: {"name": name, "count": 0.0, "bytes": 0.0, "examples": []} for names in every for name in names
    }
    for source in sources:
        for name, entry in as_object(source, "rejected").items():
            one = found[name]
            one["count"] += number_or_0(entry, "documents")
            one["bytes"] += number_or_0(entry, "bytes")
            one["examples"] += [(each, as_text(source, "source")) for each in as_objects(entry, "examples")]
    return list(found.values())


def not_read(sources: list[Json]) -> list[tuple[str, str, Json]]:
    """Files of the sources' folders that no source reads: source, suffix and what is known, most first within a source."""
    return [
        (as_text(source, "source"), suffix, as_object(entry))
        for source in sources
        for suffix, entry in list(as_object(source, "not_read").items())[:MAX_SUFFIXES]
    ]


def steps(sources: list[Json]) -> list[tuple[str, float, float]]:
    """Documents that came to each step and those that it rejected, over all sources."""
    came: defaultdict[str, float] = defaultdict(float)
    rejected: defaultdict[str, float] = defaultdict(float)
    for one in (one for source in sources for one in as_objects(source, "steps")):
        came[as_text(one, "step")] += number_or_0(one, "documents_in")
        rejected[as_text(one, "step")] += number_or_0(one, "rejected")
    return [(name, documents, rejected[name]) for name, documents in came.items()]


def largest(counts: Json) -> list[tuple[str, float]]:
    """Counts by name, the largest first; the others are summed up in the last one."""
    found = {str(name): value for name in counts if (value := number_or_0(counts, name)) > 0}
    order = sorted(found, key=lambda name: (-found[name], name))
    shown = [(name, found[name]) for name in order[:MAX_BARS]]
    if len(order) > MAX_BARS:
        shown.append((f"{len(order) - MAX_BARS} more", sum(found[name] for name in order[MAX_BARS:])))
    return shown


def _summed(rows: Iterable[Json], key: str, value: str) -> dict[int, float]:
    """Sums of a number by another one, which is whole; rows that lack one are left out."""
    sums: defaultdict[int, float] = defaultdict(float)
    for one in rows:
        place, number = as_number(one, key), as_number(one, value)
        if place is not None and number is not None:
            sums[int(place)] += number
    return dict(sums)


def clusters(statistics: Json) -> list[tuple[str, float]]:
    """Groups of duplicates by size, in powers of two from 2 on."""
    groups: defaultdict[int, float] = defaultdict(float)
    rows = as_objects(statistics, "duplicates", "clusters")
    for documents, number in _summed(rows, "documents", "clusters").items():
        if documents >= 2:
            groups[1 << (documents.bit_length() - 1)] += number
    return [(f"{low:,} to {2 * low - 1:,} documents", groups[low]) for low in sorted(groups)]


def near_duplicates(statistics: Json) -> list[tuple[str, float]]:
    """Near duplicates by their Jaccard similarity to the document that stays."""
    bins = as_objects(statistics, "duplicates", "jaccard")
    found = [(number_or_0(one, "from"), number_or_0(one, "documents")) for one in bins]
    return [(f"{low:g} to {low + 1 / len(bins):g}", documents) for low, documents in found if documents > 0]


def length_rows(sources: list[Json]) -> list[tuple[int, float, float]]:
    """Kept and rejected documents by the lower end of their length in characters; empty where none was rejected."""
    kept, rejected = (_histogram(sources, f"length_histogram{end}") for end in ("", "_rejected"))
    lows = sorted({*kept, *rejected})
    if not rejected or not lows:
        return []
    first = max(lows[0], 1)
    doublings = {first << power for power in range((lows[-1] // first).bit_length())}  # empty ones too: no gaps
    return [(low, kept.get(low, 0.0), rejected.get(low, 0.0)) for low in sorted({*lows, *doublings})]


def _histogram(sources: Iterable[Json], name: str) -> dict[int, float]:
    """Documents by the lower end of their length in characters, over the sources."""
    return _summed((one for source in sources for one in as_objects(source, name)), "from_characters", "documents")


# --- Tokens ---------------------------------------------------------------------------------------------------------


def stored(data: RunData) -> list[tuple[str, list[float]]]:
    """Documents, tokens and bytes of each source, for training and held out, and of all in the last row."""
    kinds = [(split, kind) for split in ("train", "heldout") for kind in ("documents", "tokens", "bytes")]
    sources = as_object(data.manifest, "sources")
    rows = [(name, [number_or_0(splits, *place) for place in kinds]) for name, splits in sources.items()]
    totals = [sum(column) for column in zip(*(numbers for _, numbers in rows), strict=True)]
    return [*rows, ("all", totals)] if rows else []


def tokenizer(data: RunData) -> str:
    """The tokenizer in a sentence."""
    of = as_object(data.manifest, "tokenizer")
    vocabulary, bytes_each, listed = as_number(of, "vocabulary"), as_number(of, "bytes_per_token"), of.get("changes")
    changes = [as_text(change) for change in listed if as_text(change)] if isinstance(listed, list) else []
    said = [
        f"vocabulary {count(vocabulary)}", f"{bytes_each:.2f} bytes per token" if bytes_each is not None else "–",
        "trained on this corpus" if of.get("trained") is True else "",
        f"text is changed before ({', '.join(changes)})" if changes else "",
        "no bits per byte, since its tokens do not account for the text" if of.get("counts_bytes") is False else "",
        f"hash {as_text(of, 'sha256')[:12]}" if of.get("sha256") else "",
    ]  # fmt: skip
    return f"Tokenizer: {', '.join(filter(None, said))}."


def read_too_often(data: RunData) -> list[str]:
    """Sources that were repeated so often that it no longer helped."""
    sources = as_object(data.mixture, "sources")
    return [name for name, row in sources.items() if number_or_0(row, "epochs") > REPEATS]


def largest_share(data: RunData) -> float:
    """The largest share of the mixture, to which all are drawn."""
    rows = as_object(data.mixture, "sources").values()
    return max([number_or_0(row, key) for row in rows for key in SHARES] + [1e-9])
