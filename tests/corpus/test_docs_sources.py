"""Recipe snippets of the docs parse, and docs/reference/file-formats.md lists every format."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bessemer.corpus.readers.base import BUILT_IN
from bessemer.recipe import parse
from bessemer.recipe.corpus import reader_class

DOCS = Path(__file__).parents[2] / "docs"
FORMATS = (DOCS / "reference/file-formats.md").read_text(encoding="utf-8").partition("\n## Damaged")[0]
HEAD = {"run": 'name = "t"', "model": "depth = 2"}
OTHER_SOURCES = ("wiki", "crawl")  # sources that snippets without sources may name
NO_RECIPE = re.compile(r'\[\[device\]\]|"\w+:[A-Z]\w+"')
"""A catalogue of devices, and recipes that name code: the tests of these pages run them."""


def snippets() -> Iterator[tuple[str, str]]:
    """Yield the recipes of all pages but the tutorials, whose recipes tests/test_tutorials.py runs."""
    pages = (path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "tutorials")
    for path in (DOCS.parent / "README.md", *pages):
        found = re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        yield from ((path.stem, snippet) for snippet in found if not NO_RECIPE.search(snippet))


@pytest.mark.parametrize(("page", "snippet"), snippets())
def test_snippets_are_recipes(page: str, snippet: str) -> None:
    head = "".join(f"[{table}]\n{keys}\n" for table, keys in HEAD.items() if f"[{table}]" not in snippet)
    names = ["web", *(name for name in OTHER_SOURCES if name in snippet)]
    sources = "".join(f'[[corpus.sources]]\nname = "{name}"\npaths = ["."]\n' for name in names)
    has_sources = ".sources]]" in snippet
    parsed = parse(head + snippet + sources * (not has_sources), page)
    assert parsed.corpus.sources


def test_every_format_and_its_endings_are_documented() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", FORMATS, re.MULTILINE))
    assert set(rows) == set(BUILT_IN)
    for format in ("text", "html", "warc", "mediawiki", "jsonl", "parquet"):
        assert tuple(" ".join(re.findall(r"`(\.[a-z. ]+)`", rows[format])).split()) == reader_class(format).suffixes
