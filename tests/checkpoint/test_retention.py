"""Which checkpoints stay."""

import itertools

import pytest

from bessemer.checkpoint.retention import Retention


def test_the_checkpoints_of_every_rule_stay() -> None:
    steps = list(range(10, 110, 10))
    assert Retention(2).kept(steps) == {90, 100}
    assert Retention(1, decay_start=55, healthy_until=39).kept(steps) == {30, 50, 100}
    assert Retention(1, best=40).kept(steps) == {40, 100} and Retention(1, best=45).kept(steps) == {100}
    assert Retention(1, distance=30).kept(steps) == {30, 60, 70, 90, 100}


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_one_old_enough_for_a_rollback_always_stays(newest: int) -> None:
    for every, distance in itertools.product((1, 7, 10, 64, 250, 700, 1000), (8, 100, 256)):
        retention, there = Retention(newest, distance=distance), list[int]()
        for step in range(every, 40 * every, every):
            there = sorted(retention.kept([*there, step]))
            if step - distance >= every:  # there was one
                assert any(one <= step - distance for one in there), (every, distance, step, there)
