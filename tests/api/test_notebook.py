"""Progress in a notebook."""

from __future__ import annotations

import pytest

CELL = """
import time
from bessemer.common.console import progress

with progress("reading", 100, "doc") as advance:
    advance(25)
    time.sleep(2)
"""


@pytest.mark.usefixtures("cold")
def test_a_progress_bar_in_a_notebook_disappears_at_the_end() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    seen: list[str] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message, cell, number):  # type: ignore[no-untyped-def]
            seen.append(str(message["content"].get("data", {}).get("text/html", "")))
            return super().process_message(message, cell, number)

    Client(book, timeout=60).execute()
    assert any('value="25' in one and 'max="100"' in one and "reading" in one for one in seen)
    assert [one for one in seen if "progress" in one or one == ""][-1] == ""
    assert not any("progress" in str(output) for output in book.cells[0].outputs)
