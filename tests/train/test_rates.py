from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Train
from bessemer.run import read_json, write_json
from bessemer.train import device as devices
from bessemer.train import metrics as rates


def test_a_step_above_the_measured_peak_raises_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0, 5.0])
    monkeypatch.setattr(rates, "perf_counter", lambda: next(clock))
    again = iter([1e9, 7e9])  # measured anew: still slowed by a neighbour, then not
    monkeypatch.setattr(rates, "matmul_rate", lambda device: next(again))
    path, device = tmp_path / "plan.json", devices.choose(Train(device="cpu"))
    write_json(path, {"peak_flops": 1e9, "mfu": 0.5, "hfu": 0.6, "steps": 3})
    found = rates.Rates(1e7, 1.2e7, 1e9, device, SINGLE_PROCESS, path)
    first, second, third = (found.now(tokens) for tokens in (400, 400, 2400))
    assert (first["mfu"], first["hfu"], first["peak_flops"]) == pytest.approx((1 / 1.2, 1.0, 2.4e9))
    assert "peak_flops" not in second and second["hfu"] == pytest.approx(0.5)
    assert (third["hfu"], third["peak_flops"]) == pytest.approx((1.2e7 * 480 / 7e9, 7e9))
    told = read_json(path)
    assert told == {
        "peak_flops": pytest.approx(7e9),
        "mfu": pytest.approx(0.5 / 7),
        "hfu": pytest.approx(0.6 / 7),
        "steps": 3,
    }


@pytest.mark.parametrize("has_both", [True, False])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_peak_is_the_best_of_sizes_and_libraries_in_the_precision_of_the_step(
    precision: str, dtype: torch.dtype, has_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps use torch's library, that one alone is timed."""
    now, best = 0.0, 4e9
    rate_of = {("steps", 256): 1e9, ("torch", 256): 2e9, ("steps", 512): best, ("torch", 512): 3e9}

    def product_of(library: str) -> Any:
        def product(a: torch.Tensor, b: torch.Tensor) -> None:
            nonlocal now
            assert a.dtype == b.dtype == dtype
            now += 2 * len(a) ** 3 / rate_of.get((library, len(a)), 1e9)

        return product

    monkeypatch.setattr(devices, "CPU_MATMUL_EDGES", (256, 512, 1024))
    monkeypatch.setattr(devices, "MATMUL_SECONDS", 0.06)
    monkeypatch.setattr(devices, "perf_counter", lambda: now)
    monkeypatch.setattr(devices, "prefers_onednn", lambda: has_both)
    monkeypatch.setattr(devices, "linear_kernel", product_of("steps"))
    monkeypatch.setattr(torch, "mm", product_of("torch"))
    before = torch.get_rng_state()
    found = devices.matmul_rate(devices.choose(Train(device="cpu", precision=precision)))  # type: ignore[arg-type]
    assert found == pytest.approx(best if has_both else 3e9)
    assert torch.equal(torch.get_rng_state(), before), "a training's random numbers are not drawn"


@pytest.mark.parametrize("size", [0, 1, 9, 300])
def test_records_are_those_of_tensorboards_writer(size: int) -> None:
    data, written = bytes(n * 37 % 251 for n in range(size)), io.BytesIO()
    RecordWriter(written).write(data)
    assert rates.record(data) == written.getvalue()
