import math

import pytest

from bessemer.recipe.resolved import ResolvedSchedule as Schedule
from bessemer.train.schedule import learning_rate_share


def shares(schedule: Schedule, steps: int) -> list[float]:
    return [learning_rate_share(schedule, step, steps) for step in range(steps)]


def test_cosine_equals_manual_values() -> None:
    found = shares(Schedule(kind="cosine", warmup_steps=4, final_share=0.1), 24)
    assert found[:4] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5])
    assert found[4:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * k / 19)) / 2 for k in range(20)])
    assert found[4] == 1.0, "the peak is reached"
    assert found[-1] == pytest.approx(0.1)


def test_wsd_equals_manual_values() -> None:
    found = shares(Schedule(kind="wsd", warmup_steps=2, decay_share=0.25, final_share=0.0), 20)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:15] == [1.0] * 13
    assert found[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_any_length_ends_at_the_final_share(kind: str, steps: int) -> None:
    found = shares(Schedule(kind=kind, warmup_steps=0, final_share=0.2), steps)
    assert found[-1] == pytest.approx(0.2)
    assert all(0.2 - 1e-9 <= share <= 1.0 for share in found)


def test_linear_equals_manual_values() -> None:
    found = shares(Schedule(kind="linear", warmup_steps=2, final_share=0.2), 10)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:] == pytest.approx([1 - 0.8 * k / 7 for k in range(8)])
    assert found[2] == 1.0, "the peak is reached"


def test_inverse_sqrt_equals_manual_values() -> None:
    found = shares(Schedule(kind="inverse_sqrt", warmup_steps=4, final_share=0.3), 100)
    assert found[:5] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0])
    assert found[19] == pytest.approx(0.5)  # four times the steps, half the rate
    assert found[44] == pytest.approx(1 / 3)
    assert found[60:] == pytest.approx([0.3] * 40)


def test_constant_does_not_change() -> None:
    assert shares(Schedule(kind="constant", warmup_steps=1, final_share=0.1), 5) == pytest.approx([1 / 2, 1, 1, 1, 1])
