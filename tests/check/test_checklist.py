"""`bessemer check`: every row passes for a sound recipe, and fails for the fault it is meant to find."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer.check import coordinates, masks, recipe_rows, trial, trial_rows
from bessemer.check.rows import CheckRow, collect_rows, is_go, table
from bessemer.check.trial import TrialResult
from bessemer.cli import run_command
from bessemer.common.errors import BessemerError
from bessemer.model import recipe_defaults
from bessemer.model.transformer import build_model
from bessemer.recipe import Parallel, Recipe, load
from bessemer.run.directory import RunDirectory
from bessemer.tokens.loader import Batch, Loader
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.optimizer import rules
from bessemer.train.run_spec import Fresh, RunSpec
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

PACKED = "tokens.document_mask=true"


def rows_of(found: str) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in json.loads(found)["rows"]}


def check(recipe_file: Path, runs: Path, *overrides: str, expected: int = 0) -> Any:
    sets = [part for value in (f"run.dir={runs}", *overrides) for part in ("--set", value)]
    code = run_command(["check", str(recipe_file), *sets, "--json"])
    assert code == expected


def test_a_sound_recipe_passes_and_its_run_directory_is_untouched(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    check(recipe_file, runs, PACKED)
    rows = rows_of(capsys.readouterr().out)
    bad = {name: row for name, row in rows.items() if row["status"] == "FAIL"}
    assert not bad
    held = ("falls below a uniform guess", "overfits a single sequence", "a new process continues bit for bit",
            "targets are shifted by one", "no token sees the future", "no token sees another document", "global batch",
            "token budget", "sizes multiply to the world", "validation and throughput apart",
            "holds all that a resume needs")  # fmt: skip
    assert {name: rows[name]["status"] for name in held} == dict.fromkeys(held, "ok")
    assert {rows[f"holds at every {axis}"]["status"] for axis in ("width", "depth")} <= {"ok", "warn"}
    assert len(rows) == len(held) + 3, "and the plan against a micro-run"
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before
    assert not list(runs.glob(".bessemer-check-*"))


@pytest.fixture
def small(runs: Path, recipe_file: Path) -> tuple[Recipe, TokenStore]:
    store = TokenStore.open(runs / "small" / "tokens")
    return recipe_defaults.resolve(load(recipe_file, [PACKED]), store.vocabulary), store


def trainer_of(recipe: Recipe, store: TokenStore, end_of_text: int | None = None) -> Trainer:
    model, end = build_model(config_of(recipe, store.vocabulary, 0), 1), end_of_text or store.end_of_text
    return Trainer(recipe, model, devices.choose(recipe.train), end, len(store.sources))


def failed(recipe: Recipe, store: TokenStore, trainer: Trainer, reader: Any = None) -> set[str]:
    reader = reader or trainer.task.loader(recipe, store)
    return {row.name for row in masks.mask_rows(recipe, trainer, reader, store) if row.status == "FAIL"}


def test_a_fault_fails_only_its_own_row(small: tuple[Recipe, TokenStore]) -> None:
    recipe, store = small
    trainer = trainer_of(recipe, store)
    assert failed(recipe, store, trainer) == set()

    class Unshifted(Loader):
        def batch(self, first: int, count: int) -> Batch:
            batch = super().batch(first, count)
            return replace(batch, targets=batch.inputs.copy())

    loader = trainer.task.loader(recipe, store)
    loader.__class__ = Unshifted
    assert failed(recipe, store, trainer, loader) == {"targets are shifted by one"}
    trainer.model.specs = [replace(spec, causal=False) for spec in trainer.model.specs]
    assert failed(recipe, store, trainer) == {"no token sees the future"}
    trainer = trainer_of(recipe, store, end_of_text=store.vocabulary)  # a token that is in no text
    assert failed(recipe, store, trainer) == {"no token sees another document"}


def test_a_model_without_gradients_fails_to_overfit(small: tuple[Recipe, TokenStore]) -> None:
    recipe, store = small
    batch = trainer_of(recipe, store).task.loader(recipe, store).batch(0, 1)
    frozen = trainer_of(recipe, store)
    frozen.optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    assert trial_rows.overfits(frozen, batch).status == "FAIL"


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.long)])
def test_only_a_rate_that_is_scaled_by_its_rule_holds_at_every_width(
    kind: str, small: tuple[Recipe, TokenStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinates, "LEAST_WIDTH", 32)
    monkeypatch.setattr(coordinates, "DEPTHS", (1, 2))
    recipe, store = small

    def row_of(base_width: int | None) -> CheckRow:
        tried = recipe.changed(train={"optimizer": {"kind": kind, "base_width": base_width}})
        by_width, _ = coordinates.coordinate_rows(tried, store, devices.choose(tried.train))
        return by_width

    assert row_of(32).status == "ok"
    row = row_of(None)
    assert row.status == "warn"
    assert "train.optimizer.base_width" in row.evidence
    monkeypatch.setattr(rules, "_width_rate", lambda kind, rule, config, width: width / config.base_width)
    assert row_of(32).status == "FAIL"


@pytest.fixture
def trained(small: tuple[Recipe, TokenStore], tmp_path: Path) -> tuple[Recipe, TrialResult]:
    """A recipe for a trial, and a trial of six steps."""
    recipe, store = small
    recipe = trial.scaled(recipe, trainer_of(recipe, store).model.config, 1e12, 1e10)[0]
    recipe = recipe.changed(train={"steps": 6, "validate_every": 3})
    (tmp_path / "trials").mkdir()
    run = trial.lay_out(tmp_path / "trials", "straight", spec_of(recipe, store), store.folder)
    return recipe, trial.train(run, recipe)


def spec_of(recipe: Recipe, store: TokenStore) -> RunSpec:
    config = config_of(recipe, store.vocabulary, 0)
    return RunSpec(recipe, config, "CPU", "fp32", store.digest, {"before_model": 0, "total": 0}, 0, 1e10, Fresh())


def test_a_resume_with_different_losses_fails(trained: tuple[Recipe, TrialResult]) -> None:
    recipe, straight = trained
    tokens = straight.run.tokens.resolve()
    run = trial.lay_out(straight.run.path.parent, "other-rate", spec_of(recipe, TokenStore.open(tokens)), tokens)
    trial.run_processes(run, recipe, stop=3)
    run.recipe.write_text(run.recipe.read_text().replace("learning_rate = 0.01", "learning_rate = 0.0101"))
    row = trial_rows.same(straight, trial.train(run, recipe), "stopped")
    assert row.status == "FAIL"
    assert "the loss of step 5 is" in row.evidence, "the first step whose weights differ"


def test_a_row_that_cannot_run_does_not_count_as_passed() -> None:
    rows = [CheckRow("a", "b", "ok", "c " * 100), CheckRow("d", "e", "not here", "f"), CheckRow("a", "g", "warn", "h")]
    assert is_go(rows)
    assert table(rows).index("g") < table(rows).index("e"), "rows of a topic stand together"
    assert max(map(len, table(rows).splitlines())) < 130

    def raises() -> Iterator[CheckRow]:
        yield rows[0]
        raise BessemerError("it broke")

    found = list(collect_rows("a", "part", raises))
    assert [row.status for row in found] == ["ok", "FAIL"]
    assert not is_go(found)


def test_a_large_model_is_tried_at_a_smaller_size_and_reported(small: tuple[Recipe, TokenStore]) -> None:
    recipe, store = small
    recipe = recipe_defaults.resolve(
        recipe.changed(
            model={"layers": 32, "width": 4096, "heads": 32, "kv_heads": 32, "mlp_width": 11008, "head_dim": None},
            train={"global_batch_tokens": 2**20, "micro_batch": 1}, parallel=Parallel().model_dump(),
        ).model_copy(update={"parallel": Parallel(shard=2)}),
        store.vocabulary,
    )  # fmt: skip
    from bessemer.train.task import config_of

    few, said = trial.scaled(recipe, config_of(recipe, store.vocabulary, 0), 1e11, 4e9)
    assert few.batches.full < recipe.batches.full
    assert (few.model.layers or 99) < 32
    assert few.batches.full % 2 == 0
    assert any("of 32 layers" in one for one in said)
    assert any("sequences" in one for one in said)
    config_of(few, store.vocabulary, 0)


def test_a_recipe_that_does_not_learn_is_reported(small: tuple[Recipe, TokenStore], tmp_path: Path) -> None:
    recipe, store = small
    flat = TrialResult(RunDirectory(tmp_path), dict.fromkeys(range(1, 25), 6.0), "", [])
    open_recipe = recipe.changed(train={"global_batch_tokens": None})
    split = recipe.changed(parallel={"replicate": 8}, cluster={"devices_per_node": 4})
    rows = [
        trial_rows.learns(recipe, flat, store.vocabulary),
        *recipe_rows.budget_rows(open_recipe, recipe),
        recipe_rows.layout_row(split),
    ]
    assert [row.status for row in rows] == ["FAIL", "warn", "ok", "FAIL"]


@pytest.mark.long
def test_a_failed_row_sets_the_exit_code(runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(recipe_file, runs, "train.optimizer.learning_rate=0.9", expected=1)
    assert "FAIL" in {row["status"] for row in rows_of(capsys.readouterr().out).values()}


def test_a_damaged_shard_ends_the_check(runs: Path, recipe_file: Path) -> None:
    shard = runs / "small" / "tokens" / "prose-train-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    check(recipe_file, runs, expected=2)


@pytest.mark.long
def test_a_layout_of_two_processes_is_tried_with_two_processes(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(recipe_file, runs, "parallel.shard=2")
    rows = rows_of(capsys.readouterr().out)
    assert not [row for row in rows.values() if row["status"] == "FAIL"]
    assert "one process instead" not in rows["falls below a uniform guess"]["evidence"]
