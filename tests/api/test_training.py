"""Training from Python: equal to the command's, on existing tokens, with callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bessemer as bs
from bessemer.common.errors import InputError
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.tokens.shards import TokenStore
from bessemer.train.callback import Moment
from tests.api.own_parts import WriteSteps

MODEL = {"layers": 1, "width": 16, "heads": 1, "mlp_width": 32}
TRAIN = {"steps": 4, "global_batch_tokens": 128, "micro_batch": 4, "log_every": 1, "device": "cpu"}
KEYS = {"train.optimizer.learning_rate": 0.01, "export.hf": False}


@pytest.fixture(scope="module")
def lazy(prepared: Path) -> Any:
    docs = bs.read(prepared / "text" / "prose", name="prose").add(prepared / "text" / "code", name="code")
    return docs.tokenize(vocabulary=400, sequence_length=32, held_out=0.1)


@pytest.fixture(scope="module")
def tokens(lazy: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lazy.write(tmp_path_factory.mktemp("tokens") / "data")


def test_a_training_on_tokens_with_callbacks(tokens: Any, tmp_path: Path) -> None:
    class Losses(bs.Callback):
        """Callback defined where no other process can import it."""

        def step(self, moment: Moment) -> str | None:
            seen.append(moment.metrics["loss"])
            return "enough" if len(seen) == 2 and not stopped else None

    seen, stopped = list[float](), list[str]()
    recipe = {"run.name": "a", "run.dir": str(tmp_path), "model": MODEL, "train": TRAIN}

    def train() -> bs.TrainingRun:
        callbacks = [WriteSteps(file=str(tmp_path / "steps")), Losses()]
        return bs.train_model(recipe, tokens=tokens, keys=KEYS, callbacks=callbacks)

    with pytest.raises(bs.Stopped, match="enough"):
        train()
    stopped.append("once")
    run = train()
    assert run.steps[-1] == 4 and run.path == tmp_path / "a"
    assert run.metrics()["loss"].to_pylist() == seen
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3", "4"]
    assert TokenStore.open(run.path / "tokens").digest == tokens.store.digest
    assert run.report().exists() and run.evaluation["step"] == 4 and run.loss("The time.").nats > 0
    assert load(run.path).train.callbacks == (), "the objects themselves are called"
    assert run.batch(1).inputs.shape == (4, 32)


def test_each_of_two_processes_has_its_own_callback(tokens: Any, tmp_path: Path) -> None:
    recipe = {"run.name": "two", "run.dir": str(tmp_path), "model": MODEL, "train": TRAIN, "parallel.replicate": 2}
    keys = {**KEYS, "train.micro_batch": 2}
    run = bs.train_model(recipe, tokens=tokens, keys=keys, callbacks=[WriteSteps(file=str(tmp_path / "steps"))])
    assert (tmp_path / "steps").read_text().split() == ["1", "2", "3", "4"]
    assert [one.use.rpartition(":")[2] for one in load(run.path).train.callbacks] == ["WriteSteps"]


def test_a_training_writes_to_the_run_of_its_tokens(lazy: Any, tmp_path: Path) -> None:
    written = bs.open_tokens(lazy.write(tmp_path / "b").path)
    run = bs.train_model({"model": MODEL, "train": TRAIN}, tokens=written, keys={**KEYS, "tokens.sequence_length": 32})
    assert run.path == tmp_path / "b" and checkpoint_steps(RunDirectory(run.path).checkpoints)[-1] == 4


def test_a_training_of_a_recipe_equals_that_of_the_command(recipe_file: Path, runs: Path) -> None:
    keys = {"run.dir": str(runs), "train.steps": 4, "export.hf": False}
    run = bs.train_model(recipe_file, keys=keys)
    assert run.path == runs / "small" and len(run.metrics()) == 4


def test_invalid_arguments_of_train_raise_errors(tokens: Any, recipe_file: Path, tmp_path: Path) -> None:
    class Local(bs.Callback):
        def step(self, moment: Moment) -> None: ...

    run = {"run.name": "c", "run.dir": str(tmp_path)}
    recipe: dict[str, Any] = {"model": MODEL, "train": TRAIN}
    for ask, named in (
        (lambda: bs.train_model(recipe, tokens=tokens, keys={**run, "train.stepz": 3}), "stepz"),
        (lambda: bs.train_model(recipe, tokens=tokens, keys={**run, "train.steps": object()}), "recipe"),
        (lambda: bs.train_model(keys={"run.dir": str(tmp_path)}), "run.name"),
        (lambda: bs.train_model(recipe, tokens=tokens, keys=run, callbacks=["no"]), "str"),
        (lambda: bs.train_model(recipe, tokens=tokens, keys=run, callbacks=[Local]), "Local"),
        (
            lambda: bs.train_model(
                recipe, tokens=tokens, keys={**run, "parallel.shard": 2, "train.micro_batch": 2}, callbacks=[Local()]
            ),
            "Local",
        ),
        (lambda: bs.train_model(tmp_path / "none.toml"), "none.toml"),
    ):
        with pytest.raises(InputError, match=named):
            ask()
        assert not (tmp_path / "c").exists()
