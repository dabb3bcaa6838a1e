"""Splitting of a source's files into parts of bounded size, and sampling of parts.

A compressed file, a crawl archive or a dump is one part, because it cannot be read from the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from typing import TypeVar

from bessemer.common.errors import InputError
from bessemer.common.extensions import naming_faults
from bessemer.corpus.readers.base import DAMAGE, MAY_RAISE, File, Part, Reader, build_reader, damage_of, format_of
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.run_tasks.task import check_stop

# Size of a part of a file that can be split. Parts are smaller, down to the minimum, if there would be fewer than FEW_PARTS,
# so that all workers stay busy to the end. They are larger if there would be more than MANY_PARTS.
PART_BYTES, LEAST_PART_BYTES = 32 << 20, 4 << 20
FEW_PARTS, MANY_PARTS = 64, 800_000
SAMPLED_PARTS, SAMPLED_BYTES = 16, 1 << 16  # number of parts that fill a byte budget, and their minimum size
FULL = 0.95  # share of a byte budget that counts as spent: filling the rest would prefer small and empty files
THREADS = 16  # they wait mostly for disks and file servers


def plan(source: Source, files: list[File]) -> list[Part]:
    """Return the parts of a source's files, grouped by format. With a byte budget (`max_bytes`), they are a sample.

    The beginnings of files with records are checked first. A file that is not JSON becomes one part with a description
    of the damage. Raises InputError for a `text_key` that no file has, and if no file can be read.
    """
    total, parts, readers = sum(file.size for file in files), list[Part](), list[Reader]()
    for format_, mine in files_by_format(source, files).items():
        budget = source.max_bytes
        if budget is not None and len(mine) < len(files):  # each format gets its share of the budget
            budget = max(round(budget * (sum(file.size for file in mine) / max(total, 1))), 1)
        # With a budget, parts must be small enough to sample a little of one huge file.
        wanted = max(budget // SAMPLED_PARTS, SAMPLED_BYTES) if budget else max(total // FEW_PARTS, LEAST_PART_BYTES)
        reader = build_reader(
            source, format_, part_bytes=min(wanted, max(PART_BYTES, total // MANY_PARTS)),
            beginning_bytes=max(budget // min(len(mine), SAMPLED_PARTS), SAMPLED_BYTES) if budget else None,
        )  # fmt: skip
        readers.append(reader)
        pieces = [part for some in _split(reader, mine) for part in some]
        parts += sorted(_sample(pieces, budget) if budget else pieces, key=attrgetter("name", "start"))
    _require_readable(source, parts, readers)
    return parts


def files_by_format(source: Source, files: Iterable[File]) -> dict[str, list[File]]:
    """Group the files of a source by format. Files of unknown format are plain text."""
    groups: dict[str, list[File]] = {}
    for file in files:
        groups.setdefault(format_of(source, file) or "text", []).append(file)
    return {format_: groups[format_] for format_ in sorted(groups)}


def _split(reader: Reader, files: list[File]) -> Iterable[list[Part]]:
    def split(file: File) -> list[Part]:
        check_stop()
        try:
            with naming_faults(reader, "split", file.name, *MAY_RAISE):
                parts = [*reader.split(file)]
                if wrong := next((part for part in parts if not isinstance(part, Part)), None):
                    raise TypeError(f"returns {type(wrong).__name__}, not Part")
        except DAMAGE as error:
            return [reader.part(file, damage=damage_of(error), reason="unreadable")]
        return parts

    if type(reader).split is Reader.split:  # it opens no file, so threads would not help
        return map(split, files)
    with ThreadPoolExecutor(THREADS) as pool:
        return pool.map(split, files)


def _require_readable(source: Source, parts: list[Part], readers: list[Reader]) -> None:
    """Raise InputError if no file can be read, or if the first records of every file lack the text field."""
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
    """Return parts whose total size fits in a byte budget, chosen in the order of a hash of their name; at least one."""
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
    """Yield groups of consecutive items whose total cost is at most `limit`. An item that costs more is alone in its group."""
    group, total = list[Item](), 0
    for item in items:
        if group and total + cost(item) > limit:
            yield tuple(group)
            group, total = [], 0
        group.append(item)
        total += cost(item)
    if group:
        yield tuple(group)
