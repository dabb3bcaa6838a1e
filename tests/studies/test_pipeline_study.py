from __future__ import annotations

import json

import pytest

from bessemer.cli import run_command
from bessemer.studies import STUDIES, pipeline

TEXTBOOK = {  # (stages, micro-batches): timesteps, active, idle, as one counts them in the drawing of forwards and backwards
    (4, 4): (14, 32, 24),
    (4, 8): (22, 64, 24),
    (4, 16): (38, 128, 24),
    (8, 16): (46, 256, 112),
}


def test_the_textbooks_table() -> None:
    rows = pipeline.run()["textbook"]
    assert len(rows) == 2 * len(TEXTBOOK)
    for row in rows:
        p, m = row["stages"], row["micro_batches"]
        assert (row["timesteps"], row["active"], row["idle"]) == TEXTBOOK[p, m]
        assert row["utilisation"] == pytest.approx(m / (p + m - 1)) == row["formula"]


def test_the_schedules_do_the_same_work() -> None:
    for row in pipeline.run()["schedules"]:
        if row["schedule"] == "dualpipev" and row["micro_batches"] < 2 * row["ranks"]:
            assert "as many micro-batches as stages" in row["why"]
            continue
        assert row["time"] - row["idle"] == pytest.approx(3 * row["micro_batches"])
        assert row["utilisation"] == pytest.approx(1 - row["idle"] / row["time"])
        assert row["with_send"] < row["utilisation"]
        if row["schedule"] == "interleaved" and row["micro_batches"] >= 2 * row["ranks"]:
            # Korthikanti et al. 2022, section 4.2.3: 1 + (p - 1) / (p v) of what 1F1B's first rank holds
            p, v = row["ranks"], row["virtual"]
            assert row["held"] == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert STUDIES["pipeline"].module == "pipeline"
    assert run_command(["study", "pipeline"]) == 0
    shown = capsys.readouterr().out
    assert "     8             16  1f1b             46     256   112        69.6%            69.6%" in shown
    assert max(map(len, shown.splitlines())) <= 135
    assert run_command(["study", "pipeline", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["schedules"]) == 24
