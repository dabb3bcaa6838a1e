"""The report's section about tokens: documents and tokens of each source, packing, fertility, and the mixture as it was read."""

from __future__ import annotations

from typing import Any

from bessemer.report import parts
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Block, cell, known
from bessemer.terminal import amount, size

Json = dict[str, Any]

REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
SHOWN_FERTILITY = 60  # rows; the others stand in tokens/manifest.json
RATES = (("bytes_per_token", "{:.2f}"), ("tokens_per_word", "{:.2f}"), ("single_byte_share", "{:.1%}"))


def section(data: RunData) -> Block:
    """The section; nothing without tokens and mixture."""
    if not as_object(data.manifest.get("sources")) and not as_object(data.mixture.get("sources")):
        return {}
    return parts.section("data", "Tokens and mixture", _tokens(data), _packing(data), fertility(data), _mixture(data))


def _name(data: RunData, source: str) -> Block:
    return cell(source, ink=data.ink(source))


def _percent2(share: float | None) -> str:
    return known(share, lambda value: f"{100 * value:.2f}%")


def _tokens(data: RunData) -> list[Block]:
    """Documents, tokens and bytes of each source, for training and held out."""
    kinds = [(split, kind) for split in ("train", "heldout") for kind in ("documents", "tokens", "bytes")]
    rows, sums = [], [0.0] * len(kinds)
    forms = [size if kind == "bytes" else parts.count for _, kind in kinds]
    for name, splits in as_object(data.manifest.get("sources")).items():
        values = [as_number(as_object(as_object(splits).get(split)).get(kind)) or 0.0 for split, kind in kinds]
        sums = [total + value for total, value in zip(sums, values, strict=True)]
        rows.append([_name(data, name), *(form(value) for form, value in zip(forms, values, strict=True))])
    total = ["all", *(form(value) for form, value in zip(forms, sums, strict=True))]
    columns = ["Source", "n wide-only|Documents", "n|Tokens", "n wide-only|Bytes", "n wide-only|Documents",
               cell("Tokens", css="n", narrow="held out"), "n wide-only|Bytes"]  # fmt: skip
    groups = [("", 1, ""), ("", 3, "Training"), ("", 3, "Held out")]
    shown = parts.table(columns, rows, total=total, groups=groups, groups_css="wide-only")
    return [parts.finding(_tokenizer(data)), shown] if shown else []


def _tokenizer(data: RunData) -> str:
    of = as_object(data.manifest.get("tokenizer"))
    vocabulary, bytes_each = as_number(of.get("vocabulary")), as_number(of.get("bytes_per_token"))
    listed = of.get("changes")
    changes = [as_text(change) for change in listed if as_text(change)] if isinstance(listed, list) else []
    said = [
        f"vocabulary {parts.count(vocabulary)}", f"{bytes_each:.2f} bytes per token" if bytes_each is not None else "–",
        "trained on this corpus" if of.get("trained") is True else "",
        f"text is changed before ({', '.join(changes)})" if changes else "",
        "no bits per byte, since its tokens do not account for the text" if of.get("counts_bytes") is False else "",
        f"hash {as_text(of.get('sha256'))[:12]}" if of.get("sha256") else "",
    ]  # fmt: skip
    return f"Tokenizer: {', '.join(filter(None, said))}."


def _packing(data: RunData) -> list[Block]:
    """How documents fill the training sequences, over all and by source."""
    found = as_object(data.plan.get("packing")) or as_object(data.manifest.get("packing"))
    rows = []
    for name, splits in as_object(found.get("sources")).items():
        one = as_object(as_object(splits).get("train"))
        values = {key: as_number(one.get(key)) for key in
                  ("sequences", "utilisation", "documents_cut", "cut_share", "tokens_dropped")}  # fmt: skip
        rows.append([
            _name(data, name), parts.count(values["sequences"]), _percent2(values["utilisation"]),
            parts.count(values["documents_cut"]), known(values["cut_share"], lambda value: f"{100 * value:.1f}%"),
            parts.count(values["tokens_dropped"]),
        ])  # fmt: skip
    used, cut, length = (as_number(found.get(key)) for key in ("utilisation", "cut_share", "sequence_length"))
    said = f"Packing: {as_text(found.get('packing'))}"
    said += f", sequences of {length:,.0f} tokens" if length else ""
    if used is not None and cut is not None:
        said += f"; {100 * used:.2f}% of the positions have a target, {100 * cut:.1f}% of the documents are cut"
    columns = ["Source", "n|Sequences", "n|Utilisation", "n wide-only|Documents cut", "n|Share cut",
               "n wide-only|Tokens left over"]  # fmt: skip
    shown = parts.table(columns, rows)
    return parts.titled("Documents in sequences", parts.finding(f"{said}."), shown) if shown else []


def fertility(data: RunData) -> list[Block]:
    """Bytes a token, tokens a word and single-byte tokens: a row a source and language, a group of columns a tokenizer."""
    found = as_object(data.manifest.get("fertility"))
    every, tokenizers = as_objects(found.get("rows")), as_objects(found.get("tokenizers"))
    if not every:
        return []
    largest = sorted(every, key=lambda row: -(as_number(row.get("bytes")) or 0.0))[:SHOWN_FERTILITY]
    shown, whole = [row for row in every if row in largest], as_object(found.get("all"))
    ours, others = _rate(whole, "bytes_per_token", 0), []
    for place, tokenizer in list(enumerate(tokenizers))[1:]:
        theirs = _rate(whole, "bytes_per_token", place)
        if ours and theirs:
            others.append(
                f"{100 * (ours / theirs - 1):+.1f}% against {as_text(tokenizer.get('name'))}".replace("-", "−", 1)
            )
    said = (
        f"A token stands for {ours:.2f} bytes of this text{': ' if others else ''}{', '.join(others)}." if ours else ""
    )
    has_languages = any(as_text(row.get("language")) for row in shown)
    columns = ["Source", *(["Language"] if has_languages else []), "n wide-only|Documents", "n wide-only|Bytes",
               *["n|Bytes a token", "n|Tokens a word", "n|Single bytes"] * len(tokenizers)]  # fmt: skip
    groups = [("", 1, ""), *([("", 1, "")] if has_languages else []), ("wide-only", 2, "")]
    for one in tokenizers:
        groups.append(("", 3, f"{as_text(one.get('name'))}, {as_number(one.get('vocabulary')) or 0:,.0f} ids"))

    def cells(row: Json, name: str, language: str) -> list[Any]:
        rates = [known(_rate(row, key, place), form.format) for place in range(len(tokenizers)) for key, form in RATES]
        documents, num_bytes = (as_number(row.get(key)) or 0.0 for key in ("documents", "bytes"))
        return [name, *([language] if has_languages else []), parts.count(documents), size(num_bytes), *rates]

    rows = [cells(row, as_text(row.get("source")), as_text(row.get("language")) or "–") for row in shown]
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
    sources = {name: as_object(row) for name, row in as_object(data.mixture.get("sources")).items()}
    shares = ("target_share", "drawn_share")
    largest = max([as_number(row.get(key)) or 0.0 for row in sources.values() for key in shares] + [1e-9])
    rows, often = [], []
    for name, row in sources.items():
        target, drawn, epochs, sequences, tokens = (
            as_number(row.get(key)) for key in (*shares, "epochs", "sequences", "tokens")
        )
        repeated = epochs is not None and epochs > REPEATS
        often += [name] if repeated else []
        both = target is not None and drawn is not None
        track = [[css, 100.0 * value / largest] for css, value in (("tick", target), ("", drawn)) if value is not None]
        rows.append([
            _name(data, name), _percent2(target), _percent2(drawn),
            f"{100 * ((drawn or 0) - (target or 0)):+.2f}".replace("-", "−") if both else "–",
            parts.count(sequences), known(tokens, amount),
            cell(known(epochs, lambda value: f"{value:.2f}" if value >= 0.1 else f"{value:.2g}") + (" ▲" if repeated else ""),
                 css="far" if repeated else ""),
            cell(track=track),
        ])  # fmt: skip
    columns = ["Source", "n|Target", "n|Drawn", "n wide-only|Difference, points", "n wide-only|Sequences", "n wide-only|Tokens",
               "n|Epochs", cell(css="dots wide-only", icon="legend")]  # fmt: skip
    if not rows:
        return []
    deviation, said, warning = as_number(data.mixture.get("largest_deviation")), "", ""
    if deviation is not None:
        points = f"{100 * deviation:.2f} percentage points"
        said = f"The share of a source in what was read differs from its target by at most {points}."
    if often:
        were = "was" if len(often) == 1 else "were"
        warning = (
            f"{' and '.join(often)} {were} read more than {REPEATS} times: from there on, repeated text helps less and less "
            "(Muennighoff et al. 2023)."
        )
    shown = [parts.finding(said), parts.note(warning), parts.table(columns, rows)]
    return [*parts.titled("Mixture, target and drawn", *shown), *_phases(data, list(sources))]


def _phases(data: RunData, names: list[str]) -> list[Block]:
    """Requested, planned and drawn shares of the sources in each phase, where there are several or a cap changed one."""
    rows, capped = [], False
    for phase in as_objects(data.mixture.get("phases")):
        first, last = (as_number(phase.get(key)) or 0.0 for key in ("from", "to"))
        cells: list[str] = []
        for name in names:
            row = as_object(as_object(phase.get("sources")).get(name))
            shares = [as_number(row.get(f"{kind}_share")) for kind in ("asked", "target", "drawn")]
            cells += map(_percent2, shares)
            capped = capped or (shares[0] is not None and shares[0] != shares[1])
        rows.append([f"{first:,.0f} to {last:,.0f}", *cells])
    columns = ["Samples"]
    for name in names:
        columns += [f"n|{name}, requested", "n wide-only|after caps", "n|drawn"]
    several = len(rows) > 1 or capped
    return parts.titled("The phases of the mixture", parts.table(columns, rows)) if several else []
