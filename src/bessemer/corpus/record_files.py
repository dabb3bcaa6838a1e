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
from decimal import Decimal
from typing import Any, BinaryIO

import ijson

from bessemer.corpus.delimited import NUMBER, delimiter_of, recognise, rows
from bessemer.corpus.document import Record
from bessemer.corpus.encodings import foreign_format, is_utf8, unicode_of
from bessemer.corpus.tables import MAX_RECORD_BYTES, field_in, no_text, not_utf8, record_of
from bessemer.recipe import Source

HEAD_BYTES = 64 << 10  # the beginning of a file that is looked at
SAMPLED = 50  # records of it that are looked at
READ_CHARACTERS = 1 << 20
TABLE_ENDINGS = (".csv", ".tsv")
NO_JSON = (ValueError, ijson.JSONError)
MAX_DEPTH = 200  # of values within values
MAX_NAME_CHARACTERS = 60  # a longer name of a column is taken for data, in a file that has no header
_LINE_END = re.compile(rb"\r?\n|\r")


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
        return Look("", "no_text_key", _no_column(columns, first, text_key))
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
    return first == "{" or "\n" in start[: _json(start)[1]]


def _missing(start: str, lines: list[str], values: bool, text_key: str) -> str:
    """What is there in the place of the text, when no record at the beginning has it."""
    if values:
        records, stream = list[dict[str, Any]](), Utf8Stream(io.StringIO(start))
        with contextlib.suppress(*NO_JSON):  # where the beginning ends
            records += (value for value in itertools.islice(json_values(stream), SAMPLED) if isinstance(value, dict))
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


def _no_column(columns: list[str], first: list[str], text_key: str) -> str:
    """That a table has no column of the text, and what to do: name another, or give it a header."""
    if all(column and len(column) <= MAX_NAME_CHARACTERS and not NUMBER.fullmatch(column) for column in columns):
        row = dict(itertools.zip_longest(columns, first[: len(columns)], fillvalue=""))
        return f"a table with {no_text('column', text_key, row)}"
    return "a table without a header: its first line looks like data; put the names of its columns there"


def read(file: BinaryIO, layout: str, source: Source) -> Iterator[Record]:
    """The records of a whole file; their keys are their numbers in brackets, from 1. OSError when it cannot be read."""
    head = file.read(HEAD_BYTES)
    encoding = _encoding(head)
    if source.encoding and encoding.startswith("utf-8") and not _is_utf8(file):
        encoding = source.encoding
    file.seek(0)
    if layout == "csv":
        # A byte that cannot be decoded becomes half of a surrogate pair, which costs the record it is in.
        errors = "replace" if encoding.startswith(("utf-16", "utf-32")) else "surrogateescape"
        ends = _LINE_END.search(head.replace(b"\0", b""))
        text = io.TextIOWrapper(file, encoding, errors, newline="" if ends is None else ends[0].decode()[-1])
        records = _table(text, source)
    else:
        is_clean = encoding.startswith("utf-8") and _is_utf8(file)
        file.seek(0)
        text = io.TextIOWrapper(file, encoding, "replace")
        records = _values(text, is_clean, source)
    try:
        yield from records
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


class Utf8Stream:
    """A text as bytes for ijson. num_waiting: bytes read since the last record."""

    def __init__(self, text: io.TextIOBase) -> None:
        self.text, self.num_waiting = text, 0

    def read(self, size: int) -> bytes:
        """Read on. Raises ValueError for a record that is too long."""
        if self.num_waiting > MAX_RECORD_BYTES:
            raise ValueError(f"a record of more than {MAX_RECORD_BYTES} bytes")
        block = self.text.read(size).encode()
        self.num_waiting += len(block)
        return block


def json_values(stream: Utf8Stream) -> Iterator[object]:
    """The elements of top-level arrays, and other top-level values. Raises NO_JSON."""
    builder, depth, in_array = ijson.ObjectBuilder(), 0, False
    for event, value in ijson.basic_parse(stream, multiple_values=True):
        if depth == 0 and event in ("start_array", "end_array") and in_array == (event == "end_array"):
            in_array = not in_array
            continue
        depth += event.startswith("start_") - event.startswith("end_")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        builder.event(event, float(value) if isinstance(value, Decimal) else value)
        if depth == 0:
            stream.num_waiting = 0
            yield builder.value
            builder = ijson.ObjectBuilder()


def _values(text: io.TextIOBase, is_clean: bool, source: Source) -> Iterator[Record]:
    """The values of a file of JSON; with `is_clean` a replacement character is its own. Damage costs what is behind it."""
    stream, number = Utf8Stream(text), 0
    try:
        for number, value in enumerate(json_values(stream), start=1):
            shown = json.dumps(value, ensure_ascii=False)
            size = len(shown.encode("utf-8", "surrogatepass"))
            if "\ufffd" in shown and not is_clean:
                detail = f"a byte that is not {source.encoding or 'utf-8'}"
                yield Record(f"[{number}]", size, shown[:4000], "not_utf8", detail)
            else:
                yield record_of(value, f"[{number}]", size, shown, {"item": number}, source)
    except NO_JSON as error:
        what = " ".join(str(error).split())[:200]
        detail = f"not JSON: {what}; what follows record {number} of the file was not read"
        yield Record(f"[{number + 1}]", stream.num_waiting, reason="bad_record", detail=detail)
