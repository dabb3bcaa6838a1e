"""The report's section about tokens: documents and tokens of each source, packing, fertility, and the mixture as it was read."""

from __future__ import annotations

from typing import Any

from bessemer.report import parts
from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import Block, cell, count, known
from bessemer.terminal import amount, size

REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
SHOWN_FERTILITY = 60  # rows; the others stand in tokens/manifest.json
RATES = {"bytes_per_token": "{:.2f}", "tokens_per_word": "{:.2f}", "single_byte_share": "{:.1%}"}


def section(data: RunData) -> Block:
    """The section; nothing without tokens and mixture."""
    if not as_object(data.manifest, "sources") and not as_object(data.mixture, "sources"):
        return {}
    return parts.section("data", "Tokens and mixture", _tokens(data), _packing(data), fertility(data), _mixture(data))


def _name(data: RunData, source: str) -> Block:
    return cell(source, ink=parts.source_ink(data, source))


def _percent2(share: float | None) -> str:
    return known(share, lambda value: f"{100 * value:.2f}%")


def _tokens(data: RunData) -> list[Block]:
    """Documents, tokens and bytes of each source, for training and held out."""
    kinds = [(split, kind) for split in ("train", "heldout") for kind in ("documents", "tokens", "bytes")]
    forms = [size if kind == "bytes" else count for _, kind in kinds]
    numbers = {
        name: [number_or_0(splits, *place) for place in kinds]
        for name, splits in as_object(data.manifest, "sources").items()
    }

    def cells(values: Any) -> list[str]:
        return [form(value) for form, value in zip(forms, values, strict=True)]

    rows = [[_name(data, name), *cells(values)] for name, values in numbers.items()]
    total = ["all", *cells(map(sum, zip(*numbers.values(), strict=True)))] if rows else None
    columns = ["Source", "n wide-only|Documents", "n|Tokens", "n wide-only|Bytes", "n wide-only|Documents",
               cell("Tokens", css="n", narrow="held out"), "n wide-only|Bytes"]  # fmt: skip
    groups = [("", 1, ""), ("", 3, "Training"), ("", 3, "Held out")]
    shown = parts.table(columns, rows, total=total, groups=groups, groups_css="wide-only")
    return [parts.finding(_tokenizer(data)), shown] if shown else []


def _tokenizer(data: RunData) -> str:
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


def _packing(data: RunData) -> list[Block]:
    """How documents fill the training sequences, over all and by source."""
    found = as_object(data.plan, "packing") or as_object(data.manifest, "packing")
    rows = [{"name": name, **as_object(splits, "train")} for name, splits in as_object(found, "sources").items()]
    used, cut, length = (as_number(found, key) for key in ("utilisation", "cut_share", "sequence_length"))
    said = f"Packing: {as_text(found, 'packing')}"
    said += f", sequences of {length:,.0f} tokens" if length else ""
    if used is not None and cut is not None:
        said += f"; {100 * used:.2f}% of the positions have a target, {100 * cut:.1f}% of the documents are cut"
    shown = parts.records([
        ("Source", lambda one: _name(data, one["name"])), ("n|Sequences", "sequences", count),
        ("n|Utilisation", "utilisation", _percent2), ("n wide-only|Documents cut", "documents_cut", count),
        ("n|Share cut", "cut_share", lambda share: f"{100 * share:.1f}%"),
        ("n wide-only|Tokens left over", "tokens_dropped", count),
    ], rows)  # fmt: skip
    return parts.titled("Documents in sequences", parts.finding(f"{said}."), shown) if shown else []


def fertility(data: RunData) -> list[Block]:
    """Bytes a token, tokens a word and single-byte tokens: a row a source and language, a group of columns a tokenizer."""
    found = as_object(data.manifest, "fertility")
    every, tokenizers, whole = as_objects(found, "rows"), as_objects(found, "tokenizers"), as_object(found, "all")
    if not every:
        return []
    largest = sorted(every, key=lambda row: -number_or_0(row, "bytes"))[:SHOWN_FERTILITY]
    shown = [row for row in every if row in largest]
    ours, *others = [_rate(whole, "bytes_per_token", place) for place in range(max(len(tokenizers), 1))]
    compared = [
        f"{100 * (ours / theirs - 1):+.1f}% against {as_text(tokenizer, 'name')}".replace("-", "−", 1)
        for theirs, tokenizer in zip(others, tokenizers[1:], strict=True) if ours and theirs
    ]  # fmt: skip
    against = f": {', '.join(compared)}" if compared else ""
    said = f"A token stands for {ours:.2f} bytes of this text{against}." if ours else ""
    language = ["Language"] if any(as_text(row, "language") for row in shown) else []
    columns = ["Source", *language, "n wide-only|Documents", "n wide-only|Bytes",
               *["n|Bytes a token", "n|Tokens a word", "n|Single bytes"] * len(tokenizers)]  # fmt: skip
    groups = [("", 1, ""), *[("", 1, "") for _ in language], ("wide-only", 2, "")]
    groups += [("", 3, f"{as_text(one, 'name')}, {number_or_0(one, 'vocabulary'):,.0f} ids") for one in tokenizers]

    def cells(row: Json, name: str, spoken: str) -> list[Any]:
        rates = [
            known(_rate(row, key, at), form.format) for at in range(len(tokenizers)) for key, form in RATES.items()
        ]
        volume = [count(number_or_0(row, "documents")), size(number_or_0(row, "bytes"))]
        return [name, *[spoken for _ in language], *volume, *rates]

    rows = [cells(row, as_text(row, "source"), as_text(row, "language") or "–") for row in shown]
    left = len(every) - len(shown)
    return parts.titled(
        "Fertility", parts.finding(said), parts.table(columns, rows, total=cells(whole, "all", ""), groups=groups),
        parts.note(f"{left} more rows in tokens/manifest.json." if left else ""),
    )  # fmt: skip


def _rate(row: Json, name: str, place: int) -> float | None:
    values = row.get(name)
    return as_number(values[place]) if isinstance(values, list) and place < len(values) else None


def _mixture(data: RunData) -> list[Block]:
    """Target and drawn share of each source; a mark on what was repeated so often that it no longer helps."""
    sources = {name: as_object(row) for name, row in as_object(data.mixture, "sources").items()}
    if not sources:
        return []
    shares = ("target_share", "drawn_share")
    largest = max([number_or_0(row, key) for row in sources.values() for key in shares] + [1e-9])
    often = [name for name, row in sources.items() if number_or_0(row, "epochs") > REPEATS]

    def difference(row: Json) -> str:
        target, drawn = (as_number(row, key) for key in shares)
        known_both = target is not None and drawn is not None
        return f"{100 * (drawn - target):+.2f}".replace("-", "−") if known_both else "–"  # type: ignore[operator]

    def epochs(row: Json) -> Block:
        shown = known(as_number(row, "epochs"), lambda value: f"{value:.2f}" if value >= 0.1 else f"{value:.2g}")
        return cell(f"{shown} ▲", css="far") if row["name"] in often else cell(shown)

    def track(row: Json) -> Block:
        marks = zip(("tick", ""), (as_number(row, key) for key in shares), strict=True)
        return cell(track=[[css, 100.0 * value / largest] for css, value in marks if value is not None])

    table = parts.records([
        ("Source", lambda row: _name(data, row["name"])), ("n|Target", "target_share", _percent2),
        ("n|Drawn", "drawn_share", _percent2), ("n wide-only|Difference, points", difference),
        ("n wide-only|Sequences", "sequences", count), ("n wide-only|Tokens", "tokens", amount), ("n|Epochs", epochs),
        (cell(css="dots wide-only", icon="legend"), track),
    ], [{"name": name, **row} for name, row in sources.items()])  # fmt: skip
    deviation, said, warning = as_number(data.mixture, "largest_deviation"), "", ""
    if deviation is not None:
        points = f"{100 * deviation:.2f} percentage points"
        said = f"The share of a source in what was read differs from its target by at most {points}."
    if often:
        warning = (
            f"{' and '.join(often)} {'was' if len(often) == 1 else 'were'} read more than {REPEATS} times: from there on, "
            "repeated text helps less and less (Muennighoff et al. 2023)."
        )
    shown = parts.titled("Mixture, target and drawn", parts.finding(said), parts.note(warning), table)
    return [*shown, *_phases(data, list(sources))]


def _phases(data: RunData, names: list[str]) -> list[Block]:
    """Requested, planned and drawn shares of the sources in each phase, where there are several or a cap changed one."""
    rows, capped = [], False
    for phase in as_objects(data.mixture, "phases"):
        cells = [f"{number_or_0(phase, 'from'):,.0f} to {number_or_0(phase, 'to'):,.0f}"]
        for name in names:
            shares = [as_number(phase, "sources", name, f"{kind}_share") for kind in ("asked", "target", "drawn")]
            cells += map(_percent2, shares)
            capped = capped or (shares[0] is not None and shares[0] != shares[1])
        rows.append(cells)
    columns = ["Samples"]
    for name in names:
        columns += [f"n|{name}, requested", "n wide-only|after caps", "n|drawn"]
    return parts.titled("The phases of the mixture", parts.table(columns, rows)) if len(rows) > 1 or capped else []
