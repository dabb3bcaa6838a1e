"""The report's section about a run of several processes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bessemer.report import data, page, sections
from bessemer.run.directory import RunDirectory
from tests.report.conftest import plain, section_of, tables


def split(run: RunDirectory, steps: int = 3) -> RunDirectory:
    """The run as if it had been split, with the matmul's seconds in a few steps."""
    recipe = run.recipe.read_text()
    run.recipe.write_text(recipe + "\n[parallel]\nreplicate = 1\nshard = 2\ntensor = 2\npipeline = 2\nzero = 1\n")
    plan = json.loads(run.plan.read_text()) | {"communicated_bytes": {"all_gather": 2000, "send": 500}}
    run.plan.write_text(json.dumps(plan))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()][:steps]
    for index, line in enumerate(lines[:]):
        lines.append({"kind": "ranks", "step": line["step"], "matmul_seconds": {"0": 0.001, "1": 0.002 + index / 1000}})
    run.metrics.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return run


def test_layout_bytes_and_times_are_shown(make_run: Callable[..., RunDirectory]) -> None:
    html = section_of(page.render(data.read(split(make_run(steps=40)))), "processes")
    assert "8 processes: shard 2 x tensor 2 x pipeline 2." in plain(html)
    shown = tables(html)
    assert [row[:2] for row in shown[""]] == [
        ["shard", "2"], ["tensor", "2"], ["pipeline", "2"], ["zero", "1"], ["schedule", "1f1b"],
    ]  # fmt: skip
    assert shown["Sent in a step, all processes together"] == [
        ["all-gather", "2.0 kB"],
        ["send", "500 B"],
    ]
    assert [row[0] for row in shown["The same matmul on every rank"]] == ["1", "0"]


@pytest.mark.parametrize("value", [None, "8", {"shard": "two"}, {"shard": -1}])
def test_a_damaged_layout_is_no_error(make_run: Callable[..., RunDirectory], value: object) -> None:
    run = data.read(make_run(steps=10))
    run.recipe["parallel"] = value
    assert sections.layout_sizes(run) == {}
