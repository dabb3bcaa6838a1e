"""The page's section on quality: there when a classifier ran, and as safe as the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bessemer.report import corpus, data, page
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from tests.report.conftest import valid_plotly

HOSTILE = "</script><script>alert(1)</script>"


def record(hostile: str = "") -> dict[str, Any]:
    """quality.json as the corpus writes it, of three sources."""
    return {
        "version": 2,
        "model": {"kind": "linear", "read_bytes": 20_000, "buckets": 262_144},
        "labelled": {"high": {"docs": 1173}, "low": {"code": 7574}, "train": 1800, "test": 226,
                     "duplicates_left_out": 31},
        "held_out": {"documents": 226, "high": 113, "accuracy": 0.947, "precision": 0.94, "recall": 0.956, "f1": 0.948,
                     "roc_auc": 0.987, "log_loss": 0.151, "brier": 0.041},
        "scores": {"code": [900, *[20] * 18, 5], "docs": [3] * 19 + [800], "notes": [10] * 20},
        "use": {"kind": "filter", "limit": "threshold 0.3", "threshold": 0.3, "sources": [
            {"source": "code", "judged": True, "documents": 1265, "kept": 245, "mean_score": 0.11},
            {"source": "docs", "judged": False, "documents": 857, "kept": 857, "mean_score": 0.95}]},
        "examples": [{"identity": f"{place:032x}", "source": "code", "score": place / 60, "excerpt": f"text {place}{hostile}"}
                     for place in range(60)],
        "seconds": {"score": 1.0},
    }  # fmt: skip


def test_the_section_is_there_when_the_file_is(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run(steps=10)
    assert 'id="quality"' not in page.write(run).read_text()
    write_json(run.corpus / "quality.json", record())
    html = page.write(run).read_text(encoding="utf-8")
    for said in (
        "94.7% of 226 held-out documents are on the right side of 0.5, ROC AUC 0.987.",
        "High is docs, low is code: 1,800 documents to learn from, 226 to test; 31 copies left out.",
        "Documents below 0.300 were rejected.",
        'data-figure="scores"',
    ):
        assert said in html, said


def test_examples_are_the_nearest_and_the_ends(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run(steps=10)
    write_json(run.corpus / "quality.json", record())
    groups = corpus.scored_examples(data.read(run))
    assert [f"{score:.3f}" for score, _ in groups["scored lowest"]] == ["0.000", "0.017", "0.033", "0.050"]
    assert groups["scored highest"][0][1]["excerpt"] == "text 59"
    near = [score for score, _ in groups["nearest to the limit"]]
    assert len(near) == 8 and near == sorted(near) and max(abs(score - 0.3) for score in near) < 0.07


def test_the_figure_is_valid_plotly_and_holds_the_numbers(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run(steps=10)
    write_json(run.corpus / "quality.json", record())
    figure = corpus.score_histogram(data.read(run))
    assert figure is not None
    valid_plotly(figure)
    code = next(trace for trace in figure["traces"] if trace["name"] == "code")
    assert code["y"][0] == pytest.approx(900 / 1265, abs=1e-6) and sum(code["y"]) == pytest.approx(1, abs=1e-4)
    assert figure["shapes"][0]["x0"] == 0.3


def test_hostile_text_stays_text(make_run: Callable[..., RunDirectory]) -> None:
    run = make_run(steps=10)
    write_json(run.corpus / "quality.json", record())
    calm = page.write(run).read_text(encoding="utf-8")
    write_json(run.corpus / "quality.json", record(HOSTILE))
    html = page.write(run).read_text(encoding="utf-8")
    assert html.count("<script") == calm.count("<script") and "&lt;/script&gt;" in html


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"scores": 3}',
        json.dumps({"scores": {"code": [None, "x"]}, "use": [], "held_out": 7, "examples": [1]}),
    ],
)
def test_a_damaged_file_is_a_note_or_nothing(make_run: Callable[..., RunDirectory], damage: str) -> None:
    run = make_run(steps=10)
    (run.corpus / "quality.json").write_text(damage)
    html = page.write(run).read_text(encoding="utf-8")
    assert ("corpus/quality.json is damaged" in html) == (damage in ("{", "[]"))


def test_a_model_that_was_not_tested_says_so(make_run: Callable[..., RunDirectory]) -> None:
    run, untested = make_run(steps=10), record()
    for key in ("held_out", "labelled"):
        del untested[key]
    write_json(run.corpus / "quality.json", untested)
    assert "The model was not tested here" in page.write(run).read_text(encoding="utf-8")
