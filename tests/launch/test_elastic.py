"""The layout for fewer processes than before."""

from __future__ import annotations

import pytest

from bessemer.launch.rendezvous import fitted
from bessemer.recipe import Recipe, parse


def recipe(**parallel: object) -> Recipe:
    """12 sequences a step, in micro-batches of one."""
    keys = "\n".join(f"{key} = {value!r}" for key, value in parallel.items())
    text = (
        '[run]\nname = "t"\n[model]\ndepth = 1\n[[corpus.sources]]\nname = "a"\nformat = "text"\npaths = ["a"]\n'
        "[tokens]\nsequence_length = 32\n[train]\nsteps = 4\nglobal_batch_tokens = 384\nmicro_batch = 1\n"
        f"[parallel]\n{keys}\n"
    )
    return parse(text, "here")


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        ({"replicate": 4}, 4, (4, 1)),
        ({"replicate": 4}, 3, (3, 1)),
        ({"replicate": 6}, 5, (4, 1)),  # 5 do not divide 12 sequences
        ({"replicate": 4}, 13, (12, 1)),  # more than before
        ({"replicate": 2, "shard": 2}, 3, (1, 2)),  # a whole copy goes
        ({"shard": 4}, 3, (1, 3)),
        ({"replicate": 2, "tensor": 2}, 3, (1, 1)),
        ({"tensor": 2}, 1, None),
        ({"pipeline": 2, "replicate": 2}, 3, (1, 1)),
    ],
)
@pytest.mark.fault(27)
def test_the_layout_follows_the_number_of_processes(
    asked: dict[str, int], processes: int, expected: tuple[int, int] | None
) -> None:
    found = fitted(_elastic(asked), processes)
    assert (None if found is None else (found.replicate, found.shard)) == expected
    if found is not None:
        assert found.world <= processes
        assert 12 % found.data == 0


def _elastic(asked: dict[str, int]) -> Recipe:
    made = recipe(**asked)
    return made.model_copy(update={"parallel": made.parallel.model_copy(update={"elastic": True})})
