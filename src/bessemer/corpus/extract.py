"""Bytes to clean text: decoding, the main content of HTML, the description in package metadata,
normalisation."""

from __future__ import annotations

import ast
import codecs
import re
import unicodedata
from functools import cache

MAX_HTML_DEPTH = 512
"""Deepest nesting of elements that is parsed; browsers flatten beyond 512 as well (Blink, WebKit). The
parser's time grows with the square of the depth: 1.7 s at 10,000 and 223 s at 100,000 elements."""

MAX_COMBINING_RUN = 30
"""Longest run of combining marks in text (Unicode Annex 15, Stream-Safe Text Format); normalisation sorts
such a run in quadratic time."""

_ASCII_CONTROL = bytes([*range(9), *range(11, 32), 127])
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_WEB_CHARSETS = re.compile(
    r"iso8859-\d+|cp\d+|koi8-[ru]|mac-\w+|gb2312|gbk|gb18030|big5\w*|euc_\w+|shift_jis\w*|iso2022_\w+"
)
"""Charsets of the web by their Python names. Python's other codecs are not for pages, and some take quadratic
time."""
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]{0,40})")
_UNNESTED = frozenset({
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track",
    "wbr", "p", "li", "dt", "dd", "option", "tr", "td", "th", "tbody", "thead", "tfoot",
})  # fmt: skip
"""Elements that end by themselves, so that opening many of them nests nothing."""


class NotText(ValueError):
    """The document holds no text that could be used; the message says why."""


def normalise(text: str) -> str:
    """The form in which text is kept: NFC, lines ended by \\n without trailing space, no control characters
    but tab.

    Blank lines at the beginning and the end are dropped; indentation stays. Raises NotText when it cannot be.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        text = text.encode("ascii").translate(None, _ASCII_CONTROL).decode("ascii")
    else:
        text = _CONTROL.sub("", text)
        if _combining_runs().search(text):
            raise NotText(f"more than {MAX_COMBINING_RUN} combining marks in a row")
        text = unicodedata.normalize("NFC", text)
    return "\n".join([line.rstrip() for line in text.split("\n")]).strip("\n")


def fold(text: str) -> str:
    """Case and white space folded: what exact duplicates share; words are parted by single spaces."""
    return " ".join(text.casefold().split())


def decode_html(raw: bytes) -> str:
    """HTML bytes as text: UTF-8, else the charset the page declares. Raises UnicodeDecodeError."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        declared = _CHARSET.search(raw[:2048])
        if declared is None:
            raise
        try:
            name = codecs.lookup(declared[1].decode("ascii")).name
        except LookupError:
            name = ""
        if not _WEB_CHARSETS.fullmatch(name):
            raise
        return raw.decode(name)


def main_content(html: str) -> str:
    """The text of a page without navigation, footers and scripts. Raises NotText for pages that cannot be
    parsed."""
    from resiliparse.extract.html2text import extract_plain_text

    if html_depth(html) > MAX_HTML_DEPTH:
        raise NotText(f"HTML nested deeper than {MAX_HTML_DEPTH} elements")
    return str(extract_plain_text(html, preserve_formatting=True, main_content=True, alt_texts=False))


def html_depth(html: str) -> int:
    """An upper bound of the nesting of elements; 0 when the page has too few to nest deeply."""
    if html.count("<") - html.count("</") <= MAX_HTML_DEPTH:
        return 0
    depth = deepest = 0
    unclosed: dict[str, int] = {}
    for closing, raw in _TAG.findall(html):
        name = raw.lower()
        if name in _UNNESTED:
            continue
        if not closing:
            unclosed[name] = unclosed.get(name, 0) + 1
            depth += 1
            deepest = max(deepest, depth)
        elif unclosed.get(name):  # a parser ignores an end tag that closes nothing
            unclosed[name] -= 1
            depth -= 1
    return deepest


def description(text: str) -> str:
    """The long description of a package METADATA file (core metadata: the body, or a folded Description
    header)."""
    text = text.replace("\r\n", "\n")
    header, _, body = text.partition("\n\n")
    if body.strip():
        return body
    lines = header.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("Description:"):
            folded = [line.removeprefix("Description:").strip()]
            for more in lines[number + 1 :]:
                if not more.startswith((" ", "\t")):
                    break
                folded.append(re.sub(r"^(?: {7}\||\t| {1,8})", "", more))
            return "\n".join(folded)
    return ""


def topics(code: str) -> dict[str, str]:
    """The texts in pydoc_data/topics.py. The file is parsed as a literal, never run. Raises NotText."""
    try:
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign):
                value = ast.literal_eval(statement.value)
                if isinstance(value, dict):
                    return {str(name): text for name, text in value.items() if isinstance(text, str)}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotText(f"not a dictionary of texts: {error}") from None
    raise NotText("no dictionary of texts")


@cache
def _combining_runs() -> re.Pattern[str]:
    """More combining marks in a row than any language writes."""
    ranges: list[list[int]] = []
    for code in range(0x110000):
        if unicodedata.combining(chr(code)):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    marks = "".join(f"{chr(low)}-{chr(high)}" for low, high in ranges)
    return re.compile(f"[{marks}]{{{MAX_COMBINING_RUN + 1}}}")
