"""Plans and jobs for the tests of the planner."""

import json
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout

LLAMA = ModelConfig(128_256, 32, 4096, 32, 8, 128, 14_336, 8192, qk_norm="none")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the output of `bessemer plan --json`."""
    assert run_command(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def job_of(
    model: ModelConfig, layout: Layout, batch: int, framework: str | Framework = "bessemer", device: str = "H100", precision: Any = "bf16"
) -> Job:  # fmt: skip
    """Return a job of `batch` sequences on the devices of the layout, in nodes as in the catalogue."""
    cluster = ClusterSpec.of(devices.find(device), layout.world)
    profile = frameworks.find(framework) if isinstance(framework, str) else framework
    return Job(model, layout, cluster, batch, precision, profile)
