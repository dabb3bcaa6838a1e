import io
from typing import Any

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from bessemer.recipe import Train
from bessemer.train import device as devices
from bessemer.train import metrics as rates


def test_a_step_above_the_measured_peak_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(rates, "perf_counter", lambda: next(clock))
    found = rates.Rates(1e7, 1.2e7, 1e9, devices.choose(Train(device="cpu")))
    assert [(row["mfu"], row["hfu"]) for row in (found.now(400), found.now(400))] == [(1 / 1.2, 1.0), (0.5 / 1.2, 0.5)]


@pytest.mark.parametrize("has_both", [True, False])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_peak_is_the_best_of_sizes_and_libraries_in_the_precision_of_the_step(
    precision: str, dtype: torch.dtype, has_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps use torch's library, that one alone is timed."""
    best = 4e9
    rate_of = {("steps", 256): 1e9, ("torch", 256): 2e9, ("steps", 512): best, ("torch", 512): 3e9}

    def fastest(product: Any, device: devices.Device, budget: float) -> float:
        a, b = product.args
        assert a.dtype == b.dtype == dtype
        return 2 * len(a) ** 3 / rate_of.get(("torch" if product.func is torch.mm else "steps", len(a)), 1e9)

    monkeypatch.setattr(devices, "CPU_MATMUL_EDGES", (256, 512, 1024))
    monkeypatch.setattr(devices, "MATMUL_SECONDS", 0.06)
    monkeypatch.setattr(devices, "fastest", fastest)
    monkeypatch.setattr(devices, "prefers_onednn", lambda: has_both)
    before = torch.get_rng_state()
    found = devices.matmul_rate(devices.choose(Train(device="cpu", precision=precision)))  # type: ignore[arg-type]
    assert found == pytest.approx(best if has_both else 3e9)
    assert torch.equal(torch.get_rng_state(), before), "a training's random numbers are not drawn"


@pytest.mark.parametrize("size", [0, 1, 9, 300])
def test_records_are_those_of_tensorboards_writer(size: int) -> None:
    data, written = bytes(n * 37 % 251 for n in range(size)), io.BytesIO()
    RecordWriter(written).write(data)
    assert rates.record(data) == written.getvalue()
