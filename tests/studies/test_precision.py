from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bessemer.cli import run_command
from bessemer.studies import precision


def test_the_ranges_are_those_of_the_formats() -> None:
    """From exponent and significand bits: e4m3 gives up its infinity for one more binade less one value."""
    found = precision.ranges()
    for name, exponent, bits in (("fp32", 8, 23), ("tf32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10), ("fp8 e5m2", 5, 2)):
        bias = 2 ** (exponent - 1) - 1
        row = found[name]
        assert row["largest"] == (2 - 2.0**-bits) * 2.0**bias, name
        assert row["smallest_normal"] == 2.0 ** (1 - bias), name
        assert row["smallest"] == 2.0 ** (1 - bias - bits), name
        assert row["epsilon"] == 2.0**-bits, name
    assert found["fp8 e4m3"] == {"largest": 448, "smallest_normal": 2.0**-6, "smallest": 2.0**-9, "epsilon": 0.125}
    assert found["fp16"]["smallest"] == float(np.finfo(np.float16).smallest_subnormal)


def test_scores_overflow_fp16_alone() -> None:
    rows = precision.scores()
    for row in rows:
        assert row["bf16"] == pytest.approx(row["fp32"], rel=2e-2)
        assert (row["fp16"] is None) == (row["fp32"] > 65520)
        assert (row["fp16_nan_rows"] > 0) == (row["fp16"] is None)
    assert rows[0]["fp16"] is not None and rows[-1]["fp16"] is None


def test_shares_are_counted() -> None:
    values = torch.tensor([0.0, 1.0, 1e5, 2e-5, 1e-9, -1e-9])
    assert precision._shares(values, torch.float16) == {"zero": 0.4, "subnormal": 0.2, "infinite": 0.2}
    assert precision._shares(values, torch.bfloat16) == {"zero": 0.0, "subnormal": 0.0, "infinite": 0.0}


@pytest.mark.long
def test_fp16_without_a_scale_loses_gradients_and_learns_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", "precision", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for kind in ("activations", "weights"):
        assert found["gradients"][kind]["fp16"]["zero"] > 0.01
        assert found["gradients"][kind]["fp16, scaled by 65536"]["zero"] < 1e-3
        assert found["gradients"][kind]["bf16"]["zero"] == 0
    last = {name: row["last"] for name, row in found["runs"].items()}
    assert last["bf16"] == pytest.approx(last["fp32"], abs=0.03)
    assert last["fp16, dynamic loss scale"] == pytest.approx(last["fp32"], abs=0.03)
    assert last["fp16, no loss scale"] > last["fp32"] + 0.3
    shown = precision.table(found)
    assert "fp16, no loss scale" in shown and f"{last['bf16']:.3f}" in shown
