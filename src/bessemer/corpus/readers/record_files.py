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

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import HEAD_BYTES
from bessemer.corpus.readers.delimited import delimiter_of, recognise, rows
from bessemer.corpus.readers.encodings import detected, foreign_format, is_utf8, unicode_of
from bessemer.corpus.readers.records import MAX_RECORD_BYTES, field_in, named, no_text, record_of
from bessemer.recipe import Source

SAMPLED = 50  # records of it that are looked at
READ_CHARACTERS = 1 << 20
TABLE_ENDINGS = (".csv", ".tsv")
NO_JSON = (ValueError, ijson.JSONError)
MAX_DEPTH = 200  # of values within values
_LINE_END = re.compile(rb"\r?\n|\r")


@dataclass(frozen=True)
class Look:
    """What the beginning of a file shows."""

    layout: str  # "lines" of JSON; "values": an array, or JSON values one after the other; "csv"; "" for an empty file
    reason: str = ""  # why the file cannot be read: a key of reasons.REASONS; "" when it can
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
    columns = _columns(lines, name)
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
        return Look("", "no_text_key", f"a table with {no_text('column', text_key, columns)}")
    return Look("", "wrong_format", f"not JSON: it begins with {start[:40]!r}")


def _encoding(head: bytes, other: str = "") -> str:
    """The encoding of a file by its beginning; `other` where that is not UTF-8. The decoder takes a byte order mark
    away."""
    name, mark = unicode_of(head)
    if name and name != "utf-8":
        return name.rpartition("-")[0] if mark else name
    return other if other and not is_utf8(head) else "utf-8-sig"


def _objects(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of a sample that are JSON objects."""
    for line in lines[:SAMPLED]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def _is_pretty(start: str) -> bool:
    """Whether a JSON object takes several lines."""
    try:
        return start.partition("\n")[0].strip() == "{" or "\n" in start[: json.JSONDecoder().raw_decode(start)[1]]
    except (ValueError, RecursionError):
        return False


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
    return no_text("field", text_key, named(records[0]))


def _columns(lines: list[str], name: str) -> list[str]:
    """The header of a table; none when the lines are no table."""
    if not lines:
        return []
    delimiter = delimiter_of(lines[0])
    named = name.lower().endswith(TABLE_ENDINGS)
    if not named and (len(lines) < 2 or not lines[0].count(delimiter) == lines[1].count(delimiter) > 0):
        return []
    try:
        return [column.strip() for column in next(csv.reader(lines, delimiter=delimiter), [])]
    except csv.Error:
        return []


def read(file: BinaryIO, layout: str, source: Source) -> Iterator[Document]:
    """The records of a whole file; their keys are their numbers in brackets, from 1. OSError when it cannot be read.

    A byte that cannot be decoded costs the record that it is in.
    """
    head = file.read(HEAD_BYTES)
    encoding, undecodable, line_end = _encoding(head), "", None
    if encoding.startswith("utf-8") and not _is_utf8(file):
        likely = "" if source.encoding else detected(head)
        encoding = source.encoding or encoding
        undecodable = f"a byte that is not {encoding}" + (f"; probably {likely}" if likely else "")
    if layout == "csv":
        ends = _LINE_END.search(head.replace(b"\0", b""))
        line_end = "" if ends is None else ends[0].decode()[-1]
    file.seek(0)
    text = io.TextIOWrapper(file, encoding, "replace", newline=line_end)
    try:
        records = _rows(text) if layout == "csv" else _values(text)
        for number, (shown, value, problem) in enumerate(records, start=1):
            key, size = f"[{number}]", len(shown.encode("utf-8", "surrogatepass"))
            if problem:
                yield Document(key, size, shown[:4000], "bad_record", problem[:300])
            elif undecodable and "\ufffd" in shown:
                yield Document(key, size, shown[:4000], "not_utf8", undecodable)
            else:
                yield record_of(value, key, size, shown, {"item": number}, source)
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


def _rows(text: io.TextIOBase) -> Iterator[tuple[str, object, str]]:
    """The rows of a table: source text, fields by their names, problem."""
    table = recognise(text)
    for source, fields, problem in rows(text, table):
        yield source, dict(zip(table.columns, fields, strict=not problem)), problem


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


def _values(text: io.TextIOBase) -> Iterator[tuple[str, object, str]]:
    """The values of a file of JSON, as text and as they are; damage, which costs what is behind it, as a problem."""
    stream, number = Utf8Stream(text), 0
    try:
        for value in json_values(stream):
            number += 1
            yield json.dumps(value, ensure_ascii=False), value, ""
    except NO_JSON as error:
        what = " ".join(str(error).split())[:200]
        yield "", None, f"not JSON: {what}; what follows record {number} of the file was not read"
