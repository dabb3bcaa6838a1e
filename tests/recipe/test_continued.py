"""What a recipe with train.start takes over from the run, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer import preflight
from bessemer.cli import run_command
from bessemer.defaults import derived_keys
from bessemer.errors import InputError
from bessemer.recipe import dump, load
from bessemer.run import RunFolder, read_json_lines, write_atomic
from bessemer.train.measure import RunTiming
from tests.conftest import recipe_text


@pytest.fixture
def base(runs: Path, recipe_file: Path) -> Path:
    """A run that looks trained: its recipe as resolved, and a newest checkpoint."""
    folder = runs / "small"
    write_atomic(folder / "recipe.toml", dump(derived_keys.resolve(load(recipe_file), 400)))
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("step-00000024")
    return folder


def recipe(base: Path, place: Path, *overrides: str, keys: str = "") -> Path:
    """A recipe that starts from the run and says neither model nor tokenizer."""
    text = recipe_text(place).replace(str(place / "text"), str(base.parent.parent / "text"))
    head, _, rest = text.partition("[tokenizer]")
    _, _, train = rest.partition("[train]")
    train = train.replace("[train.optimizer]\nlearning_rate = 0.01\n", "")
    path = place / "on.toml"
    path.write_text(f'{head}[tokens]\nheld_out = 0.2\n{keys}[train]\nstart = "{base}"{train}')
    return path


def test_model_tokenizer_length_and_rate_follow_from_the_run(base: Path, tmp_path: Path) -> None:
    found = load(recipe(base, tmp_path))
    theirs = load(base / "recipe.toml")
    assert found.model.model_dump() == theirs.model.model_dump()
    assert found.tokenizer.path == str(base / "tokens" / "tokenizer.json")
    assert found.tokens.sequence_length == 32
    assert found.train.optimizer.learning_rate == pytest.approx(0.1 * 0.01)
    assert load(recipe(base, tmp_path), ["train.optimizer.learning_rate=0.02"]).train.optimizer.learning_rate == 0.02
    # Another optimizer's rate says nothing: a tenth of what would be derived for it.
    lion = derived_keys.resolve(load(recipe(base, tmp_path), ["train.optimizer.kind=lion"]), 400)
    fresh = load(base / "recipe.toml")
    optimizer = fresh.train.optimizer.model_copy(update={"learning_rate": None})
    fresh = fresh.model_copy(update={"train": fresh.train.model_copy(update={"optimizer": optimizer})})
    derived = derived_keys.resolve(fresh, 400).train.optimizer.learning_rate
    assert derived is not None and lion.train.optimizer.learning_rate is not None
    assert lion.train.optimizer.learning_rate <= 0.1 * derived * 1.001
    optimizer = optimizer.model_copy(update={"kind": "lion"})
    fresh = fresh.model_copy(update={"train": fresh.train.model_copy(update={"optimizer": optimizer})})
    assert derived_keys.resolve(fresh, 400).train.optimizer.learning_rate == pytest.approx(derived / 4, rel=1e-3)


def test_weights_that_are_tuned_get_a_tenth_of_the_rate_a_new_head_alone_the_whole(base: Path, tmp_path: Path) -> None:
    def rate(*overrides: str) -> float:
        path = recipe(base, tmp_path)
        for name in ("prose", "code"):
            path.write_text(path.read_text().replace(f'name = "{name}"', f'name = "{name}"\nlabel = "{name}"'))
        found = load(path, [*overrides, "train.objective=classify", "train.optimizer.kind=lion"])
        return derived_keys.resolve(found, 400, labels=2).train.optimizer.learning_rate or 0.0

    assert rate() <= 0.11 * rate("train.classify.frozen=true")


def test_a_run_that_was_only_imported_has_no_rate_to_follow(base: Path, tmp_path: Path) -> None:
    (base / "checkpoints" / "latest").write_text("step-00000000")
    assert load(recipe(base, tmp_path)).train.optimizer.learning_rate is None


def test_a_classifier_keeps_the_rate_of_a_new_head(base: Path, tmp_path: Path) -> None:
    labels = ["train.objective=classify", "corpus.sources.prose.label=a", "corpus.sources.code.label=b"]
    found = load(recipe(base, tmp_path), labels)
    assert found.model.layers == 2 and found.train.optimizer.learning_rate is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("[model]\nrope_theta = 500.0\n", "model: rope_theta = 500.0 is not what"),
        ("[model]\ndepth = 3\n", "model: layers = 3 is not what"),
        ("[model]\nlayers = 2\nwidth = 64\nheads = 2\n", "model: width = 64 is not what"),
    ],
)
def test_keys_that_contradict_the_run_are_refused_before_its_corpus(
    base: Path, tmp_path: Path, keys: str, says: str
) -> None:
    path = recipe(base, tmp_path, keys=keys)
    found = load(path)
    with pytest.raises(InputError, match=says):
        preflight.check(found, RunFolder(tmp_path / "new"), str(path))


def test_a_run_that_is_not_there_is_said(base: Path, tmp_path: Path) -> None:
    path = recipe(base.parent / "nowhere", tmp_path)
    with pytest.raises(InputError, match="nowhere: no recipe.toml there, so nothing says the model"):
        load(path)


def test_a_continued_training_is_validated_before_its_first_step(
    runs: Path, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same held-out text it begins with the score that the run ended with, and a start over says it once."""
    monkeypatch.setattr("bessemer.train.measure.time_run", lambda *arguments: RunTiming(0.01, 0.0, 0.0, 2))
    assert run_command(["train", str(recipe_file), "--set", f"run.dir={runs}"]) == 0
    base, on = runs / "small", tmp_path / "on" / "runs" / "small"
    on.mkdir(parents=True)
    for part in ("corpus", "tokens"):
        (on / part).symlink_to(base / part)
    path = recipe(base, tmp_path / "on")
    (on / "metrics.jsonl").write_text('{"kind": "validation", "step": 0, "loss": 9.0}\n{"kind": "train", "step": 1}\n')
    assert run_command(["train", str(path), "--set", "train.steps=2"]) == 0
    rows = [row for row in read_json_lines(on / "metrics.jsonl") if row["kind"] == "validation"]
    before = [row for row in read_json_lines(base / "metrics.jsonl") if row["kind"] == "validation"]
    assert before[0]["step"] > 0, "a fresh start has nothing to validate"
    assert rows[0]["step"] == 0 and [row["step"] for row in rows].count(0) == 1
    assert rows[0]["loss"] == pytest.approx(before[-1]["loss"], rel=1e-6)
    assert rows[0]["tokens"] == 0
