"""Rows of CSV and TSV, by Python's `csv` in strict mode. A row that does not fit costs itself, never the lines after it.

Tables follow RFC 4180. Of tables separated by tabs, a quotation mark is text unless the file shows that it quotes. In all, a
backslash escapes a quotation mark where more rows fit then. The whole file decides.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from bessemer.run_tasks.task import require

MAX_LINE_CHARACTERS = 64 << 20  # a longer line is rejected unread
READ_CHARACTERS = 1 << 20
GLUED_SHARE = 0.8  # of the lines of one row that read as rows: a stray quotation mark joined them
DELIMITERS = "\t,;|"  # a tie goes to the first: names contain commas too
NUMBER = re.compile(r"[-+]?[\d.,:%e/-]{1,40}", re.IGNORECASE)
NO_DELIMITER = "\x1f"  # of a table of one column, in which commas are text
# Halves of surrogate pairs, which no decoder yields, in the place of \" and \\ while a line is parsed: csv would take every
# backslash for an escape, also that of \frac
QUOTE, BACKSLASH = "\ud800", "\ud801"
_ESCAPES = re.compile(r'\\(["\\])')
_LONE_BACKSLASH = re.compile(r'(?<!\\)(?:\\\\)*\\(?![\\"])')


class TableLines:
    """Physical lines of a text. again: lines to read once more; taken: the lines of the current row."""

    def __init__(self, text: io.TextIOBase, is_escaped: bool = False) -> None:
        text.seek(0)
        self.text, self.is_escaped, self.num_read = text, is_escaped, 0
        self.again, self.taken = list[str](), list[str]()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.again.pop() if self.again else self._read()
        self.taken.append(line)
        return line

    def _read(self) -> str:
        line = self.text.readline(MAX_LINE_CHARACTERS + 1)
        if not line:
            raise StopIteration
        self.num_read += 1
        if len(line) > MAX_LINE_CHARACTERS and line[-1] not in "\r\n":
            while (more := self.text.readline(READ_CHARACTERS)) and more[-1] not in "\r\n":
                pass
        if self.is_escaped and "\\" in line:
            line = _ESCAPES.sub(lambda found: QUOTE if found[1] == '"' else BACKSLASH, line)
        return line


@dataclass(frozen=True)
class Table:
    """How a table is written. num_proofs: rows with a field that is quoted for a reason."""

    columns: list[str]
    delimiter: str
    is_quoted: bool = True
    is_escaped: bool = False
    escaped_backslash: str = "\\"
    num_proofs: int = 0

    def reader(self, lines: TableLines) -> Iterator[list[str]]:
        """Return a parser of rows."""
        if not self.is_quoted:
            return (line.rstrip("\r\n").split(self.delimiter) for line in lines)
        return csv.reader(lines, delimiter=self.delimiter, strict=True)

    def is_glued(self, fields: list[str], lines: list[str]) -> bool:
        """Return whether the lines of a row read as rows themselves, with numbers where the row has them."""
        numeric = [at for at, value in enumerate(fields) if NUMBER.fullmatch(value.strip())]
        is_likely = (
            bool(numeric) or self.delimiter == "\t"
        )  # of a CSV, whose writers quote line ends, text alone proves little
        if (
            len(fields) == 1
            or (self.num_proofs and not is_likely)
            or len(lines) < (2 if is_likely and not self.num_proofs else 5)
        ):
            return False
        split = [line.rstrip("\r\n").split(self.delimiter) for line in lines]
        num_rows = sum(
            len(parts) == len(fields) and all(NUMBER.fullmatch(parts[at].strip()) for at in numeric) for parts in split
        )
        return num_rows >= GLUED_SHARE * len(lines)


def rows(text: io.TextIOBase, table: Table) -> Iterator[tuple[str, list[str], str]]:
    """Source text, fields and problem of each row below the header. Raises BessemerError unless each line is in one row."""
    csv.field_size_limit(MAX_LINE_CHARACTERS)
    lines, num_used, is_header = TableLines(text, table.is_escaped), 0, True
    reader = table.reader(lines)
    while True:
        lines.taken, fields, problem = [], list[str](), ""
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            problem = f"not CSV: {error}"
        taken = lines.taken
        if len(taken[-1]) > MAX_LINE_CHARACTERS:
            problem = f"a line of more than {MAX_LINE_CHARACTERS} characters"
        elif not problem and len(fields) != len(table.columns):
            problem = f"{len(fields)} fields, where the header has {len(table.columns)}"
        if len(taken) > 1 and (problem or table.is_glued(fields, taken)):
            problem = problem or f"a quotation mark that joins {len(taken)} lines which are rows"
            lines.again += reversed(taken[1:])
            del taken[1:]
        num_used += len(taken)
        source = "".join(taken)
        if table.is_escaped:
            fields = [value.replace(QUOTE, '"').replace(BACKSLASH, table.escaped_backslash) for value in fields]
            source = source.replace(QUOTE, '\\"').replace(BACKSLASH, "\\\\")
        if source.strip("\r\n"):
            if not is_header:
                yield source, fields, problem
            is_header = False
    require(lines.num_read == num_used, f"{lines.num_read} lines of a table were read, but {num_used} are in rows")


def delimiter_of(header: str) -> str:
    """Return what separates the columns, by their names."""
    commonest = max(DELIMITERS, key=header.count)
    return commonest if commonest in header else NO_DELIMITER


def recognise(text: io.TextIOBase) -> Table:
    """Find out how the table in a text is written, by all of its rows."""
    header = next((line for line in TableLines(text) if line.strip("\r\n")), "")
    delimiter = delimiter_of(header)
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    columns = [f"{name}.{count}" if count else name for name, count in zip(names, earlier, strict=True)]
    table = Table(columns, delimiter)
    text.seek(0)
    blocks = iter(partial(text.read, READ_CHARACTERS), "")
    marks = {mark for block in blocks for mark in ('"', '\\"') if mark in block}
    if not marks:
        return replace(table, is_quoted=False)
    num_proofs, may_be_text = int(header.startswith('"')), delimiter in ("\t", NO_DELIMITER)
    for source, fields, problem in rows(text, table):
        if num_proofs and not may_be_text:
            break
        num_proofs += not problem and '"' in source and any(_is_proof(value, source, delimiter) for value in fields)
    table = replace(table, num_proofs=num_proofs)
    candidates = [table]
    if len(marks) > 1:
        is_doubled = not any(_LONE_BACKSLASH.search(line) for line in TableLines(text))
        candidates.append(replace(table, is_escaped=True, escaped_backslash="\\" if is_doubled else "\\\\"))
    if may_be_text:
        is_last = delimiter != "\t" or num_proofs > 0
        candidates.insert(len(candidates) * is_last, replace(table, is_quoted=False))

    def num_against(candidate: Table) -> int:
        problems = sum(bool(problem) for *_, problem in rows(text, candidate))
        return problems if candidate.is_quoted else problems + num_proofs

    return min(candidates, key=num_against) if len(candidates) > 1 else table


def _is_proof(value: str, source: str, delimiter: str) -> bool:
    """Return whether a field is quoted for a mark or separator in it; not for a line end, which a stray mark may have joined."""
    quoted = '"' + value.replace('"', '""') + '"'
    return "\n" not in value and (delimiter in value or '"' in value) and quoted in source
