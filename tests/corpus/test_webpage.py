"""Pages as browsers and crawls give them: charsets, menus, lists, code."""

import time

import pytest

from bessemer.corpus import webpage
from bessemer.corpus.extract import NotText
from bessemer.recipe import Extract

PLAIN = Extract()


def test_decode_html_by_declared_charset() -> None:
    page = '<meta charset="iso-8859-1"><p>café</p>'
    assert webpage.decode_html(page.encode("latin-1")) == page
    assert webpage.decode_html(page.encode("utf-8")) == page


@pytest.mark.parametrize("charset", ["", "zip", "punycode", "unicode_escape", "no-such"])
def test_decode_html_refuses_other_codecs(charset: str) -> None:
    with pytest.raises(UnicodeDecodeError):
        webpage.decode_html(f'<meta charset="{charset}">'.encode() + b"\xff\xe9")


def test_main_content() -> None:
    body = "<p>The first paragraph of the article.</p><p>The second one.</p>"
    page = f"<html><body><nav><a href=/>Home</a></nav><main>{body}</main><script>x=1</script></body></html>"
    text = webpage.page_text(page, PLAIN)
    assert "first paragraph" in text
    assert "second one" in text
    assert "Home" not in text
    assert "x=1" not in text


@pytest.mark.parametrize("page", ["<div>" * 20_000 + "x" + "</div>" * 20_000, "</x><div>" * 20_000])
def test_deeply_nested_html_is_refused_quickly(page: str) -> None:
    started = time.perf_counter()
    with pytest.raises(NotText, match="nested deeper"):
        webpage.page_text(page, PLAIN)
    assert time.perf_counter() - started < 1


def test_long_flat_html_is_not_deep() -> None:
    assert webpage.html_depth("<p>a<br><li>b</li>" * 2000 + "<div><b>x</b></div>" * 2000) <= 3
