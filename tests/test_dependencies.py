"""docs/dependencies.md names every package of pyproject.toml, with the extras and the licence that it has."""

import re
import tomllib
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
LICENCES = ("MIT", "BSD", "Apache", "LGPL", "MPL", "ISC", "PSF|Python Software Foundation")


def table() -> dict[str, tuple[list[str], str]]:
    """Return the extras and the licence of each package, from the page."""
    rows = re.findall(
        r"^\| ([\w.-]+) \| ([^|]*)\| ([^|]+) \| [\d.]+ \| [^|]+ \|$", (ROOT / "docs/dependencies.md").read_text(), re.M
    )
    assert len(rows) == len({name for name, *_ in rows})
    return {name: (re.findall(r"\w+", extras), licence) for name, extras, licence in rows}


def required() -> dict[str, list[str]]:
    """Return the extras of each package, from pyproject.toml; none for the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = defaultdict[str, list[str]](list)
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for line in lines:
            name = re.match(r"[\w.-]+", line)
            assert name is not None, line
            if name[0] != "bessemer":
                found[name[0]] += [extra] if extra else []
    return found


def test_the_page_lists_every_dependency() -> None:
    assert {name: sorted(extras) for name, (extras, _) in table().items()} == {
        name: sorted(extras) for name, extras in required().items()
    }


def test_the_licences_are_those_of_the_packages() -> None:
    compared = 0
    for name, (_, licence) in table().items():
        try:
            about = metadata(name)
        except PackageNotFoundError:
            continue
        classifiers = [line for line in about.get_all("Classifier") or [] if line.startswith("License")]
        own = " ".join([about.get("License-Expression") or "", (about.get("License") or "")[:100], *classifiers])
        families = {family for family in LICENCES if re.search(family, own)}
        if families:
            assert any(re.search(family, licence) for family in families), (name, licence, own)
            compared += 1
    assert compared > 20


def test_the_core_needs_no_torch() -> None:
    assert not {name for name, extras in required().items() if not extras} & {"torch", "transformers", "pyarrow"}
