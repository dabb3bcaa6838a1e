"""Mistakes that would end a run after hours are reported before its corpus is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer import preflight
from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.recipe import load
from bessemer.train import device


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["train.optimizer.learning_rate=10"], "train.optimizer.learning_rate = 10: each step would move weights"),
        (["train.optimizer.embedding_rate=200"], "learning_rate = 0.01, times embedding_rate: each step would move weights"),
        (["train.optimizer.batch_scaling=linear", "train.optimizer.reference_batch_tokens=2"], "times batch_scaling: each step"),
        (["train.schedule.warmup_steps=25"], "train.schedule.warmup_steps = 25 is more than the 24 steps of the run"),
        (["train.tokens=2560", "train.schedule.warmup_steps=11"], "warmup_steps = 11 is more than the 10 steps of the run"),
        (["train.steps=5", "train.minutes=2"], "train.steps = 5 and train.minutes = 2 exclude each other"),
        (["train.start=/no/such/run"], "train.start: /no/such/run: no such run folder"),
        (["train.start={folder}"], "no checkpoint there; name the folder of a trained run"),
        (["tokenizer.path={tokenizer}", "tokenizer.end_of_text=</s>"], "the tokenizer has no token '</s>'"),
        (["tokenizer.path={tokenizer}", "model.family=bert", "train.objective=masked"], "the tokenizer has no special token '<|mask|>'"),
        (["tokenizer.path=/no/tokenizer.json"], "/no/tokenizer.json: no such tokenizer file"),
        (["train.batch_ramp={{start_tokens=512,steps=3}}"], "train.batch_ramp.start_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["run", "train"])
def test_it_is_said_before_the_corpus_is_read(
    name: str,
    overrides: list[str],
    complaint: str,
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = recipe_file.parent / "runs" / "small" / "tokens" / "tokenizer.json"
    text = recipe_file.read_text()
    if any("tokenizer.path" in override for override in overrides):
        text = text.replace("vocabulary = 400", "")
    (tmp_path / "own.toml").write_text(text)
    sets = [part for one in overrides for part in ("--set", one.format(folder=tmp_path, tokenizer=tokenizer))]
    assert run_command([name, str(tmp_path / "own.toml"), *sets, "--set", f"run.dir={tmp_path / 'runs'}"]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "nothing is begun"


def test_a_training_that_would_be_killed_for_its_memory_is_refused_and_a_doubtful_one_warned_of(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "available_bytes", lambda device: 10_000_000_000)
    recipe = load(recipe_file)
    preflight.require_memory({"fits": True, "memory_bytes": {"total": 5_000_000_000}}, recipe)
    assert not capsys.readouterr().err
    preflight.require_memory({"fits": False, "memory_bytes": {"total": 11_000_000_000}}, recipe)
    assert (
        "planned to take 11.0 GB, and 10.0 GB are free: it may be killed; take a smaller model"
        in capsys.readouterr().err
    )
    with pytest.raises(InputError, match=r"planned to take 20.0 GB, and 10.0 GB are free; take a smaller model.depth"):
        preflight.require_memory({"fits": False, "memory_bytes": {"total": 20_000_000_000}}, recipe)
