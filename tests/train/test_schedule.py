import math

import pytest

from bessemer.recipe.resolved import ResolvedSchedule as Schedule
from bessemer.train.schedule import learning_rate_share


def shares(steps: int, **schedule: object) -> list[float]:
    return [learning_rate_share(Schedule(**schedule), step, steps) for step in range(steps)]  # type: ignore[arg-type]


COSINE = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 19)) / 2 for step in range(20)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "cosine", "warmup_steps": 4, "final_share": 0.1}, [1 / 5, 2 / 5, 3 / 5, 4 / 5, *COSINE]),
        ({"kind": "wsd", "warmup_steps": 2, "decay_share": 0.25, "final_share": 0.0},
         [1 / 3, 2 / 3, *[1.0] * 13, 0.8, 0.6, 0.4, 0.2, 0.0]),
        ({"kind": "linear", "warmup_steps": 2, "final_share": 0.2}, [1 / 3, 2 / 3, *(1 - 0.8 * step / 7 for step in range(8))]),
        ({"kind": "constant", "warmup_steps": 1, "final_share": 0.1}, [1 / 2, 1, 1, 1, 1]),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_shares_equal_manual_values(schedule: dict[str, object], expected: list[float]) -> None:
    assert shares(len(expected), **schedule) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_any_length_ends_at_the_final_share(kind: str, steps: int) -> None:
    found = shares(steps, kind=kind, warmup_steps=0, final_share=0.2)
    assert found[-1] == pytest.approx(0.2)
    assert all(0.2 - 1e-9 <= share <= 1.0 for share in found)


def test_inverse_sqrt_equals_manual_values() -> None:
    found = shares(100, kind="inverse_sqrt", warmup_steps=4, final_share=0.3)
    assert found[:5] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0])
    assert found[19] == pytest.approx(0.5)  # four times the steps, half the rate
    assert found[44] == pytest.approx(1 / 3)
    assert found[60:] == pytest.approx([0.3] * 40)
