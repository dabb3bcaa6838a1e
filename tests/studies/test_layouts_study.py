"""The certificate: the short list is run here; the full one is in the docs, as the study wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from bessemer import studies
from bessemer.cli import run_command
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.studies import layouts, layouts_page
from bessemer.studies.layouts_training import CASES, CertificateRun, batch_of

ROOT = Path(__file__).parent.parent.parent


def test_the_short_list_meets_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "layouts", "--short", "--folder", str(tmp_path / "s")]
    assert run_command(arguments) == 0
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "s" / "layouts.json").read_text())
    assert [(row["layout"], row["case"]) for row in found["rows"]] == [
        (layout, case) for layout in layouts.SHORT for case in ("hard", "dropout")
    ]
    for row in found["rows"]:
        assert row["loss"] <= 1e-12 and row["weight"] <= 1e-12, row
        assert row["layout"] in shown
    assert (tmp_path / "s" / "layouts.md").read_text() == layouts_page.page(found)
    # What is done is kept: no process is started, and a changed number is seen.
    kept = tmp_path / "s" / "runs" / "tp2" / "hard-fp64" / "run.json"
    told = json.loads(kept.read_text())
    told["losses"][3] += 1e-6
    kept.write_text(json.dumps(told))
    assert run_command(arguments) == 1
    assert "tp2, hard, fp64: 1.0e-06 is over 1e-09" in capsys.readouterr().err


def found_with(rows: list[dict[str, Any]]) -> dict[str, Any]:
    missed = [sentence for row in rows if (sentence := layouts._missed(row)) is not None]
    return {
        "settings": vars(CertificateRun()), "cases": {"plain": {}}, "targets": layouts.TARGETS, "rows": rows, "missed": missed,
        "made": {"day": "2026-01-01", "bessemer": "0", "torch": "2", "python": "3", "machine": "2 CPU cores, gloo"},
        "folder": "there",
    }  # fmt: skip


def row(precision: str, loss: float) -> dict[str, Any]:
    return {
        "layout": "dp2", "processes": 2, "case": "plain", "precision": precision, "loss": loss, "weight": 1e-3,
    }  # fmt: skip


def test_a_missed_target_is_said_and_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"layout": "tp4", "processes": 4, "case": "plain", "precision": "fp64", "why": "no such heads"}
    found = found_with([row("fp64", 2e-9), row("fp32", 9e-6), row("bf16", 0.5), refused])
    assert found["missed"] == ["dp2, plain, fp64: 2.0e-09 is over 1e-09", "tp4, plain, fp64: no such heads"]
    monkeypatch.setattr(layouts, "run", lambda short, folder: found)
    assert run_command(["study", "layouts"]) == 1
    said = capsys.readouterr()
    assert "2 of 4 rows miss it or failed" in said.out
    assert "dp2, plain, fp64: 2.0e-09 is over 1e-09; and 1 more; all of it is in there" in said.err
    assert "3 of 4 runs ended; 2 failed or missed their target." in said.out and layouts.plot(found).startswith("<svg")
    page = layouts_page.page(found)
    assert "| dp2 | 2 | 2.0e-09 | 1.0e-03 | 9.0e-06 | 1.0e-03 | 5.0e-01 | 1.0e-03 |" in page
    assert "| tp4 | 4 | no such heads | - |" in page and "- tp4, plain, fp64: no such heads" in page


def test_losses_that_are_no_numbers_do_not_pass() -> None:
    assert layouts._largest([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert layouts._largest([1.0, None], [1.0, 2.0]) == float("inf")  # type: ignore[list-item]


def test_other_studies_have_no_short_list() -> None:
    with pytest.raises(studies.InputError, match="neither --short nor --folder"):
        studies.run("pipeline", short=True)


def test_ragged_batches_are_ragged() -> None:
    asked = CertificateRun()
    batches = [batch_of(asked, CASES["hard"], number, SINGLE_PROCESS) for number in range(20)]
    counts = [int((batch.targets >= 0).sum()) for batch in batches]
    assert len(set(counts)) > 10 and max(counts) < asked.sequences * asked.length
    pieces: list[int] = []
    for batch in batches:
        assert batch.starts is not None and batch.starts[:, 0].all()
        pieces += np.diff(np.flatnonzero(batch.starts.ravel())).tolist()
        ends = np.roll(batch.starts, -1, axis=1)
        ends[:, -1] = False
        assert (batch.targets[ends] == -1).all()  # nothing is predicted over the border of two documents
    assert min(pieces) == 1 and max(pieces) > 35
    halves = [(batch.targets[part::2] >= 0).sum() for batch in batches for part in (0, 1)]
    assert len(set(map(int, halves))) > 10


def test_the_docs_say_what_the_study_found() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "layouts.json").read_text())
    assert (ROOT / "docs" / "parallel-certificate.md").read_text() == layouts_page.page(found)
    assert (ROOT / "docs" / "layouts.svg").read_text() == layouts_page.picture(found)

    assert found["settings"]["steps"] == 100
    assert {row["layout"] for row in found["rows"]} == set(layouts.LAYOUTS)
    for one in found["rows"]:
        if "why" not in one and one["precision"] in layouts.TARGETS:
            assert one["loss"] <= layouts.TARGETS[one["precision"]], one


def test_in_the_picture_a_point_stands_where_its_difference_is() -> None:
    found = found_with([row("fp64", 1e-15), row("fp32", 0.0)])
    drawn = ElementTree.fromstring(layouts_page.picture(found))
    points = {
        circle[0].text: float(circle.attrib["cx"])
        for circle in drawn.iter("{http://www.w3.org/2000/svg}circle")
        if len(circle)
    }
    scale = layouts_page.WIDTH / 16
    assert points == {
        "dp2, fp64: 1.0e-15": pytest.approx(layouts_page.LEFT + 2 * scale, abs=0.1),
        "dp2, fp32: equal bit for bit": layouts_page.LEFT,
    }
