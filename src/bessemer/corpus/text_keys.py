"""Files of a source whose records keep their text under another key than the source's: which they are, by the counts of all of
their records, and the sources to write for them."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bessemer import storage
from bessemer.corpus.files import base_folder
from bessemer.corpus.partition import Partition, partition_folder
from bessemer.recipe import Source
from bessemer.store_path import opened

NEARLY_ALL = 0.9  # of the records of a file that could be read
MAX_PARTITIONS, MAX_FILES = 256, 100  # of a source, and files with another key: of more nothing is said
TEXT_KEY = re.compile(r'; set text_key = "([^"]*)"$')
UNREADABLE = ("bad_record", "unreadable", "wrong_format", "not_utf8")  # records of which it is unknown what they have
LEFT_OUT = ("name", "paths", "exclude", "text_key")  # keys of a source that the new ones have their own of


def other_text_keys(source: Source, partitions: Sequence[Partition], min_characters: int) -> dict[str, str]:
    """The key under which nearly all records of a file have their text, by the names of the files of which nearly none has
    `source.text_key`. partitions: all of the source, cleaned; min_characters: a file without a record of so many bytes is left
    out, as a source of it would be empty."""
    names = {piece.name for one in partitions for unit in one.units for piece in unit.pieces}
    if source.format == "chat" or len(partitions) > MAX_PARTITIONS:
        return {}
    counts, longest = _counts(partitions)
    bearers = Counter(Path(name).name for name in names)  # `exclude` takes all files of one name
    found = {}
    for name, keys in counts.items():
        key, number = max(
            ((key, number) for key, number in keys.items() if key), key=lambda pair: pair[1], default=("", 0)
        )
        is_other = number >= NEARLY_ALL * keys.total() and longest[name] >= min_characters
        if key and is_other and name in names and bearers[Path(name).name] == 1:
            found[name] = key
    return dict(sorted(found.items())) if len(found) <= MAX_FILES else {}


def _counts(partitions: Iterable[Partition]) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """How many records of each file have which other key, "" for the source's; and the bytes of the longest with another."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    counts, longest = dict[str, Counter[str]](), Counter[str]()
    for one in partitions:
        with pq.ParquetFile(opened(partition_folder(one.work, one.number) / "rows.parquet")) as file:
            table = file.read(columns=["path", "reason", "detail", "num_bytes"])
        table = table.filter(pc.invert(pc.is_in(pc.fill_null(table["reason"], ""), value_set=_array(UNREADABLE))))
        lacks = pc.equal(pc.fill_null(table["reason"], ""), "no_text_key")
        table = table.set_column(2, "detail", pc.if_else(lacks, table["detail"], ""))
        groups = table.group_by(["path", "detail"]).aggregate([("num_bytes", "count"), ("num_bytes", "max")])
        for row in groups.to_pylist():
            named = TEXT_KEY.search(row["detail"] or "")
            key = named[1] if named else "" if not row["detail"] else "?"
            counts.setdefault(row["path"], Counter())[key] += row["num_bytes_count"]
            if named:
                longest[row["path"]] = max(longest[row["path"]], row["num_bytes_max"])
    return counts, longest


def _array(values: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.array(values, pa.large_string())


def separate_sources(sources: Sequence[Source], statistics: Mapping[str, Any]) -> list[str]:
    """Lines of a recipe that reads each file by the key that its records have; none where one key is enough for each source."""
    import tomli_w

    counts = {row["source"]: row for row in statistics["sources"]}
    taken, tables, is_needed = {source.name for source in sources}, list[dict[str, Any]](), False
    for source in sources:
        own = source.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        files = {
            name: place for name in counts[source.name].get("other_text_keys", {}) if (place := _place(source, name))
        }
        keys: dict[str, list[str]] = {}
        for name in files:
            keys.setdefault(counts[source.name]["other_text_keys"][name], []).append(name)
        is_all = len(files) == counts[source.name]["files"]
        if not keys or (is_all and len(keys) == 1):  # of one key the lines on what was rejected say all
            tables.append(own)
            continue
        is_needed = True
        for key, names in keys.items():
            number = next(number for number in range(1, len(taken) + 2) if f"{source.name}-{number}" not in taken)
            taken.add(f"{source.name}-{number}")
            rest = {name: value for name, value in own.items() if name not in LEFT_OUT}
            paths = [files[name] for name in names]
            tables.append({"name": f"{source.name}-{number}", "paths": paths, "text_key": key, **rest})
        named = {path for path in source.paths if path in files.values()}  # which `exclude` would not keep out
        own["paths"] = [path for path in source.paths if path not in named]
        out = (glob.escape(Path(name).name) for name, place in files.items() if place not in named)
        if exclude := [*source.exclude, *out]:
            own["exclude"] = exclude
        if not is_all:
            tables.append(own)
    return tomli_w.dumps({"corpus": {"sources": tables}}).strip().splitlines() if is_needed else []


def _place(source: Source, name: str) -> str:
    """Where a file of a source lies, by its name in the corpus; "" where that is not known."""
    if storage.is_remote(name):
        return name
    place = base_folder(source.paths) / name
    return str(place) if place.is_file() and "://" not in name else ""
