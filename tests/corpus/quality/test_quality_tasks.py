"""Quality scores as tasks: no document is scored twice after a stop, and workers decide like one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import prose, recipe

from bessemer.common.errors import BessemerError
from bessemer.corpus import global_steps, partition, pipeline
from bessemer.corpus.filters.quality import decide
from bessemer.recipe import Quality, Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from tests.storage_folder import contents


@pytest.fixture
def of(data: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Write two sources in several buckets, one of them with advertisements."""
    monkeypatch.setattr(partition, "BUCKET_BYTES", 20_000)
    monkeypatch.setattr(global_steps, "GROUP_BYTES", 20_000)
    for name in ("good", "raw"):
        (data / name).mkdir()
    for number in range(70):
        (data / "good" / f"{number}.txt").write_text(prose(number))
        (data / "raw" / f"{number}.txt").write_text(prose(1000 + number) + " SUBSCRIBE now click here, cookies!" * 5)
    sources = ({"name": name, "format": "text", "paths": [str(data / name)]} for name in ("good", "raw"))
    quality = Quality(high=("good",), low=("raw",), hash_bits=12, use="filter", keep_share=0.5)
    return recipe(*sources).changed(corpus={"quality": quality})


def test_a_stopped_build_scores_nothing_twice(of: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, run = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "run")
    pipeline.build(of, whole)
    scored: list[str] = []
    learned_classifier = decide.learned_classifier

    class Counted:
        def __init__(self, *of: Any) -> None:
            self.model = learned_classifier(*of)

        def score(self, texts: list[str]) -> Any:
            if scored and not is_again:
                raise BessemerError("stopped")
            scored.extend(texts)
            return self.model.score(texts)

    monkeypatch.setattr(decide, "learned_classifier", Counted)
    is_again = False
    with pytest.raises(BessemerError, match="stopped"):
        pipeline.build(of, run)
    assert 0 < len(scored) < 140
    is_again = True
    pipeline.build(of, run)
    assert len(scored) == len(set(scored)) == 140
    assert contents(run.corpus) == contents(whole.corpus)
    rejected = json.loads((run.corpus / "statistics.json").read_text())["totals"]["rejected"]
    assert rejected["low_quality"] == 35


@pytest.mark.long
def test_workers_decide_like_one_process(of: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two")
    pipeline.build(of, one)
    monkeypatch.setattr(worker, "SMALL_BYTES", 100_000)  # for work other than scoring
    pipeline.build(of.changed(corpus={"workers": 2}), two)
    assert contents(two.corpus) == contents(one.corpus)
