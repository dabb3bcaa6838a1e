"""Text of web pages: decoding of charsets, and extraction of the main content with the lines of code and lists.

resiliparse drops bulleted lists near the root (fewer than four elements below <body>) as menus, and lists with more than a
fifth of their characters in links. In flat layouts and reference documentation these lists are content. They are therefore
wrapped and their links turned into plain text first, unless links make up most of them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import partial
from typing import Any

from bessemer.common.errors import NotText, require_import
from bessemer.corpus.readers.encodings import codec, detected, unicode_of
from bessemer.recipe import Extract
from bessemer.run_tasks.time_limit import is_left_out

# Maximum number of tags for trafilatura. 100,000 take 1 to 2 s, but 5 s in pages of divisions without paragraphs, where one
# of its queries is quadratic (13.6 s at 167,000). A time limit would give different texts on different machines.
MAX_TAGS = 100_000
# Maximum nesting of elements by engine. libxml2 returns no text from 254 levels on. resiliparse takes quadratic time in the
# depth for the main content (11 s at 10,000 with text at each level) and linear time for all text (2 s at 1.6 million).
# Browsers also flatten elements beyond 512 levels (Blink, WebKit).
MAX_DEPTH = {"resiliparse": 512, "trafilatura": 250}
EXTRACTION = "extraction"  # metadata key: the method used when that of [corpus.extract] was not possible
DAMAGE = "damage"  # metadata key: the reason why a page of a crawl may be incomplete
BY_RESILIPARSE, ALL_TEXT = "resiliparse in place of trafilatura", "all text in place of the main content"
# Maximum of unclosed formatting elements times tags. The parser reopens the former in each block (HTML standard, 13.2.4.3),
# which could fill the memory.
MAX_REOPENED = 1 << 24
# Maximum lists to check per page, and links per list. Pages with more are not prose and would take seconds.
MAX_LISTS, MAX_LINKS = 2000, 1000
SHALLOW = 4  # resiliparse 2.0 drops a <ul> with fewer elements between it and <body>
SAFE_LINK_SHARE = 0.15  # resiliparse drops lists with a share of links above 0.2, where it also counts white space

# Line numbers of code listings in the markup of Pygments, Rouge and Prism
LINE_NUMBERS = ("td.linenos", "td.gutter", ".lineno", ".linenos", ".line-numbers-rows")
# Parts around the content that resiliparse keeps in many layouts, by words in their class or id
_WORDS = ("footer", "copyright", "related", "author-box", "respond", "subscribe", "pagination")
FURNITURE = [f"[{name}*='{word}' i]:not(body):not(main):not(article)" for word in _WORDS for name in ("class", "id")]
_FORMATTING = re.compile(r"<(/)?(?:b|big|code|em|font|i|s|small|strike|strong|tt|u)[\s/>]", re.IGNORECASE)
META_BYTES = 2048  # search for a charset in the beginning of a page; browsers use 1024 bytes
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_LEADS = bytes(range(0xC2, 0xF5))  # first bytes of multi-byte characters in UTF-8
_FRAMES = frozenset({"nav", "header", "footer", "aside"})


def decode_html(raw: bytes, http_charset: str | None = None, max_undecodable: float = 0.0) -> str:
    """Decode a page with the first encoding that fits.

    The order is: byte order mark, valid UTF-8, charset of the HTTP header, charset that the page declares, and
    uchardet's guess. Valid UTF-8 comes before a declared charset, because text in other charsets is practically never
    valid UTF-8 and headers often name a server's default. If none fits, one in which at most the share
    `max_undecodable` of the characters is lost is used. Raises UnicodeDecodeError if there is none.
    """
    if shown := unicode_of(raw):
        return raw.decode(shown, "replace")
    match = _CHARSET.search(raw[:META_BYTES])
    named = [name for name in map(codec, (http_charset, match and match[1].decode("ascii"))) if name]
    # A UTF-16 declaration that can be read as ASCII is wrong.
    named = [name for name in named if 0 in raw or not name.startswith("utf-16")]
    is_utf8_too = any(name.startswith(("iso2022", "utf-16")) for name in named)  # such text may also be valid UTF-8
    for name in (*named, "utf-8") if is_utf8_too else ("utf-8", *named):
        with suppress(UnicodeDecodeError):
            return raw.decode(name)
    num_leads = len(raw) - len(raw.translate(None, _LEADS))
    for name in filter(None, ("utf-8", *named[::-1], detected(raw))):
        text = raw.decode(name, "replace")
        lost = text.count("\ufffd")
        if lost <= max_undecodable * len(text) and (name != "utf-8" or name in named or 4 * lost < num_leads):
            return text
    return raw.decode()


def page_text(html: str, settings: Extract, metadata: dict[str, Any] | None = None) -> str:
    """Return the text of a page, extracted with the settings of `[corpus.extract]`.

    A page that is too large or too deep for trafilatura is extracted by resiliparse. One that is too deep for both, or
    in which no main content is found, is extracted as all text. `metadata` records such a fallback. Raises NotText if
    parsing would reopen too many formatting elements.
    """
    from resiliparse.parse.html import HTMLTree

    if is_left_out():
        raise NotText("it took too long")
    _check_formatting(html)
    tree, main_content, fallback = HTMLTree.parse(html), settings.main_content, ""
    if settings.engine == "trafilatura" and (html.count("<") > MAX_TAGS or _is_deeper(tree, MAX_DEPTH["trafilatura"])):
        fallback = BY_RESILIPARSE
    if (settings.engine == "resiliparse" or fallback) and main_content and _is_deeper(tree, MAX_DEPTH["resiliparse"]):
        main_content, fallback = False, ALL_TEXT
    if settings.engine == "trafilatura" and not fallback:
        import trafilatura

        take = partial(trafilatura.extract, include_comments=settings.comments, include_tables=True)
        text = str((take if main_content else trafilatura.html2txt)(html) or "")
    else:
        if main_content and tree.body is not None:
            _keep_lists(tree, settings.max_list_link_share)
        text = _plain_text(tree, main_content, settings.comments)
    if not text.strip():
        text = _plain_text(tree, False, True, noscript=True)  # an unclosed <noscript> may contain the whole page
        fallback = ALL_TEXT if main_content and text.strip() else fallback
    if fallback and metadata is not None:
        metadata[EXTRACTION] = fallback
    return text


def _plain_text(tree: Any, main_content: bool, comments: bool, noscript: bool = False) -> str:
    """Return the text of a parsed page by resiliparse.

    The flags say whether to return only the main content, and whether to include comments of readers and <noscript>.
    """
    from resiliparse.extract.html2text import extract_plain_text

    return str(
        extract_plain_text(
            tree, preserve_formatting=True, main_content=main_content, alt_texts=False, comments=comments,
            noscript=noscript, skip_elements=[*LINE_NUMBERS, *(FURNITURE if main_content else ())],
        )
    )  # fmt: skip


def _is_deeper(tree: Any, limit: int) -> bool:
    """Return whether elements of a parsed page are nested deeper than `limit`."""
    # A single selector is matched in compiled code; a traversal in Python takes 12 us per element.
    return tree.document is not None and tree.document.query_selector("*" + " > *" * limit) is not None


def _check_formatting(html: str) -> None:
    """Raise NotText if unclosed formatting elements, such as <b>, would make an HTML parser create too many elements."""
    unclosed = most = 0
    for match in _FORMATTING.finditer(html):
        unclosed = max(unclosed + (-1 if match[1] else 1), 0)
        most = max(most, unclosed)
    if most > 2 and most * html.count("<") > MAX_REOPENED:
        raise NotText(f"HTML nested too deeply: {most} formatting elements are open at one time")


def check_engine(settings: Extract) -> None:
    """Raise InputError if `settings.engine` is trafilatura and this library is not installed."""
    if settings.engine == "trafilatura":
        with require_import(
            "corpus.extract.engine: trafilatura is not installed; pip install 'bessemer[trafilatura]', or take resiliparse"
        ):
            import trafilatura  # noqa: F401


def _keep_lists(tree: Any, max_link_share: float) -> None:
    """Wrap bulleted lists of a page in <div> elements, so that resiliparse keeps them.

    Only lists in which links have at most the share `max_link_share` of the characters are wrapped; others are
    navigation.
    """
    # Iterating over the collection itself would take quadratic time.
    for element in tree.body.query_selector_all("ul").values()[:MAX_LISTS]:
        depth = _depth_of_list(element)
        if depth is None:
            continue
        anchors = element.query_selector_all("a")
        if len(anchors) > MAX_LINKS:
            continue
        links = anchors.values()
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
    """Return the depth of a list below <body>, at most SHALLOW.

    Returns None for a list within another list, or within <nav>, <header>, <footer> or <aside>.
    """
    depth, above = 1, element.parent
    if above is not None and above.tag in ("ul", "ol", "li"):
        return None
    while above is not None and above.tag != "body" and depth < SHALLOW:
        if above.tag in _FRAMES:
            return None
        depth, above = depth + 1, above.parent
    return depth
