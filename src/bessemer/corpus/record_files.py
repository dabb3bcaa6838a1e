"""Files of records that are not lines of JSON: JSON arrays, pretty-printed JSON, JSON in UTF-16, CSV. What a file is,
its beginning tells; its records are read one by one, in the memory of one."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from bessemer.corpus.document import Record
from bessemer.corpus.first_bytes import bom_of, foreign_format
from bessemer.corpus.tables import MAX_RECORD_BYTES, no_text, record_of

HEAD_BYTES = 64 << 10
"""The beginning of a file that is looked at."""

SAMPLED = 50
"""Records of it that are looked at."""

READ_CHARACTERS = 1 << 20
DELIMITERS = ",\t;|"
TABLE_ENDINGS = (".csv", ".tsv")

_SKIPPED = re.compile(r"[\s,]*")
_NEXT_OBJECT = re.compile(r"\n\{")


@dataclass(frozen=True)
class Look:
    """What the beginning of a file shows."""

    layout: str
    """"lines" of JSON; "values": an array, or JSON values one after the other; "csv"; "" for an empty file."""
    reason: str = ""
    """Why the file cannot be read: a key of document.REASONS; "" when it can."""
    detail: str = ""
    missing: str = ""
    """Which fields there are, when none of the records at the beginning has the one that should hold the text."""


def look(head: bytes, is_whole: bool, name: str, text_key: str) -> Look:
    """Judge a file by its beginning; `name` is that of the uncompressed file, `is_whole` whether `head` is all of it."""
    if not head.strip():
        return Look("")
    if foreign := foreign_format(head):
        return Look("", "wrong_format", foreign)
    encoding = _encoding(head)
    text = head.decode(encoding, "replace")
    start = text.lstrip()
    if (nul := text.find("\0")) >= 0:
        return Look("", "wrong_format", f"binary data, not JSON: a NUL at character {nul}")
    lines = [line for line in (text.split("\n") if is_whole else text.split("\n")[:-1] or [text]) if line.strip()]
    if start[:1] in "{[" and not name.lower().endswith(TABLE_ENDINGS):
        values = start[0] == "[" or not encoding.startswith("utf-8") or _is_pretty(start)
        return Look("values" if values else "lines", missing=_missing(start, lines, values, text_key))
    if any(line.lstrip().startswith("{") for line in lines[:SAMPLED]):
        return Look("lines")
    columns = _columns(lines, name)
    if text_key in columns:
        return Look("csv")
    if columns:
        fields = dict.fromkeys(columns, "")
        return Look("", "no_text_key", f"a table with {no_text('column', text_key, fields)}")
    return Look("", "wrong_format", f"not JSON: it begins with {start[:40]!r}")


def _encoding(head: bytes) -> str:
    if bom := bom_of(head):
        return "utf-8-sig" if bom == "utf-8" else bom.rpartition("-")[0]  # the decoder takes the mark away
    guess = json.detect_encoding(head[:4]) if len(head) >= 4 else "utf-8"
    return guess if head[:4].decode(guess, "replace").lstrip()[:1] in ("{", "[") else "utf-8"


def _is_pretty(start: str) -> bool:
    """Whether a JSON object takes several lines."""
    first = start.partition("\n")[0].strip()
    if first == "{":
        return True
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        pass
    else:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return False
    return "\n" in start[:end]


def _missing(start: str, lines: list[str], values: bool, text_key: str) -> str:
    """What is there in the place of the text, when no record at the beginning has it."""
    found: list[object] = []
    if values:
        found = [value for _, _, value, _ in _values(io.StringIO(start))][:SAMPLED]
    else:
        for line in lines[:SAMPLED]:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                continue
    records = [value for value in found if isinstance(value, dict)]
    if not records or any(text_key in record for record in records):
        return ""
    return no_text("field", text_key, records[0])


def _columns(lines: list[str], name: str) -> list[str]:
    """The header of a table; none when the lines are no table."""
    if not lines:
        return []
    delimiter = _delimiter(lines[0])
    named = name.lower().endswith(TABLE_ENDINGS)
    if not named and (len(lines) < 2 or not lines[0].count(delimiter) == lines[1].count(delimiter) > 0):
        return []
    return [column.strip() for column in next(csv.reader([lines[0]], delimiter=delimiter), [])]


def _delimiter(header: str) -> str:
    return max(DELIMITERS, key=header.count)


def read(file: BinaryIO, layout: str, text_key: str, label_key: str = "") -> Iterator[Record]:
    """The records of a whole file; their keys are their numbers in brackets, from 1. OSError when it cannot be read."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    encoding = _encoding(head)
    # A byte that cannot be decoded becomes half of a surrogate pair, which costs the record it is in (clean.check_text).
    text = io.TextIOWrapper(
        file, encoding, "surrogateescape" if encoding.startswith("utf-8") else "replace", newline=""
    )
    try:
        if layout == "csv":
            yield from _csv(text, text_key, label_key)
            return
        for number, raw, value, problem in _values(text):
            key = f"[{number}]"
            size = len(raw.encode("utf-8", "surrogateescape"))
            if problem:
                yield Record(key, size, raw[:4000], "bad_record", problem[:300])
            else:
                yield record_of(value, key, size, raw, {"item": number}, text_key, label_key)
    finally:
        text.detach()


def _csv(text: io.TextIOBase, text_key: str, label_key: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    delimiter = _delimiter(text.readline())
    text.seek(0)
    number = 0
    try:
        rows = csv.reader(text, delimiter=delimiter)
        header = [column.strip() for column in next(rows)]
        for number, row in enumerate(rows, start=1):
            if row:
                size = sum(len(cell.encode("utf-8", "surrogateescape")) + 1 for cell in row)
                value = dict(zip(header, row, strict=False))
                yield record_of(value, f"[{number}]", size, delimiter.join(row), {"item": number}, text_key, label_key)
    except csv.Error as error:
        yield Record(f"[{number + 1}]", 0, reason="bad_record", detail=f"not CSV from here on: {error}")


def _values(text: io.TextIOBase) -> Iterator[tuple[int, str, object, str]]:
    """The elements of top-level arrays and the values beside them: number, source text, value, or what is wrong.

    A broken value between others costs itself; a broken element of an array costs the rest of the array.
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
