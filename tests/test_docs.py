"""Every command of the documentation runs, in the order in which a reader meets it. Links: tests/test_site.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

from bessemer.cli import command_parser
from bessemer.common.extensions import KINDS
from tests.conftest import recipe_text, with_model, write_text

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    *(
        f"docs/{page}"
        for page in re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
        if (ROOT / "docs" / page).exists()
    ),
)
"""Pages in the order of the navigation, which tests/test_site.py compares with the folder."""


def commands(page: str) -> list[str]:
    """Return the `bessemer` commands of the page's shell blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("bessemer ")]


def python_blocks(page: str) -> list[str]:
    """Return the blocks of Python code of the page."""
    return re.findall(r"```python[^\n]*\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my.toml, small enough to run, and a `bessemer` on the path."""
    folder = tmp_path_factory.mktemp("docs")
    write_text(folder / "text")
    (folder / "README.txt").write_text("Text of its own, to be scored. " * 50)
    (folder / "tasks").mkdir()
    for text in re.findall(
        r"```yaml\n(task: (\w+)\n.*?)```", (ROOT / "docs/how-to/evaluate.md").read_text(), re.DOTALL
    ):
        (folder / "tasks" / f"{text[1]}.yaml").write_text(text[0])
    (folder / "tasks" / "capitals.jsonl").write_text(
        '{"country": "Peru", "cities": ["Lima", "Quito"], "answer": 0}\n' * 3
    )
    (folder / "bin").mkdir()
    program = folder / "bin" / "bessemer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bessemer "$@"\n')
    program.chmod(0o755)
    (folder / "own.toml").write_text(recipe_text(folder).replace(f'dir = "{folder / "runs"}"', 'dir = "runs"'))
    wider = (folder / "own.toml").read_text().replace("width = 32", "width = 64")
    (folder / "wider.toml").write_text(wider)
    labelled = recipe_text(folder).replace(f'dir = "{folder / "runs"}"', 'dir = "runs"')
    for old, new in (
        ('name = "small"', 'name = "labels"'),
        ('name = "prose"', 'name = "prose"\nlabel = "prose"'),
        ('name = "code"', 'name = "code"\nlabel = "code"'),
        ("vocabulary = 400", 'path = "runs/encoder/tokens/tokenizer.json"'),
        ("heads = 2\nkv_heads = 1", 'heads = 4\nfamily = "modernbert"'),
        ("[train]\n", '[train]\nobjective = "classify"\nstart = "runs/encoder"\n'),
    ):
        assert old in labelled
        labelled = labelled.replace(old, new)
    (folder / "labels.toml").write_text(labelled)
    tuned = (
        (folder / "own.toml").read_text().replace('name = "small"', 'name = "tuned"').replace("vocabulary = 400\n", "")
    )
    (folder / "tuned.toml").write_text(with_model(tuned, 'from = "hf:runs/small/export"'))
    return folder


# Commands whose results other commands of a page may read: these run on every page. Any other line runs on the first page that
# has it.
BEFORE_OTHERS = ("bessemer run my.toml", "bessemer corpus my.toml", "bessemer tokens my.toml")
SHORTENED = (
    ("my.toml", "shown.toml", ">"),
    ("train.steps=20 ", "train.steps=3 ", ""),  # on eight processes
    ("plan demo --set 'corpus.", "plan my.toml --set 'corpus.", ""),  # the demo's text: docs/how-to/ladder.md
    ("--budget 2e12", "--budget 8e11 --seeds 1", "bessemer ladder"),
)  # replacements, in lines that contain a third text


def commands_to_run() -> dict[str, list[str]]:
    """Return the commands of each page that has any, without repetition. tests/test_tutorials.py runs the tutorials."""
    seen, found = set[str](), dict[str, list[str]]()
    for page in PAGES:
        if page.startswith("docs/tutorials/"):
            continue
        lines = [line for line in commands(page) if line in BEFORE_OTHERS or line not in seen]
        seen.update(lines)
        if set(lines) - {*BEFORE_OTHERS}:
            found[page] = lines
    return found


TO_RUN = commands_to_run()
PYTHON_AFTER_COMMANDS = ("docs/how-to/export.md",)
"""Pages whose Python code reads results of their commands."""


@pytest.mark.long
@pytest.mark.parametrize("page", TO_RUN)
def test_the_commands_of_the_docs_run(page: str, place: Path) -> None:
    environment = {**os.environ, "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    shutil.rmtree(place / "runs" / "text", ignore_errors=True)  # of an earlier page, which may have trained it longer
    for line in TO_RUN[page]:
        # `recipe demo > my.toml` writes the demo's recipe; a reader edits it, and the test replaces it with a small one.
        (place / "my.toml").write_text((place / "own.toml").read_text())
        for old, new, where in SHORTENED:
            line = line.replace(old, new) if where in line else line
        line = re.sub(r"(train\.minutes=0\.)(\d)", r"\g<1>0\2", line)
        done = subprocess.run(
            ["bash", "-c", line], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"
    for block in python_blocks(page) if page in PYTHON_AFTER_COMMANDS else ():
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}: {block}\n{done.stderr}"


@pytest.mark.parametrize("page", ["how-to/own-filter"])
def test_the_python_of_the_docs_runs(page: str) -> None:
    blocks = python_blocks(f"docs/{page}.md")
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"__name__": page})


def code(page: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the code blocks of a page by language ("" for none), and the code within its text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = defaultdict[str, list[str]](list)
    for language, block in re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        blocks[language].append(block)
    plain = re.sub(r"^```.*\n(?:.*\n)*?```$", "", text, flags=re.MULTILINE)
    return blocks, re.findall(r"`([^`]+)`", plain)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_code_that_no_other_test_runs_is_valid(page: str) -> None:
    """Commands have options that exist, targets are in the Makefile, entry points have groups that Bessemer reads."""
    blocks, spans = code(page)
    commands = command_parser()
    known = commands._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for span in spans:
        words = span.split()
        if words[:1] == ["bessemer"] and len(words) > 1 and words[1].isalpha() and words[1].islower():
            options = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
            assert words[1] in known and options <= {*known[words[1]]._option_string_actions}, f"{page}: {span}"
    lines = [line for kind in ("", "bash") for block in blocks[kind] for line in block.replace("\\\n", "").splitlines()]
    for line in lines:
        if line.startswith("bessemer ") and line.split()[1] in known:  # the output may begin so too
            commands.parse_args(shlex.split(re.split(r" (?:<<<|->|[|>]) ", line)[0], comments=True)[1:])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", "\n".join([*lines, *spans]), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {target}"
    for block in blocks['toml title="pyproject.toml"']:
        for group in tomllib.loads(block)["project"]["entry-points"]:
            assert group.removeprefix("bessemer.") in KINDS, f"{page}: {group}"
    for block in blocks["json"]:
        assert all(isinstance(json.loads(line), dict) for line in block.splitlines())
    assert set(blocks) <= {"", "bash", "toml", "python", "json", "yaml"} | {key for key in blocks if " title=" in key}


def test_the_docs_stay_short() -> None:
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md")}
    assert sum(len(text.split()) for text in texts.values()) <= 32_000
    assert not [page for page, text in texts.items() if "how-to/" in page and len(text.split()) > 400]
    for page, limit in (("README.md", 120), ("CHANGELOG.md", 40), ("CONTRIBUTING.md", 80)):
        assert len(texts[page].splitlines()) < limit, page


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [
        page for page in PAGES[1:] if page != "docs/index.md" and f"({page.removeprefix('docs/')})" not in index
    ]


def test_the_files_that_the_map_names_exist() -> None:
    source = ROOT / "src" / "bessemer"
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text[text.index("| package |") : text.index("`import bessemer.train`")]
    listed = set()
    for row in table.strip().splitlines()[2:]:
        _, modules, _, _, first, _ = row.split("|")
        packages = re.findall(r"`([\w/.]+)`", modules)
        listed |= {package.rstrip("/").removesuffix(".py") for package in packages}
        for name in re.findall(r"`([\w/.]+)`", first):
            assert any((source / folder / name).exists() for folder in ("", *packages)), f"{packages[0]}: {name}"
    there = {path.stem for path in source.iterdir() if path.suffix in ("", ".py") and not path.name.startswith("__")}
    assert listed == there, listed ^ there
    text = text.replace(table, "")
    for page, said in (
        ("docs/architecture.md", text),
        ("CONTRIBUTING.md", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")),
    ):
        for name in re.findall(r"`(?:src/bessemer/)?(\w+/[\w/]+\.(?:py|toml))`", said):
            assert (source / name).exists() or (ROOT / name).exists(), f"{page}: {name}"


EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.usefixtures("cold")  # the kernel is a separate program
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_and_its_findings_hold(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell of each notebook asserts its finding."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    for name, value in {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "QUICK": "1"}.items():
        monkeypatch.setenv(name, value)
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert book.cells[-1].outputs[-1]["data"]["text/plain"]


def test_notebooks_are_short_and_only_a_long_one_has_outputs() -> None:
    assert len(NOTEBOOKS) == 18
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        lines = [line.strip() for cell in cells for line in cell["source"]]
        assert sum(bool(line) and not line.startswith("#") for line in lines) <= 80, path.name
        is_long = any("QUICK" in line for line in lines)
        assert any(cell["outputs"] or cell["execution_count"] for cell in cells) is is_long, path.name
        assert {"plt.show()", "assert"} <= {line.partition(" ")[0] for line in lines}, path.name


LICENCES = ("MIT", "BSD", "Apache", "LGPL", "MPL", "ISC", "PSF|Python Software Foundation")


def table() -> dict[str, tuple[list[str], str]]:
    """Return the extras and the licence of each package, from the page."""
    rows = re.findall(
        r"^\| ([\w.-]+) \| ([^|]*)\| ([^|]+) \| [\d.]+ \| [^|]+ \|$",
        (ROOT / "docs/reference/dependencies.md").read_text(),
        re.M,
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


def test_the_licences_equal_those_of_the_packages() -> None:
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
