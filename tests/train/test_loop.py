"""The training loop with every option of a recipe: resumed bit for bit, with the right order and statistics in a batch ramp."""

import json
import mmap
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from bessemer.checkpoint import save
from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.model.mixture_of_experts import MixtureOfExperts
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import load, load_resolved
from bessemer.run.directory import NEWEST, RunDirectory
from bessemer.run.files import read_json, read_json_lines
from bessemer.tokens import trace
from bessemer.tokens.build import build
from bessemer.tokens.loader import open_loader
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.device import choose
from bessemer.train.run_spec import Fresh, Resume, RunSpec
from bessemer.train.starting_weights import start_from
from bessemer.train.state import TrainState, capture, open_trained
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer
from bessemer.workflow import preflight, stages
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session
from tests.train.faulty_runs import record_batches

RAMP = ("train.batch_ramp.start_tokens=128", "train.batch_ramp.steps=14", "train.micro_batch=2")
MIXTURE = ("model.experts=8", "model.experts_per_token=2", "model.balance=none", "model.layers=3", "model.dense_layers=1",
           "train.log_every=1", "report.tensorboard=false")  # fmt: skip
SIZES = [4] * 7 + [6] * 7 + [8] * 10  # 4 + 4 step / 14 sequences, rounded down to micro-batches of 2


def train(recipe_file: Path, runs: Path, *overrides: str) -> Path:
    sets = [part for value in (f"run.dir={runs}", *overrides) for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets]) == 0
    return runs / "small"


def steps_of(folder: Path) -> list[dict[str, object]]:
    return [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize("is_biased", [True, False])
def test_a_collapsed_router_is_one_incident_per_block_also_of_a_resumed_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, is_biased: bool
) -> None:
    """The first logged step that raises the alarm is trained again after the resume."""
    scores = MixtureOfExperts._scores

    def biased(mixture: MixtureOfExperts, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NE, scores_NE = scores(mixture, x_ND)
        return logits_NE, scores_NE + (torch.arange(8) < 3)

    if is_biased:
        monkeypatch.setattr(MixtureOfExperts, "_scores", biased)
    folder = train(recipe_file, runs, *MIXTURE)
    if is_biased:
        loads = [(row["expert_load"], row["auxiliary_loss"]) for row in steps_of(folder)]
        for step in (16, 24):  # as if killed after step 8
            shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
        train(recipe_file, runs, *MIXTURE)
        assert [(row["expert_load"], row["auxiliary_loss"]) for row in steps_of(folder)] == loads
    incidents = RunDirectory(folder).incidents
    rows = read_json_lines(incidents) if incidents.exists() else []
    found = [(row["step"], row["block"]) for row in rows if row["what"] == "collapse"]
    assert found == [(10, "1"), (10, "2")] * is_biased
    assert all(row["dead_experts"] == {"1": 5, "2": 5} for row in steps_of(folder)) == is_biased


@pytest.mark.parametrize(
    "overrides",
    [
        (*RAMP, "train.ema=0.9", "checkpoint.asynchronous=true", "train.dropout.hidden=0.1", "train.dropout.attention=0.1"),
        ("train.optimizer.kind=muon", "model.width=128", "train.optimizer.base_width=32", "train.precision=fp16"),
        ("train.optimizer.kind=lion", "train.precision=bf16"),
    ],
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one(runs: Path, recipe_file: Path, overrides: tuple[str, ...]) -> None:
    torch.rand(3)  # whatever was drawn before
    overrides = ("model.layers=1", "report.tensorboard=false", "train.steps=16", *overrides)
    folder = train(recipe_file, runs, *overrides)
    first = folder / "checkpoints" / "step-00000016"
    saved, seed = load_file(first / "rng.safetensors")["cpu"], load(folder).run.seed
    assert np.array_equal(saved, torch.Generator().manual_seed(seed).get_state().numpy()), "the same in every run"
    shutil.copytree(first, runs / "kept")
    numbers = [(row["loss"], row.get("loss_scale")) for row in steps_of(folder)]
    shutil.rmtree(first)  # as if killed after step 8
    train(recipe_file, runs, *overrides)
    assert [(row["loss"], row.get("loss_scale")) for row in steps_of(folder)] == numbers
    facts = [json.loads((place / "manifest.json").read_text())["facts"] for place in (first, runs / "kept")]
    assert facts[0] == facts[1]
    for file in sorted((runs / "kept").glob("*.safetensors")):
        assert file.read_bytes() == (first / file.name).read_bytes(), file.name
    assert (first / "ema.safetensors").exists() == ("train.ema=0.9" in overrides)


@pytest.mark.usefixtures("fixed_step_time")
def test_steps_of_a_batch_ramp_read_every_sample_once_and_agree_with_the_ledger(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = record_batches(monkeypatch)
    folder = train(
        recipe_file, runs, *RAMP, "train.schedule.kind=constant", "train.schedule.warmup_steps=0",
    )  # fmt: skip
    rows = steps_of(folder)
    assert [row["tokens"] for row in rows] == [32 * sum(SIZES[: step + 1]) for step in range(24)]
    plan, audit = read_json(folder / "plan.json"), read_json(folder / "mixture.json")
    assert plan["tokens"] == 32 * sum(SIZES) == 32 * audit["samples"]
    recipe, store = load_resolved(folder / "recipe.toml"), TokenStore.open(folder / "tokens")
    assert [len(batch.inputs) for batch in read] == SIZES
    whole = open_loader(recipe, store).batch(0, sum(SIZES))
    assert np.array_equal(np.concatenate([batch.inputs for batch in read]), whole.inputs)
    for step in (1, 7, 8, 15, 24):
        rows, first = trace.step_documents(recipe, store, folder / "corpus", step), sum(SIZES[: step - 1])
        assert {row["sample"] for row in rows} == set(range(first, first + SIZES[step - 1]))
        assert read[step - 1].first == first
        steps = trace.document_steps(recipe, store, folder / "corpus", rows[0]["document"])
        assert step in {row["step"] for row in steps}
        for row in steps:
            assert recipe.batches.step_of(row["sample"]) == row["step"] - 1


def test_validation_and_readers_use_the_moving_average(runs: Path, recipe_file: Path) -> None:
    from bessemer.train.state import load_model

    folder = train(recipe_file, runs, "train.ema=0.95")
    last = folder / "checkpoints" / "step-00000024"
    average, trained = load_file(last / "ema.safetensors"), load_file(last / "model.safetensors")
    assert average.keys() == trained.keys()
    assert not np.array_equal(average["head.weight"], trained["head.weight"])
    recipe = load_resolved(folder / "recipe.toml")
    store, restored = load_model(recipe, RunDirectory(folder))
    for name, weight in restored.trainer.model.named_parameters():
        assert np.array_equal(weight.detach().numpy(), average[name])
    from bessemer.tokens.held_out import held_out
    from bessemer.train.validation import validate

    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "validation"]
    found = validate(restored.trainer, held_out(store, 32, recipe.evaluate.max_tokens))
    assert rows[-1]["loss"] == pytest.approx(found.loss, rel=1e-12)


def test_a_training_follows_the_plan_of_its_specification(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file, [f"run.dir={runs}", "train.steps=4", "train.validate_every=4"])
    run = RunDirectory(recipe.run.folder)
    session = Session(recipe, run)
    spec = prepare(session, measure_seconds=0.0)
    planned = read_json(run.plan)
    assert RunSpec.read(run) == spec and spec.memory_bytes == planned["memory_bytes"]
    assert spec.start == Fresh() and spec.memory_bytes["before_model"] > 1e7
    freed = torch.ones(75_000_000)  # of an earlier stage; the heap keeps it, but it is not part of the training's base
    del freed
    resident = devices.resident_bytes()
    # As measured next to other load on the cores, and planned by a process without memory in use.
    stages.train(session, replace(spec, peak_flops=1e6).with_base(7))

    logged = [row for row in read_json_lines(run.metrics) if row["kind"] == "memory"][-1]
    trained = [row for row in read_json_lines(run.metrics) if row["kind"] == "train"]
    assert all(0 < row["mfu"] <= row["hfu"] <= 1 for row in trained), "no step is faster than the peak"
    assert read_json(run.plan) == planned
    base = logged["planned"] - spec.with_base(0).memory_bytes["total"]
    assert base > 1e7
    if sys.platform.startswith("linux") and resident > spec.memory_bytes["before_model"] + 2.9e8:
        assert base < resident - 2.5e8, "a C library that keeps what is freed"
    compared = read_json(run.path / "planned_against_measured.json")
    assert compared["memory_bytes"]["planned"] == logged["planned"]
    assert prepare(session).start == Resume(4)


def test_a_training_on_other_tokens_than_planned_is_an_error(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file, [f"run.dir={runs}", "train.steps=2"])
    session = Session(recipe, RunDirectory(recipe.run.folder))
    spec = prepare(session, measure_seconds=0.0)
    with pytest.raises(InputError, match="token shards"):
        stages.train(session, replace(spec, tokens_digest="of another corpus"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_token_files_do_not_count_as_training_memory(tmp_path: Path) -> None:
    np.zeros(64 << 20, np.uint8).tofile(tmp_path / "shard.bin")
    devices.reset_peak_resident()
    before = devices.peak_resident_bytes()
    shard = np.memmap(tmp_path / "shard.bin", np.uint8, "r")
    assert int(shard.sum(dtype=np.int64)) == 0
    assert devices.peak_resident_bytes() < before + (16 << 20)
    with mmap.mmap(-1, 64 << 20) as taken:  # not from the heap, which has free resident pages
        taken.write(bytes(64 << 20))
        assert devices.peak_resident_bytes() > before + (56 << 20)


CLASSIFY = ("train.objective=classify", "corpus.sources.prose.label=prose", "corpus.sources.code.label=code")
ENCODER = ("model.family=bert", "model.kv_heads=2")


def seeded_trainer(recipe_file: Path, *overrides: str, seed: int = 1) -> Trainer:
    recipe = resolve(load(recipe_file, overrides), 400)
    return Trainer(recipe, build_model(config_of(recipe, 400, 2), seed), choose(recipe.train), 0, 2)


def pretrained(runs: Path, recipe_file: Path, *overrides: str) -> Trainer:
    """A checkpoint of an untrained model with random weights everywhere."""
    trainer = seeded_trainer(recipe_file, *overrides, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    store = TokenStore.open(runs / "small" / "tokens")
    tensors, facts = capture(trainer, TrainState(9, 72), load(recipe_file), store)
    save(runs / "small" / "checkpoints", 9, tensors, facts, keep=1)
    return trainer


@pytest.mark.parametrize(("kind", "objective"), [((), ()), (ENCODER, ("train.objective=masked",))])
def test_a_classifier_starts_from_everything_but_its_head(
    runs: Path, recipe_file: Path, kind: tuple[str, ...], objective: tuple[str, ...]
) -> None:
    theirs = dict(pretrained(runs, recipe_file, *kind, *objective).model.named_parameters())
    trainer = seeded_trainer(recipe_file, *kind, *CLASSIFY)
    fresh = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    said = start_from(trainer, runs / "small", TokenStore.open(runs / "small" / "tokens"))
    assert "step 9 of " in said and "new: classifier." in said
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, fresh[name] if name.startswith("classifier.") else theirs[name]), name


def test_starting_from_a_run_uses_its_moving_average(runs: Path, recipe_file: Path) -> None:
    """Evaluation, generation and export of that run use the average too."""
    ema = "train.ema=0.5"
    theirs, store = pretrained(runs, recipe_file, ema), TokenStore.open(runs / "small" / "tokens")
    recipe = resolve(load(recipe_file, [ema]), 400)
    evaluated = open_trained(recipe, RunDirectory(runs / "small"), store, choose(recipe.train), NEWEST)
    wanted = dict(evaluated.trainer.model.named_parameters())
    for overrides in ((), (ema,), CLASSIFY):
        trainer = seeded_trainer(recipe_file, *overrides)
        start_from(trainer, runs / "small", store)
        for name, parameter in trainer.model.named_parameters():
            assert name.startswith("classifier.") or torch.equal(parameter, wanted[name]), name
    raw = dict(theirs.model.named_parameters())
    assert not torch.equal(raw["head.weight"], wanted["head.weight"])


@pytest.mark.parametrize(
    ("override", "key"),
    [("width=64", "width"), ("layers=1", "layers"), ("family=llama", "qk_norm"), ("rope_theta=500000.0", "rope_theta")],
)
def test_starting_from_another_model_is_an_error(runs: Path, recipe_file: Path, override: str, key: str) -> None:
    pretrained(runs, recipe_file)
    other, store = seeded_trainer(recipe_file, f"model.{override}"), TokenStore.open(runs / "small" / "tokens")
    with pytest.raises(InputError, match=key):
        start_from(other, runs / "small", store)
    sets = ["run.name=next", f"run.dir={runs}", f"train.start={runs / 'small'}", f"model.{override}"]
    with pytest.raises(InputError, match=key):  # before its corpus is built
        preflight.check(load(recipe_file, sets), RunDirectory(runs / "next"), str(recipe_file))


def test_starting_from_another_tokenizer_or_no_run_is_an_error(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    pretrained(runs, recipe_file)
    store = TokenStore.open(runs / "small" / "tokens")
    tokenizer = store.manifest["tokenizer"]
    other = TokenStore(store.folder, {**store.manifest, "tokenizer": {**tokenizer, "sha256": "f" * 64}})
    with pytest.raises(InputError, match="tokenizer.path = "):
        start_from(seeded_trainer(recipe_file), runs / "small", other)
    with pytest.raises(InputError, match=r"train\.start"):
        start_from(seeded_trainer(recipe_file), tmp_path / "none", store)
    shutil.rmtree(runs / "small" / "checkpoints" / "step-00000009")
    with pytest.raises(InputError, match=r"train\.start"):
        start_from(seeded_trainer(recipe_file), runs / "small", store)


def test_another_tokenizer_is_an_error_before_the_text_is_encoded(runs: Path, recipe_file: Path) -> None:
    start = runs / "small"
    sets = [f"run.dir={runs}", "run.name=other", f"train.start={start}"]
    recipe = load(recipe_file, [*sets, "tokenizer.vocabulary=300"])
    run = RunDirectory(recipe.run.folder)
    shutil.copytree(start / "corpus", run.corpus)
    with pytest.raises(InputError, match=r"\[tokenizer\]"):
        build(recipe, run)
    assert not run.tokens.exists()
    equal = load(recipe_file, sets)  # an equal one is accepted
    assert build(equal, run).vocabulary == 400
