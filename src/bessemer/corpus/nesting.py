"""How deeply the elements of a web page nest: an estimate that bounds what the parser does, and the parsed tree itself.

The parser (lexbor, by resiliparse) takes linear time in the depth, the extraction quadratic: 0.2 s at 2,000 and 4 s at
10,000 elements. What a page writes and what the parser nests differ: tags in scripts, in comments and in attributes are
none, `<path/>` within SVG is closed, a second `<a>` ends the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from bessemer.corpus.extract import NotText

MAX_DEPTH = {"resiliparse": 512, "trafilatura": 250}
"""Deepest nesting of elements by engine. Browsers flatten beyond 512 as well (Blink, WebKit); libxml2, which trafilatura
parses with, gives no text from 254 on."""

MAX_OPEN = 4096
"""Elements open at one time from which a page is not even parsed."""

MAX_REOPENED = 1 << 24
"""Unclosed formatting elements times the tags of a page: the parser opens the former again in each block (HTML
standard, 13.2.4.3), which could fill the memory."""

_TAG = re.compile(r"</?[A-Za-z][A-Za-z0-9-]{0,40}")
_MARKUP = re.compile(r"<!--|</?[A-Za-z][A-Za-z0-9:-]{0,40}")
_TAG_END = re.compile(r">|=\s{0,9}([\"'])")
_UNNESTED = frozenset({
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
    "a", "button", "form", "nobr", "option", "p", "li", "dt", "dd", "tr", "td", "th", "tbody", "thead", "tfoot",
})  # fmt: skip
"""Elements that are void or closed by the next of their kind, so that opening many of them nests nothing."""
_FORMATTING = ("b", "big", "code", "em", "font", "i", "s", "small", "strike", "strong", "tt", "u")
_RAW_TEXT = frozenset({"script", "style", "textarea", "title", "iframe", "noembed", "noframes", "xmp"})
"""Elements whose content is text: no tag is looked for in it."""
_FOREIGN = ("svg", "math")
_LEAVE_FOREIGN = frozenset({
    *_FORMATTING, "blockquote", "body", "br", "center", "dd", "div", "dl", "dt", "embed", "h1", "h2", "h3", "h4", "h5",
    "h6", "head", "hr", "img", "li", "menu", "meta", "nobr", "ol", "p", "pre", "ruby", "span", "sub", "sup", "table",
    "ul", "var",
})  # fmt: skip
"""Elements of HTML that end SVG or MathML (HTML standard, 13.2.6.5); a `/>` does not close them."""


def may_nest_deeply(html: str, limit: int) -> bool:
    """Whether the parsed tree could be deeper than `limit`. Raises NotText where parsing it would not be safe."""
    suspect = limit // 2  # a parser adds elements that nobody wrote, such as <body> and <tbody>
    num_tags = html.count("<")
    if num_tags - html.count("</") <= suspect:
        return False
    most, formatting = _most_open(_TAG.findall(html))
    if most > suspect:
        most, formatting = _most_open(_markup(html))
    if most > MAX_OPEN or formatting * num_tags > MAX_REOPENED:
        raise NotText(f"HTML nested deeper than {limit} elements: {most} are open at one time")
    return most > suspect


def check_tree(tree: Any, limit: int) -> None:
    """Raise NotText when the elements of a parsed page nest deeper than `limit`."""
    # One selector: it is matched in compiled code, where a walk in Python takes 12 us an element.
    if tree.document.query_selector("*" + " > *" * limit) is not None:
        raise NotText(f"HTML nested deeper than {limit} elements")


def _most_open(tags: Iterable[str]) -> tuple[int, int]:
    """Most elements, and most formatting elements, that are open at one time."""
    depth = deepest = formatting = most_formatting = 0
    numbers: dict[str, int] = {}  # by tag: above zero where an element begins, below where it ends, 0 if none nests
    names = {name: number for number, name in enumerate(_FORMATTING, start=1)}
    unclosed = [0] * (len(names) + 1)
    for tag in tags:
        number = numbers.get(tag)
        if number is None:
            name = tag.lstrip("</").lower()
            if name not in names:
                names[name] = 0 if name in _UNNESTED else len(unclosed)
                unclosed.append(0)
            number = numbers[tag] = names[name] * (-1 if tag[1] == "/" else 1)
        if number > 0:
            unclosed[number] += 1
            depth += 1
            deepest = depth if depth > deepest else deepest  # max() takes three times as long
            if number <= len(_FORMATTING):
                formatting += 1
                most_formatting = formatting if formatting > most_formatting else most_formatting
        elif number and unclosed[-number]:  # a parser ignores an end tag that closes nothing
            unclosed[-number] -= 1
            depth -= 1
            formatting -= -number <= len(_FORMATTING)
    return deepest, most_formatting


def _markup(html: str) -> Iterator[str]:
    """The tags of a page that nest elements: not those within comments, attributes, scripts and other raw text, and not
    self-closed ones of SVG and MathML. Linear in the length of the page."""
    position = foreign = 0
    while found := _MARKUP.search(html, position):
        tag, position = found[0], found.end()
        if tag == "<!--":
            end = html.find("-->", found.start() + 2)
            if end < 0:
                return
            position = end + 3
            continue
        name, is_end = tag.lstrip("</").lower(), tag[1] == "/"
        end = _end_of_tag(html, position)
        if end < 0:
            return
        position = end + 1
        if name in _RAW_TEXT and not is_end and not foreign:
            close = re.compile(f"</{name}", re.IGNORECASE).search(html, position)
            if close is None:
                return
            position = close.end()
            continue
        if foreign and html[end - 1] == "/" and name not in _LEAVE_FOREIGN:
            continue
        if name in _FOREIGN:
            foreign = max(foreign + (-1 if is_end else 1), 0)
        yield tag


def _end_of_tag(html: str, position: int) -> int:
    """Where the `>` stands that ends a tag, behind quoted attributes; -1 when the page ends before."""
    while found := _TAG_END.search(html, position):
        if found[1] is None:
            return found.start()
        position = html.find(found[1], found.end()) + 1
        if not position:
            return -1
    return -1
