"""Texts that pass the rules, and recipes from a few lines."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from bessemer.recipe import Recipe, parse


def prose(seed: int, num_words: int = 120) -> str:
    """Return random words that are long enough to keep and differ from those of any other seed."""
    words = random.Random(seed)
    lines = []
    for _ in range(num_words // 10):
        lines.append(" ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(10)))
    return "\n".join(lines)


def page_files(page: str) -> dict[str, str]:
    """Return the files that a page of the documentation shows, by name."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', text, re.DOTALL))


def subtitles(text: str) -> str:
    """Return a file of subtitles that speak the lines of a text."""
    return "\n\n".join(
        f"{place}\n00:00:0{place % 10} --> 00:01:00\n{line}" for place, line in enumerate(text.split("\n"), 1)
    )


def recipe(*sources: dict[str, Any], rules: str = "", dedup: str = "") -> Recipe:
    """Return a recipe of these sources. `rules` and `dedup` are TOML lines."""
    text = '[run]\nname = "t"\n[model]\ndepth = 2\n'
    text += f"[corpus.rules]\n{rules}\n[corpus.dedup]\n{dedup}\n"
    for source in sources:
        text += "[[corpus.sources]]\n"
        text += "".join(f"{key} = {value!r}\n" for key, value in source.items())
    return parse(text, "test")


def http(body: bytes, *headers: str, status: str = "200 OK", content_type: str = "text/html; charset=utf-8") -> bytes:
    """Return an HTTP response as a crawler stores it."""
    head = [f"HTTP/1.1 {status}", *([f"Content-Type: {content_type}"] if content_type else []), *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def warc_record(
    block: bytes, kind: str = "response", url: str = "http://a.example/", length: int | None = None
) -> bytes:
    """Return a record of a crawl archive in Common Crawl's layout. `length` overrides the true content length."""
    header = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{len(block)}>\r\n"
        f"WARC-Date: 2024-05-06T07:08:09Z\r\nWARC-Target-URI: {url}\r\n"
        "Content-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(block) if length is None else length}\r\n\r\n"
    )
    return header.encode() + block + b"\r\n\r\n"


def html_page(number: int) -> bytes:
    """Return a page with a menu, whose text is `page_line(number)`."""
    menu = '<nav><ul><li><a href="/">Home</a></li><li><a href="/b">Blog</a></li></ul></nav>'
    return f"<html><body>{menu}<main><p>{page_line(number)}</p></main></body></html>".encode()


def page_line(number: int) -> str:
    """Return the one paragraph of `html_page(number)`."""
    return f"Page {number}: " + prose(number, 30).replace("\n", " ")
