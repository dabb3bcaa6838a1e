"""Statistics from inside the model are the same on every mesh, and measuring them changes no bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import Parallel
from bessemer.train.device import choose
from bessemer.train.layer_metrics import activations
from bessemer.train.parallelize import initial_weights
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.distributed.small_model import batches, config_of, part, recipe_of


def trainer_on(mesh: ProcessMesh) -> Trainer:
    config, recipe = config_of(), recipe_of("fp64").model_copy(update={"parallel": mesh.layout})
    model = build_model(config, 3) if mesh.is_single else meta_model(config)
    return Trainer(recipe, model, choose(recipe.train), 0, 2, mesh, initial_weights(config, 3))


def watched(layout: Parallel) -> tuple[dict[str, Any], bool]:
    """The statistics of a step, and whether its update has the bits of a step that nobody looks at."""
    mesh, digests = join(layout, torch.device("cpu")), []
    statistics: dict[str, Any] = {}
    for looks in (True, False):
        trainer = trainer_on(mesh)
        batch = part(batches(1)[0], mesh)
        found = trainer.forward_backward(batch)
        if looks:
            statistics = activations(trainer, batch)
        trainer.update(0, found.grad_norm)
        digests.append(tensors_digest(owned_parameters(trainer.model), mesh))
    return statistics, digests[0] == digests[1]


@pytest.mark.parametrize(
    "layout",
    long_but(
        [
            Parallel(replicate=2),
            Parallel(shard=2, zero=3),
            Parallel(tensor=2),
            Parallel(context=2),
            Parallel(pipeline=2),
            Parallel(shard=2, tensor=2, pipeline=2, zero=3),
        ],
        Parallel(shard=2, zero=3),
        Parallel(context=2),
    ),
    ids=str,
)
def test_statistics_are_those_of_one_process(layout: Parallel) -> None:
    trainer, batch = trainer_on(SINGLE_PROCESS), batches(1)[0]
    parts = [activations(trainer, batch.part(rank, layout.data)) for rank in range(layout.data)]
    for statistics, is_unchanged in run_on(layout.world, watched, layout):
        assert is_unchanged
        for name, by_block in statistics.items():
            assert list(by_block) == ["0", "1"]
            for block, value in by_block.items():
                each = [one[name][block] for one in parts]
                expected = np.sqrt(np.mean(np.square(each))) if name == "activation_rms" else max(each)
                assert value == pytest.approx(expected, rel=1e-6), (name, block)
