"""A mixture of experts as a user runs it: trained, killed and resumed, exported, and asked to generate."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.commands import bessemer, command, interrupted
from tests.newest import training_result

KEYS = (
    "experts=4", "experts_per_token=2", "shared_experts=1", "dense_layers=1", "router=sigmoid", "balance=both",
    "balance_rate=0.01", "router_scale=2", "router_z_loss=0.001",
)  # fmt: skip
SETS = [word for key in KEYS for word in ("--set", f"model.{key}")]


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("model.router=softmax", 'router = "sigmoid" instead of "softmax"'),
        ("model.experts_per_token=1", "model.router_normalised"),
        ("parallel.expert=2", "possible: 1"),
    ],
)
def test_an_impossible_router_or_division_is_an_error_before_training(
    key: str, named: str, runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("run", recipe_file, *SETS, "--set", key, "--set", f"run.dir={runs}") == 2
    assert named in " ".join(capsys.readouterr().err.split())
    assert not (runs / "small" / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_killed_mixture_exports_the_same_tensors(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, safetensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    straight = tmp_path / "straight"
    shutil.copytree(runs, straight)
    for step in (3, 13):
        assert interrupted(recipe_file, runs, step, signal.SIGKILL, *SETS)[0] == -signal.SIGKILL
    for folder in (straight, runs):
        done = bessemer("run", recipe_file, "--set", f"run.dir={folder}", *SETS)
        assert done.returncode == 0, done.stderr
        assert ("continuing from step" in done.stderr) == (folder == runs)
    assert training_result(runs / "small") == training_result(straight / "small")
    assert command("export", runs / "small", tmp_path / "again") == 0
    folders = (straight / "small/export", runs / "small/export", tmp_path / "again")
    wanted, *others = (safetensors.load_file(folder / "model.safetensors") for folder in folders)
    for other in others:
        assert other.keys() == wanted.keys() and all(other[name].equal(wanted[name]) for name in wanted)
    assert wanted["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() > 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").model_type == "dots1"
    assert json.loads((tmp_path / "again/config.json").read_text())["n_shared_experts"] == 1
    capsys.readouterr()
    assert command("generate", runs / "small", "def ", "--temperature", "0", "--max-tokens", "4") == 0
    assert capsys.readouterr().out.strip()
