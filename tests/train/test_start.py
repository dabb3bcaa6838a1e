"""Starting from another run's weights: what is taken, what is new, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch

from bessemer.checkpoint import save
from bessemer.common.errors import InputError
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import load
from bessemer.run.directory import NEWEST, RunDirectory
from bessemer.tokens.build import build
from bessemer.tokens.shards import TokenStore
from bessemer.train.device import choose
from bessemer.train.objective import config_of
from bessemer.train.starting_weights import start_from
from bessemer.train.state import TrainState, capture, open_trained
from bessemer.train.trainer import Trainer

CLASSIFY = ("train.objective=classify", "corpus.sources.prose.label=prose", "corpus.sources.code.label=code")
ENCODER = ("model.family=bert", "model.kv_heads=2")


def trainer_of(recipe_file: Path, *overrides: str, seed: int = 1) -> Trainer:
    recipe = resolve(load(recipe_file, overrides), 400)
    return Trainer(recipe, build_model(config_of(recipe, 400, 2), seed), choose(recipe.train), 0, 2)


def pretrained(runs: Path, recipe_file: Path, *overrides: str) -> Trainer:
    """A checkpoint of an untrained model whose weights are all random."""
    trainer = trainer_of(recipe_file, *overrides, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    store = TokenStore.open(runs / "small" / "tokens")
    tensors, facts = capture(trainer, TrainState(9, 72), load(recipe_file), store)
    save(runs / "small" / "checkpoints", 9, tensors, facts, keep=1)
    return trainer


@pytest.mark.parametrize(("kind", "objective"), [((), ()), (ENCODER, ("train.objective=masked",))])
def test_a_classifier_takes_everything_but_its_head(
    runs: Path, recipe_file: Path, kind: tuple[str, ...], objective: tuple[str, ...]
) -> None:
    theirs = dict(pretrained(runs, recipe_file, *kind, *objective).model.named_parameters())
    trainer = trainer_of(recipe_file, *kind, *CLASSIFY)
    fresh = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    said = start_from(trainer, runs / "small", TokenStore.open(runs / "small" / "tokens"))
    assert "starting from step 9" in said and "new: classifier." in said
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, fresh[name] if name.startswith("classifier.") else theirs[name]), name


def test_a_run_with_a_moving_average_is_started_from_it(runs: Path, recipe_file: Path) -> None:
    """It is what evaluation, generation and export of that run take."""
    ema = "train.ema=0.5"
    theirs, store = pretrained(runs, recipe_file, ema), TokenStore.open(runs / "small" / "tokens")
    recipe = resolve(load(recipe_file, [ema]), 400)
    evaluated = open_trained(recipe, RunDirectory(runs / "small"), store, choose(recipe.train), NEWEST)
    wanted = dict(evaluated.trainer.model.named_parameters())
    for overrides in ((), (ema,), CLASSIFY):
        trainer = trainer_of(recipe_file, *overrides)
        start_from(trainer, runs / "small", store)
        for name, parameter in trainer.model.named_parameters():
            assert name.startswith("classifier.") or torch.equal(parameter, wanted[name]), name
    raw = dict(theirs.model.named_parameters())
    assert not torch.equal(raw["head.weight"], wanted["head.weight"])


@pytest.mark.parametrize(
    ("override", "key"),
    [("width=64", "width"), ("layers=1", "layers"), ("family=llama", "qk_norm"), ("rope_theta=500000.0", "rope_theta")],
)
def test_another_model_is_refused(runs: Path, recipe_file: Path, override: str, key: str) -> None:
    pretrained(runs, recipe_file)
    other, store = trainer_of(recipe_file, f"model.{override}"), TokenStore.open(runs / "small" / "tokens")
    with pytest.raises(InputError, match=f"{key}: "):
        start_from(other, runs / "small", store)


def test_another_tokenizer_and_no_run_are_refused(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    pretrained(runs, recipe_file)
    store = TokenStore.open(runs / "small" / "tokens")
    tokenizer = store.manifest["tokenizer"]
    other = TokenStore(store.folder, {**store.manifest, "tokenizer": {**tokenizer, "sha256": "f" * 64}})
    with pytest.raises(InputError, match="another tokenizer than this run's.*tokenizer.path = "):
        start_from(trainer_of(recipe_file), runs / "small", other)
    with pytest.raises(InputError, match="no checkpoints here"):
        start_from(trainer_of(recipe_file), tmp_path / "none", store)
    shutil.rmtree(runs / "small" / "checkpoints" / "step-00000009")
    with pytest.raises(InputError, match="no checkpoint;"):
        start_from(trainer_of(recipe_file), runs / "small", store)


def test_another_tokenizer_is_refused_before_the_text_is_encoded(runs: Path, recipe_file: Path) -> None:
    start = runs / "small"
    sets = [f"run.dir={runs}", "run.name=other", f"train.start={start}"]
    recipe = load(recipe_file, [*sets, "tokenizer.vocabulary=300"])
    run = RunDirectory(recipe.run.folder)
    shutil.copytree(start / "corpus", run.corpus)
    with pytest.raises(InputError, match=r"trained with another tokenizer .* leave \[tokenizer\] out"):
        build(recipe, run)
    assert not run.tokens.exists()
    equal = load(recipe_file, sets)  # one that comes out the same is as good
    assert build(equal, run).vocabulary == 400
