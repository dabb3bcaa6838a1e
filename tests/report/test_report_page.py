"""The page: whole, self-contained, safe, and there only in whole."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

from bessemer.report import page
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from tests.report.conftest import MakeRun, Reader

SECTIONS = [
    "story",
    "curves",
    "plan",
    "samples",
    "corpus",
    "data",
    "incidents",
    "export",
    "stages",
    "environment",
    "recipe",
]
HOSTILE = (
    "</script></pre><script>alert(1)</script><img src=x onerror=alert(2)><!-- <script> {{ 7 * 7 }} \u2028 \u202e '\""
)


def read(run: RunDirectory) -> Reader:
    return Reader(page.write(run).read_text(encoding="utf-8"))


def test_every_section_is_there_in_order(make_run: MakeRun) -> None:
    read(make_run(steps=60)).is_whole(SECTIONS)
    style = (Path(page.__file__).parent / "style.css").read_text()
    assert "url(" not in style and "@import" not in style


def test_sections_without_data_are_absent(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    for path in [*run.path.rglob("*.json"), run.metrics, run.incidents, run.recipe]:
        if path.parent != run.corpus:
            path.unlink()
    found = read(run)
    assert found.sections() == ["corpus"]
    assert "12,649 of 14,874 documents were kept" in "".join(found.text)


def test_a_page_without_curves_holds_no_plotting_library(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    write_json(run.path / "stages.json", {"stages": [{"name": "corpus", "seconds": 3.0, "skipped": False}]})
    assert page.write(run).stat().st_size < 100_000


def test_hostile_text_stays_text(make_run: MakeRun) -> None:
    run = make_run(steps=20, hostile=HOSTILE)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows:
        for key in ("loss_by_source", "bits_per_byte_by_source"):
            if key in row:
                row[key][HOSTILE] = 3.0  # inside the figures, which stand in a script element
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(run)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in "".join(found.text)
    assert not any(tag == "img" for tag, _ in found.elements)
    assert "{{ 7 * 7 }}" in "".join(found.text)
    assert len(found.scripts) == 3
    data = found.scripts[1]
    assert "<" not in data
    assert any("</script>" in trace["name"] for trace in json.loads(data)["sources"]["traces"])


def test_half_a_character_is_no_error(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    run.evaluation.write_text('{"samples": [{"prompt": "x", "text": "torn \\ud83d here"}]}')
    assert "torn ? here" in page.write(run).read_text(encoding="utf-8")


def test_the_page_is_written_as_a_whole(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(steps=10)
    run.report.write_text("the old page")

    def fails(*arguments: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(OSError, match="disk full"):
            page.write(run)
    assert run.report.read_text() == "the old page"
    assert page.write(run) == run.report
    assert run.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(run.path.glob(".*"))
