"""The textbook exercise, at its own size: it takes a second."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("numba", reason="the corpus extra is not installed")

from bessemer.cli import run_command
from bessemer.studies import quality_classifier as study


@pytest.fixture(scope="module")
def found() -> dict:
    return study.run()


def test_it_is_the_exercise(found: dict) -> None:
    assert len(found["epochs"]) == 30 and len(found["weights"]) == 5 and len(found["snippets"]) == 10
    assert found["settings"]["samples"] == 500 and found["held_out"]["texts"] == 100
    json.dumps(found, allow_nan=False)


def test_it_learns(found: dict) -> None:
    losses = [row["loss"] for row in found["epochs"]]
    assert losses[0] < np.log(2) and losses[-1] < 0.7 * losses[0]
    assert found["held_out"]["accuracy"] >= 0.85 and found["held_out"]["roc_auc"] >= 0.95
    assert found["held_out"]["accuracy"] == found["epochs"][-1]["held_out_accuracy"]
    # No epoch is below the optimum, and the last is near it.
    assert found["optimum"]["loss"] <= min(losses) < found["optimum"]["loss"] + 0.02


def test_snippets_fall_on_the_right_side(found: dict) -> None:
    scores = [row["score"] for row in found["snippets"]]
    assert min(scores[:5]) > 0.5 > max(scores[5:])


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    draw = np.random.default_rng(1)
    values, high = np.c_[np.ones(60), draw.normal(size=(60, 5))], draw.random(60) < 0.4
    weights = draw.normal(size=6)
    gradient = study.loss_and_gradient(weights, values, high)[1]
    for axis in np.eye(6):
        up, down = (study.loss_and_gradient(weights + sign * 1e-6 * axis, values, high)[0] for sign in (1, -1))
        assert (up - down) / 2e-6 == pytest.approx(gradient @ axis, abs=1e-8)


def test_it_is_the_same_every_time(found: dict) -> None:
    again = study.run()
    assert {**again, "seconds": 0} == {**found, "seconds": 0}


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", "quality-classifier"]) == 0
    said = capsys.readouterr().out
    assert "Held out: " in said and "stop_word_share" in said and all(text[:60] in said for text in study.SNIPPETS)
