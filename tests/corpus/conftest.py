"""Fixtures: a run directory, a data folder, and a function that builds a corpus."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the corpus extra is not installed")

import slurm_commands
from build_corpus import cut_finely

from bessemer.common import extensions
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.run_tasks import run as worker
from bessemer.run_tasks import slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split the work finely."""
    cut_finely(monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put Slurm's commands on the PATH and return the folder of their state."""
    folder = tmp_path / "slurm of this test"
    monkeypatch.setenv("PATH", f"{slurm_commands.install(folder)}:{os.environ['PATH']}")
    monkeypatch.setenv(extensions.TRUSTED, "{}")
    for name, value in {"READ_SECONDS": 0.02, "ASK_SECONDS": 0.1, "SEEN_SECONDS": 0.3}.items():
        monkeypatch.setattr(slurm, name, value)
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    return folder


Built = tuple[list[dict[str, str]], list[dict[str, str]], dict[str, Any]]


@pytest.fixture
def build(run: RunDirectory) -> Callable[[Recipe], Built]:
    """Return a function that builds a corpus and returns documents, rejects and statistics."""

    def built(of: Recipe) -> Built:
        import pyarrow.parquet as pq

        from bessemer.corpus import pipeline

        pipeline.build(of, run)
        documents = pq.read_table(run.corpus / "documents").to_pylist()
        rejected = pq.read_table(run.corpus / "rejected").to_pylist()
        return documents, rejected, read_json(run.corpus / "statistics.json")

    return built


@pytest.fixture(autouse=True)
def nobody_asked_to_stop() -> None:
    """Clear the stop request that a test may leave, which only the next build would clear."""
    from bessemer.run_tasks.task import STOP

    STOP.clear()
