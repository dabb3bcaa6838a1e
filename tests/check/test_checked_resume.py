"""`bessemer check` on layouts of several processes, and `--resume`: a recipe stopped in every way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from bessemer.check import sample
from bessemer.cli import run_command
from bessemer.defaults import derived_keys
from bessemer.recipe import load
from bessemer.tokens.loader import loader_of
from bessemer.tokens.shards import TokenStore
from tests.check.test_checklist import check, rows_of

PACKED = ("tokens.packing=best-fit", "tokens.document_mask=true")


def test_a_store_of_the_first_documents_is_read_as_the_whole_one(prepared: Path, tmp_path: Path) -> None:
    store = TokenStore.open(prepared / "runs" / "small" / "tokens")
    recipe = derived_keys.resolve(load(prepared / "small.toml", [*PACKED]), store.vocabulary)
    few = sample.beginning_of(store, recipe, tmp_path / "few", 3000)
    few.verify()
    assert 3000 <= few.train_tokens < 4000 < store.train_tokens
    assert few.held_out_tokens == store.held_out_tokens
    for name in store.sources:
        ours, theirs = few.split(name, "train"), store.split(name, "train")
        assert (ours.shards[0].tokens == theirs.shards[0].tokens[: ours.num_tokens]).all()
        assert ours.documents(0, 500) == theirs.documents(0, 500)
    assert sum(loader_of(recipe, few).mixture.sequences) > 0


@pytest.mark.long
def test_a_recipe_resumes_in_every_way(runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packed, with a growing batch, dropout and a moving average: everything that a resume must carry on."""
    shutil.rmtree(runs / "small" / "tokens")  # packed tokens are others
    sets = (*PACKED, "train.batch_ramp={start_tokens=128,steps=5}", "train.dropout.hidden=0.1", "train.ema=0.9")
    check(recipe_file, runs, *sets, resume=True)
    rows = rows_of(capsys.readouterr().out)
    ways = {name for name in rows if name.startswith("one process")}
    assert ways == {
        "one process, stopped in an epoch", "one process, stopped at an epoch's edge", "one process, stopped repeatedly",
        "one process, stopped while the batch grows", "one process, then two",
    }  # fmt: skip
    assert {rows[name]["status"] for name in ways} == {"ok"}
    said = rows["what is trained"]["evidence"]
    assert all(word in said for word in ("packing best-fit", "growing batch", "dropout", "moving average"))


@pytest.mark.long
def test_a_layout_of_two_processes_is_tried_with_them(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(recipe_file, runs, "parallel.shard=2")
    rows = rows_of(capsys.readouterr().out)
    assert not [row for row in rows.values() if row["status"] == "FAIL"]
    assert "all-reduce of 8.4 MB over 2" in rows["links along shard"]["evidence"]
    assert rows["clocks agree"]["status"] == "ok"
    assert "files of 2 processes seen by all" in rows["file system"]["evidence"]
    assert rows["a new process continues bit for bit"]["status"] == "ok"
    check(recipe_file, runs, "parallel.shard=2", resume=True)
    rows = rows_of(capsys.readouterr().out)
    assert {row["status"] for name, row in rows.items() if name.startswith("2 processes")} == {"ok"}
    assert len([name for name in rows if name.startswith("2 processes")]) == 3


def test_a_layout_that_does_not_fit_is_said_not_passed(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("parallel.replicate=8", "train.global_batch_tokens=512", "train.micro_batch=1")
    check(recipe_file, runs, *sets)
    rows = rows_of(capsys.readouterr().out)
    assert rows["collectives by axis"]["status"] == rows["planned memory fits"]["status"] == "not here"
    assert "one process instead of 8" in rows["falls below a uniform guess"]["evidence"]
    assert "more than this machine runs" in rows["sizes multiply to the world"]["evidence"]


@pytest.mark.long
def test_processes_of_a_launcher_try_devices_and_links_together(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    from bessemer.launch.group import run_group

    arguments = ("-m", "bessemer", "check", str(recipe_file), "--set", f"run.dir={runs}", "--set", "parallel.shard=2",
                 "--json")  # fmt: skip
    assert run_group(arguments, 2, tmp_path / "log", seconds=200) is None
    found = json.loads((tmp_path / "log-0.txt").read_text())
    assert {"links along shard", "file system", "clocks agree"} <= {row["name"] for row in found["rows"]}
    assert json.loads((tmp_path / "log-1.txt").read_text()) == {}
    assert "RANK" not in os.environ


def test_a_finished_run_and_one_with_a_damaged_checkpoint(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [part for value in (f"run.dir={runs}", "train.steps=4", "checkpoint.every=2") for part in ("--set", value)]
    assert run_command(["train", str(recipe_file), *sets]) == 0
    capsys.readouterr()
    assert run_command(["check", str(runs / "small"), "--json"]) == 0
    row = rows_of(capsys.readouterr().out)["the run's newest checkpoint is whole"]
    assert row["evidence"].startswith("step 4, every byte verified")
    model = next((runs / "small" / "checkpoints" / "step-00000004").glob("model*"))
    model.write_bytes(model.read_bytes()[:-7])
    assert run_command(["check", str(runs / "small"), "--json"]) == 1
    row = rows_of(capsys.readouterr().out)["the run's newest checkpoint is whole"]
    assert row["status"] == "FAIL"
    assert "step-00000004" in row["evidence"]
