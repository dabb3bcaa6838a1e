"""Rows of CSV and TSV, line by line. A row that does not fit costs itself, never the lines after it.

Tables follow RFC 4180. Of tables separated by tabs, a quotation mark is text unless the file shows that it quotes. In all, a
backslash before a quotation mark escapes it where more rows fit then. The whole file decides.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from bessemer.corpus.engine import require

MAX_LINE_CHARACTERS = 64 << 20  # a longer line is rejected unread
READ_CHARACTERS = 1 << 20
NUMERIC_SHARE = 0.9  # of the values of a column of numbers
GLUED_SHARE = 0.8  # of the lines of one row that read as rows: a stray quotation mark joined them
DELIMITERS = "\t,;|"  # a tie goes to the first: names contain commas too
NUMBER = re.compile(r"[-+]?[\d.,:%e/-]{1,40}", re.IGNORECASE)
NO_DELIMITER = "\x1f"  # of a table of one column, in which commas are text
# Halves of surrogate pairs, which no decoder yields, in the place of \" and \\ while a line is parsed
QUOTE, BACKSLASH = "\ud800", "\ud801"
_ESCAPES = re.compile(r'\\(["\\])')
_LONE_BACKSLASH = re.compile(r'(?<!\\)(?:\\\\)*\\(?![\\"])')


class TableLines:
    """Lines of a text, some of which can be given back."""

    def __init__(self, text: io.TextIOBase, is_escaped: bool) -> None:
        text.seek(0)
        self.text, self.is_escaped, self.num_read, self.given_back = text, is_escaped, 0, list[str]()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.given_back:
            return self.given_back.pop()
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
    """How a table is written. numeric: the columns of numbers; num_proofs: rows with a field that is quoted for a reason."""

    columns: list[str]
    delimiter: str
    is_quoted: bool = True
    is_escaped: bool = False
    doubles_backslashes: bool = False
    num_proofs: int = 0
    numeric: tuple[int, ...] = ()

    def is_row(self, line: str, unsure: bool) -> bool:
        """Return whether a line reads as a row of its own; unsure: the answer where neither separators nor numbers show it."""
        fields = line.rstrip("\r\n").split(self.delimiter)
        if len(fields) != len(self.columns):
            before, quote, _ = line.partition('"')
            fields = before.split(self.delimiter)
            if not quote or fields.pop() or len(fields) >= len(self.columns):
                return False
            if all(column >= len(fields) for column in self.numeric):
                return unsure
        return all(NUMBER.fullmatch(fields[column].strip()) for column in self.numeric if column < len(fields))

    def is_glued(self, lines: list[str]) -> bool:
        """Return whether the lines of a row are rows themselves."""
        is_proven = self.num_proofs > 0 or any('""' in line for line in lines)
        is_trusted = is_proven and not self.numeric and self.delimiter != "\t"
        if len(self.columns) == 1 or is_trusted or len(lines) < (5 if is_proven else 2):
            return False
        return sum(self.is_row(line, unsure=False) for line in lines) >= GLUED_SHARE * len(lines)


def rows(text: io.TextIOBase, table: Table) -> Iterator[tuple[str, list[str], str]]:
    """Source text, fields and problem of each row below the header. Raises BessemerError unless each line is in one row."""
    lines, num_used, is_header = TableLines(text, table.is_escaped), 0, True
    csv.field_size_limit(MAX_LINE_CHARACTERS)

    def noted() -> Iterator[str]:
        yield line
        for more in lines:
            taken.append(more)
            yield more

    for line in lines:
        fields, problem, taken = list[str](), "", [line]
        if len(line) > MAX_LINE_CHARACTERS:
            problem = f"a line of more than {MAX_LINE_CHARACTERS} characters"
        elif not table.is_quoted or '"' not in line:
            fields = line.rstrip("\r\n").split(table.delimiter)
        else:
            try:
                fields = next(csv.reader(noted(), delimiter=table.delimiter, strict=True))
            except csv.Error as error:
                problem = f"not CSV: {error}"
        if not problem and len(fields) != len(table.columns):
            problem = f"{len(fields)} fields, where the header has {len(table.columns)}"
        if len(taken) > 1 and (problem or table.is_glued(taken)):
            problem = problem or f"a quotation mark that joins {len(taken)} lines which are rows"
            end = next((at for at in range(1, len(taken)) if table.is_row(taken[at], unsure=True)), len(taken))
            lines.given_back += reversed(taken[end:])
            del taken[end:]
        num_used += len(taken)
        source = "".join(taken)
        if table.is_escaped:
            single = "\\" if table.doubles_backslashes else "\\\\"
            fields = [value.replace(QUOTE, '"').replace(BACKSLASH, single) for value in fields]
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
    header = next((line for line in TableLines(text, False) if line.strip("\r\n")), "")
    delimiter = delimiter_of(header)
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    earlier = [names[:at].count(name) for at, name in enumerate(names)]
    columns = [f"{name}.{count}" if count else name for name, count in zip(names, earlier, strict=True)]
    table = Table(columns, delimiter, num_proofs=int(header.startswith('"')))
    text.seek(0)
    if not any('"' in block for block in iter(partial(text.read, READ_CHARACTERS), "")):
        return replace(table, is_quoted=False)
    numbers, num_rows, num_proofs, has_escapes, is_doubled = Counter[int](), 0, table.num_proofs, False, True
    for source, fields, problem in rows(text, table):
        if "\\" in source:
            has_escapes, is_doubled = has_escapes or '\\"' in source, is_doubled and not _LONE_BACKSLASH.search(source)
        if not problem:
            num_rows += 1
            numbers.update(at for at, value in enumerate(fields) if NUMBER.fullmatch(value.strip()))
            num_proofs += '"' in source and any(_is_proof(value, source, delimiter) for value in fields)
    numeric = tuple(column for column, count in numbers.items() if count >= NUMERIC_SHARE * num_rows)
    table = replace(table, num_proofs=num_proofs, numeric=numeric)
    candidates = [table]
    if has_escapes:
        candidates.append(replace(table, is_escaped=True, doubles_backslashes=is_doubled))
    if delimiter in ("\t", NO_DELIMITER):
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
