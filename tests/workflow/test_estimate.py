"""Plans of this machine from a run's own steps."""

import json
from pathlib import Path

import pytest
import torch

from bessemer import cli
from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.recipe import Recipe, load
from bessemer.run.directory import RunDirectory
from bessemer.train import device
from bessemer.workflow import estimate, preflight, stages
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session
from tests.conftest import recipe_text, write_text


def small(folder: Path) -> Path:
    write_text(folder / "text")
    (folder / "my.toml").write_text(recipe_text(folder))
    return folder / "my.toml"


def test_a_model_that_is_too_slow_to_time_uses_a_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = load(small(tmp_path)), RunDirectory(tmp_path / "none")
    assert estimate.plan_only(recipe, run, 0.4)[0]["step_seconds_from"] == "measured on this machine"
    monkeypatch.setattr(estimate, "MEASURABLE_SECONDS", 0.0)
    assert estimate.plan_only(recipe, run, 0.4)[0]["step_seconds_from"] == "40% of the peak"


def test_a_plan_counts_memory_left_by_the_corpus_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = load(small(tmp_path)), RunDirectory(tmp_path / "none")

    def before_model(of: Recipe) -> int:
        found: int = estimate.plan_only(of, run, 0.0)[0]["memory_bytes"]["before_model"]
        return found

    before_model(recipe)  # modules loaded by the first plan stay
    made_here, alone = before_model(recipe), recipe.changed(parallel={"shard": 2})
    ranks = before_model(alone)
    monkeypatch.setattr(estimate, "DATA_HALF", 0)
    assert made_here - before_model(recipe) == pytest.approx(220e6, abs=2e7)
    assert ranks == pytest.approx(before_model(alone), abs=2e7), "ranks are processes of their own"


@pytest.mark.long
def test_a_run_is_compared_with_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small(tmp_path)
    assert cli.run_command(["run", str(recipe)]) == 0
    folder = tmp_path / "runs" / "small"
    told = json.loads((folder / "planned_against_measured.json").read_text())
    assert told["step_seconds"]["measured"] > 0 and told["memory_bytes"]["measured"] > 1e7
    assert abs(told["memory_bytes"]["error"]) < 0.5
    shown = capsys.readouterr().err
    assert "planned" in shown and "measured" in shown
    (folder / "planned_against_measured.json").unlink()
    assert cli.run_command(["report", str(folder)]) == 0
    assert (folder / "planned_against_measured.json").exists()


def test_a_ladder_predicts_the_run_that_is_trained(tmp_path: Path) -> None:
    path = small(tmp_path)
    path.write_text(path.read_text().replace("steps = 24", "max_epochs = 2.0"))
    recipe = load(path, ["train.precision=fp32"])
    session = Session(recipe, RunDirectory(recipe.run.folder))
    with session.run.lock():
        planned = stages.planned_recipe(session)
        assert planned.train == prepare(session, 0.0).recipe.train
        assert stages.planned_recipe(session) == planned, "once the run has a plan too"


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["train.optimizer.learning_rate=10"], "train.optimizer.learning_rate = 10"),
        (["train.optimizer.embedding_rate=200"], "learning_rate = 0.01, times embedding_rate"),
        (["train.schedule.warmup_steps=25"], "train.schedule.warmup_steps = 25"),
        (["train.steps=5", "train.minutes=2"], "train.steps and train.minutes"),
        (["train.start={folder}"], "train.start"),
        (["tokenizer.path={tokenizer}", "tokenizer.end_of_text=</s>"], "the tokenizer has no token '</s>'"),
        (["tokenizer.path={tokenizer}", "model.family=bert", "train.objective=masked"], "tokenizer.mask_token: the tokenizer has no token '<|mask|>'"),
        (["tokenizer.path=/no/tokenizer.json"], "/no/tokenizer.json: no such file"),
        (["train.precision=tf32", "train.device=cpu"], "cannot compute in tf32; use "),
        (["train.batch_ramp={{start_tokens=512,steps=3}}"], "train.batch_ramp.start_tokens"),
        (["parallel.shard=2", "train.micro_batch=1", "train.batch_ramp={{start_tokens=96,steps=6}}"], "train.batch_ramp: the 3 sequences"),
    ],
)  # fmt: skip
def test_errors_are_reported_before_the_corpus_is_read(
    overrides: list[str], complaint: str, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = recipe_file.parent / "runs" / "small" / "tokens" / "tokenizer.json"
    text = recipe_file.read_text()
    if any("tokenizer.path" in override for override in overrides):
        text = text.replace("vocabulary = 400", "")
    (tmp_path / "own.toml").write_text(text)
    sets = [part for one in overrides for part in ("--set", one.format(folder=tmp_path, tokenizer=tokenizer))]
    for command in ("run", "train"):
        assert run_command([command, str(tmp_path / "own.toml"), *sets, "--set", f"run.dir={tmp_path / 'runs'}"]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "nothing is begun"


def test_a_key_without_effect_gives_a_warning(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["optimizer.muon_rate=0.1", "schedule.decay_share=0.5"]
    preflight.warn_of_unused(load(recipe_file, [*(f"train.{key}" for key in keys), "parallel.offload=true"]))
    said = " ".join(capsys.readouterr().err.split())
    assert "train.optimizer.muon_rate has no effect with train.optimizer.kind = 'adamw'" in said
    assert "train.schedule.decay_share has no effect with train.schedule.kind = 'cosine'" in said
    assert "parallel.offload has no effect without parallel.shard" in said
    read = ["optimizer.kind=muon", "schedule.kind=wsd"]
    preflight.warn_of_unused(load(recipe_file, [f"train.{key}" for key in (*keys, *read)]))
    assert not capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("sets", [("parallel.offload=true", "parallel.shard=2"), ("train.optimizer.state=8bit",)])
def test_keys_that_need_a_gpu_are_rejected_on_a_cpu(
    recipe_file: Path, sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", str(recipe_file), *(word for key in sets for word in ("--set", key))]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"bessemer: {sets[0].partition('=')[0]}: ")


def test_a_training_larger_than_memory_is_an_error_and_a_doubtful_one_gives_a_warning(
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
    with pytest.raises(InputError, match=r"20.0 GB.* 10.0 GB"):
        preflight.require_memory({"fits": False, "memory_bytes": {"total": 20_000_000_000}}, recipe)


def test_a_classifier_that_cannot_be_exported_is_an_error_before_the_corpus(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipe_file.read_text().replace("[train]\n", '[train]\nobjective = "classify"\nclassify.pooling = "mean"\n')
    (tmp_path / "own.toml").write_text(text.replace("kv_heads = 1", 'family = "bert"'))
    keys = f"run.dir={tmp_path / 'runs'}", "corpus.sources.code.label=c", "corpus.sources.prose.label=p"
    sets = [part for key in keys for part in ("--set", key)]
    assert run_command(["run", str(tmp_path / "own.toml"), *sets]) == 2
    said = capsys.readouterr().err
    assert "pooling" in said and "export.hf" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("override", ["train.optimizer.learning_rate=1000", "train.schedule.warmup_steps=25"])
def test_plan_rejects_what_run_rejects(override: str, recipe_file: Path, tmp_path: Path) -> None:
    sets = ["--set", f"run.dir={tmp_path / 'runs'}", "--set", override]
    assert run_command(["plan", str(recipe_file), *sets]) == 2
