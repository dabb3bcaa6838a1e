"""ZeRO inside a pipeline: whatever is divided when, the same model is trained."""

from __future__ import annotations

import pytest
from processes import run_on
from test_data import difference, on_a_team, recipe_of, trained

from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Parallel
from tests.choose import long_but

CASES = [(recipe_of("fp64"), False), (recipe_of("fp64", recompute="full"), True)]


@pytest.mark.parametrize(
    "layout",
    long_but(
        [
            Parallel(shard=2, pipeline=2, zero=2),
            Parallel(replicate=2, shard=2, pipeline=2, zero=3),
            Parallel(shard=2, pipeline=2, zero=3),
        ],
    ),
    ids=["zero2", "hsdp zero3", "zero3"],
)
def test_a_divided_pipeline_trains_as_one_process(layout: Parallel) -> None:
    alone = [trained(recipe, tied, SINGLE_PROCESS) for recipe, tied in CASES]
    for found in run_on(layout.world, on_a_team, layout, CASES):
        for expected, given in zip(alone, found, strict=True):
            losses, weights = difference(expected, given)
            assert losses <= 1e-11
            assert weights <= 1e-9
