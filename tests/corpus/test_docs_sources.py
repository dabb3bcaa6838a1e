"""Recipe snippets of how-to pages parse, and docs/reference/file-formats.md lists every format."""

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
PAGES = (
    "choose-a-model",
    "contamination",
    "deduplicate",
    "encoders",
    "evaluate",
    "import-a-model",
    "kubernetes",
    "language",
    "lost-nodes",
    "mix-sources",
    "optimizers",
    "packing",
    "personal-data",
    "pipeline",
    "precision",
    "quality-classifier",
    "rules",
    "save-memory",
    "several-processes",
    "slurm",
    "sources",
    "tokenizer",
    "watch",
    "write-a-recipe",
)


def snippets() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = (DOCS / "how-to" / f"{page}.md").read_text(encoding="utf-8")
        yield from ((page, snippet) for snippet in re.findall(r"```toml\n(.*?)```", text, re.DOTALL))


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
