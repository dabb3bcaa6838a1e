"""Files of records that are not lines of JSON: JSON arrays, pretty-printed JSON, JSON in UTF-16, CSV. The beginning of
a file shows what it is; its records are read one by one, in the memory of one."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from bessemer.corpus.delimited import NUMBER, delimiter_of, recognise, rows
from bessemer.corpus.document import Record
from bessemer.corpus.encodings import foreign_format, is_utf8, unicode_of
from bessemer.corpus.tables import MAX_RECORD_BYTES, field_in, no_text, not_utf8, record_of
from bessemer.recipe import Source

HEAD_BYTES = 64 << 10  # the beginning of a file that is looked at
SAMPLED = 50  # records of it that are looked at
READ_CHARACTERS = 1 << 20
TABLE_ENDINGS = (".csv", ".tsv")
MAX_NAME_CHARACTERS = 60  # a longer name of a column is taken for data, in a file that has no header
_SKIPPED = re.compile(r"[\s,]*")
_LINE_END = re.compile(rb"\r?\n|\r")
_NEXT_OBJECT = re.compile(r"\n\{")


@dataclass(frozen=True)
class Look:
    """What the beginning of a file shows."""

    layout: str  # "lines" of JSON; "values": an array, or JSON values one after the other; "csv"; "" for an empty file
    reason: str = ""  # why the file cannot be read: a key of document.REASONS; "" when it can
    detail: str = ""
    # which fields there are, when none of the records at the beginning has the one that should hold the text
    missing: str = ""


def look(head: bytes, is_whole: bool, name: str, text_key: str, encoding: str = "") -> Look:
    """Judge a file by its beginning; `name` is that of the uncompressed file, `is_whole` whether `head` is all of it,
    `encoding` what the source is in where it is not UTF-8."""
    if not head.strip():
        return Look("")
    if foreign := foreign_format(head):
        return Look("", "wrong_format", foreign)
    wide = unicode_of(head)[0] not in ("", "utf-8")
    text = head.decode(_encoding(head, encoding), "replace").replace("\r\n", "\n").replace("\r", "\n")
    start = text.lstrip()
    if (nul := text.find("\0")) >= 0:
        return Look("", "wrong_format", f"binary data, not JSON: a NUL at character {nul}")
    lines = [line for line in (text.split("\n") if is_whole else text.split("\n")[:-1] or [text]) if line.strip()]
    is_named_table = name.lower().endswith(TABLE_ENDINGS)
    if start[:1] in "{[" and not is_named_table:
        values = start[0] == "[" or wide or _is_pretty(start)
        return Look("values" if values else "lines", missing=_missing(start, lines, values, text_key))
    columns, first = _columns(lines, name)
    if (count := columns.count(text_key)) > 1:
        return Look("", "no_text_key", f"a table with {count} columns named {text_key!r}; give each a name of its own")
    # Fields of several lines may hold code, and so lines that begin with a brace: a table's name and header decide.
    if is_named_table and text_key in columns:
        return Look("csv")
    has_object = next(_objects(lines), None) is not None
    if has_object if is_named_table else any(line.lstrip().startswith("{") for line in lines[:SAMPLED]):
        return Look("lines")
    if text_key in columns:
        return Look("csv")
    if columns:
        return Look("", "no_text_key", _no_column(columns, first, text_key, delimiter_of(lines[0])))
    return Look("", "wrong_format", f"not JSON: it begins with {start[:40]!r}")


def _encoding(head: bytes, other: str = "") -> str:
    """The encoding of a file by its beginning; `other` where that is not UTF-8. The decoder takes a byte order mark
    away."""
    name, mark = unicode_of(head)
    if name and name != "utf-8":
        return name.rpartition("-")[0] if mark else name
    return other if other and not is_utf8(head) else "utf-8-sig"


def _json(text: str) -> tuple[object, int]:
    """The JSON value with which a text begins, and where it ends; 0 for none."""
    try:
        return json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0


def _objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of a sample that are JSON objects."""
    for line in lines[:SAMPLED]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _is_pretty(start: str) -> bool:
    """Whether a JSON object takes several lines."""
    first = start.partition("\n")[0].strip()
    if first == "{" or first.endswith("},"):  # the second: an array's elements, one a line, without its brackets
        return True
    return "\n" in start[: _json(start)[1]]


def _missing(start: str, lines: list[str], values: bool, text_key: str) -> str:
    """What is there in the place of the text, when no record at the beginning has it."""
    if values:
        sample = [value for _, _, value, _ in _values(io.StringIO(start))][:SAMPLED]
        records = [value for value in sample if isinstance(value, dict)]
    else:
        records = [*_objects(lines)]
    if not records or any(field_in(record, text_key)[0] is not None for record in records):
        return ""
    return no_text("field", text_key, records[0])


def _columns(lines: list[str], name: str) -> tuple[list[str], list[str]]:
    """The header of a table and its first row; none when the lines are no table."""
    if not lines:
        return [], []
    delimiter = delimiter_of(lines[0])
    named = name.lower().endswith(TABLE_ENDINGS)
    if not named and (len(lines) < 2 or not lines[0].count(delimiter) == lines[1].count(delimiter) > 0):
        return [], []
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        return [column.strip() for column in next(reader, [])], next(reader, [])
    except csv.Error:
        return [], []


def _no_column(columns: list[str], first: list[str], text_key: str, delimiter: str) -> str:
    """That a table has no column of the text, and what to do: name another, or give it a header."""
    if all(column and len(column) <= MAX_NAME_CHARACTERS and not NUMBER.fullmatch(column) for column in columns):
        row = dict(itertools.zip_longest(columns, first[: len(columns)], fillvalue=""))
        return f"a table with {no_text('column', text_key, row)}"
    longest = max(range(len(columns)), key=lambda place: len(columns[place]))
    header = delimiter.replace("\t", "\\t").join(
        text_key if place == longest else f"column{place + 1}" for place in range(len(columns))
    )
    return (
        f"a table without a header: its first line looks like data ({columns[longest][:40]!r}...); put the names of its "
        f"columns there, e.g. sed '1i {header}' FILE > NEW"
    )


def read(file: BinaryIO, layout: str, source: Source) -> Iterator[Record]:
    """The records of a whole file; their keys are their numbers in brackets, from 1. OSError when it cannot be read."""
    head = file.read(HEAD_BYTES)
    encoding = _encoding(head)
    if source.encoding and encoding.startswith("utf-8") and not _is_utf8(file):
        encoding = source.encoding
    file.seek(0)
    # A byte that cannot be decoded becomes half of a surrogate pair, which costs the record it is in.
    errors = "replace" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
    ends = _LINE_END.search(head.replace(b"\0", b"")) if layout == "csv" else None
    line_end = "" if ends is None else ends[0].decode()[-1]
    text = io.TextIOWrapper(file, encoding, errors, newline=line_end)
    try:
        if layout == "csv":
            yield from _table(text, source)
            return
        for number, raw, value, problem in _values(text):
            key = f"[{number}]"
            yield _rejected(key, raw, problem) if problem else _checked(value, key, raw, number, source)
    finally:
        text.detach()


def _is_utf8(file: BinaryIO) -> bool:
    """Whether all of a file is UTF-8."""
    file.seek(0)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := file.read(READ_CHARACTERS):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _checked(value: object, key: str, raw: str, number: int, source: Source) -> Record:
    """A value as a record, unless its source text `raw` holds bytes that could not be decoded."""
    data = raw.encode("utf-8", "surrogateescape")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return not_utf8(key, data, error)
    return record_of(value, key, len(data), raw, {"item": number}, source)


def _table(text: io.TextIOBase, source: Source) -> Iterator[Record]:
    """The rows of a table."""
    table = recognise(text)
    for number, (raw, fields, problem) in enumerate(rows(text, table), start=1):
        if problem:
            yield _rejected(f"[{number}]", raw, problem)
        else:
            yield _checked(dict(zip(table.columns, fields, strict=True)), f"[{number}]", raw, number, source)


def _rejected(key: str, raw: str, problem: str) -> Record:
    return Record(key, len(raw.encode("utf-8", "surrogateescape")), raw[:4000], "bad_record", problem[:300])


def _values(text: io.TextIOBase) -> Iterator[tuple[int, str, object, str]]:
    """The elements of top-level arrays and other top-level values: number, source text, value, or the problem.

    A broken top-level value costs itself; a broken element costs the rest of its array.
    """
    decoder = json.JSONDecoder()
    buffer, position, ended, in_array, number = "", 0, False, False, 0

    def grow() -> None:
        nonlocal buffer, position, ended
        more = text.read(max(READ_CHARACTERS, len(buffer) - position))
        buffer, position, ended = buffer[position:] + more, 0, not more

    while True:
        skipped = _SKIPPED.match(buffer, position)
        position = skipped.end() if skipped else position
        if position == len(buffer):
            if ended:
                return
            grow()
            continue
        if buffer[position] in "[]" and (buffer[position] == "]") == in_array:
            in_array, position = not in_array, position + 1
            continue
        problem = ""
        try:
            value, end = decoder.raw_decode(buffer, position)
        except RecursionError:
            problem = "not JSON: nested too deeply"
        except ValueError as error:
            near_end = not isinstance(error, json.JSONDecodeError) or error.pos > len(buffer) - 64
            unfinished = near_end or str(error).startswith("Unterminated string")
            if unfinished and not ended and len(buffer) - position <= MAX_RECORD_BYTES:
                grow()
                continue
            problem = f"not JSON: {error}"
        else:
            if end == len(buffer) and not ended and buffer[end - 1] not in '}]"':
                grow()  # a number may go on
                continue
        number += 1
        if not problem:
            yield number, buffer[position:end], value, ""
            position = end
            continue
        following = None if in_array else _NEXT_OBJECT.search(buffer, position)
        rest = ", and what follows in the array" if in_array else ""
        yield number, buffer[position : following.start() if following else position + 4000], None, problem + rest
        if following is None:
            return
        position = following.start()
