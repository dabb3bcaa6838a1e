"""What the planner knows of shards that divide no dimension of a weight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bessemer.distributed.shards import padded_elements, padding
from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks, memory, step
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout


def config(**changes: object) -> ModelConfig:
    """As Llama 3 8B, of few blocks."""
    values = {
        "vocabulary": 1024, "layers": 4, "width": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_width": 14_336,
        "sequence_length": 4096, "qk_norm": "none",
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def job(layout: Layout, framework: str = "bessemer") -> Job:
    device = devices.find("H100")
    return Job(config(), layout, ClusterSpec.of(device, layout.world), 192, "bf16", frameworks.find(framework))


def test_padding_is_that_of_the_dimension_that_is_cut() -> None:
    assert padded_elements((8, 6, 128, 4096), 32) == 8 * 6 * 128 * 4096  # 128 divides
    assert padded_elements((8, 6, 128, 4096), 96) == 96 * 6 * 128 * 4096  # 8 processes of 96 have a part
    assert padded_elements((2, 14_336, 4096), 96) == 96 * 14_336 * 4096  # 2 of them
    assert padded_elements((4096, 14_336), 96) == 43 * 96 * 14_336
    assert padding(config(), 1, 32) == 1.0
    assert padding(config(), 2, 96) == 1.0  # require_shards refuses it


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_padded_weights_cost_memory_and_time(zero: int) -> None:
    """Against the same devices as copies of shards that divide; of a program without padding they cost nothing."""
    uneven = Layout(shard=96, zero=zero)
    even = replace(uneven, replicate=3, shard=32)
    ours, theirs = ([job(layout, name) for layout in (uneven, even)] for name in ("bessemer", "torchtitan"))
    factor = padding(config(), 1, 96)
    assert factor > 20
    held = [memory.memory(one) for one in ours]
    assert held[0].optimizer > 0.8 * factor / 3 * held[1].optimizer and held[0].buffers > 10 * held[1].buffers
    assert step.step(ours[0]).seconds > 1.5 * step.step(ours[1]).seconds
    assert memory.memory(theirs[0]).optimizer < memory.memory(theirs[1]).optimizer
    assert step.step(theirs[0]).seconds < 1.1 * step.step(theirs[1]).seconds
