"""The facts of sublayers, compared with the modules that are built."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import meta_model
from tests.model.samples import BLOCKS, config

CONFIGS: dict[str, dict[str, Any]] = BLOCKS | {
    f"{family.name}: {name}": {"kv_heads": 2, "layers": 2, **family.options, **changes}
    for family in FAMILIES.values()
    for name, changes in family.examples.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    """By name, shape and order, which exports, optimizers and tensor parallelism rely on."""
    made = config(**CONFIGS[name])
    model = meta_model(made)
    block = {name: tuple(parameter.shape) for name, parameter in model.blocks[1].named_parameters()}
    assert block == {name: facts.shape for name, facts in made.block_table.items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == made.parameters
