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


def test_decode_html_by_declared_charset() -> None:
    page = '<meta charset="iso-8859-1"><p>café</p>'
    assert extract.decode_html(page.encode("latin-1")) == page
    assert extract.decode_html(page.encode("utf-8")) == page


@pytest.mark.parametrize("charset", ["", "zip", "punycode", "unicode_escape", "no-such"])
def test_decode_html_refuses_other_codecs(charset: str) -> None:
    with pytest.raises(UnicodeDecodeError):
        extract.decode_html(f'<meta charset="{charset}">'.encode() + b"\xff\xe9")


def test_main_content() -> None:
    body = "<p>The first paragraph of the article.</p><p>The second one.</p>"
    page = f"<html><body><nav><a href=/>Home</a></nav><main>{body}</main><script>x=1</script></body></html>"
    text = extract.main_content(page)
    assert "first paragraph" in text
    assert "second one" in text
    assert "Home" not in text
    assert "x=1" not in text


@pytest.mark.parametrize("page", ["<div>" * 20_000 + "x" + "</div>" * 20_000, "</x><div>" * 20_000])
def test_deeply_nested_html_is_refused_quickly(page: str) -> None:
    started = time.perf_counter()
    with pytest.raises(extract.NotText, match="nested deeper"):
        extract.main_content(page)
    assert time.perf_counter() - started < 1


def test_long_flat_html_is_not_deep() -> None:
    assert extract.html_depth("<p>a<br><li>b</li>" * 2000 + "<div><b>x</b></div>" * 2000) <= 3


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
