"""CSV and TSV: every row is kept as written or rejected by number, and affects no other row."""

import csv
import io
import random

import pytest

from bessemer.corpus.readers import delimited
from bessemer.corpus.readers.formats.jsonl import inspect_head
from bessemer.recipe import Source
from tests.corpus.corpus_samples import prose

Row = tuple[str, dict[str, str], str]


def line(number: int) -> str:
    return prose(number, 40).replace("\n", " ")


def read(content: str) -> list[Row]:
    return [*delimited.rows(io.StringIO(content, newline=""))]


def texts(found: list[Row]) -> list[str]:
    return [fields["text"] for _, fields, problem in found if not problem]


def problems(found: list[Row]) -> list[int]:
    """Return the numbers of the rejected rows, from 0."""
    return [number for number, (*_, problem) in enumerate(found) if problem]


def table(delimiter: str, rows: dict[int, str], num_rows: int = 10) -> str:
    """Return a table of a number and a text, with some rows replaced."""
    made = [f"{number}{delimiter}{rows.get(number, line(number))}" for number in range(num_rows)]
    return "\n".join([f"id{delimiter}text", *made]) + "\n"


MARKS = {
    "one opens": {3: f'"{line(3)}'},
    "one opens, one closes": {3: f'"{line(3)}', 7: f'{line(7)}"'},
    "two open": {3: f'"{line(3)}', 6: f'"{line(6)}'},
    "a saying": {3: f'"{line(3)}," he said. "{line(4)}"'},
    "inches": {3: f'"{line(3)}', 5: f'{line(5)} 5"'},
}


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("name", MARKS)
def test_an_unclosed_quotation_mark_rejects_only_its_row_of_a_csv_and_none_of_a_tsv(name: str, delimiter: str) -> None:
    found = read(table(delimiter, MARKS[name]))
    rejected = [number for number, text in MARKS[name].items() if text.startswith('"') and delimiter == ","]
    assert problems(found) == rejected
    assert texts(found) == [MARKS[name].get(number, line(number)) for number in range(10) if number not in rejected]


@pytest.mark.parametrize("quoted", [3, 8])
def test_a_damaged_row_of_a_quoted_csv_rejects_only_itself(quoted: int) -> None:
    rows = {number: f'"{line(number)}, ""and""\nmore, of it"' for number in range(0, 10, 2)}
    rows[quoted] = f'"{line(quoted)}, and no end'
    found = read(table(",", rows))
    assert problems(found) == [quoted]
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
    assert problems(found) == [3]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_written_tables_read_back_unchanged(delimiter: str, quoting: int, line_end: str) -> None:
    """Read what Python's writer makes of texts with quotation marks, separators, line breaks and backslashes."""
    draw = random.Random(1)
    words = ["word", "and,", "of;", '"quoted"', '5"', "a\tb", "C:\\new", "a|b", "end."]
    if line_end != "\r":
        words.append("line\n")
    rows = [[str(number), " ".join(draw.choices(words, k=draw.randint(1, 20))), "web"] for number in range(60)]
    made = io.StringIO()
    csv.writer(made, delimiter=delimiter, quoting=quoting, lineterminator=line_end).writerows(
        [["id", "text", "from"], *rows]
    )
    found = read(made.getvalue())
    assert problems(found) == []
    assert [[*fields.values()] for _, fields, _ in found] == rows
    assert "".join(source for source, *_ in found) == made.getvalue().partition(line_end)[2]


def test_quotation_marks_escaped_by_backslashes_are_not_csv() -> None:
    rows = {1: r'"the \"C:\new\" folder"', 2: r'"a \"b\", c"', 3: r'"ends so \""'}
    found = read(table(",", rows))
    assert problems(found) == [1, 2, 3]
    assert texts(found) == [line(number) for number in range(10) if number not in rows]


def test_commas_of_a_table_with_one_column_are_text() -> None:
    found = read('text\nA text, with commas\n"Another, ""quoted"""\n\n"on two\nlines"\n')
    assert texts(found) == ["A text, with commas", 'Another, "quoted"', "on two\nlines"]


def test_columns_with_the_same_name() -> None:
    ((_, fields, _),) = read("text,note,note\na,b,c\n")
    assert fields == {"text": "a", "note": "b", "note.1": "c"}
    assert inspect_head(b"text,text\na,b\n", "a.csv", Source(name="s", paths=("a",))).reason == "no_text_key"


def test_a_line_over_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_LINE_CHARACTERS", 100)
    rows = {0: "a", 1: '"' + "y" * 40 + '\n"', 2: '"' + "w\n" * 80, 3: "x" * 500}
    found = delimited.rows(io.StringIO(table(",", rows, 5)))
    assert texts([next(found), next(found)]) == ["a", "y" * 40 + "\n"]
    with pytest.raises(ValueError):
        list(found)


def test_every_byte_of_a_damaged_table_is_in_a_row() -> None:
    draw = random.Random(2)
    for _ in range(20):
        raw = [*table(draw.choice(",\t"), {n: f'"{line(n)}, ""x""\nb"' for n in range(0, 10, 3)})]
        for _ in range(5):
            raw[draw.randrange(9, len(raw))] = draw.choice('",\t\n\\')
        lines = "".join(raw).splitlines(keepends=True)
        assert "".join(source for source, *_ in read("".join(lines))) == "".join(
            one for one in lines[1:] if one != "\n"
        )
