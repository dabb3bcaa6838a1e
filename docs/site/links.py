"""Conversion of links and tables from the form for a code host to that for the site.

Pages are written for a code host and for the site. On the code host a link may lead to any file of the repository. On the site it
leads to a page, and a link to another file becomes its text.
"""

from __future__ import annotations

import posixpath
import re

FROM_ELSEWHERE = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "results.md",
}
"""Files outside docs/ that are pages of the site, with their names on it."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```[ \t]*$", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"^(?!\|)(.*\S.*)\n(?=\|)", re.MULTILINE)


def prepared(markdown: str, page: str) -> str:
    """Return a page as the site needs it. `page` is its name on the site."""
    begin, parts = 0, []
    for fence in FENCE.finditer(markdown):
        parts += [_prepared(markdown[begin : fence.start()], page), fence[0]]
        begin = fence.end()
    return "".join([*parts, _prepared(markdown[begin:], page)])


def site_place(page: str, target: str) -> str | None:
    """Return the page of the site that a link leads to; None for a file of the repository that is no page."""
    source = next((file for file, name in FROM_ELSEWHERE.items() if name == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path in FROM_ELSEWHERE:
        return FROM_ELSEWHERE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _prepared(text: str, page: str) -> str:
    """Convert Markdown without code blocks."""
    text = LINK.sub(lambda link: _link(link, page), text)
    return TABLE.sub(r"\1\n\n", text)  # Python-Markdown starts a table only after a blank line


def _link(link: re.Match[str], page: str) -> str:
    target, _, anchor = link[3].partition("#")
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    place = site_place(page, target)
    if place is None:
        return link[2]
    relative = posixpath.relpath(place, posixpath.dirname(page) or ".")
    return f"{link[1]}[{link[2]}]({relative}{'#' if anchor else ''}{anchor})"
