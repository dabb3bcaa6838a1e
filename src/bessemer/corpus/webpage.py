"""Main content of web pages as text; code and lists keep their lines.

resiliparse drops bulleted lists near the root (fewer than four elements below <body>) as menus, and lists with more
than a fifth of their characters in links. In flat layouts and reference documentation these are content: such lists are
wrapped and their links made plain first, unless links make up most of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bessemer.corpus.extract import NotText
from bessemer.errors import InputError

if TYPE_CHECKING:
    from bessemer.recipe import Extract

# Longest page by engine: about a second of work. Common Crawl cuts pages at 5 MiB.
MAX_HTML_BYTES = {"resiliparse": 8 << 20, "trafilatura": 256 << 10}
# Deepest nesting of elements by engine: parsing takes linear time in the depth, the extraction quadratic (4 s at
# 10,000). Browsers flatten beyond 512 as well (Blink, WebKit); libxml2, which trafilatura parses with, gives no text
# from 254 on.
MAX_DEPTH = {"resiliparse": 512, "trafilatura": 250}
# unclosed formatting elements times the tags of a page: the parser opens the former again in each block (HTML standard,
# 13.2.4.3), which could fill the memory
MAX_REOPENED = 1 << 24
# Lists of a page that are looked at, and links in one; what has more is not prose, and would take seconds
MAX_LISTS, MAX_LINKS = 2000, 1000
SHALLOW = 4  # elements between a list and <body>, below which resiliparse drops it (2.0, its rule for <ul>)
SAFE_LINK_SHARE = 0.15  # of a list; resiliparse drops one above 0.2, counted with its white space

# line numbers of listings in the markup of Pygments, Rouge and Prism, which are not code
LINE_NUMBERS = ("td.linenos", "td.gutter", ".lineno", ".linenos", ".line-numbers-rows")
_FORMATTING = re.compile(r"<(/)?(?:b|big|code|em|font|i|s|small|strike|strong|tt|u)[\s/>]", re.IGNORECASE)
_FRAMES = frozenset({"nav", "header", "footer", "aside"})


def page_text(html: str, settings: Extract) -> str:
    """The text of a page, as [corpus.extract] wants it. Raises NotText for pages that nest too deeply."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    limit = MAX_DEPTH[settings.engine]
    _check_formatting(html, limit)
    tree = HTMLTree.parse(html)
    # One selector: it is matched in compiled code, where a walk in Python takes 12 us an element.
    if tree.document is not None and tree.document.query_selector("*" + " > *" * limit) is not None:
        raise NotText(f"HTML nested deeper than {limit} elements")
    if settings.engine == "trafilatura":
        import trafilatura

        if not settings.main_content:
            return str(trafilatura.html2txt(html) or "")
        return str(trafilatura.extract(html, include_comments=False, include_tables=True) or "")
    if settings.main_content and tree.body is not None:
        _keep_lists(tree, settings.max_list_link_share)
    return str(
        extract_plain_text(
            tree, preserve_formatting=True, main_content=settings.main_content, alt_texts=False,
            skip_elements=list(LINE_NUMBERS),
        )
    )  # fmt: skip


def _check_formatting(html: str, limit: int) -> None:
    """Raise NotText where parsing would open formatting elements again too often."""
    unclosed = most = 0
    for match in _FORMATTING.finditer(html):
        unclosed = max(unclosed + (-1 if match[1] else 1), 0)
        most = max(most, unclosed)
    if most > 2 and most * html.count("<") > MAX_REOPENED:
        raise NotText(f"HTML nested deeper than {limit} elements: {most} formatting elements are open at one time")


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
    """Elements from <body> to an outermost list, SHALLOW at the most; None for an inner list or one in a frame."""
    depth, above = 1, element.parent
    if above is not None and above.tag in ("ul", "ol", "li"):
        return None
    while above is not None and above.tag != "body" and depth < SHALLOW:
        if above.tag in _FRAMES:
            return None
        depth, above = depth + 1, above.parent
    return depth
