"""Rows of CSV and TSV by Python's `csv` in strict mode. A malformed row never affects the lines after it.

Tables follow RFC 4180. In a TSV without quotes in its header, a quotation mark is text unless its field needs quotes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

MAX_LINE_CHARACTERS = 64 << 20
GLUED_SHARE = 0.8  # if this share of a row's lines are rows themselves, a stray quotation mark joined them
DELIMITERS = "\t,;|"  # in order of preference, because names may contain commas
NUMBER = re.compile(r"[-+]?[\d.,:%e/-]{1,40}", re.IGNORECASE)
NO_DELIMITER = "\x1f"  # for a table of one column, in which commas are text


class _TableLines:
    """An iterator over the lines of a table. `again` holds lines to read again, and `taken` the lines of the current row."""

    def __init__(self, text: TextIO) -> None:
        self.text, self.again, self.taken = text, list[str](), list[str]()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.again.pop() if self.again else self.text.readline(MAX_LINE_CHARACTERS)
        if not line:
            raise StopIteration
        if len(line) == MAX_LINE_CHARACTERS:
            raise ValueError(f"a line of more than {MAX_LINE_CHARACTERS} characters")
        self.taken.append(line)
        return line


def header(lines: Iterable[str]) -> tuple[list[str], str, bool]:
    """Return (names of the columns, delimiter, is_plain) from the first line of a table that is not blank.

    `is_plain` is True for a TSV whose header has no quotes, in which a quotation mark may be text.
    """
    line = next((line for line in lines if line.strip()), "")
    commonest = max(DELIMITERS, key=line.count)
    delimiter = commonest if commonest in line else NO_DELIMITER
    columns = [name.strip() for name in next(csv.reader([line], delimiter=delimiter), [])]
    return columns, delimiter, delimiter == "\t" and not line.startswith('"')


def rows(text: TextIO) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield (text of the row, {column: field}, problem) for each row below the header.

    `problem` describes why a row is invalid; it is "" for a valid one. Raises ValueError for a line that is too long.
    """
    csv.field_size_limit(MAX_LINE_CHARACTERS)
    lines = _TableLines(text)
    names, delimiter, is_plain = header(lines)
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    columns = [f"{name}.{count}" if count else name for name, count in zip(names, earlier, strict=True)]
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.taken, fields, problem = [], list[str](), ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"not CSV: {error}"
        taken = lines.taken
        if not problem and len(fields) != len(columns):
            problem = f"{len(fields)} fields, where the header has {len(columns)}"
        elif not problem and _are_rows(taken, fields, delimiter):
            problem = f"a quotation mark that joins {len(taken)} lines which are rows"
        if problem:
            lines.again += reversed(taken[1:])
            del taken[1:]
        first = taken[0].rstrip("\r\n").split(delimiter)
        if is_plain and len(first) == len(columns) and (problem or (len(taken) == 1 and '""' not in taken[0])):
            fields, problem = first, ""
        source = "".join(taken)
        if source.strip("\r\n"):
            yield source, dict(zip(columns, fields, strict=not problem)), problem


def _are_rows(lines: list[str], fields: list[str], delimiter: str) -> bool:
    """Return True if a quotation mark joined several rows of a table into one.

    `fields` are those of the joined row, and `lines` its lines. They count as rows if most have equally many fields, with
    numbers in the same columns.
    """
    numeric = [at for at, value in enumerate(fields) if NUMBER.fullmatch(value.strip())]
    # CSV fields may contain line breaks, so lines of text alone prove little.
    if len(fields) == 1 or len(lines) < (2 if numeric or delimiter == "\t" else 5):
        return False
    split = [line.rstrip("\r\n").split(delimiter) for line in lines]
    num_rows = sum(
        len(parts) == len(fields) and all(NUMBER.fullmatch(parts[at].strip()) for at in numeric) for parts in split
    )
    return num_rows >= GLUED_SHARE * len(lines)
