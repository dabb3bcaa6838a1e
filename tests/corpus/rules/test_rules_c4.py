from __future__ import annotations

import pytest

from bessemer.corpus.filters.rules.apply import edit_c4
from bessemer.recipe.rules import C4
from bessemer.text.statistics import Statistics

FIVE = "\n".join(f"This is a good sentence number {number}." for number in range(5))


def edited(text: str, **settings: object) -> tuple[str, str | None]:
    found, finding = edit_c4(Statistics(text), C4(**settings))
    return found.text, finding and finding.reason


@pytest.mark.parametrize(
    "line",
    [
        "a line without an end mark", "a line that ends in an ellipsis...", "Two words.",
        "Please enable JavaScript to see this.", "We do make use of cookies here.",
        "Read our Privacy Policy before that.", "w" * 1001 + " and two more.",
    ],
)  # fmt: skip
def test_c4_removes_lines(line: str) -> None:
    assert edited(f"{line}\n{FIVE}") == (FIVE, None)


@pytest.mark.parametrize(
    "line",
    ["Three words here.", "Really now, you?", 'He said "so it is"', "w" * 1000 + " and more.", "  An indented line here!  "],
)  # fmt: skip
def test_c4_keeps_lines(line: str) -> None:
    assert edited(f"{line}\n{FIVE}") == (f"{line.strip()}\n{FIVE}", None)


def test_citations_are_removed() -> None:
    assert edited(f"It is so[1] and so[citation needed].[edit]\n{FIVE}")[0] == f"It is so and so.\n{FIVE}"
    assert edited(f"It is so[1] and so.\n{FIVE}", remove_citations=False)[0] == f"It is so[1] and so.\n{FIVE}"


def test_c4_rejects_pages() -> None:
    assert edited(f"{FIVE}\nLorem ipsum dolor sit amet.")[1] == "c4.lorem_ipsum"
    assert edited(f"{FIVE}\nA curly {'{'} bracket.")[1] == "c4.curly_bracket"
    assert edited(f"{FIVE}\nlorem ipsum without an end mark")[1] is None  # as in C4, whose line filter comes first


def test_the_number_of_sentences_at_its_limit() -> None:
    assert edited(FIVE)[1] is None
    assert edited(FIVE, min_sentences=6)[1] == "c4.sentences"
    four = FIVE.rpartition("\n")[0]
    assert edited(four)[1] == "c4.sentences"
    assert edited(four, min_sentences=3)[1] is None
    assert edited("nothing stays", min_sentences=0) == ("", None)


def test_switches_and_long_lines() -> None:
    assert edited(f"no mark is here\n{FIVE}", require_terminal=False)[0].startswith("no mark")
    assert edited(f"Two words.\n{FIVE}", min_words_per_line=2)[0].startswith("Two words.")
    long = ("x" * 195 + " y z.").ljust(200)
    text = "\n".join([long] * 3) + "\n" + FIVE
    assert edited(text, min_long_lines=3)[1] is None
    assert edited(text, min_long_lines=4)[1] == "c4.long_lines"
    assert edited(text, min_long_lines=3, long_line_characters=201)[1] == "c4.long_lines"
