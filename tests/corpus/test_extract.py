import time

import pytest

from bessemer.corpus import extract


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\ufeffa\r\nb\rc", "a\nb\nc"),
        ("a\x00\x07b\tc\x7f", "ab\tc"),
        ("é\x00\x85\ufeffx", "éx"),
        ("a  \n\tb\t\n", "a\n\tb"),
        ("\n\n    def f():\n        pass\n\n", "    def f():\n        pass"),
        ("e\u0301", "é"),
    ],
)
def test_normalise(raw: str, clean: str) -> None:
    assert extract.normalise(raw) == clean
    assert extract.normalise(clean) == clean


def test_runs_of_combining_marks_are_refused_quickly() -> None:
    started = time.perf_counter()
    with pytest.raises(extract.NotText, match="combining"):
        extract.normalise("a" + "\u0301\u0323" * 500_000)
    assert time.perf_counter() - started < 2


def test_long_runs_of_space_take_linear_time() -> None:
    started = time.perf_counter()
    assert extract.normalise("a" + " " * 2_000_000 + "b").endswith("b")
    assert time.perf_counter() - started < 1


def test_fold() -> None:
    assert extract.fold("  A\n\tb  STRASSE ") == extract.fold("a b straße")


def test_description() -> None:
    assert extract.description("Metadata-Version: 2.1\nName: x\n\nThe body.\n\nMore.") == "The body.\n\nMore."
    folded = "Name: x\nDescription: First\n        second\n       |third\nKeywords: k\n\n"
    assert extract.description(folded) == "First\nsecond\nthird"
    assert extract.description("Name: x\n") == ""


def test_topics_are_parsed_not_run(tmp_path: object) -> None:
    assert extract.topics("topics = {'a': 'text a',\n 'b': r'''text\nb'''}") == {
        "a": "text a",
        "b": "text\nb",
    }
    for code in ("topics = {'a': open('x', 'w').name}", "x = 1", "(" * 1000, "topics = {"):
        with pytest.raises(extract.NotText):
            extract.topics(code)
