import random
import re
import unicodedata
from collections import Counter

import pytest

from bessemer.common.errors import NotText
from bessemer.corpus.readers.formats.descriptions import description, topics
from bessemer.text import normalise
from tests.costs import no_quadratic_pass


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\ufeffa\r\nb\rc", "a\nb\nc"), ("a\x00\x07b\tc\x7f", "ab\tc"), ("é\x00\x85\ufeffx", "é\nx"),
        ("1\x0b2\x0c3\x1c4\x1d5\x1e6\x857", "1\n2\n3\n4\n5\n6\n7"),
        ("don\x92t \x93say\x94 \x96 it\x85 \x80 5\x81", "don’t “say” – it… € 5"), ("a  \n\tb\t\n", "a\n\tb"),
        ("\n\n    def f():\n        pass\n\n", "    def f():\n        pass"), ("e\u0301", "é"),
    ],
)  # fmt: skip
def test_normalise(raw: str, clean: str) -> None:
    assert normalise.normalise(raw) == clean
    assert normalise.normalise(clean) == clean


def test_replaced_control_characters_are_counted() -> None:
    counts = Counter[str]()
    normalise.normalise("a\x0bb\x1fc\x07\x00", counts)
    normalise.normalise("é don\x92t\x85\x81", counts)
    assert counts == {"separators": 2, "Windows-1252": 2, "removed": 3}


def test_runs_of_combining_marks_are_rejected_quickly() -> None:
    with no_quadratic_pass(), pytest.raises(NotText, match="combining"):
        normalise.normalise("a" + "\u0301\u0323" * 500_000)


def test_long_runs_of_space_take_linear_time() -> None:
    with no_quadratic_pass():
        assert normalise.normalise("a" + " " * 2_000_000 + "b").endswith("b")


def test_fold() -> None:
    assert normalise.fold("  A\n\tb  STRASSE ") == normalise.fold("a b straße")


def test_description() -> None:
    assert description("Metadata-Version: 2.1\nName: x\n\nThe body.\n\nMore.") == "The body.\n\nMore."
    folded = "Name: x\nDescription: First\n        second\n       |third\nKeywords: k\n\n"
    assert description(folded) == "First\nsecond\nthird"
    assert description("Name: x\n") == ""


def test_topics_are_parsed_not_run(tmp_path: object) -> None:
    assert topics("topics = {'a': 'text a',\n 'b': r'''text\nb'''}") == {"a": "text a", "b": "text\nb"}
    for code in ("topics = {'a': open('x', 'w').name}", "x = 1", "(" * 1000, "topics = {"):
        with pytest.raises(ValueError):
            topics(code)


def longest_run_one_by_one(text: str) -> int:
    longest = run = 0
    for character in text:
        run = run + 1 if unicodedata.combining(character) else 0
        longest = max(longest, run)
    return longest


def normalised_line_by_line(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub("[\x0b\x0c\x1c-\x1e\x85]", "\n", text).replace("\x1f", " ")
    text = "".join(c for c in text if c in "\t\n" or not (ord(c) < 32 or 127 <= ord(c) < 160 or c == "\ufeff"))
    if longest_run_one_by_one(text) > normalise.MAX_COMBINING_RUN:
        return "not text"
    return "\n".join(line.rstrip() for line in unicodedata.normalize("NFC", text).split("\n")).strip("\n")


@pytest.mark.parametrize("alphabet", ["ab \t\n\r\x0b\x1c\x1f\x07", "ab \t\n\x85\xa0\u0301\u0302\u0345é\u3000"])
def test_normalise_equals_its_definition(alphabet: str) -> None:
    draw = random.Random(0)
    refused = 0
    for _ in range(1500):
        text = "".join(draw.choice(alphabet) * draw.choice([1, 1, 1, 2, 30, 31]) for _ in range(8))
        expected = normalised_line_by_line(text)
        try:
            assert normalise.normalise(text) == expected
        except NotText:
            assert expected == "not text"
            refused += 1
    assert refused > 40 or "\u0301" not in alphabet
