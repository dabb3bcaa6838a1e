"""Fixtures: a run directory, a data folder, and a function that builds a corpus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the corpus extra is not installed")

from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
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
