"""What the curves keep of the numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from bessemer.report import curves, data
from bessemer.run.directory import RunDirectory
from tests.report.conftest import MakeRun, valid_plotly


def test_thinning_keeps_ends_and_extremes() -> None:
    x = np.arange(1, 1_000_001, dtype=np.float64)
    y = np.random.default_rng(0).normal(size=len(x))
    y[123_456], y[987_654] = 40.0, -40.0
    kept_x, kept_y = curves.thin(x, y, 2000)
    assert 1000 < len(kept_x) <= 2000
    assert (kept_x[0], kept_x[-1]) == (1.0, 1_000_000.0)
    assert (kept_y[0], kept_y[-1]) == (y[0], y[-1])
    assert (kept_y.max(), kept_x[kept_y.argmax()]) == (40.0, 123_457.0)
    assert (kept_y.min(), kept_x[kept_y.argmin()]) == (-40.0, 987_655.0)
    assert np.all(np.diff(kept_x) > 0)


@pytest.mark.parametrize("points", [1, 2, 3, 1999, 2000, 2001, 5000])
def test_thinning_of_any_length(points: int) -> None:
    x = np.arange(points, dtype=np.float64)
    kept_x, kept_y = curves.thin(x, x**2, 2000)
    assert len(kept_x) <= 2000
    assert (kept_x[0], kept_x[-1], kept_y[-1]) == (0.0, points - 1.0, (points - 1.0) ** 2)


def test_smoothing_is_centred_and_skips_gaps() -> None:
    line = np.arange(200.0)
    assert np.allclose(curves.smooth(line, 21)[:180], line[:180])
    line[50] = np.nan
    assert np.isfinite(curves.smooth(line, 21)).all()
    spike = np.zeros(101)
    spike[50] = 1.0
    smoothed = curves.smooth(spike, 21)
    assert smoothed.argmax() == 50
    assert np.allclose(smoothed[40:50], smoothed[60:50:-1])


def test_figures_are_valid_plotly(make_run: MakeRun) -> None:
    figures = curves.curves(data.read(make_run(steps=60)))
    assert {"loss", "bits"} <= {figure["id"] for figure in figures}
    for figure in figures:
        valid_plotly(figure)


def test_baselines_are_lines_and_a_missing_one_says_how_to_get_it(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    both = next(figure for figure in curves.curves(data.read(run)) if figure["id"] == "bits")
    levels = {trace["name"]: trace["y"][0] for trace in both["traces"][-2:]}
    assert levels == {"a byte 5-gram": 2.042, "PPMd order 10": 1.402} and "pip install" not in both["note"]
    run.evaluation.write_text(json.dumps({**json.loads(run.evaluation.read_text()), "ppmd": None}))
    one = next(figure for figure in curves.curves(data.read(run)) if figure["id"] == "bits")
    assert one["traces"][-1]["name"] == "a byte 5-gram" and "pip install 'bessemer[ppmd]'" in one["note"]


def test_figures_hold_no_nan(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows[10:20]:
        row["loss"] = row["grad_norm"] = None
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert json.dumps(curves.curves(data.read(run)), allow_nan=False)


def test_a_long_run_makes_a_small_page() -> None:
    steps = np.arange(1, 300_001, dtype=np.float64)
    values = np.random.default_rng(0).normal(size=len(steps))
    names = [
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "step_seconds",
        "data_wait",
        "memory_bytes",
        "mfu",
    ]
    columns = {**dict.fromkeys(names, values), "tokens": steps}
    long = data.RunData("long", train=data.Curves(steps, columns, {"loss_by_source": {"a": values, "b": values}}))
    assert len(json.dumps(curves.curves(long))) < 1_000_000


def test_every_statistic_of_the_layers_becomes_a_figure(tmp_path: Path) -> None:
    """Blocks in their order, of twelve six; the largest logit of any block; groups of weights by kind, the mean over blocks."""
    run = RunDirectory(tmp_path)
    rows = [
        {
            "kind": "inside", "step": step,
            "activation_rms": {str(block): 1.0 + block for block in range(12)},
            "attention_logit_max": {str(block): float(step + block % 7) for block in range(12)},
            "router_entropy": {str(block): 0.5 * block for block in range(2)},
            "update_ratio": {**{f"{block}.mlp": 1e-3 * (block + 1) for block in range(12)}, "head": 5e-3},
        }
        for step in (50, 100)
    ]  # fmt: skip
    run.recipe.write_text("[run]\n")
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {figure["id"]: figure for figure in curves.curves(data.read(run))}
    activations, logits, updates = (found[name]["traces"] for name in ("activations", "logits", "updates"))
    assert [trace["name"] for trace in activations] == [f"block {number}" for number in (1, 3, 5, 8, 10, 12)]
    assert [trace["y"][0] for trace in activations] == [1, 3, 5, 8, 10, 12]
    assert found["activations"]["note"] == "6 of 12 blocks."
    assert (logits[0]["x"], logits[0]["y"]) == ([50, 100], [56, 106])
    assert {trace["name"]: trace["y"][-1] for trace in updates} == {
        "mlp": 0.0065, "head": 0.005, "usual with Adam": 0.001,
    }  # fmt: skip
    entropy = found["layers-router_entropy"]
    assert entropy["title"] == "Router entropy"
    assert {trace["name"]: trace["y"] for trace in entropy["traces"]} == {"block 1": [0, 0], "block 2": [0.5, 0.5]}
