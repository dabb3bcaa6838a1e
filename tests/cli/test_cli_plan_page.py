"""`bessemer plan --html`, and the keys that every plan has as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.common.console import QUIET

CLUSTER = ("plan", "--model", "llama3-8b", "--tokens", "1T", "--gpus", "16xH100")
KEYS = {
    "parameters", "flops_per_token", "total_flops", "step_seconds", "tokens_per_second_per_device", "model_tflops_per_device", "mfu",
    "hfu", "bubble", "days", "device_hours", "cost", "fits",
}  # fmt: skip
LAYOUT = {"replicate", "shard", "tensor", "pipeline", "virtual", "context", "micro_batch", "recompute"}
MEMORY = {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "total"}


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """--json silences this process; the next test is to hear again."""
    monkeypatch.setenv(QUIET, "")


def test_a_plan_is_written_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    assert run_command([*CLUSTER, "--what-if", "gpus=32", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    for section in ("facts", "what-if", "memory", "step"):
        assert f'<section id="{section}">' in html
    assert "gpus=32" in html


def test_a_folder_that_is_not_there_is_said_before_anything_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(*arguments: Any, **more: Any) -> None:
        raise AssertionError("counted before it looked where to write")

    monkeypatch.setattr("bessemer.plan.plan_result.make_plan", counted)
    assert run_command([*CLUSTER, "--html", str(tmp_path / "none" / "plan.html")]) == 2
    told = capsys.readouterr()
    assert "no such folder" in told.err and "none" in told.err
    assert not list(tmp_path.iterdir())


def test_a_plan_of_this_machine_has_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    assert run_command(["plan", "llama-7b", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    for section in ("facts", "memory"):
        assert f'<section id="{section}">' in html


@pytest.mark.parametrize("arguments", [CLUSTER, ("plan", "llama-7b")])
def test_every_plan_has_the_same_keys(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= KEYS
    assert set(found["layout"]) >= LAYOUT
    assert set(found["memory_bytes_per_device"]) >= MEMORY
    assert set(found.get("memory_bytes", MEMORY)) >= MEMORY, "the names of parts are the same"
    assert set(found["chinchilla"]) >= {"optimal_tokens", "ratio", "loss"}
    assert isinstance(found["parameters"], int)
    parts = {name: value for name, value in found["memory_bytes_per_device"].items() if name != "total"}
    assert sum(parts.values()) == found["memory_bytes_per_device"]["total"]
    assert found["flops_per_token"] * found["tokens"] == pytest.approx(found["total_flops"])
    assert found["device_hours"] == pytest.approx(24 * found["days"] * found.get("devices", 1))
    assert found["chinchilla"]["ratio"] == pytest.approx(found["tokens"] / (20 * found["parameters"]))
    assert found["mfu"] <= found["hfu"] <= 1


def test_the_bubble_of_this_machines_plan_is_its_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"layers": 4, "width": 64, "heads": 2, "kv_heads": 2, "mlp_width": 128}
    more = (
        "train.micro_batch=1",
        "parallel.pipeline=4",
        "tokens.sequence_length=512",
        "train.global_batch_tokens=4096",
    )
    keys = (*(f"model.{key}={value}" for key, value in model.items()), *more)
    options = [item for key in keys for item in ("--set", key)]
    assert run_command(["plan", "llama-7b", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["micro_batches"] == 8
    assert found["bubble"] == pytest.approx(3 / (8 + 3))  # (p - 1) / (m + p - 1)
