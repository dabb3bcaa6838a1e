"""The study of width transfer, at a size that takes seconds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bessemer import studies
from bessemer.cli import run_command
from bessemer.studies import mup, text

TINY = mup.Grid(
    widths=(32, 64), rates=(0.01, 0.02, 0.04), layers=1, head_dim=16, steps=4, sequences=2, length=32, max_bytes=200_000,
    held_out=4,
)  # fmt: skip


def test_the_rules_differ_only_beyond_the_base_width() -> None:
    found = mup.run(TINY)
    standard, transferred = found["loss"]["standard"], found["loss"]["base_width"]
    assert standard[32] == transferred[32]
    assert all(standard[64][rate] != transferred[64][rate] for rate in TINY.rates)
    for rule in mup.RULES:
        for width in TINY.widths:
            losses = found["loss"][rule][width]
            assert list(losses) == list(TINY.rates)
            assert losses[found["best"][rule][width]] == min(losses.values())
            assert all(0 < value < np.log(256) + 0.5 for value in losses.values())
    said = mup.table(found)
    assert f"{min(standard[64].values()):.3f}*" in said
    assert "base_width = 32" in said
    json.dumps(found, allow_nan=False)


def test_a_run_that_diverges_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mup._trained
    monkeypatch.setattr(
        mup, "_trained", lambda asked, width, rate, base: np.inf if rate == 0.04 else honest(asked, width, rate, base)
    )
    found = mup.run(TINY)
    assert found["loss"]["standard"][64][0.04] is None
    assert "diverged" in mup.table(found)


def test_the_bottom_of_a_parabola_is_found_between_the_rates() -> None:
    def losses(bottom: float) -> dict[float, float]:
        return {rate: 2.0 + 0.3 * np.log2(rate / bottom) ** 2 for rate in (1.0, 2.0, 4.0, 8.0)}

    assert mup._lowest(losses(2.7)) == pytest.approx(2.7)
    assert mup._lowest(losses(0.2)) == 1.0
    assert mup._lowest(losses(30.0)) == 8.0


def test_the_text_is_python_and_the_held_out_part_is_never_trained_on() -> None:
    training, held = text.training_and_held_out(200_000)
    whole = len(training) + len(held)
    assert whole >= 200_000 and b"def " in bytes(training) and abs(len(held) / whole - 0.1) < 0.01
    batch = text.batch(3, 4, 32, 200_000)
    assert np.array_equal(batch.inputs, text.batch(3, 4, 32, 200_000).inputs)
    assert not np.array_equal(batch.inputs, text.batch(4, 4, 32, 200_000).inputs)
    assert all(bytes(row.astype(np.uint8)) in bytes(training) for row in batch.inputs)
    part = text.held_out(5, 32, 200_000)
    assert part.bytes.sum() == part.num_targets
    assert all(bytes(row.astype(np.uint8)) in bytes(held) for row in part.inputs)


def test_the_command_lists_studies_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study"]) == 0
    assert "mup" in capsys.readouterr().out
    assert run_command(["study", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(studies.STUDIES)
    assert run_command(["study", "nothing"]) == 2
    assert f"no study of that name; there are: {', '.join(studies.STUDIES)}" in capsys.readouterr().err


def test_the_command_prints_the_table_or_the_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = mup.run
    monkeypatch.setattr(mup, "run", lambda: honest(TINY))
    assert run_command(["study", "mup"]) == 0
    assert "One learning rate for every width" in capsys.readouterr().out
    assert run_command(["study", "mup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["widths"] == [32, 64]


@pytest.mark.parametrize("name", list(studies.STUDIES))
def test_every_study_has_what_the_command_needs(name: str) -> None:
    subject = studies.load(name)
    assert all(callable(getattr(subject, part)) for part in ("run", "table", "shows", "plot"))
