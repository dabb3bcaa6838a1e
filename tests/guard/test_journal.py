"""The journal: what is in it, what of it holds, and what of damage is noticed."""

import json
from pathlib import Path

import pytest

from bessemer.common.errors import BessemerError
from bessemer.guard.journal import Journal, Rollback


def rollback(number: int, at: int, to: int) -> Rollback:
    return Rollback(number, at, to, "diverged", at - 10, (8 * at, 8 * at + 80), 20)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Back from 120 to 80, from 150 to 60, and from 400 to 300; with a skipped update on each branch."""
    found = Journal(tmp_path / "journal.jsonl")
    found.add_skip(57)
    found.add_skip(90)
    found.add_rollback(rollback(1, 120, 80))
    found.add_skip(75)
    found.add_rollback(rollback(2, 150, 60))
    found.add_skip(95)
    found.add_rollback(rollback(3, 400, 300))
    found.add_skip(310)
    return found


def test_what_was_written_is_read(journal: Journal) -> None:
    assert journal.path is not None
    assert Journal.read(journal.path) == journal
    assert Journal.read(journal.path.with_name("none")).rollbacks == []


def test_the_path_is_what_no_rollback_undid(journal: Journal) -> None:
    assert [step for step in (57, 75, 90, 95, 310) if journal.skips_step(step)] == [57, 95, 310]
    assert [journal.keeps(60, 0), journal.keeps(80, 0), journal.keeps(80, 1), journal.keeps(300, 2)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert journal.keeps(301, 3) and not journal.keeps(301, 2)


def test_the_learning_rate_is_that_of_the_last_rollback_to_a_step_before(journal: Journal) -> None:
    governing = {step: journal.governing(step) for step in (0, 59, 60, 80, 299, 300)}
    assert {step: found and found.number for step, found in governing.items()} == {
        0: None, 59: None, 60: 2, 80: 2, 299: 2, 300: 3,
    }  # fmt: skip
    assert (journal.num_rollbacks_within(400, 10_000), journal.num_rollbacks_within(400, 260)) == (3, 2)


def test_a_line_that_a_kill_cut_short_was_not_acted_on(journal: Journal) -> None:
    assert journal.path is not None
    whole = journal.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(1, len(last)):
        journal.path.write_bytes(whole[:-length])
        found = Journal.read(journal.path)
        assert found.num_rollbacks == 3 and not found.skips_step(310)
        found.drop_torn_line()
        found.add_skip(311)
        assert Journal.read(journal.path).skips_step(311)


@pytest.mark.parametrize("damage", ["cut", "missing", "changed", "foreign"])
def test_other_damage_is_refused(journal: Journal, damage: str) -> None:
    assert journal.path is not None
    lines = journal.path.read_text().splitlines()
    if damage == "cut":
        lines[2] = lines[2][:30]
    elif damage == "missing":
        del lines[2]  # the first of the rollbacks
    elif damage == "changed":
        lines[2] = json.dumps({**json.loads(lines[2]), "omitted": 3})
    else:
        lines[0] = "[]"
    journal.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BessemerError, match=r"journal.jsonl: line [1345] is damaged.*--restart"):
        Journal.read(journal.path)
