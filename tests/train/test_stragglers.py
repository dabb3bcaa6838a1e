"""A device that computes slower than the others in two comparisons in a row is recorded, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bessemer.distributed.mesh import ProcessMesh
from bessemer.recipe import Parallel
from bessemer.run.files import read_json_lines
from bessemer.train import stragglers
from bessemer.train.device import Device
from bessemer.train.metrics import MetricsLog
from bessemer.train.precision import PRECISIONS

CPU = Device(torch.device("cpu"), "cpu", PRECISIONS["fp32"], compile=False)
CUDA = replace(CPU, torch_device=torch.device("cuda"))


class Lines:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.rows.append({"kind": kind, "step": step, **values})


class Mesh(ProcessMesh):
    """Rank 0 of four, of which rank 2 needs longer."""

    is_single = False  # type: ignore[assignment]

    def gather(self, value: Any) -> list[Any]:
        host, seconds = value
        return [(host, factor * seconds) for factor in (1.0, 1.01, 1.3, 0.99)]


def test_a_slow_device_is_recorded_after_two_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "probe_seconds", lambda device: 0.01)
    log = Lines()
    watcher = stragglers.Stragglers(Mesh(Parallel(shard=4)), CUDA, 3, tmp_path / "incidents.jsonl")
    for step in range(1, 10):
        watcher.stepped(cast(MetricsLog, log), step)
        assert set(watcher.slow_ranks) == ({2} if step >= 6 else set())
    assert [(row["step"], row["slowest"]) for row in log.rows] == [(3, 2), (6, 2), (9, 2)]
    assert log.rows[0]["matmul_seconds"] == pytest.approx({"0": 0.01, "1": 0.0101, "2": 0.013, "3": 0.0099})
    (incident,) = read_json_lines(tmp_path / "incidents.jsonl")
    assert (incident["what"], incident["step"], incident["rank"]) == ("straggler", 6, 2)


def test_cpus_and_single_processes_are_not_compared(tmp_path: Path) -> None:
    for mesh, device in ((Mesh(Parallel(shard=4)), CPU), (ProcessMesh(Parallel()), CUDA)):
        log = Lines()
        stragglers.Stragglers(mesh, device, 1, tmp_path / "incidents.jsonl").stepped(cast(MetricsLog, log), 1)
        assert log.rows == []
