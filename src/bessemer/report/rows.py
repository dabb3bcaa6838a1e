"""The tables of the page, as rows ready to be shown: corpus, tokens, mixture, incidents and the rest."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from bessemer.report.data import RunData, number, table, tables, text
from bessemer.terminal import amount, duration, size

Row = dict[str, Any]

REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
SHOWN_DOCUMENTS = 8  # of an incident
SHOWN_INCIDENTS = 200
SHOWN_CLASSES = 20  # a wider confusion matrix is left to evaluation.json


def corpus(data: RunData) -> Row:
    """The funnel: what came in, each reason as the stretch it takes away, what stayed; and by source."""
    sources = tables(data.statistics.get("sources"))
    totals = table(data.statistics.get("totals"))
    came = number(totals.get("documents_in")) or 0.0
    kept = number(totals.get("documents_kept")) or 0.0
    if not came:
        return {}
    # The totals name the reasons in the order in which documents are held against them.
    order = list(table(totals.get("rejected")))
    reasons: dict[str, Row] = {reason: {"count": 0.0, "bytes": 0.0, "examples": []} for reason in order}
    for source in sources:
        for reason, entry in table(source.get("rejected")).items():
            row = reasons.setdefault(reason, {"count": 0.0, "bytes": 0.0, "examples": []})
            row["count"] += number(table(entry).get("documents")) or 0.0
            row["bytes"] += number(table(entry).get("bytes")) or 0.0
            for example in tables(table(entry).get("examples")):
                row["examples"].append({"source": text(source.get("source")), **_example(example)})
    left, steps = came, []
    for reason, row in reasons.items():
        left -= row["count"]
        steps.append(
            {
                "name": _words(reason),
                "count": f"{row['count']:,.0f}",
                "share": _percent(row["count"] / came),
                "size": size(row["bytes"]),
                "right": 100.0 * (1.0 - (left + row["count"]) / came),
                "width": 100.0 * row["count"] / came,
                "examples": row["examples"],
            }
        )
    bytes_in, bytes_kept = number(totals.get("bytes_in")), number(totals.get("bytes_kept"))
    commonest = max(reasons.items(), key=lambda item: item[1]["count"], default=None)
    of_text = f", {size(bytes_kept)} of clean text" if bytes_kept else ""
    finding = f"{kept:,.0f} of {came:,.0f} documents were kept{of_text}."
    if commonest and commonest[1]["count"]:
        finding += f" The commonest reason against one: {_words(commonest[0])} ({commonest[1]['count']:,.0f})."
    return {
        "finding": finding,
        "came": f"{came:,.0f}",
        "kept": f"{kept:,.0f}",
        "kept_share": _percent(kept / came),
        "kept_width": 100.0 * kept / came,
        "bytes_in": _maybe(bytes_in, size),
        "bytes_kept": _maybe(bytes_kept, size),
        "steps": steps,
        "sources": [_funnel_of(source) for source in sources],
    }


def tokens(data: RunData) -> Row:
    """Documents, tokens and bytes of each source, for training and held out."""
    sources = table(data.manifest.get("sources"))
    if not sources:
        return {}
    tokenizer = table(data.manifest.get("tokenizer"))
    kinds = [(split, kind) for split in ("train", "heldout") for kind in ("documents", "tokens", "bytes")]
    rows, sums = [], dict.fromkeys(kinds, 0.0)
    for name, splits in sources.items():
        cells = {}
        for split, kind in kinds:
            value = number(table(table(splits).get(split)).get(kind)) or 0.0
            cells[f"{split}_{kind}"] = size(value) if kind == "bytes" else f"{value:,.0f}"
            sums[split, kind] += value
        rows.append({"name": name, "ink": _ink(data, name), **cells})
    total = {
        f"{split}_{kind}": size(value) if kind == "bytes" else f"{value:,.0f}" for (split, kind), value in sums.items()
    }
    listed = tokenizer.get("changes")
    changes = [text(change) for change in listed if text(change)] if isinstance(listed, list) else []
    facts = [
        _maybe(number(tokenizer.get("vocabulary")), lambda value: f"vocabulary {value:,.0f}"),
        _maybe(number(tokenizer.get("bytes_per_token")), lambda value: f"{value:.2f} bytes per token"),
        "trained on this corpus" if tokenizer.get("trained") is True else "",
        f"text is changed before ({', '.join(changes)})" if changes else "",
        "no bits per byte, since its tokens do not account for the text"
        if tokenizer.get("counts_bytes") is False
        else "",
        f"hash {text(tokenizer.get('sha256'))[:12]}" if tokenizer.get("sha256") else "",
    ]
    said = ", ".join(fact for fact in facts if fact)
    return {"rows": rows, "total": total, "tokenizer": f"Tokenizer: {said}." if said else "", **_packing(data)}


def _packing(data: RunData) -> Row:
    """How documents fill the training sequences, over all and by source."""
    found = table(data.plan.get("packing")) or table(data.manifest.get("packing"))
    sources = {name: table(table(splits).get("train")) for name, splits in table(found.get("sources")).items()}
    if not sources:
        return {"packing": "", "packed": []}
    rows = [
        {
            "name": name,
            "ink": _ink(data, name),
            "sequences": _maybe(number(row.get("sequences")), lambda value: f"{value:,.0f}"),
            "utilisation": _maybe(number(row.get("utilisation")), lambda value: f"{100 * value:.2f}%"),
            "cut": _maybe(number(row.get("documents_cut")), lambda value: f"{value:,.0f}"),
            "cut_share": _maybe(number(row.get("cut_share")), lambda value: f"{100 * value:.1f}%"),
            "dropped": _maybe(number(row.get("tokens_dropped")), lambda value: f"{value:,.0f}"),
        }
        for name, row in sources.items()
    ]
    used, cut = number(found.get("utilisation")), number(found.get("cut_share"))
    length = number(found.get("sequence_length"))
    finding = f"Packing: {text(found.get('packing'))}"
    finding += _maybe(length, lambda value: f", sequences of {value:,.0f} tokens") if length else ""
    if used is not None and cut is not None:
        finding += f"; {100 * used:.2f}% of the positions have a target, {100 * cut:.1f}% of the documents are cut"
    return {"packing": f"{finding}.", "packed": rows}


def mixture(data: RunData) -> Row:
    """Target and drawn share of each source; a mark on what was repeated so often that it no longer helps."""
    sources = table(data.mixture.get("sources"))
    if not sources:
        return {}
    rows, often = [], []
    largest = max([number(table(row).get(key)) or 0.0 for row in sources.values() for key in _SHARES] + [1e-9])
    for name, row in ((name, table(row)) for name, row in sources.items()):
        target, drawn, epochs = (number(row.get(key)) for key in (*_SHARES, "epochs"))
        repeated = epochs is not None and epochs > REPEATS
        often += [name] if repeated else []
        rows.append(
            {
                "name": name,
                "ink": _ink(data, name),
                "target": _maybe(target, lambda value: f"{100 * value:.2f}%"),
                "drawn": _maybe(drawn, lambda value: f"{100 * value:.2f}%"),
                "deviation": _signed(target, drawn),
                "target_place": 100.0 * target / largest if target is not None else None,
                "drawn_place": 100.0 * drawn / largest if drawn is not None else None,
                "sequences": _maybe(number(row.get("sequences")), lambda value: f"{value:,.0f}"),
                "tokens": _maybe(number(row.get("tokens")), amount),
                "epochs": _maybe(epochs, lambda value: f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"),
                "repeated": repeated,
            }
        )
    deviation = number(data.mixture.get("largest_deviation"))
    finding = ""
    if deviation is not None:
        points = f"{100 * deviation:.2f} percentage points"
        finding = f"The share of a source in what was read differs from its target by at most {points}."
    warning = ""
    if often:
        warning = (
            f"{' and '.join(often)} {'was' if len(often) == 1 else 'were'} read more than {REPEATS} times: "
            "from there on, repeated text helps less and less (Muennighoff et al. 2023)."
        )
    phases = [_phase(phase, list(sources)) for phase in tables(data.mixture.get("phases"))]
    several = len(phases) > 1 or any(row["capped"] for row in phases)
    return {
        "finding": finding, "warning": warning, "rows": rows, "names": list(sources), "phases": phases if several else []
    }  # fmt: skip


def _phase(phase: Row, names: list[str]) -> Row:
    """Asked, planned and drawn shares of the sources in one phase of the mixture."""
    cells, capped = [], False
    for name in names:
        row = table(table(phase.get("sources")).get(name))
        shares = [number(row.get(f"{kind}_share")) for kind in ("asked", "target", "drawn")]
        asked, target, drawn = (_maybe(share, lambda value: f"{100 * value:.2f}%") for share in shares)
        cells.append({"asked": asked, "target": target, "drawn": drawn})
        capped = capped or (shares[0] is not None and shares[0] != shares[1])
    first, last = number(phase.get("from")) or 0.0, number(phase.get("to")) or 0.0
    return {"samples": f"{first:,.0f} to {last:,.0f}", "cells": cells, "capped": capped}


def incidents(data: RunData) -> list[Row]:
    """What went wrong and what was done, with the documents of the batch."""
    rows = []
    for incident in data.incidents[:SHOWN_INCIDENTS]:
        documents = _names(incident.get("documents"))
        rows.append(
            {
                "step": _maybe(number(incident.get("step")), lambda value: f"{value:,.0f}"),
                "time": _clock(incident.get("time")),
                "what": _words(text(incident.get("what"))),
                "cause": text(incident.get("cause")),
                "action": text(incident.get("action")),
                "documents": documents[:SHOWN_DOCUMENTS],
                "more": max(len(documents) - SHOWN_DOCUMENTS, 0),
            }
        )
    return rows


def export(data: RunData) -> Row:
    """The checks that the export passed, and its files."""
    record = data.export
    if not record:
        return {}
    difference, tolerance = number(record.get("logits_max_difference")), number(record.get("tolerance"))
    greedy, documents = (
        number(record.get("greedy_tokens_equal")),
        number(record.get("tokenizer_documents_equal")),
    )
    checks = []
    if difference is not None:
        limit = f"; {tolerance:.0e} is allowed" if tolerance is not None else ""
        checks.append(
            (
                tolerance is None or difference <= tolerance,
                f"Logits differ by at most {difference:.1e}{limit}",
            )
        )
    if greedy:
        checks.append((greedy > 0, f"{greedy:,.0f} tokens of greedy generation are equal"))
    if documents is not None:
        checks.append((documents > 0, f"The tokenizer gives the same tokens for {documents:,.0f} documents"))
    if (tensors := number(record.get("tensors"))) is not None:  # streamed
        checks.append(
            (tensors > 0, f"{tensors:,.0f} tensors were read back and are equal; {text(record.get('logits'))}")
        )
    library = f"transformers {text(record.get('transformers'))}".strip()
    name = text(record.get("architecture")) or "a model"
    files = [
        (name, size(value)) for name, raw in table(record.get("files")).items() if (value := number(raw)) is not None
    ]
    return {
        "finding": "Written tensor by tensor, and compared with the checkpoint."
        if tensors is not None
        else f"Loaded back with {library} as {name} and compared with the trained model.",
        "checks": checks,
        "files": files,
    }


def stages(data: RunData) -> Row:
    """The time of each stage."""
    found = [
        (text(row.get("name")), number(row.get("seconds")) or 0.0, row.get("skipped") is True) for row in data.stages
    ]
    longest, total = (
        max((seconds for _, seconds, _ in found), default=0.0),
        sum(seconds for _, seconds, _ in found),
    )
    rows = [
        {
            "name": name,
            "time": duration(seconds),
            "share": _percent(seconds / total) if total else "–",
            "width": 100.0 * seconds / longest if longest else 0.0,
            "skipped": skipped,
        }
        for name, seconds, skipped in found
    ]
    return {"rows": rows, "total": duration(total)} if rows else {}


def environment(data: RunData) -> Row:
    """The machine and the programs."""
    known = data.environment
    if not known:
        return {}
    shown = []
    for key, value in known.items():
        if key == "git":
            git = table(value)
            commit = text(git.get("commit"))
            value = (commit[:12] + (", with uncommitted changes" if git.get("dirty") else "")) if commit else ""
        elif key == "memory_bytes":
            value = _maybe(number(value), size)
        elif key == "started":
            value = _clock(value)
        if isinstance(value, str | int | float) and value != "":
            shown.append((_words(key.removesuffix("_bytes")), str(value)))
    packages = sorted((name, str(version)) for name, version in table(known.get("packages")).items() if version)
    return {"facts": shown, "packages": packages}


def samples(data: RunData) -> list[Row]:
    """Prompts and what the model made of them."""
    rows = []
    for sample in tables(data.evaluation.get("samples")):
        prompt, continuation = text(sample.get("prompt")), text(sample.get("text"))
        temperature = number(sample.get("temperature"))
        rows.append(
            {
                "prompt": prompt,
                "text": continuation,
                "how": "" if temperature is None else "greedy" if temperature == 0 else f"temperature {temperature:g}",
            }
        )
    return rows


def fill_ins(data: RunData) -> list[Row]:
    """Words hidden in held-out text and what the model put there."""
    rows = []
    for found in tables(data.evaluation.get("fill_ins")):
        guesses = [
            {"word": _visible(text(guess.get("word"))), "share": _maybe(number(guess.get("probability")), _percent)}
            for guess in tables(found.get("guesses"))
        ]
        word = text(found.get("word"))
        rows.append(
            {
                **{key: text(found.get(key)) for key in ("source", "before", "after")},
                "word": word,
                "guesses": guesses,
                "right": bool(guesses) and guesses[0]["word"] == _visible(word),
            }
        )
    return rows


def _visible(word: str) -> str:
    """A token of white space alone, as signs a reader can see."""
    return word if word.strip() else word.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")


def classes(data: RunData) -> Row:
    """Precision, recall and F1 of each class, and what each was taken for."""
    found = tables(data.evaluation.get("classes"))
    if not found:
        return {}
    names = [text(row.get("label")) for row in found]
    shown = [
        {
            "label": text(row.get("label")),
            "texts": _maybe(number(row.get("texts")), lambda value: f"{value:,.0f}"),
            **{key: _maybe(number(row.get(key)), _percent) for key in ("precision", "recall", "f1")},
        }
        for row in found
    ]
    raw = data.evaluation.get("confusion")
    matrix = (
        [[number(cell) or 0.0 for cell in row] for row in raw if isinstance(row, list)] if isinstance(raw, list) else []
    )
    whole = isinstance(raw, list) and len(raw) == len(matrix) == len(names)
    small = whole and len(names) <= SHOWN_CLASSES and all(len(row) == len(names) for row in matrix)
    confusion = [
        {"label": name, "cells": [{"count": f"{cell:,.0f}", "share": 100.0 * cell / (sum(row) or 1.0)} for cell in row]}
        for name, row in zip(names, matrix, strict=False)
    ]
    right = number(data.evaluation.get("accuracy"))
    finding = f"{right:.1%} of the held-out texts are put in the right class." if right is not None else ""
    return {"finding": finding, "rows": shown, "names": names, "confusion": confusion if small else []}


def origin(data: RunData) -> str:
    """When and where the run started, in one line."""
    known = data.environment
    commit = text(table(known.get("git")).get("commit"))
    parts = [
        f"started {_clock(known['started'])}" if known.get("started") else "",
        text(known.get("device")),
        text(known.get("precision")),
        f"commit {commit[:8]}" if commit else "",
        f"Bessemer {known['bessemer']}" if known.get("bessemer") else "",
    ]
    return " · ".join(part for part in parts if part)


_SHARES = ("target_share", "drawn_share")


def _funnel_of(source: Row) -> Row:
    came, kept = number(source.get("documents_in")) or 0.0, number(source.get("documents_kept")) or 0.0
    return {
        "name": text(source.get("source")),
        "format": text(source.get("format")),
        "files": _maybe(number(source.get("files")), lambda value: f"{value:,.0f}"),
        "came": f"{came:,.0f}",
        "kept": f"{kept:,.0f}",
        "share": _percent(kept / came) if came else "–",
        "width": 100.0 * kept / came if came else 0.0,
        "bytes_in": _maybe(number(source.get("bytes_in")), size),
        "bytes_kept": _maybe(number(source.get("bytes_kept")), size),
    }


def _example(example: Row) -> Row:
    return {key: text(example.get(key)) for key in ("path", "excerpt", "detail")}


def _names(value: Any) -> list[str]:
    """Document names, whether they are listed plainly or by the sequence that held them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _names(value.get("documents"))
    return list(dict.fromkeys(name for item in value for name in _names(item))) if isinstance(value, list) else []


def _ink(data: RunData, name: str) -> str:
    return f"source-{data.source_names.index(name) % 6 + 1}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share >= 0.001 or share == 0 else "<0.1%"


def _signed(target: float | None, drawn: float | None) -> str:
    if target is None or drawn is None:
        return "–"
    return f"{100 * (drawn - target):+.2f}".replace("-", "−")


def _maybe(value: float | None, shown: Any) -> str:
    return "–" if value is None else str(shown(value))


def _clock(value: Any) -> str:
    """An ISO time as a person reads it, in the zone it was written in."""
    try:
        moment = datetime.fromisoformat(text(value))
    except ValueError:
        return text(value)
    return f"{moment.day} {moment:%b %Y, %H:%M} {moment.tzname() or ''}".rstrip()
