"""The recipe snippets of docs/how-to/sources.md are recipes, and docs/reference/file-formats.md lists every format."""

import re
from pathlib import Path

import pytest

from bessemer.corpus.readers.base import BUILT_IN
from bessemer.recipe import parse
from bessemer.recipe.corpus import reader_class

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to/sources.md").read_text(encoding="utf-8")
FORMATS = (DOCS / "reference/file-formats.md").read_text(encoding="utf-8").partition("\n## Damaged")[0]
SNIPPETS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda text: text.splitlines()[1])
def test_snippets_are_recipes(snippet: str) -> None:
    parsed = parse('[run]\nname = "t"\n[model]\ndepth = 2\n' + snippet, "docs")
    assert parsed.corpus.sources or parsed.corpus.extract


def test_every_format_and_its_endings_are_told() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", FORMATS, re.MULTILINE))
    assert set(rows) == set(BUILT_IN)
    for format in ("text", "html", "warc", "mediawiki", "jsonl", "parquet"):
        assert tuple(" ".join(re.findall(r"`(\.[a-z. ]+)`", rows[format])).split()) == reader_class(format).suffixes
