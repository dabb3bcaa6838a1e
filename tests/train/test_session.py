"""A training takes what was planned from its specification; no MFU is above 1."""

import mmap
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_json_lines
from bessemer.train import device as devices
from bessemer.train.run_spec import Fresh, Resume, RunSpec
from bessemer.workflow import stages
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session


def test_a_training_takes_its_plan_from_the_specification(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file, [f"run.dir={runs}", "train.steps=4", "train.validate_every=4"])
    run = RunDirectory(recipe.run.folder)
    session = Session(recipe, run)
    spec = prepare(session, measure_seconds=0.0)
    planned = read_json(run.plan)
    assert RunSpec.read(run) == spec and spec.memory_bytes == planned["memory_bytes"]
    assert spec.start == Fresh() and spec.memory_bytes["before_model"] > 1e7
    freed = torch.ones(75_000_000)  # of an earlier stage; the heap keeps it, but it is no part of the training's base
    del freed
    resident = devices.resident_bytes()
    # As measured next to a neighbour that took the cores, and planned by a process that held nothing.
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


def test_a_training_stops_for_other_tokens_than_planned(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file, [f"run.dir={runs}", "train.steps=2"])
    session = Session(recipe, RunDirectory(recipe.run.folder))
    spec = prepare(session, measure_seconds=0.0)
    with pytest.raises(InputError, match="token shards"):
        stages.train(session, replace(spec, tokens="of another corpus"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_token_files_are_no_memory_of_the_training(tmp_path: Path) -> None:
    np.zeros(64 << 20, np.uint8).tofile(tmp_path / "shard.bin")
    devices.reset_peak_resident()
    before = devices.peak_resident_bytes()
    shard = np.memmap(tmp_path / "shard.bin", np.uint8, "r")
    assert int(shard.sum(dtype=np.int64)) == 0
    assert devices.peak_resident_bytes() < before + (16 << 20)
    with mmap.mmap(-1, 64 << 20) as taken:  # not from the heap, which has resident pages to give
        taken.write(bytes(64 << 20))
        assert devices.peak_resident_bytes() > before + (56 << 20)
