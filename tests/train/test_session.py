"""The memory that a run was planned to take is one figure, with what the training process itself held; no MFU is above 1."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.recipe import load
from bessemer.report.planned import of_run
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_json_lines, write_json
from bessemer.train import device as devices
from bessemer.workflow import stages


def test_a_process_plans_with_its_own_base(runs: Path, recipe_file: Path) -> None:
    recipe = load(recipe_file, [f"run.dir={runs}", "train.steps=4", "train.validate_every=4"])
    run = RunDirectory(recipe.run.folder)
    session = stages.Session(recipe, run)
    prepared = stages.prepare(session, measure_seconds=0.0)
    memory = prepared.plan["memory_bytes"]
    # as another process had planned
    other = {**memory, "before_model": 7, "total": memory["total"] - memory["before_model"] + 7}
    freed = torch.ones(75_000_000)  # an earlier stage's, which the heap keeps: it is no part of the training's base
    del freed
    resident = devices.resident_bytes()
    slow = {"memory_bytes": other, "peak_flops": 1e6}  # as measured beside a neighbour that took the cores
    write_json(run.plan, {**read_json(run.plan), **slow})
    stages.train(session, stages.Prepared(prepared.recipe, {**prepared.plan, **slow}))

    planned = read_json(run.plan)
    logged = [row for row in read_json_lines(run.metrics) if row["kind"] == "memory"][-1]
    trained = [row for row in read_json_lines(run.metrics) if row["kind"] == "train"]
    assert all(0 < row["mfu"] <= row["hfu"] <= 1 for row in trained), "no step is faster than the peak"
    found = of_run(run)
    assert found is not None
    assert planned["memory_bytes"]["before_model"] > 1e7
    if (
        sys.platform.startswith("linux") and resident > memory["before_model"] + 2.9e8
    ):  # a C library that keeps what is freed
        assert planned["memory_bytes"]["before_model"] < resident - 2.5e8
    assert planned["memory_bytes"]["total"] == logged["planned"] == found["memory_bytes"]["planned"]
    assert sum(size for part, size in planned["memory_bytes"].items() if part != "total") == logged["planned"]
    assert planned["parameters"] and planned["layout"]  # the rest of the plan stays


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
