"""The documentation site: each page is in the navigation, links and anchors resolve. `make docs` builds it strictly."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmark_files import results

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
MAX_PICTURE_BYTES = 60_000


def module(name: str) -> ModuleType:
    """Import a module of docs/site."""
    sys.path.insert(0, str(DOCS / "site"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def pages_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def configuration() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    read: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return read


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages_of(configuration()["nav"]))
    assert len(listed) == len(set(listed))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    made = {*module("links").FROM_ELSEWHERE.values(), *module("reference").api_pages()}
    assert not pages & made, "two pages of one name"
    missing = pages - set(listed)
    assert not missing, f"add to `nav` of mkdocs.yml: {sorted(missing)}"
    assert set(listed) == pages | made, set(listed) - pages - made


def test_every_module_of_the_api_pages_exists() -> None:
    for package, names in module("reference").MODULES.items():
        for name in names:
            assert importlib.util.find_spec(f"bessemer.{package}.{name}"), (
                f"MODULES of docs/site/reference.py: {package}.{name}"
            )


def sources() -> list[str]:
    return [*(str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.md"))), *module("links").FROM_ELSEWHERE]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and the site generate them."""
    headings = re.findall(r"^#{1,6} (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", sources())
def test_links_and_anchors_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code((ROOT / page).read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        place = (ROOT / page).parent / file if file else ROOT / page
        assert place.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(place), f"{page}: {target} has no such heading"


def test_the_reference_has_every_key_with_its_range() -> None:
    from bessemer.model.huggingface.families import FAMILIES
    from bessemer.recipe.keys import keys, keys_and_limits

    reference = module("reference")
    known = keys_and_limits()
    assert "corpus.rules.c4.min_sentences" in known.keys() - keys().keys()
    values = [name for name, info in known.items() if not reference.section_of(info.annotation)]
    assert reference.recipe_keys().count("\n| `") == len(values)
    assert reference.kind_of(known["run.seed"]) == "integer, ≥ 0"
    assert reference.kind_of(known["tokens.held_out"]).startswith("number")
    assert reference.kind_of(known["train.steps"]) == "integer, > 0"
    assert "`" not in "".join(
        reference.type_name(known[name].annotation) for name in ("run.name", "corpus.sources.paths")
    )
    assert all("bessemer." not in reference.kind_of(known[name]) for name in values)
    assert "| `spike` | skip the update |" in reference.incidents()
    assert reference.families().count("\n| `") == len(FAMILIES)


def test_pictures_are_small() -> None:
    for path in DOCS.rglob("*.svg"):
        assert path.stat().st_size < MAX_PICTURE_BYTES, path.name
        assert "http" not in path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", ""), path.name


def test_the_comparison_has_the_measured_figures() -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    shown = {peer: ratio for _, peer, ratio, _ in (row for row in rows if len(row) == 4)}
    measured = {row["side"]: row["bessemer_over_side_median"] for row in results("step_cpu")["sides"]}
    encoding = results("encoding")["sides"]
    ours = encoding["Bessemer"]["times_tokenizers"]
    measured["tokenizers, batches"] = ours
    measured["tiktoken"] = ours / encoding["tiktoken"]["times_tokenizers"]
    measured["datatrove, 14 x 8"] = results("dedup")["rows"][0]["times_the_peer"]
    rates = results("corpus")["rates"]
    measured["datatrove, whole commands"] = rates["Bessemer"] / rates["datatrove"]
    measured["datatrove, four rule sets"] = next(
        row["ratio"] for row in results("rules")["rows"] if row["filter"] == "all"
    )
    checked = [peer for peer in shown if peer in measured]
    assert len(checked) == len([ratio for ratio in shown.values() if re.fullmatch(r"[\d.]+", ratio)]) >= 10
    for peer in checked:
        digits = len(shown[peer].partition(".")[2])
        assert f"{measured[peer]:.{digits}f}" == shown[peer], peer
