"""Web pages to text: the bytes decoded, the main content found, code and lists kept by lines.

resiliparse takes any bulleted list near the top of the tree for a menu (fewer than four elements below <body>),
and any list with more than a fifth of its characters in links. On pages with a flat layout, and in reference
documentation, that is content: such lists are wrapped and their links made plain before the extraction, unless
links make up most of them.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

from bessemer.corpus import nesting
from bessemer.corpus.first_bytes import unicode_of
from bessemer.errors import InputError

if TYPE_CHECKING:
    from bessemer.recipe import Extract

MAX_HTML_BYTES = {"resiliparse": 8 << 20, "trafilatura": 256 << 10}
"""Longest page by engine: about a second of work. Common Crawl cuts pages at 5 MiB."""

MAX_LISTS = 2000
MAX_LINKS = 1000
"""Lists of a page that are looked at, and links in one; what has more is not prose, and would take seconds."""

SHALLOW = 4
"""Lists with fewer elements between them and <body> than this are dropped by resiliparse (2.0, its rule for <ul>)."""

SAFE_LINK_SHARE = 0.15
"""resiliparse drops a list above 0.2, counted with its white space."""

LINE_NUMBERS = ("td.linenos", "td.gutter", ".lineno", ".linenos", ".line-numbers-rows")
"""The column of line numbers beside a listing, in the markup of Pygments, Rouge and Prism: no part of the code."""

META_BYTES = 2048
"""Where a page's own charset is looked for; browsers look at 1024 bytes."""

_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_WEB_CHARSETS = re.compile(
    r"utf-8|utf-16(-[lb]e)?|iso8859-\d+|cp\d+|koi8-[ru]|mac-\w+|gb2312|gbk|gb18030|big5\w*|euc_\w+|shift_jis\w*|iso2022_\w+"
)
"""Charsets of the web by their Python names. Python's other codecs are not for pages, and some take quadratic
time."""
_SUPERSETS = {"iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030", "shift_jis": "cp932",
              "euc_kr": "cp949", "iso8859-11": "cp874"}  # fmt: skip
"""What browsers take instead (WHATWG Encoding Standard, section 4.2)."""
_LEADS = bytes(range(0xC2, 0xF5))
"""Bytes with which a character of more than one byte begins in UTF-8."""
_FRAMES = frozenset({"nav", "header", "footer", "aside"})


def decode_html(raw: bytes, http_charset: str | None = None, max_undecodable: float = 0.0) -> str:
    """A page's bytes as text: byte order mark; UTF-8 where that fits; the charset of the HTTP header, then the
    page's own; then what the bytes look like (uchardet, by resiliparse).

    UTF-8 that decodes goes before a declared charset: bytes of another charset practically never form it, while
    headers often name a server's default. Up to `max_undecodable` of the characters may be lost. Raises
    UnicodeDecodeError.
    """
    name, mark = unicode_of(raw)
    if name:
        return raw[mark:].decode(name, "replace")
    found = _CHARSET.search(raw[:META_BYTES])
    named = [http_charset, found[1].decode("ascii") if found else None]
    declared = list(dict.fromkeys(name for name in map(_codec, named) if name))
    if any(name.startswith("iso2022") for name in declared):  # these bytes are ASCII, and so UTF-8
        declared.append("utf-8")
    else:
        declared.insert(0, "utf-8")
    failure: UnicodeDecodeError | None = None
    for name in declared:
        if name.startswith("utf-16") and not raw.count(0):
            continue  # a page that says so of itself was read as ASCII to say it
        try:
            return raw.decode(name)
        except UnicodeDecodeError as error:
            failure = failure or error
    meant = "utf-8" in map(_codec, named)
    if meant or len(declared) == 1:
        text = raw.decode("utf-8", "replace")
        lost = text.count("\ufffd")
        if lost <= max_undecodable * len(text) and (meant or 4 * lost < len(raw) - len(raw.translate(None, _LEADS))):
            return text
    for guess in (*declared[:0:-1], detected(raw)):
        if guess:
            text = raw.decode(guess, "replace")
            if text.count("\ufffd") <= max_undecodable * len(text):
                return text
    assert failure is not None
    raise failure


def _codec(name: str | None) -> str | None:
    """Python's codec for a charset of the web; None for anything else."""
    try:
        known = codecs.lookup(name).name if name else ""
    except (LookupError, ValueError):
        return None
    return _SUPERSETS.get(known, known) if _WEB_CHARSETS.fullmatch(known) else None


def detected(raw: bytes) -> str | None:
    """The encoding that bytes look like (uchardet, by resiliparse); None for no idea."""
    from resiliparse.parse.encoding import detect_encoding

    return _codec(detect_encoding(raw, from_html_meta=False))


def page_text(html: str, settings: Extract) -> str:
    """The text of a page, as [corpus.extract] wants it. Raises NotText for pages that cannot be parsed."""
    limit = nesting.MAX_DEPTH[settings.engine]
    if nesting.may_nest_deeply(html, limit):
        from resiliparse.parse.html import HTMLTree

        nesting.check_tree(HTMLTree.parse(html), limit)
    if settings.engine == "trafilatura":
        return _by_trafilatura(html, settings.main_content)
    return _by_resiliparse(html, settings.main_content, settings.max_list_link_share)


def max_html_bytes(settings: Extract) -> int:
    """Longest page that is read."""
    return settings.max_html_bytes or MAX_HTML_BYTES[settings.engine]


def check_engine(settings: Extract) -> None:
    """Raise InputError when the library that the recipe names is not installed."""
    if settings.engine == "trafilatura":
        try:
            import trafilatura  # noqa: F401
        except ImportError:
            raise InputError(
                "corpus.extract.engine: trafilatura is not installed; pip install 'bessemer[trafilatura]', or take "
                "resiliparse"
            ) from None


def _by_resiliparse(html: str, main_content: bool, max_link_share: float) -> str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    tree = HTMLTree.parse(html)
    if main_content and tree.body is not None:
        _keep_lists(tree, max_link_share)
    return str(
        extract_plain_text(
            tree, preserve_formatting=True, main_content=main_content, alt_texts=False, skip_elements=list(LINE_NUMBERS)
        )
    )


def _keep_lists(tree: Any, max_link_share: float) -> None:
    """Put bulleted lists that are content where the extraction keeps them."""
    # values(), as stepping through a collection takes quadratic time.
    for element in tree.body.query_selector_all("ul").values()[:MAX_LISTS]:
        depth = _depth_of_list(element)
        if depth is None:
            continue
        found = element.query_selector_all("a")
        if len(found) > MAX_LINKS:
            continue
        links = found.values()
        length = len("".join(element.text.split()))
        linked = sum(len("".join(link.text.split())) for link in links)
        if not length or linked > max_link_share * length:
            continue
        for link in links if linked > SAFE_LINK_SHARE * length else ():
            plain = tree.create_element("span")
            while link.first_child is not None:
                plain.append_child(link.first_child)
            link.parent.replace_child(plain, link)
        for _ in range(SHALLOW - depth):
            wrapper = tree.create_element("div")
            element.parent.replace_child(wrapper, element)
            wrapper.append_child(element)


def _depth_of_list(element: Any) -> int | None:
    """Elements from <body> down to an outermost list, SHALLOW at the most; None for a list within a list or in a
    page's frame."""
    depth, above = 1, element.parent
    if above is not None and above.tag in ("ul", "ol", "li"):
        return None
    while above is not None and above.tag != "body" and depth < SHALLOW:
        if above.tag in _FRAMES:
            return None
        depth, above = depth + 1, above.parent
    return depth


def _by_trafilatura(html: str, main_content: bool) -> str:
    import trafilatura

    if not main_content:
        return str(trafilatura.html2txt(html) or "")
    return str(trafilatura.extract(html, include_comments=False, include_tables=True) or "")
