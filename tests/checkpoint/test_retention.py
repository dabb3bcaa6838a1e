"""Which checkpoints stay."""

from __future__ import annotations

from bessemer.checkpoint.retention import Retention


def test_the_checkpoints_of_every_rule_stay() -> None:
    steps = list(range(10, 110, 10))
    assert Retention(2).kept(steps) == {90, 100}
    assert Retention(1, decay_start=55, healthy_until=39, changed_at=20).kept(steps) == {20, 30, 50, 100}
    assert Retention(1, distance=30).kept(steps) == {30, 60, 90, 100}
