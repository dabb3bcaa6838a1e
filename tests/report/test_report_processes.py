"""The report's section about a run of several processes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bessemer.report import data, page, processes
from bessemer.run import RunFolder


def split(run: RunFolder, steps: int = 3) -> RunFolder:
    """The run as if it had been split, with bytes of a few steps."""
    recipe = run.recipe.read_text()
    run.recipe.write_text(recipe + "\n[parallel]\nreplicate = 1\nshard = 2\ntensor = 2\npipeline = 2\nzero = 1\n")
    plan = json.loads(run.plan.read_text()) | {"communicated_bytes": {"all_gather": 2000, "send": 500}}
    run.plan.write_text(json.dumps(plan))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()][:steps]
    for index, line in enumerate(lines):
        line["communicated_bytes"] = {"all_gather": 2000, "all_reduce": 30 + index}
    run.metrics.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return run


def test_layout_and_bytes_stand_beside_the_formula(make_run: Callable[..., RunFolder]) -> None:
    found = processes.section(data.read(split(make_run(steps=40))))
    assert "8 processes: shard 2 x tensor 2 x pipeline 2" in found["finding"]
    assert {row["way"]: row["count"] for row in found["split"]} == {
        "shard": 2, "tensor": 2, "pipeline": 2, "zero": 1, "schedule": "1f1b",
    }  # fmt: skip
    rows = {row["kind"]: row for row in found["sent"]}
    assert rows["all-gather"]["ratio"] == 1.0
    assert rows["all-reduce"]["measured"] == "31 B" and rows["all-reduce"]["ratio"] is None  # the median; no formula
    assert rows["send"]["planned"] == "500 B" and rows["send"]["measured"] == "–"


def test_the_page_has_the_section_only_then(make_run: Callable[..., RunFolder]) -> None:
    run = make_run(steps=40)
    assert processes.section(data.read(run)) == {}
    assert 'id="processes"' not in page.render(data.read(run))
    assert 'id="processes"' in page.render(data.read(split(run)))


@pytest.mark.parametrize("value", [None, "8", {"shard": "two"}, {"shard": -1}])
def test_a_damaged_layout_is_no_error(make_run: Callable[..., RunFolder], value: object) -> None:
    run = data.read(make_run(steps=10))
    run.recipe["parallel"] = value
    assert processes.section(run) == {}
