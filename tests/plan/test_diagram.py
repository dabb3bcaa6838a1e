import json
import re
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.distributed.schedules import NAMES, generate
from bessemer.plan import schedule_table
from bessemer.plan.timetable import Durations, Timetable, simulate


def timetable(name: str, p: int, m: int, durations: Durations | None = None) -> Timetable:
    return simulate(generate(name, p, m), durations)


def test_the_textbooks_picture() -> None:
    assert schedule_table.lines(timetable("gpipe", 2, 2, Durations(1, 1)), 80) == [
        "        0     2     4",
        "rank 0  F0 F1 ····· B0 B1",
        "rank 1  ·· F0 F1 B0 B1 ··",
    ]


def test_a_long_action_has_dashes_and_a_narrow_terminal_panels() -> None:
    assert schedule_table.lines(timetable("1f1b", 2, 3), 28) == [
        "        0     2     4",
        "rank 0  F0 F1 ····· B0───",
        "rank 1  ·· F0 B0─── F1 B1─",
        "",
        "        6     8     10",
        "rank 0  F2 B1─── ·· B2───",
        "rank 1  ── F2 B2─── ·····",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [80, 160])
def test_every_action_is_drawn_once_and_no_line_is_too_long(name: str, width: int) -> None:
    for p, m, durations in ((2, 4, Durations()), (4, 8, Durations(1, 1)), (8, 16, Durations())):
        table = timetable(name, p, m, durations)
        drawn = schedule_table.lines(table, width)
        assert max(map(len, drawn)) <= width
        if "--svg" in drawn[-1]:
            continue
        for rank, row in enumerate(table.slots):
            text = "".join(
                line.removeprefix(f"rank {rank}  ").ljust(width) for line in drawn if line.startswith(f"rank {rank} ")
            )
            labels = re.findall(r"\d*[FBIW]\d+", text)
            assert labels == [schedule_table.label(table, slot.action) for slot in row]


def test_the_picture_of_the_docs_is_what_is_drawn() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert schedule_table.table(schedule_table.plan_schedule("1f1b", 4, 8), 120) in page


def test_the_command_draws_and_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    asked = ["plan", "--schedule", "1f1b:4x8"]
    assert run_command(asked) == 0
    assert capsys.readouterr().out.startswith(schedule_table.table(schedule_table.plan_schedule("1f1b", 4, 8), 120))
    assert run_command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["timesteps"], found["active"], found["idle"]) == (33, 96, 36)
    assert found["utilisation"] == pytest.approx(8 / 11)
    assert found["rows"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert found["slots"][3][1] == ["3B0", 4, 6]


def test_a_recipes_model_is_cut_and_its_stages_take_what_they_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", "gpt2-124m", "--schedule", "1f1b:2x8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["blocks"] for row in found["cut"]] == [[0, 8], [8, 12]]
    shares = [row["share"] for row in found["cut"]]
    assert sum(shares) == pytest.approx(1) and shares[0] < shares[1]
    assert found["utilisation"] < 8 / 9  # what equal stages would give
    table = schedule_table.table(schedule_table.plan_schedule("zbv", 2, 4), 100)
    assert "stage " not in table.splitlines()[-1]


def test_a_recipe_without_a_run_is_cut_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nlayers = 4\nwidth = 64\nheads = 2\nvocabulary = 256\n[train]\nsteps = 2\n")
    assert run_command(["plan", str(path), "--schedule", "1f1b:2x4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cut"]) == 2
