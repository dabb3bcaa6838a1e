"""Cut the files of a source into parts of bounded size, and take a sample of them.

A compressed file, a crawl archive and a dump are one part each: none is read from its middle on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import TypeVar

from bessemer.common.errors import InputError
from bessemer.corpus.readers.base import DAMAGE, File, Part, Reader, build_reader, damage_of, format_of, naming_faults
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.run_tasks.task import check_stop

# Bytes of a part of a file that can be split. Where parts of this size would be fewer than FEW_PARTS they are shorter, down to
# the least, so that all workers are busy to the end; where they would be more than MANY_PARTS they are longer
PART_BYTES, LEAST_PART_BYTES = 32 << 20, 4 << 20
FEW_PARTS, MANY_PARTS = 64, 800_000
SAMPLED_PARTS, SAMPLED_BYTES = 16, 1 << 16  # parts that fill a byte budget, and the least bytes of one
FULL = 0.95  # a byte budget counts as spent at this share: filling up the rest would pick small and empty files
THREADS = 16  # they wait for disks and file servers


def plan(source: Source, files: list[File]) -> list[Part]:
    """Return the parts of a source's files, format by format. The beginnings of files of records are looked at before anything is
    read: a file that is no JSON costs itself, and a text_key that none of the files has raises InputError."""
    total, parts, readers = sum(file.size for file in files), list[Part](), list[Reader]()
    for format_, mine in files_by_format(source, files).items():
        budget = source.max_bytes
        if budget is not None and len(mine) < len(files):  # each format contributes its part of the budget
            budget = max(round(budget * (sum(file.size for file in mine) / max(total, 1))), 1)
        # With a budget fine enough that a small part of one huge file can be taken
        wanted = max(budget // SAMPLED_PARTS, SAMPLED_BYTES) if budget else max(total // FEW_PARTS, LEAST_PART_BYTES)
        reader = build_reader(
            source, format_, part_bytes=min(wanted, max(PART_BYTES, total // MANY_PARTS)),
            beginning_bytes=max(budget // min(len(mine), SAMPLED_PARTS), SAMPLED_BYTES) if budget else None,
        )  # fmt: skip
        readers.append(reader)
        found = [part for some in _split(reader, mine) for part in some]
        parts += sorted(_sample(found, budget) if budget else found, key=attrgetter("name", "start"))
    _require_readable(source, parts, readers)
    return parts


def files_by_format(source: Source, files: Iterable[File]) -> dict[str, list[File]]:
    """Return the files of a source by their format, which is plain text where nothing tells it."""
    found: dict[str, list[File]] = {}
    for file in files:
        found.setdefault(format_of(source, file) or "text", []).append(file)
    return {format_: found[format_] for format_ in sorted(found)}


def _split(reader: Reader, files: list[File]) -> Iterable[list[Part]]:
    def split(file: File) -> list[Part]:
        check_stop()
        try:
            with naming_faults(reader, "split", file.name):
                parts = [*reader.split(file)]
                if wrong := next((part for part in parts if not isinstance(part, Part)), None):
                    raise TypeError(f"returns {type(wrong).__name__}, not Part")
        except DAMAGE as error:
            return [reader.part(file, damage=damage_of(error), reason="unreadable")]
        return parts

    if type(reader).split is Reader.split:  # opens no file
        return map(split, files)
    with ThreadPoolExecutor(THREADS) as pool:
        return pool.map(split, files)


def _require_readable(source: Source, parts: list[Part], readers: list[Reader]) -> None:
    """Raise InputError when not one of the files can be read, with the first of each reason, or when the first
    records of every file lack the text."""
    where = f"corpus.sources.{source.name}"
    if parts and all(part.damage for part in parts):
        first = {part.reason: f"{part.name}: {part.damage}" for part in reversed(parts)}
        raise InputError(f"{where}: none of its files can be read: {'; '.join(sorted(first.values()))}")
    probes = [reader.context for reader in readers]
    missing, keys = [text for one in probes for text in one.missing], {key for one in probes for key in one.keys}
    fields = {reader.context.format for reader in readers if reader.has_fields}
    if missing and not keys and all(part.damage or part.format in fields for part in parts):
        raise InputError(f"{where}: {min(missing)}")
    unknown = [key for key in text_keys(source.text_key) if key not in keys]
    if keys and unknown:
        raise InputError(f"{where}.text_key: the first records of no file have a field {unknown[0]!r}")


def _sample(parts: list[Part], budget: int) -> list[Part]:
    """Return parts in the order of their hash that fit into the budget; the first one when none does."""
    chosen, room = list[Part](), budget
    ordered = sorted(parts, key=lambda part: hashlib.blake2b(
        f"{part.name}\0{part.start}".encode("utf-8", "surrogatepass"), digest_size=16
    ).digest())  # fmt: skip
    for part in ordered:
        if room <= budget * (1 - FULL):
            break
        if part.size <= room:
            chosen.append(part)
            room -= part.size
    return chosen or ordered[:1]


Item = TypeVar("Item")


def in_groups(items: Iterable[Item], limit: int, cost: Callable[[Item], int]) -> Iterator[tuple[Item, ...]]:
    """Yield items in their order, in groups that cost at most `limit`, or of one item."""
    group, total = list[Item](), 0
    for item in items:
        if group and total + cost(item) > limit:
            yield tuple(group)
            group, total = [], 0
        group.append(item)
        total += cost(item)
    if group:
        yield tuple(group)
