"""The words and tables of the report: what each section says, as plain values for the template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bessemer.report.data import RunData, number, table, tables, text
from bessemer.terminal import amount, duration, rate, size

REASON_WORDS = {
    "unreadable": "could not be read",
    "not_utf8": "not UTF-8",
    "bad_record": "broken record",
    "empty": "empty",
    "too_short": "too short",
    "too_long": "too long",
    "long_lines": "lines too long",
    "not_text": "not text",
    "repetitive": "repetitive",
    "exact_duplicate": "exact duplicate",
    "near_duplicate": "near duplicate",
}


def headline(data: RunData) -> str:
    """What the run did, in one sentence."""
    parameters = number(table(data.plan.get("parameters")).get("total"))
    seconds = _train_seconds(data)
    read = data.train.last("tokens")
    bits = _bits_per_byte(data)
    if read is None or parameters is None:
        kept = number(table(data.statistics.get("totals")).get("documents_kept"))
        return f"A corpus of {kept:,.0f} documents." if kept is not None else "A run that has not been trained yet."
    said = f"A decoder of {amount(parameters)} parameters read {amount(read)} tokens"
    said += f" in {duration(seconds)} of training steps" if seconds else ""
    if bits is not None:
        said += f" and needs {bits:.3f} bits per byte for text it has not seen"
        baseline = number(table(data.evaluation.get("ngram")).get("bits_per_byte"))
        if baseline is not None:
            side = "fewer" if bits < baseline else "more"
            said += f", {abs(baseline - bits):.3f} {side} than a byte 5-gram trained on the same text"
    return said + "."


def tiles(data: RunData) -> list[dict[str, str]]:
    """Key figures."""
    found: list[tuple[str, str, str]] = []
    bits = _bits_per_byte(data)
    if bits is not None:
        baseline = number(table(data.evaluation.get("ngram")).get("bits_per_byte"))
        found.append(
            ("bits per byte", f"{bits:.3f}", f"5-gram {baseline:.3f}" if baseline is not None else "held-out text")
        )
    parameters = table(data.plan.get("parameters"))
    if (total := number(parameters.get("total"))) is not None:
        body = number(parameters.get("non_embedding")) or 0.0
        found.append(("parameters", amount(total), f"{amount(body)} without embeddings"))
    if (tokens := data.train.last("tokens")) is not None:
        found.append(("tokens read", amount(tokens), f"{tokens / total:.1f} a parameter" if total else ""))
    if (seconds := _train_seconds(data)) is not None:
        found.append(("in training steps", duration(seconds), f"{len(data.train):,} lines logged"))
    if (speed := _median(data, "tokens_per_second")) is not None:
        mfu = _median(data, "mfu")
        found.append(("tokens per second", amount(speed), f"MFU {mfu:.0%}" if mfu is not None else "median"))
    totals = table(data.statistics.get("totals"))
    if (kept := number(totals.get("documents_kept"))) is not None:
        came = number(totals.get("documents_in")) or 0.0
        found.append(("documents kept", f"{kept:,.0f}", f"of {came:,.0f}"))
    return [{"label": label, "value": value, "note": note} for label, value, note in found[:6]]


def planned(data: RunData) -> list[dict[str, str]]:
    """What was said before the run against what was measured in it."""
    memory = table(data.plan.get("memory_bytes"))
    rows = [
        ("Time in steps", number(data.plan.get("seconds")), _train_seconds(data), duration),
        (
            "Seconds a step",
            number(data.plan.get("step_seconds")),
            _median(data, "step_seconds"),
            lambda x: f"{x:.3g} s",
        ),
        ("Tokens per second", number(data.plan.get("tokens_per_second")), _median(data, "tokens_per_second"), amount),
        ("Peak memory", number(memory.get("total")), _largest(data, "memory_bytes"), size),
    ]
    return [
        {"name": name, "planned": shown(said), "measured": shown(found), "ratio": f"{found / said:.2f}"}
        for name, said, found, shown in rows
        if said and found
    ]


def samples(data: RunData) -> list[dict[str, str]]:
    """What the model wrote."""
    return [
        {
            "prompt": text(row.get("prompt")),
            "text": text(row.get("text")),
            "temperature": f"{number(row.get('temperature')) or 0:g}",
        }
        for row in tables(data.evaluation.get("samples"))
    ]


def funnel(data: RunData) -> list[dict[str, Any]]:
    """Each source: what came in, what stayed, and each reason with its examples."""
    rows = []
    for place, source in enumerate(tables(data.statistics.get("sources"))):
        came, kept = number(source.get("documents_in")) or 0.0, number(source.get("documents_kept")) or 0.0
        rows.append(
            {
                "name": text(source.get("source")),
                "ink": f"source-{place % 6 + 1}",
                "format": text(source.get("format")),
                "files": f"{number(source.get('files')) or 0:,.0f}",
                "came": f"{came:,.0f}",
                "kept": f"{kept:,.0f}",
                "kept_share": kept / max(came, 1),
                "bytes_in": size(number(source.get("bytes_in")) or 0),
                "bytes_kept": size(number(source.get("bytes_kept")) or 0),
                "reasons": list(_reasons(source, came)),
            }
        )
    return rows


def _reasons(source: dict[str, Any], came: float) -> Iterator[dict[str, Any]]:
    for reason, entry in table(source.get("rejected")).items():
        count = number(table(entry).get("documents")) or 0.0
        yield {
            "name": REASON_WORDS.get(reason, reason),
            "count": f"{count:,.0f}",
            "share": count / max(came, 1),
            "bytes": size(number(table(entry).get("bytes")) or 0),
            "examples": [
                {key: text(example.get(key)) for key in ("path", "excerpt", "detail")}
                for example in tables(table(entry).get("examples"))
            ],
        }


def token_rows(data: RunData) -> list[dict[str, str]]:
    """Tokens of each source and split."""
    rows = []
    for name, splits in table(data.manifest.get("sources")).items():
        train, held_out = table(table(splits).get("train")), table(table(splits).get("heldout"))
        tokens, documents = number(train.get("tokens")) or 0.0, number(train.get("documents")) or 0.0
        rows.append(
            {
                "name": name,
                "documents": f"{documents:,.0f}",
                "tokens": amount(tokens),
                "held_out": amount(number(held_out.get("tokens")) or 0.0),
                "bytes_per_token": f"{(number(train.get('bytes')) or 0.0) / max(tokens - documents, 1):.2f}",
            }
        )
    return rows


def mixture(data: RunData) -> dict[str, Any]:
    """The audit of the mixture."""
    rows = []
    for name, row in table(data.mixture.get("sources")).items():
        target, drawn = number(row.get("target_share")) or 0.0, number(row.get("drawn_share")) or 0.0
        rows.append(
            {
                "name": name,
                "target": f"{target:.3%}",
                "drawn": f"{drawn:.3%}",
                "difference": f"{drawn - target:+.3%}",
                "tokens": amount(number(row.get("tokens")) or 0.0),
                "epochs": f"{number(row.get('epochs')) or 0.0:.2f}",
                "repeated": bool(row.get("repeated_often")),
            }
        )
    largest = number(data.mixture.get("largest_deviation"))
    return {"rows": rows, "largest": f"{largest:.3%}" if largest is not None else ""}


def incidents(data: RunData) -> list[dict[str, str]]:
    """What went wrong and what was done."""
    return [
        {
            "step": f"{number(row.get('step')) or 0:,.0f}",
            "what": text(row.get("what")).replace("_", " "),
            "cause": text(row.get("cause")),
            "action": text(row.get("action")),
            "documents": ", ".join(
                sorted({name for sample in tables(row.get("documents")) for name in sample.get("documents", [])})[:4]
            ),
        }
        for row in data.incidents
    ]


def export(data: RunData) -> list[tuple[str, str]]:
    """What the export's gate measured."""
    found = data.export
    if not found:
        return []
    difference, tolerance = number(found.get("logits_max_difference")), number(found.get("tolerance"))
    rows = [
        (
            "Loads in transformers as",
            f"{text(found.get('architecture'))} (transformers {text(found.get('transformers'))})",
        )
    ]
    if difference is not None and tolerance is not None:
        rows.append(("Largest difference of a logit", f"{difference:.1e} (allowed: {tolerance:.0e})"))
    rows.append(("Greedy tokens equal", f"{number(found.get('greedy_tokens_equal')) or 0:.0f}"))
    rows.append(("Documents tokenized alike", f"{number(found.get('tokenizer_documents_equal')) or 0:.0f}"))
    files = table(found.get("files"))
    rows.append(("Files", ", ".join(f"{name} ({size(number(length) or 0)})" for name, length in files.items())))
    return rows


def stages(data: RunData) -> list[dict[str, Any]]:
    """Each stage and its time."""
    longest = max((number(row.get("seconds")) or 0.0 for row in data.stages), default=0.0)
    return [
        {
            "name": text(row.get("name")),
            "seconds": duration(number(row.get("seconds")) or 0.0),
            "share": (number(row.get("seconds")) or 0.0) / max(longest, 1e-9),
            "skipped": bool(row.get("skipped")),
        }
        for row in data.stages
    ]


def environment(data: RunData) -> list[tuple[str, str]]:
    """Where the run ran."""
    found = data.environment
    if not found:
        return []
    git, memory = table(found.get("git")), number(found.get("memory_bytes"))
    peak = number(data.plan.get("peak_flops"))
    rows = [
        ("Started", text(found.get("started"))),
        ("Device", text(found.get("device"))),
        ("Precision", text(found.get("precision"))),
        ("Peak for MFU", rate(peak) if peak else ""),
        ("Cores", str(found.get("cores") or "")),
        ("Memory", size(memory) if memory else ""),
        ("Platform", text(found.get("platform"))),
        ("Python", text(found.get("python"))),
        ("Bessemer", text(found.get("bessemer"))),
        ("Git", f"{text(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}" if git else ""),
        (
            "Packages",
            ", ".join(f"{name} {version}" for name, version in table(found.get("packages")).items() if version),
        ),
    ]
    return [(name, value) for name, value in rows if value]


def _bits_per_byte(data: RunData) -> float | None:
    return number(data.evaluation.get("bits_per_byte")) or data.validation.last("bits_per_byte")


def _train_seconds(data: RunData) -> float | None:
    """Seconds spent in training steps: the mean logged step times the number of steps."""
    column, step = data.train.column("step_seconds"), data.train.step
    if column is None:
        return None
    finite = column[np.isfinite(column)]
    return float(finite.mean() * step[-1])


def _median(data: RunData, name: str) -> float | None:
    column = data.train.column(name)
    if column is None:
        return None
    return float(np.nanmedian(column))


def _largest(data: RunData, name: str) -> float | None:
    column = data.train.column(name)
    return None if column is None else float(np.nanmax(column))
