"""Fertility: how many tokens text takes, by source and language, for one tokenizer or several beside each other.

Measured on a sample of the documents, chosen by the hash of their identity, so that it is the same whatever the order and the
number of workers. A word is what stands between white space: in scripts without spaces the tokens per word say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.tokens.order import key_of

SEPARATOR = "\t"  # between source and language in the keys of a tally
Tally = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Gauge:
    """What is measured with: names of the tokenizers, and which of each one's tokens are a single byte.

    share: of the documents; seed: names the sample.
    """

    names: tuple[str, ...]
    single: tuple[npt.NDArray[np.bool_], ...]
    share: float
    seed: int

    def takes(self, identity: str) -> bool:
        """Whether a document is in the sample."""
        return self.share >= 1.0 or key_of("fertility", self.seed, identity) < self.share * 2.0**64

    def measure(self, source: str, language: str, text: str, encoded: Sequence[npt.NDArray[Any]], into: Tally) -> None:
        """Add one document. encoded: its ids by each tokenizer, without end-of-text."""
        row = into.setdefault(source + SEPARATOR + language, _empty(len(self.names)))
        row["documents"] += 1
        row["bytes"] += len(text.encode())
        row["words"] += len(text.split())
        for number, (ids, single) in enumerate(zip(encoded, self.single, strict=True)):
            row["tokens"][number] += len(ids)
            row["single_byte"][number] += int(single[ids].sum())


def merge(into: Tally, more: Tally) -> None:
    """Add one tally to another."""
    for key, row in more.items():
        mine = into.setdefault(key, _empty(len(row["tokens"])))
        for name in ("documents", "bytes", "words"):
            mine[name] += row[name]
        for name in ("tokens", "single_byte"):
            mine[name] = [left + right for left, right in zip(mine[name], row[name], strict=True)]


def table(tally: Tally, names: Sequence[str], vocabularies: Sequence[int]) -> dict[str, Any]:
    """The tally as the manifest keeps it: a row a source and language, sources in order, and one over all of them."""
    whole = _empty(len(names))
    for row in tally.values():
        merge({"": whole}, {"": row})
    keyed = [(key.split(SEPARATOR), row) for key, row in sorted(tally.items())]
    rows = [{"source": source, "language": language, **_rates(row)} for (source, language), row in keyed]
    return {
        "tokenizers": [{"name": name, "vocabulary": size} for name, size in zip(names, vocabularies, strict=True)],
        "rows": rows,
        "all": _rates(whole),
    }


def _empty(tokenizers: int) -> dict[str, Any]:
    return {"documents": 0, "bytes": 0, "words": 0, "tokens": [0] * tokenizers, "single_byte": [0] * tokenizers}


def _rates(row: dict[str, Any]) -> dict[str, Any]:
    def each(values: Iterable[float]) -> list[float]:
        return [round(value, 4) for value in values]

    tokens = row["tokens"]
    return {
        **{name: row[name] for name in ("documents", "bytes", "words", "tokens")},
        "bytes_per_token": each(row["bytes"] / max(count, 1) for count in tokens),
        "tokens_per_word": each(count / max(row["words"], 1) for count in tokens),
        "single_byte_share": each(
            single / max(count, 1) for single, count in zip(row["single_byte"], tokens, strict=True)
        ),
    }
