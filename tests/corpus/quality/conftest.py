"""Two kinds of generated documents as tables."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pyarrow as pa
import pytest

pytest.importorskip("numba", reason="the corpus extra is not installed")

Document = tuple[str, str, str]

GOOD = [
    "the", "river", "and", "people", "of", "that", "valley", "have", "known",
    "to", "be", "with", "history", "reason", "study", "found", "because", "science",
]  # fmt: skip
BAD = [
    "login", "click", "cart", "price", "cheap", "deal", "menu", "share", "cookie",
    "subscribe", "buy", "now", "free", "offer", "top", "page", "link", "home",
]  # fmt: skip


def document(number: int, source: str, words: list[str], extra: list[str] | None = None) -> Document:
    draw = random.Random(f"{source} {number}")
    choice = [*words, *(extra or [])]
    lines = [" ".join(draw.choices(choice, k=9)) + draw.choice([".", ".", ""]) for _ in range(8)]
    return hashlib.blake2b(f"{source} {number}".encode(), digest_size=16).hexdigest(), source, "\n".join(lines)


@pytest.fixture
def documents() -> list[Document]:
    """300 high, 300 low, and 200 of a third source with both kinds of words."""
    rows = [document(number, "wiki", GOOD, BAD[:9]) for number in range(300)]
    rows += [document(number, "crawl", BAD, GOOD[:9]) for number in range(300)]
    return rows + [document(number, "blog", GOOD, BAD) for number in range(200)]


@pytest.fixture
def tables() -> Callable[..., object]:
    """Return tables of the requested columns, as the corpus passes documents to steps."""

    def made(rows: list[Document], at_once: int = 97) -> object:
        columns = dict(zip(("identity", "source", "text"), zip(*rows, strict=True), strict=True))
        table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
        return lambda wanted, _: [
            table.select(list(wanted)).slice(at, at_once) for at in range(0, table.num_rows, at_once)
        ]

    return made
