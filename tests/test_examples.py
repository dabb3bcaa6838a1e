"""The notebooks of examples/ run, and find what they say."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.usefixtures("cold")  # the kernel is a program of its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_finds_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell of each asserts its finding."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert book.cells[-1].outputs[-1]["data"]["text/plain"]


def test_notebooks_are_short_and_committed_without_outputs() -> None:
    assert len(NOTEBOOKS) == 16
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        lines = [line.strip() for cell in cells for line in cell["source"]]
        assert sum(bool(line) and not line.startswith("#") for line in lines) <= 80, path.name
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), path.name
        assert any("plt.show()" in line for line in lines) and any(line.startswith("assert ") for line in lines), (
            path.name
        )
