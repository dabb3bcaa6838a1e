"""Statistics of layers are the same on every mesh, sound their alarms there, and measuring them changes no bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import local, tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.trends import Trends
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import Parallel
from bessemer.run.files import read_steps
from bessemer.train.device import choose
from bessemer.train.layer_metrics import METRICS, Watch
from bessemer.train.parallelize import initial_weights
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.distributed.small_model import batches, config_of, part, recipe_of

LAYOUTS = [
    Parallel(replicate=2),
    Parallel(shard=2, zero=3),
    Parallel(tensor=2),
    Parallel(context=2),
    Parallel(pipeline=2),
    Parallel(shard=2, tensor=2, pipeline=2, zero=3),
]


class Log:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, step: int, **values: Any) -> None:
        self.rows.append(values)


def trainer_on(mesh: ProcessMesh, tied: bool) -> Trainer:
    # Biases are whole on each tensor rank, next to matrices that are not.
    config = replace(config_of(tied), out_bias=True, mlp_bias=True)
    recipe = recipe_of("fp64").model_copy(update={"parallel": mesh.layout})
    model = build_model(config, 3) if mesh.is_single else meta_model(config)
    return Trainer(recipe, model, choose(recipe.train), 0, 2, mesh, initial_weights(config, 3))


def watched(layout: Parallel, tied: bool) -> tuple[dict[str, Any], bool]:
    """The statistics of a step, and whether its update has the bits of a step that is not watched."""
    mesh, digests, log = join(layout, torch.device("cpu")), [], Log()
    for every in (1, 0):
        trainer = trainer_on(mesh, tied)
        batch = part(batches(1)[0], mesh)
        stats = trainer.forward_backward(batch)
        with Watch(trainer, log, Trends(None), every)(1, batch, stats.skip_flag()):  # type: ignore[arg-type]
            trainer.update(0, stats.grad_norm)
        digests.append(tensors_digest(owned_parameters(trainer.model), mesh))
    return log.rows[0], digests[0] == digests[1]


@pytest.mark.parametrize(
    ("layout", "tied"),
    [*long_but([(layout, False) for layout in LAYOUTS], (LAYOUTS[1], False), (LAYOUTS[2], False), (LAYOUTS[3], False)),
     pytest.param(Parallel(pipeline=2), True)],
    ids=str,
)  # fmt: skip
def test_statistics_are_those_of_one_process(layout: Parallel, tied: bool) -> None:
    trainer, batch, log = trainer_on(SINGLE_PROCESS, tied), batches(1)[0], Log()
    stats, watch = trainer.forward_backward(batch), Watch(trainer, log, Trends(None), 1)  # type: ignore[arg-type]
    for rank in range(layout.data):  # activations are of the first sequence of each part
        with watch(1, batch.part(rank, layout.data), stats.skip_flag()):
            if rank == layout.data - 1:
                trainer.update(0, stats.grad_norm)
    for statistics, is_unchanged in run_on(layout.world, watched, layout, tied):
        assert is_unchanged
        assert statistics.keys() == METRICS.keys() | {"seconds"}
        for name in METRICS:
            assert list(statistics[name]) == list(log.rows[-1][name]), name
            for layer, value in statistics[name].items():
                each = [row[name][layer] for row in log.rows]
                if name == "update_ratio":
                    each = each[-1:]
                expected = np.sqrt(np.mean(np.square(each))) if name == "activation_rms" else max(each)
                assert value == pytest.approx(expected, rel=1e-6), (name, layer)


def grown(layout: Parallel, incidents: Path) -> None:
    """Watch steps before the last of which the second block's output grows."""
    mesh = join(layout, torch.device("cpu"))
    trainer = trainer_on(mesh, False)
    watch = Watch(trainer, Log(), Trends(incidents if mesh.is_main else None), 1)  # type: ignore[arg-type]
    for number in range(1, 7):
        if number == 6:
            named = dict(trainer.model.named_parameters())
            for weight in (p for name, p in named.items() if name == "blocks.1.mlp.down.weight"):
                local(weight.detach()).mul_(1000.0)
        batch = part(batches(1)[0], mesh)
        stats = trainer.forward_backward(batch)
        with watch(number, batch, stats.skip_flag()):
            trainer.update(0, stats.grad_norm)


@pytest.mark.parametrize("layout", long_but(LAYOUTS, LAYOUTS[4]), ids=str)
def test_growth_in_one_block_sounds_an_alarm(layout: Parallel, tmp_path: Path) -> None:
    run_on(layout.world, grown, layout, tmp_path / "incidents.jsonl")
    incidents = read_steps(tmp_path / "incidents.jsonl")
    assert [(row["what"], row["step"]) for row in incidents] == [("activation", 6)]
    assert "block 1" in incidents[0]["cause"]
