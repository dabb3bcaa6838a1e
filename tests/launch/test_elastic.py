"""The layout for fewer processes than before."""

import pytest

from bessemer.common.errors import InputError
from bessemer.launch.rendezvous import fitted
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import parse

RECIPE = """
run.name = "t"
model.depth = 1
corpus.sources = [{ name = "a", format = "text", paths = ["a"] }]
tokens.sequence_length = 32
train = { steps = 4, global_batch_tokens = 384, micro_batch = 1 }
"""


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        ({"replicate": 4}, 3, (3, 1)),
        ({"replicate": 6}, 5, (4, 1)),  # 5 do not divide 12 sequences
        ({"replicate": 4}, 13, (12, 1)),  # more than before
        ({"replicate": 2, "shard": 2}, 3, (1, 2)),  # a whole copy goes
        ({"shard": 4}, 3, (1, 3)),
        ({"replicate": 2, "tensor": 2}, 3, (1, 1)),
        ({"tensor": 2}, 1, None),
    ],
)
@pytest.mark.fault(27)
def test_the_layout_follows_the_number_of_processes(
    asked: dict[str, int], processes: int, expected: tuple[int, int] | None
) -> None:
    made = resolve(parse(RECIPE, "here"), 300).changed(parallel={**asked, "elastic": True})
    if expected is None:
        with pytest.raises(InputError, match="takes at least 2"):
            fitted(made, processes)
        return
    found = fitted(made, processes)
    assert (found.replicate, found.shard) == expected
