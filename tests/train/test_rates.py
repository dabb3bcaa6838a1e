import gzip
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from bessemer.cli import run_command
from bessemer.distributed.mesh import ProcessMesh
from bessemer.recipe import Parallel, Train
from bessemer.run.files import read_json_lines
from bessemer.train import device as devices
from bessemer.train import metrics as rates
from bessemer.train import stragglers
from bessemer.train.device import Device
from bessemer.train.metrics import MetricsLog
from bessemer.train.precision import PRECISIONS
from bessemer.train.profile import StepProfiler
from tests.newest import training_result
from tests.train.small_trainer import batch, trainer_of


def test_a_step_above_the_measured_peak_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 4.0])
    monkeypatch.setattr(rates, "perf_counter", lambda: next(clock))
    found = rates.Rates(1e7, 1.2e7, 1e9, devices.choose(Train(device="cpu")))
    assert [(row["mfu"], row["hfu"]) for row in (found.now(400), found.now(400))] == [(1 / 1.2, 1.0), (0.5 / 1.2, 0.5)]


@pytest.mark.parametrize("has_both", [True, False])
@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_peak_is_the_best_of_sizes_and_libraries_in_the_steps_precision(
    precision: str, dtype: torch.dtype, has_both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If steps use torch's library, only that one is timed."""
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
def test_records_equal_those_of_tensorboards_writer(size: int) -> None:
    data, written = bytes(n * 37 % 251 for n in range(size)), io.BytesIO()
    RecordWriter(written).write(data)
    assert rates.record(data) == written.getvalue()


CPU = Device(torch.device("cpu"), "cpu", PRECISIONS["fp32"], compile=False)
CUDA = replace(CPU, torch_device=torch.device("cuda"))


class Lines:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.rows.append({"kind": kind, "step": step, **values})


class Mesh(ProcessMesh):
    """Mesh of rank 0 of four, of which rank 2 is slower."""

    is_single = False  # type: ignore[assignment]

    def gather(self, value: Any) -> list[Any]:
        host, seconds = value
        return [(host, factor * seconds) for factor in (1.0, 1.01, 1.3, 0.99)]


def test_a_slow_device_is_recorded_after_two_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "probe_seconds", lambda device: 0.01)
    log = Lines()
    watcher = stragglers.Stragglers(Mesh(Parallel(shard=4)), CUDA, 3, tmp_path / "incidents.jsonl")
    for step in range(1, 10):
        watcher.compare_if_due(cast(MetricsLog, log), step)
    assert [(row["step"], row["slowest"]) for row in log.rows] == [(3, 2), (6, 2), (9, 2)]
    assert log.rows[0]["matmul_seconds"] == pytest.approx({"0": 0.01, "1": 0.0101, "2": 0.013, "3": 0.0099})
    (incident,) = read_json_lines(tmp_path / "incidents.jsonl")
    assert (incident["what"], incident["step"], incident["rank"]) == ("straggler", 6, 2)


def test_cpus_and_single_processes_are_not_compared(tmp_path: Path) -> None:
    for mesh, device in ((Mesh(Parallel(shard=4)), CPU), (ProcessMesh(Parallel()), CUDA)):
        log = Lines()
        stragglers.Stragglers(mesh, device, 1, tmp_path / "incidents.jsonl").compare_if_due(cast(MetricsLog, log), 1)
        assert log.rows == []


@pytest.mark.parametrize(("num_steps", "profiled"), [(1, 1), (3, 2), (6, 3)])
def test_a_few_steps_are_profiled_even_in_a_short_session(
    recipe_file: Path, tmp_path: Path, num_steps: int, profiled: int
) -> None:
    trainer = trainer_of(recipe_file)
    profiler = StepProfiler(trainer.device, num_steps, tmp_path / "profile")
    for data in profiler(iter([batch() for _ in range(num_steps)])):
        trainer.update(0, trainer.forward_backward(data).grad_norm)
    table = (tmp_path / "profile" / "operators.txt").read_text()
    assert "aten::mm" in table or "aten::addmm" in table
    events = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))["traceEvents"]
    assert len([event for event in events if str(event.get("name", "")).startswith("Optimizer.step")]) == profiled


def test_profiling_does_not_change_the_weights(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = f"run.dir={runs}", "train.steps=4", "model.layers=1", "report.tensorboard=false"
    given = ["train", str(recipe_file), *(part for value in sets for part in ("--set", value))]
    assert run_command(given) == 0
    expected = training_result(runs / "small")
    assert run_command([*given, "--profile"]) == 2, "no step is left"
    capsys.readouterr()
    assert run_command([*given, "--restart", "--profile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]
    assert Path(found["table"]).exists() and Path(found["trace"]).exists()
    assert training_result(runs / "small") == expected
