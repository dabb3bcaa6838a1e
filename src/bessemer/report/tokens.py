"""What the report shows of tokens that is worked out: each source's share of the text, fertility, the mixture."""

from __future__ import annotations

from bessemer.report.data import Json, RunData, as_number, as_object, as_objects, as_text, number_or_0
from bessemer.report.parts import count

REPEATS = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)
MAX_FERTILITY_ROWS = 60  # the others stand in tokens/manifest.json
SHARES = ("target_share", "drawn_share")


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


def fertility(data: RunData) -> Json:
    """Bytes a token, tokens a word and single-byte tokens: a row a source and language, a group of columns a tokenizer."""
    found = as_object(data.manifest, "fertility")
    every, tokenizers, whole = as_objects(found, "rows"), as_objects(found, "tokenizers"), as_object(found, "all")
    if not every:
        return {}
    largest = sorted(every, key=lambda row: -number_or_0(row, "bytes"))[:MAX_FERTILITY_ROWS]
    shown = [row for row in every if row in largest]
    listed = whole.get("bytes_per_token")
    ours, *others = map(as_number, listed) if isinstance(listed, list) and listed else [None]
    compared = [
        f"{100 * (ours / theirs - 1):+.1f}% against {as_text(tokenizer, 'name')}".replace("-", "−", 1)
        for theirs, tokenizer in zip(others, tokenizers[1:], strict=False) if ours and theirs
    ]  # fmt: skip
    against = f": {', '.join(compared)}" if compared else ""
    has_languages = any(as_text(row, "language") for row in shown)
    columns = ["Source", *["Language"] * has_languages, "n wide-only|Documents", "n wide-only|Bytes"]
    return {
        "said": f"A token stands for {ours:.2f} bytes of this text{against}." if ours else "",
        "columns": columns + ["n|Bytes a token", "n|Tokens a word", "n|Single bytes"] * len(tokenizers),
        "languages": has_languages, "tokenizers": tokenizers, "rows": shown, "all": whole, "left": len(every) - len(shown),
    }  # fmt: skip


def read_too_often(data: RunData) -> list[str]:
    """Sources that were repeated so often that it no longer helped."""
    sources = as_object(data.mixture, "sources")
    return [name for name, row in sources.items() if number_or_0(row, "epochs") > REPEATS]


def largest_share(data: RunData) -> float:
    """The largest share of the mixture, to which all are drawn."""
    rows = as_object(data.mixture, "sources").values()
    return max([number_or_0(row, key) for row in rows for key in SHARES] + [1e-9])


def has_phases(data: RunData) -> bool:
    """Whether the mixture has several phases, or a cap changed the shares of its only one."""
    phases, names = as_objects(data.mixture, "phases"), as_object(data.mixture, "sources")
    asked = [[as_number(phase, "sources", name, key) for key in ("asked_share", "target_share")]
             for phase in phases for name in names]  # fmt: skip
    return len(phases) > 1 or any(one is not None and one != target for one, target in asked)
