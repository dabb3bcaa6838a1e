"""Values that a recipe with train.start inherits from the run, and those it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.model import recipe_defaults
from bessemer.recipe import dump, load
from bessemer.run.files import write_atomic
from tests.conftest import recipe_text, write_text


@pytest.fixture
def base(runs: Path, recipe_file: Path) -> Path:
    """A run that looks trained: a resolved recipe and a newest checkpoint."""
    folder = runs / "small"
    write_atomic(folder / "recipe.toml", dump(recipe_defaults.resolve(load(recipe_file), 400)))
    (folder / "checkpoints" / "step-00000024").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text("step-00000024")
    return folder


def recipe(base: Path, place: Path, *overrides: str) -> Path:
    """Return a recipe that starts from the run, without model and tokenizer."""
    text = recipe_text(place).replace(str(place / "text"), str(base.parent.parent / "text"))
    head, _, rest = text.partition("[tokenizer]")
    _, _, train = rest.partition("[train]")
    train = train.replace("[train.optimizer]\nlearning_rate = 0.01\n", "")
    path = place / "on.toml"
    path.write_text(f'{head}[tokens]\nheld_out = 0.2\n[train]\nstart = "{base}"{train}')
    return path


def test_model_tokenizer_length_and_rate_follow_from_the_run(base: Path, tmp_path: Path) -> None:
    found = load(recipe(base, tmp_path))
    theirs = load(base / "recipe.toml")
    assert found.model.model_dump() == theirs.model.model_dump()
    assert found.tokenizer.path == str(base / "tokens" / "tokenizer.json")
    assert found.tokens.sequence_length == 32
    assert found.train.optimizer.learning_rate == pytest.approx(0.1 * 0.01)
    assert load(recipe(base, tmp_path), ["train.optimizer.learning_rate=0.02"]).train.optimizer.learning_rate == 0.02
    # The rate of another optimizer does not carry over: a tenth of the rate derived for this one.
    lion = recipe_defaults.resolve(load(recipe(base, tmp_path), ["train.optimizer.kind=lion"]), 400)
    fresh = load(base / "recipe.toml")
    fresh = fresh.changed(train={"optimizer": {"learning_rate": None}})
    derived = recipe_defaults.resolve(fresh, 400).train.optimizer.learning_rate
    assert derived is not None and lion.train.optimizer.learning_rate is not None
    assert lion.train.optimizer.learning_rate <= 0.1 * derived * 1.001


def test_tuned_weights_get_a_tenth_of_the_rate_and_a_new_head_the_whole_rate(base: Path, tmp_path: Path) -> None:
    def rate(*overrides: str) -> float:
        path = recipe(base, tmp_path)
        for name in ("prose", "code"):
            path.write_text(path.read_text().replace(f'name = "{name}"', f'name = "{name}"\nlabel = "{name}"'))
        found = load(path, [*overrides, "train.objective=classify", "train.optimizer.kind=lion"])
        return recipe_defaults.resolve(found, 400, labels=2).train.optimizer.learning_rate or 0.0

    assert rate() <= 0.11 * rate("train.classify.frozen=true")


def test_an_imported_run_has_no_rate_to_inherit(base: Path, tmp_path: Path) -> None:
    (base / "checkpoints" / "latest").write_text("step-00000000")
    assert load(recipe(base, tmp_path)).train.optimizer.learning_rate is None


CLUSTER = ("--gpus", "1xH100", "--tokens", "1000000")


def planned_recipe(kind: str, base: Path, folder: Path) -> Path:
    """Return a recipe with its own text that pretrains, classifies or starts from a run."""
    write_text(folder / "text")
    text = recipe_text(folder)
    if kind == "classify":
        for name in ("prose", "code"):
            text = text.replace(f'name = "{name}"', f'name = "{name}"\nlabel = "{name}"')
        text = text.replace("[train]", '[train]\nobjective = "classify"')
    elif kind == "start":
        rate, model = "[train.optimizer]\nlearning_rate = 0.01\n", text[text.index("[model]") : text.index("[train]")]
        tokenizer = text[text.index("[tokenizer]") : text.index("[model]")]
        text = text.replace(rate, "").replace(model, "").replace("[train]", f'[train]\nstart = "{base}"')
        text = text.replace(tokenizer, "[tokens]\nheld_out = 0.2\nsequence_length = 32\n")
    (folder / "planned.toml").write_text(text)
    return folder / "planned.toml"


def planned(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    assert run_command(["plan", str(path), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("words", [CLUSTER, ()], ids=("of a cluster", "of this machine"))
@pytest.mark.parametrize("kind", ["pretraining", "start", "classify"])
def test_only_a_pretraining_is_planned_by_the_scaling_laws(
    kind: str, words: tuple[str, ...], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = planned_recipe(kind, base, tmp_path / "own")
    found, by_laws = planned(capsys, path, *words), kind == "pretraining"
    assert (found["chinchilla"] is not None) == by_laws
    if words:
        assert (found["batch"] is not None) == by_laws
    assert run_command(["plan", str(path), *words]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert ("scaling" in rows) == by_laws and "training" in rows
