"""The line numbers of the examples in the funnel: counted for these few, as a reader of byte ranges knows none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bessemer.corpus import storage
from bessemer.corpus.partition import Partition
from bessemer.corpus.statistics import Funnel
from bessemer.corpus.units import Piece

MAX_COUNTED_BYTES = 1 << 30
"""Line ends are counted in the beginning of a file, as far as this: less than a second."""

READ_BYTES = 1 << 20


def add_lines(funnels: dict[str, Funnel], partitions: Iterable[Partition]) -> None:
    """Give each example of a rejected line of JSONL the number of its line, counted from 1, where the file lies on this
    machine."""
    wanted: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for funnel in funnels.values():
        for entry in funnel.rejected.values():
            for example in entry.examples:
                if example["place"].isdecimal():
                    wanted.setdefault((funnel.source, example["path"]), []).append(example)
    parts: dict[tuple[str, str], dict[int, Piece]] = {}
    for partition in partitions if wanted else ():
        for unit in partition.units:
            for piece in unit.pieces if unit.format == "jsonl" else ():
                if (unit.source, piece.name) in wanted and not storage.is_remote(piece.path) and not piece.damage:
                    parts.setdefault((unit.source, piece.name), {}).setdefault(piece.offset, piece)
    for key, examples in wanted.items():
        if key in parts:
            _count(examples, [parts[key][offset] for offset in sorted(parts[key])])


def _count(examples: list[dict[str, Any]], pieces: list[Piece]) -> None:
    """Number the lines of one file, which lies in one piece after the other."""
    places = sorted(examples, key=lambda example: int(example["place"]), reverse=True)
    line, position = 1, 0
    for piece in pieces:
        try:
            with open(piece.path, "rb") as file:
                while places and position < MAX_COUNTED_BYTES:
                    length = min(int(places[-1]["place"]) - position, READ_BYTES)
                    block = file.read(length) if length else b""
                    line += block.count(b"\n")
                    position += len(block)
                    if position == int(places[-1]["place"]):
                        places.pop()["line"] = line
                    elif not block:
                        break
        except OSError:
            return
