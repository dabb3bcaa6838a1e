"""Out-of-memory errors name what needed the memory, and a damaged small file is not reported as one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.format import load_manifest
from bessemer.cli import run_command
from bessemer.common.errors import BessemerError, InputError
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_json_or_none
from bessemer.workflow.session import Session

ERRORS = (
    MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("CUDA out of memory."),
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize(
    ("stage", "key"), [("corpus", "corpus.workers"), ("train", "train.micro_batch"), ("export", "")]
)
def test_the_stage_that_ran_out_of_memory_is_named(error: Exception, stage: str, key: str, tmp_path: Path) -> None:
    def work() -> str:
        raise error

    with pytest.raises(BessemerError) as caught:
        Session(load("demo"), RunDirectory(tmp_path)).stage(stage, work)
    said = str(caught.value)
    assert caught.value.exit_code == 1 and said.startswith(f"{stage}: ") and key in said
    assert ("train.micro_batch" in said) == (stage == "train")


def test_other_failures_of_a_stage_are_not_changed(tmp_path: Path) -> None:
    def work() -> str:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Session(load("demo"), RunDirectory(tmp_path)).stage("train", work)


def test_running_out_of_memory_outside_a_stage_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("bessemer.cli.runs.open_run", fails)
    assert run_command(["generate", "runs/x", "The"]) == 1
    error = capsys.readouterr().err
    assert "memory" in error and "micro_batch" not in error and "Traceback" not in error


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("kind", ["nested", "huge", "exhausting"])
def test_a_damaged_small_file_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(nested(200_000) if kind == "nested" else "{}")
    if kind == "huge":
        os.truncate(path, 20 << 30)  # a sparse file, which takes no space
    if kind == "exhausting":

        def fails(text: str) -> None:
            raise MemoryError

        monkeypatch.setattr(json, "loads", fails)
    for read in (read_json, lambda place: load_manifest(place.parent)):
        with pytest.raises(InputError) as caught:
            read(path)
        assert str(path) in str(caught.value) and "micro_batch" not in str(caught.value)
    assert read_json_or_none(path) is None
