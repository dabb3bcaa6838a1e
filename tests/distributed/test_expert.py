"""Expert parallelism: the exchange of rows, trainings that equal one process, checkpoints between layouts, sizes that divide."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bessemer.checkpoint import latest, save
from bessemer.common.errors import InputError
from bessemer.distributed.collectives import RankGroup
from bessemer.distributed.expert import Exchange
from bessemer.distributed.mesh import MESH_AXES, SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import local, tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.distributed.validity import require_valid
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel
from bessemer.train import optimizer as optimizers
from bessemer.train.trainer import Trainer
from tests.distributed.processes import run_on
from tests.distributed.small_model import batches, config_of, part, recipe_of, trainer_on

MIXTURE: dict[str, Any] = {
    "experts": 4, "experts_per_token": 2, "expert_width": 24, "shared_experts": 1, "layers": 3, "dense_layers": 1,
    "balance": "both", "balance_loss": 0.01, "balance_rate": 0.01, "router_z_loss": 0.001,
}  # fmt: skip
STEPS = 4


def exchanged(counts: list[list[int]]) -> list[Any]:
    """Send rows that name their expert, and return what this rank received, and its rows after the way back."""
    mesh = join(Parallel(replicate=len(counts)), torch.device("cpu"))
    group = RankGroup.from_mesh(mesh, "replicate")
    counts_E = torch.tensor(counts[mesh.rank])
    expert_M = torch.arange(len(counts_E)).repeat_interleave(counts_E)
    x_MI = torch.stack([expert_M + 0.0, torch.arange(len(expert_M)) + 10.0 * mesh.rank], dim=1).requires_grad_()
    exchange = Exchange.from_counts(counts_E, group)
    y_RI = exchange.send(x_MI)
    (exchange.send_back(3.0 * y_RI) * x_MI.detach()).sum().backward()
    return [y_RI.tolist(), exchange.counts_L.tolist(), exchange.send_back(y_RI).tolist(), x_MI.tolist(), x_MI.grad]


def test_rows_reach_their_experts_and_return() -> None:
    """One rank sends nothing to the other, and one expert gets no row."""
    (first, *one), (second, *other) = run_on(2, exchanged, [[2, 0, 1, 3], [0, 0, 1, 1]])
    assert first == [[0.0, 0.0], [0.0, 1.0]] and one[0] == [2, 0]
    assert second == [[2.0, 2.0], [2.0, 10.0], [3.0, 3.0], [3.0, 4.0], [3.0, 5.0], [3.0, 11.0]] and other[0] == [2, 4]
    for _, back, sent, gradient in (one, other):
        assert back == sent and gradient.tolist() == (3.0 * torch.tensor(sent)).tolist()


def trained(trainer: Trainer, mesh: ProcessMesh, steps: range) -> list[float]:
    """Train the given steps, and return the loss, the auxiliary loss, the gradient norm and the load of each."""
    numbers = list[float]()
    for step, batch in zip(steps, batches(STEPS)[steps.start : steps.stop], strict=True):
        results = trainer.forward_backward(part(batch, mesh))
        trainer.update(step, results.grad_norm)
        [stats] = trainer.read([results])
        numbers += [stats.loss, stats.objective_loss, stats.grad_norm, *stats.load.flatten().tolist()]
    return numbers


def tensors_of(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    model = {name: parameter.detach() for name, parameter in owned_parameters(trainer.model)}
    return {"model": model, "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer)}


def halves(layouts: list[Parallel], train: dict[str, Any], folder: str) -> list[Any]:
    """Train half of the steps with each layout, save, and train the rest with the next layout from that checkpoint."""
    first, found = join(layouts[0], torch.device("cpu")), list[Any]()
    meshes = [SINGLE_PROCESS, first]
    for layout in layouts[1:]:
        sizes = tuple(int(getattr(layout, axis)) for axis in MESH_AXES)
        device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_AXES)
        meshes.append(ProcessMesh(layout, first.rank, device_mesh, first.control))
    config = config_of().with_changes(**MIXTURE)
    for number, (before, after) in enumerate(zip(meshes, meshes[1:] + meshes[:1], strict=True)):
        place = Path(folder) / f"{number}-{0 if before is not SINGLE_PROCESS else first.rank}"
        trainer = trainer_on(before, recipe_of("fp64", **train).changed(parallel=before.layout), config)
        numbers = trained(trainer, before, range(STEPS // 2))
        save(place, 2, tensors_of(trainer), {}, 1, before)
        digest = tensors_digest(owned_parameters(trainer.model), before)
        size = sum(local(p).numel() for name, p in trainer.model.named_parameters() if ".experts." in name)
        place = Path(folder) / f"{number}-0"
        first.control.barrier().wait()
        trainer = trainer_on(after, recipe_of("fp64", **train).changed(parallel=after.layout), config)
        checkpoint = latest(place)
        assert checkpoint is not None
        checkpoint.fill("model", trainer.model.named_parameters())
        optimizers.load_state(trainer.model, trainer.optimizer, checkpoint)
        assert tensors_digest(owned_parameters(trainer.model), after) == digest
        found.append((numbers + trained(trainer, after, range(STEPS // 2, STEPS)), size))
    return found


OF_TWO = [Parallel(shard=2, expert=2), Parallel(tensor=2, expert=2), Parallel(shard=2, zero=1)]
OF_FOUR = [
    Parallel(shard=2, tensor=2, expert=2), Parallel(replicate=2, context=2, expert=4), Parallel(shard=4, zero=1),
    Parallel(pipeline=2, shard=2, expert=2),
]  # fmt: skip
MUON = {"optimizer": {"kind": "muon"}, "recompute": "selective"}


@pytest.mark.parametrize(
    ("layouts", "train"),
    [(OF_TWO, {"recompute": "selective"}), pytest.param(OF_FOUR, MUON, marks=pytest.mark.long)],
    ids=["two", "four"],
)
def test_layouts_train_like_one_process_and_continue_each_other(
    layouts: list[Parallel], train: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of().with_changes(**MIXTURE)
    single = trainer_on(SINGLE_PROCESS, recipe_of("fp64", **train | {"recompute": "none"}), config)
    wanted = trained(single, SINGLE_PROCESS, range(STEPS))
    assert wanted[1] > wanted[0]
    for of_rank in run_on(layouts[0].world, halves, layouts, train, str(tmp_path)):
        for numbers, _ in of_rank:
            assert numbers == pytest.approx(wanted, abs=1e-10)
        # The first layout is one process. In the pipeline the stages hold one and two blocks, of which the first has no experts.
        assert [size for _, size in of_rank[1:4]] == [of_rank[0][1] // layouts[0].world] * 3


@pytest.mark.parametrize(
    ("sizes", "experts", "possible"),
    [
        ({"shard": 4, "expert": 3}, 12, "1, 2, 4"), ({"shard": 6, "expert": 4}, 12, "2, 3, 6"),
        ({"replicate": 2, "tensor": 2, "expert": 8}, 8, "1, 2, 4"), ({"shard": 2, "expert": 2}, 0, "no experts"),
        ({"pipeline": 2, "shard": 2, "expert": 4}, 4, "1, 2"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_name_those_that_do(sizes: dict[str, int], experts: int, possible: str) -> None:
    config = ModelConfig(
        64, layers=2, width=32, heads=2, kv_heads=2, head_dim=16, mlp_width=64, sequence_length=16, experts=experts,
        expert_width=24,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"parallel\.expert") as error:
        require_valid(config, Parallel(**sizes), 4)
    assert possible in str(error.value)
