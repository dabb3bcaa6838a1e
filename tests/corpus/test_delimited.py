"""CSV and TSV: every row is kept as its writer meant it, or rejected by name, and costs no other row."""

import csv
import io
import json
import random
from pathlib import Path

import pytest

from bessemer.corpus.document import Document
from bessemer.corpus.readers import delimited, record_files
from bessemer.recipe import Source
from tests.corpus.corpus_samples import prose, recipe

NO_DEDUP = "exact = false\nminhash = false"


def line(number: int) -> str:
    return prose(number, 40).replace("\n", " ")


def read(content: str | bytes) -> list[Document]:
    raw = io.BytesIO(content.encode() if isinstance(content, str) else content)
    return [*record_files.read(io.BufferedReader(raw), "csv", Source(name="s", paths=("a",)))]


def texts(found: list[Document]) -> list[str]:
    return [record.text for record in found if record.reason is None]


def problems(found: list[Document]) -> list[tuple[str, str | None]]:
    return [(record.key, record.reason) for record in found if record.reason is not None]


def table(delimiter: str, rows: dict[int, str], num_rows: int = 10) -> str:
    """A table of a number and a text, with some rows as given."""
    made = [f"{number}{delimiter}{rows.get(number, line(number))}" for number in range(num_rows)]
    return "\n".join([f"id{delimiter}text", *made]) + "\n"


MARKS = {
    "one opens": {3: f'"{line(3)}'},
    "one opens, one closes": {3: f'"{line(3)}', 7: f'{line(7)}"'},
    "two open": {3: f'"{line(3)}', 6: f'"{line(6)}'},
    "a saying": {3: f'"{line(3)}," he said. "{line(4)}"'},
    "inches": {3: f'"{line(3)}', 5: f'{line(5)} 5"'},
}


@pytest.mark.parametrize("name", MARKS)
def test_a_quotation_mark_is_text_in_a_tsv_that_does_not_quote(name: str) -> None:
    found = read(table("\t", MARKS[name]))
    assert texts(found) == [MARKS[name].get(number, line(number)) for number in range(10)]


@pytest.mark.parametrize("name", MARKS)
def test_a_quotation_mark_that_does_not_close_costs_its_row_of_a_csv(name: str) -> None:
    found = read(table(",", MARKS[name]))
    rejected = [number for number, text in MARKS[name].items() if text.startswith('"')]
    assert problems(found) == [(f"[{number + 1}]", "bad_record") for number in rejected]
    assert texts(found) == [MARKS[name].get(number, line(number)) for number in range(10) if number not in rejected]


@pytest.mark.parametrize("quoted", [3, 8])
def test_a_damaged_row_of_a_quoted_csv_costs_itself(quoted: int) -> None:
    rows = {number: f'"{line(number)}, ""and""\nmore, of it"' for number in range(0, 10, 2)}
    rows[quoted] = f'"{line(quoted)}, and no end'
    found = read(table(",", rows))
    assert problems(found) == [(f"[{quoted + 1}]", "bad_record")]
    whole = [f'{line(number)}, "and"\nmore, of it' if number in rows else line(number) for number in range(10)]
    assert texts(found) == whole[:quoted] + whole[quoted + 1 :]


@pytest.mark.parametrize("num_poems", [1, 40])
def test_lines_within_quotes_belong_to_the_text_of_a_csv_of_words(num_poems: int) -> None:
    """Each line of the only quoted fields has as many separators as a row."""
    poems = [f"An old pond {number}\na frog jumps in, the sound\nof water, again" for number in range(num_poems)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [
            ("title", "text"),
            *((f"Note {one % 7}a", line(one)) for one in range(30)),
            *(("Poem", poem) for poem in poems),
        ]
    )
    found = read(out.getvalue())
    assert not problems(found) and texts(found) == [*map(line, range(30)), *poems]


BAD_ROWS = {
    "more fields": "3,a comma, that is not quoted",
    "fewer fields": "3",
    "a mark that closes early": '3,"He said "yes" to it"',
    "more fields behind a quoted one": '3,"a text, quoted",x',
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("delimiter", [",", ";", "|"])
def test_a_row_that_does_not_fit_is_rejected_by_its_number(name: str, delimiter: str) -> None:
    lines = table(",", {}).splitlines()
    lines[4] = BAD_ROWS[name]
    found = read("\n".join(lines).replace(",", delimiter))
    assert texts(found) == [line(number) for number in range(10) if number != 3]
    assert problems(found) == [("[4]", "bad_record")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("is_escaped", [False, True], ids=["doubled", "escaped"])
def test_a_table_gives_what_its_writer_was_given(delimiter: str, quoting: int, line_end: str, is_escaped: bool) -> None:
    """What Python's writer makes of texts with marks, separators, lines and backslashes."""
    draw = random.Random(1)
    words = ["word", "and,", "of;", '"quoted"', '5"', "a\tb", "C:\\new" if not is_escaped else "x", "a|b", "end."]
    if line_end != "\r":
        words.append("line\n")
    rows = [[number, " ".join(draw.choices(words, k=draw.randint(1, 20))), "web"] for number in range(60)]
    made = io.StringIO()
    escapes = {"doublequote": False, "escapechar": "\\"} if is_escaped else {}
    writer = csv.writer(made, delimiter=delimiter, quoting=quoting, lineterminator=line_end, **escapes)
    writer.writerows([["id", "text", "from"], *rows])
    found = read("\ufeff" + made.getvalue())
    assert problems(found) == []
    assert texts(found) == [row[1] for row in rows]
    assert [record.metadata["id"] for record in found] == [str(number) for number in range(60)]
    rest = made.getvalue().partition(line_end)[2]
    assert sum(record.num_bytes for record in found) == len(rest)


def test_backslashes_that_escape_nothing_stay() -> None:
    rows = {1: r'"the \"C:\new\" folder, of \\server"', 2: r'"a \"b\", c"'}
    assert texts(read(table(",", rows, 3)))[1:] == [r'the "C:\new" folder, of \\server', 'a "b", c']


def test_commas_of_a_table_with_one_column_are_text() -> None:
    found = read('text\nA text, with commas\n"Another, ""quoted"""\n\n"on two\nlines"\n')
    assert texts(found) == ["A text, with commas", 'Another, "quoted"', "on two\nlines"]


def test_columns_of_one_name(data: Path) -> None:
    (found,) = read("text,note,note\na,b,c\n")
    assert (found.text, found.metadata["note"], found.metadata["note.1"]) == ("a", "b", "c")
    look = record_files.look(b"text,text\na,b\n", True, "a.csv", "text")
    assert look.reason == "no_text_key"


def test_a_line_over_the_limit_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_LINE_CHARACTERS", 100)
    monkeypatch.setattr(delimited, "READ_CHARACTERS", 10)
    rows = {0: "a", 1: "x" * 500, 2: '"' + "y" * 40 + '\n"', 3: '"' + "w\n" * 80, 4: "b"}
    found = read(table(",", rows, 5))
    assert texts(found) == ["a", "y" * 40 + "\n", "b"]
    assert {reason for _, reason in problems(found)} == {"bad_record"}


def test_a_text_of_many_lines_is_one_row() -> None:
    """Lines with as many commas as a row has, in a table that quotes."""
    verse = "\n".join(f"line {number}, of it" for number in range(40))
    rows = {number: f'"{line(number)}, quoted"' for number in range(4)} | {2: f'"{verse}"'}
    assert texts(read(table(",", rows, 4)))[2] == verse


def test_every_byte_of_a_damaged_table_is_in_a_row(data: Path, build) -> None:
    draw = random.Random(2)
    for _ in range(20):
        raw = bytearray(table(draw.choice(",\t"), {n: f'"{line(n)}, ""x""\nb"' for n in range(0, 10, 3)}).encode())
        for _ in range(5):
            raw[draw.randrange(9, len(raw))] = ord(draw.choice('",\t\n\\'))
        assert sum(record.num_bytes for record in read(bytes(raw))) >= len(raw) - 9 - raw.count(b"\n\n") * 2
    (data / "a.tsv").write_text(table("\t", MARKS["two open"]))
    documents, rejected, _ = build(recipe({"name": "s", "paths": [str(data)]}, dedup=NO_DEDUP))
    assert (len(documents), rejected) == (10, [])
    assert {json.loads(row["metadata"])["id"] for row in documents} == {str(number) for number in range(10)}
