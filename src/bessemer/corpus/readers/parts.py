"""Cut the files of a source into parts of bounded size, take a sample of them, and read parts to documents.

Whatever is wrong with a document costs that document, which is then counted.

A compressed file, a crawl archive and a dump are one part each: none is read from its middle on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

from bessemer.common.errors import FileChanged, InputError, first_line
from bessemer.common.extensions import is_own
from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import DAMAGE, File, Part, Reader, build_reader, format_of, naming_faults, stamp
from bessemer.recipe import Corpus, Source
from bessemer.recipe.corpus import text_keys
from bessemer.run_tasks.task import check_stop
from bessemer.storage import filesystem

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
            return [reader.part(file, damage=_detail(error), reason="unreadable")]
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
    has_text = any(one.num_with_text for one in probes) or any(
        not part.damage and part.format not in fields for part in parts
    )
    if missing and not has_text:
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


def read(
    source: Source, parts: Iterable[Part], corpus: Corpus, passed_over: Counter[str] | None = None
) -> Iterator[tuple[Part, Document]]:
    """Yield the documents of a source's parts, each with its part. Never raises for bad data.

    passed_over: Counts records that hold no document by nature, by type.
    A missing or unreadable file yields one rejected document per part. Raises FileChanged for a file that is not the one that was
    listed, BessemerError when an object store fails, InputError when the library of [corpus.extract] is not installed.
    """
    readers = dict[str, Reader]()
    more = {} if passed_over is None else {"passed_over": passed_over}
    for part in parts:
        if part.format not in readers:
            readers[part.format] = build_reader(source, part.format, corpus, **more)
        for document in _read_unchanged(readers[part.format], part):
            document.source, document.path, document.format = source.name, part.name, part.format
            document.label = document.label or source.label or ""
            yield part, document


def _read_unchanged(reader: Reader, part: Part) -> Iterator[Document]:
    """Yield the documents of a part, as long as the file is the one that was listed."""
    source, size = reader.context.source, part.size
    try:
        require_unchanged(part, source)
        if part.damage:
            yield Document(f"{part.start}!", part.size, reason=part.reason, detail=part.damage)
            return
        with naming_faults(reader, "read", part.name):
            documents = reader.read(part)
            for document in documents if is_own(type(reader)) else _checked(documents):
                size = max(size - document.num_bytes, 0)
                yield document
        with suppress(FileNotFoundError):  # all of it was read before it vanished
            require_unchanged(part, source)
    except DAMAGE as error:
        yield Document(f"{part.start}!", size, reason="unreadable", detail=_detail(error))


def _detail(error: Exception) -> str:
    return getattr(error, "strerror", None) or first_line(error)[:300]


def _checked(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield what a user's reader yields. Raises TypeError for what is no document, and for a key that comes again."""
    keys = set[str]()
    for document in documents:
        if not isinstance(document, Document):
            raise TypeError(f"yields {type(document).__name__}, not Document")
        if document.key in keys:
            raise TypeError(f"yields two documents with the key {document.key!r}")
        keys.add(document.key)
        yield document


def require_unchanged(part: Part, source: Source) -> None:
    """Raise FileChanged where a file is not the one that was listed; OSError where it is gone."""
    if part.stamp and part.stamp != stamp(*filesystem.version(part.path, source)):
        raise FileChanged(f"corpus.sources.{source.name}: {part.name} changed while it was read")


Item = TypeVar("Item")


def in_groups(items: Iterable[Item], limit: int, cost: Callable[[Item], int]) -> list[tuple[Item, ...]]:
    """Return items in their order, in groups that cost at most `limit`, or of one item."""
    groups, total = list[list[Item]](), 0
    for item in items:
        if not groups or total + cost(item) > limit:
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += cost(item)
    return [tuple(group) for group in groups]
