"""Every way a model is cut over a tensor group, against the same model on one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import run_on
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bessemer.model.config import FAMILIES, ModelConfig
from bessemer.model.initialisation import shell
from bessemer.model.transformer import Transformer
from bessemer.parallel.team import Team, join
from bessemer.parallel.tensor import finish_gradients, split
from bessemer.recipe import Parallel, parse
from bessemer.train import recompute
from bessemer.train.task import Causal, Classify, Masked, Task
from tests.model.samples import config, stirred

END, ROWS, LENGTH = 0, 4, 24
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
RECIPE = '[run]\nname="x"\n[tokens]\nsequence_length=24\n[model]\nlayers=2\nwidth=32\nheads=4\n'

CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, all terms": {"family": "llama", "logit_soft_cap": 4.0, "terms": ("z_loss=0.01", "label_smoothing=0.1")},
    "llama, wide vocabulary, chunks": {"family": "llama", "vocabulary": 101, "terms": ("loss_chunk=5",)},
    "qwen3": {"family": "qwen3"},
    "qwen3, tied, all recomputed": {"family": "qwen3", "tie_embeddings": True, "recompute": "full"},
    "olmo2": {"family": "olmo2"},
    "olmo2, a part recomputed": {"family": "olmo2", "recompute": "selective"},
    "gpt2": {"family": "gpt2"},
    "bert": {"family": "bert", "terms": ("z_loss=0.01", "label_smoothing=0.1")},
    "modernbert": {"family": "modernbert", "window": 8},
    "llama, classifier": {"family": "llama", "labels": 5},
    "bert, classifier": {"family": "bert", "labels": 5, "pooling": "first"},
    "modernbert, classifier": {"family": "modernbert", "labels": 5, "pooling": "mean"},
}  # fmt: skip


def config_of(case: dict[str, Any]) -> ModelConfig:
    changes = {name: value for name, value in case.items() if name not in ("family", "terms", "recompute")}
    return config(**{**FAMILIES[case["family"]], "heads": 4, "kv_heads": 4, "head_dim": 8, **changes})


def task_of(case: dict[str, Any], wanted: ModelConfig) -> Task:
    settings = parse(RECIPE, "x", [f"train.{term}" for term in case.get("terms", ())]).train
    if wanted.labels:
        return Classify(settings, END)
    return Causal(settings, True, END) if wanted.causal else Masked(settings, True, END)


def data_of(wanted: ModelConfig) -> tuple[Tensor, Tensor]:
    """Packed documents, ragged and some without a target; the vocabulary's last ids are among them."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randint(1, wanted.vocabulary, (ROWS, LENGTH), generator=draw)
    if wanted.labels:
        for row, length in enumerate((5, 24, 1, 17)):
            inputs[row, 0], inputs[row, length:] = END, END
        return inputs, torch.randint(0, wanted.labels, (ROWS, 1), generator=draw)
    inputs[0, [4, 5, 13]] = inputs[2, 22] = END
    targets = torch.randint(0, wanted.vocabulary, inputs.shape, generator=draw)
    targets[1, 3], targets[3] = wanted.vocabulary - 1, -1
    return inputs, targets.where(torch.rand(targets.shape, generator=draw) < 0.7, -1)


def step(model: Transformer, task: Task, inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Loss of the batch and nats of each sequence, after a backward pass through each of two micro-batches."""
    total, nats = 0.0, []
    for part in range(2):
        mine = slice(part * ROWS // 2, (part + 1) * ROWS // 2)
        found = task.loss(model, model(inputs[mine], task.documents(inputs[mine])), inputs[mine], targets[mine])
        (found.total / int((targets >= 0).sum())).backward()
        total += float(found.total.detach().double())
        nats.append(found.nats_B)
    return total / int((targets >= 0).sum()), torch.cat(nats)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(model: Transformer, alone: Transformer) -> float:
    """Largest difference of a gradient, relative to the tensor's largest or a thousandth of the model's."""
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert list(found) == list(wanted), "names and ties stay"
    floor = 1e-3 * max(float(g.abs().max()) for g in wanted.values())
    return max(
        float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        for name, gradient in wanted.items()
    )


def differences(team: Team, case: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """How far a split model's loss and gradients are from those of this process alone."""
    wanted = config_of(case)
    alone, model = stirred(wanted).to(dtype), stirred(wanted).to(dtype)
    split(model, team)
    recompute.apply(model, case.get("recompute", "none"), wanted.layers if "recompute" in case else 0)
    task, (inputs, targets) = task_of(case, wanted), data_of(wanted)
    one, nats = step(alone, task, inputs, targets)
    here, nats_here = step(model, task, inputs, targets)
    finish_gradients(model)
    assert all(p.grad is None or p.grad.placements == p.placements for p in model.parameters())
    found = {
        "loss": abs(here - one),
        "nats": float((nats_here - nats).abs().max()) / LENGTH,
        "gradients": worst(model, alone),
    }
    with torch.no_grad():
        hidden, expected = model(inputs), alone(inputs)
        if not wanted.labels:
            found["logits"] = float((model.head.logits(hidden) - alone.head.logits(expected)).abs().max())
        (_, guess), (_, guess_alone) = (
            task.score(m, h, inputs, targets) for m, h in ((model, hidden), (alone, expected))
        )
        assert guess is None or torch.equal(guess, guess_alone)
    return found


def against_one(layout: Parallel, precisions: list[torch.dtype]) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    team = join(layout, torch.device("cpu"))
    return {(name, dtype): differences(team, case, dtype) for dtype in precisions for name, case in CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("ways", "precisions"), [(2, [torch.float64]), (4, [torch.float64, torch.float32])])
def test_split_models_are_the_same_model(ways: int, precisions: list[torch.dtype]) -> None:
    for of in run_on(ways, against_one, Parallel(tensor=ways), precisions):
        for (name, dtype), found in of.items():
            assert max(found.values()) <= TOLERANCE[dtype], (name, dtype, found)


def cut_by_fsdp(parameter: nn.Parameter) -> Shard:
    """The last dimension that the tensor group leaves whole."""
    assert isinstance(parameter, DTensor)
    cut = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
    even = [d for d in range(parameter.dim()) if d not in cut and parameter.shape[d] % 2 == 0]
    return Shard(max(even, default=0))


def fill(model: Transformer, wanted: Transformer) -> None:
    """Each process its part of the values, from a model without memory."""
    if wanted.config.tie_embeddings and not wanted.config.labels:
        model.head.tie(model.embedding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = wanted.state_dict()[name]
            assert isinstance(parameter, DTensor)
            part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())


def with_fsdp(layout: Parallel, names: list[str]) -> dict[str, dict[str, float]]:
    """Split on the meta device, FSDP2 over it, each data rank one half of the batch."""
    team = join(layout, torch.device("cpu"))
    assert team.mesh is not None
    found = {}
    for name in names:
        case = CASES[name]
        wanted = config_of(case)
        alone, model = stirred(wanted).double(), shell(wanted).double()
        split(model, team)
        for module in (*model.blocks, model):
            sharded = fully_shard(
                module,
                mesh=team.mesh["shard"],
                shard_placement_fn=cut_by_fsdp,
                reshard_after_forward=module is not model,
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        fill(model, alone)
        task, (inputs, targets) = task_of(case, wanted), data_of(wanted)
        one, _ = step(alone, task, inputs, targets)
        total = torch.zeros((), dtype=torch.float64)
        for row in (team.data_rank, team.data_rank + 2):  # two micro-batches of one row
            mine = slice(row, row + 1)
            loss = task.loss(
                model, model(inputs[mine], task.documents(inputs[mine])), inputs[mine], targets[mine]
            ).total
            (loss / int((targets >= 0).sum())).backward()
            total += loss.detach()
        torch.distributed.all_reduce(total, group=team.group("shard"))
        finish_gradients(model)
        found[name] = {
            "loss": abs(float(total) / int((targets >= 0).sum()) - one),
            "gradients": worst(model, alone),
        }
    return found


@pytest.mark.slow
def test_fsdp_over_a_split_model_is_the_same_model() -> None:
    names = ["qwen3, tied, all recomputed", "olmo2", "gpt2", "bert", "bert, classifier"]
    for of in run_on(4, with_fsdp, Parallel(shard=2, tensor=2), names):
        for name, differences in of.items():
            assert max(differences.values()) <= TOLERANCE[torch.float64], (name, differences)
