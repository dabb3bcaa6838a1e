"""Tensor-parallel models compared with one process: loss and every gradient."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from bessemer.common.errors import InputError
from bessemer.distributed.context import LocalBatch
from bessemer.distributed.mesh import ProcessMesh, join
from bessemer.distributed.tensor import apply_tp, reduce_partial_gradients, sharded_dimension
from bessemer.distributed.validity import require_tensor, require_valid
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer, meta_model
from bessemer.recipe import Parallel, parse
from bessemer.train import recompute
from bessemer.train.task import ClassifyTask, ObjectiveTask
from tests.distributed.processes import run_on
from tests.distributed.small_model import whole
from tests.model.samples import BLOCKS, config, stirred

END, ROWS, LENGTH = 0, 4, 24
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}
RECIPE = '[run]\nname="x"\n[tokens]\nsequence_length=24\n[model]\nlayers=2\nwidth=32\nheads=4\n'

CASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama, all terms": {"family": "llama", "logit_soft_cap": 4.0, "terms": ("z_loss=0.01",)},
    "llama, wide vocabulary, chunks": {"family": "llama", "vocabulary": 101, "terms": ("loss_chunk=5",)},
    "qwen3": {"family": "qwen3"},
    "qwen3, tied, all recomputed": {"family": "qwen3", "tie_embeddings": True, "recompute": "full"},
    "olmo2": {"family": "olmo2"},
    "olmo2, a part recomputed": {"family": "olmo2", "recompute": "selective"},
    "gpt2": {"family": "gpt2"},
    "bert": {"family": "bert", "terms": ("z_loss=0.01",)},
    "modernbert": {"family": "modernbert", "window": 8},
    **{name: {"family": "qwen3", **options} for name, options in BLOCKS.items()},
    "MLP without a gate, some biases": {"family": "qwen3", "gated": False, "mlp_bias": True, "out_bias": True},
    "roberta": {"family": "bert", "position_padding": END, "token_types": 1},
    "llama, classifier": {"family": "llama", "labels": 5},
    "bert, classifier": {"family": "bert", "labels": 5, "pooling": "first"},
    "modernbert, classifier": {"family": "modernbert", "labels": 5, "pooling": "mean"},
}  # fmt: skip


def config_of(case: dict[str, Any]) -> ModelConfig:
    changes = {name: value for name, value in case.items() if name not in ("family", "terms", "recompute")}
    return config(**{**FAMILIES[case["family"]].options, "heads": 4, "kv_heads": 4, "head_dim": 8, **changes})


def task_of(case: dict[str, Any], wanted: ModelConfig) -> ObjectiveTask:
    settings = parse(RECIPE, "x", [f"train.{term}" for term in case.get("terms", ())]).train
    if wanted.labels:
        return ClassifyTask(settings, END)
    return ObjectiveTask(settings, END, True, is_encoder=not wanted.causal)


def data_of(wanted: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return packed ragged documents, some without a target; they contain the last ids of the vocabulary."""
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


def step(model: Transformer, task: ObjectiveTask, inputs: Tensor, targets: Tensor) -> tuple[float, Tensor]:
    """Return loss and nats of each sequence after a backward pass through each of two micro-batches."""
    total, nats = 0.0, []
    for part in range(2):
        mine = slice(part * ROWS // 2, (part + 1) * ROWS // 2)
        batch = LocalBatch(inputs[mine], targets[mine])
        found = task.loss(model, model(inputs[mine], task.documents(inputs[mine])), batch)
        (found.total / int((targets >= 0).sum())).backward()
        total += float(found.total.detach().double())
        nats.append(found.nats_B)
    return total / int((targets >= 0).sum()), torch.cat(nats)


def worst(model: Transformer, alone: Transformer) -> float:
    """Return the largest difference of a gradient, relative to the tensor's largest value or a thousandth of the model's."""
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert list(found) == list(wanted), "names and ties stay"
    floor = 1e-3 * max(float(g.abs().max()) for g in wanted.values())
    return max(
        float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        for name, gradient in wanted.items()
    )


def differences(mesh: ProcessMesh, case: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Return the differences of a split model's loss and gradients from those of one process."""
    wanted = config_of(case)
    alone, model = stirred(wanted).to(dtype), stirred(wanted).to(dtype)
    apply_tp(model, mesh)
    recompute.apply_recompute(model, case.get("recompute", "none"), wanted.layers if "recompute" in case else 0)
    task, (inputs, targets) = task_of(case, wanted), data_of(wanted)
    one, nats = step(alone, task, inputs, targets)
    here, nats_here = step(model, task, inputs, targets)
    reduce_partial_gradients(model)
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
            task.score(m, h, LocalBatch(inputs, targets)) for m, h in ((model, hidden), (alone, expected))
        )
        assert guess is None or torch.equal(guess, guess_alone)
    return found


def against_one(
    layout: Parallel, work: list[tuple[torch.dtype, list[str]]]
) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    mesh = join(layout, torch.device("cpu"))
    return {(name, dtype): differences(mesh, CASES[name], dtype) for dtype, names in work for name in names}


# Four processes for parts whose size matters: vocabulary, heads and a norm over all of them, divided by four.
BY_FOUR = (
    "llama, wide vocabulary, chunks", "qwen3, tied, all recomputed", "olmo2", "olmo2, a part recomputed", "gpt2", "modernbert",
    "bert, classifier",
)  # fmt: skip


@pytest.mark.parametrize(
    ("ways", "work"),
    [
        (2, [(torch.float64, [name for name in CASES if name not in BY_FOUR[2:]])]),
        pytest.param(
            4,
            [(torch.float64, list(BY_FOUR)), (torch.float32, ["llama, all terms", "olmo2", "gpt2", "bert"])],
            marks=pytest.mark.long,
        ),
    ],
    ids=["2", "4"],
)
def test_tensor_parallel_models_equal_one_process(ways: int, work: list[tuple[torch.dtype, list[str]]]) -> None:
    for of in run_on(ways, against_one, Parallel(tensor=ways), work, timeout=300):
        for (name, dtype), found in of.items():
            assert max(found.values()) <= TOLERANCE[dtype], (name, dtype, found)


def cut_by_fsdp(parameter: nn.Parameter) -> Shard:
    """Return the last dimension that the tensor group does not split."""
    assert isinstance(parameter, DTensor)
    cut = [placement.dim for placement in parameter.placements if isinstance(placement, Shard)]
    even = [d for d in range(parameter.dim()) if d not in cut and parameter.shape[d] % 2 == 0]
    return Shard(max(even, default=0))


def fill(model: Transformer, wanted: Transformer) -> None:
    """Fill each process's part of the values of a model on the meta device."""
    if wanted.config.tie_embeddings and not wanted.config.labels:
        model.head.tie(model.embedding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = wanted.state_dict()[name]
            assert isinstance(parameter, DTensor)
            part = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())


def with_fsdp(layout: Parallel, names: list[str]) -> dict[str, dict[str, float]]:
    """Split on the meta device and apply FSDP2, with half of the batch on each data rank."""
    mesh = join(layout, torch.device("cpu"))
    assert mesh.device_mesh is not None
    found = {}
    for name in names:
        case = CASES[name]
        wanted = config_of(case)
        alone, model = stirred(wanted).double(), meta_model(wanted).double()
        apply_tp(model, mesh)
        for module in (*model.blocks, model):
            sharded = fully_shard(
                module,
                mesh=mesh.device_mesh["shard"],
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
        for row in (mesh.data_rank, mesh.data_rank + 2):  # two micro-batches of one row
            mine = slice(row, row + 1)
            batch = LocalBatch(inputs[mine], targets[mine])
            loss = task.loss(model, model(inputs[mine], task.documents(inputs[mine])), batch).total
            (loss / int((targets >= 0).sum())).backward()
            total += loss.detach()
        torch.distributed.all_reduce(total, group=mesh.group("shard"))
        reduce_partial_gradients(model)
        found[name] = {"loss": abs(float(total) / int((targets >= 0).sum()) - one), "gradients": worst(model, alone)}
    return found


@pytest.mark.long
def test_fsdp_over_a_tensor_parallel_model_equals_one_process() -> None:
    names = ["qwen3, tied, all recomputed", "olmo2", "bert", "bert, classifier"]
    for of in run_on(4, with_fsdp, Parallel(shard=2, tensor=2), names, timeout=300):
        for name, differences in of.items():
            assert max(differences.values()) <= TOLERANCE[torch.float64], (name, differences)


@pytest.mark.parametrize(
    ("changes", "layout", "says"),
    [
        ({"kv_heads": 2}, Parallel(tensor=4), r"model.kv_heads = 2 .* 4 .*: 1, 2$"),
        ({"heads": 6, "kv_heads": 6}, Parallel(tensor=4), r"model.heads = 6 .*: 1, 2, 3, 6$"),
        ({"kv_heads": 4, "mlp_width": 50}, Parallel(tensor=4), r"model.mlp_width = 50 .*: 1, 2$"),
        ({"kv_heads": 4, "vocabulary": 5}, Parallel(tensor=4), r"model.vocabulary = 5 .*: 1, 2$"),
        ({"kv_heads": 4, "sequence_length": 18}, Parallel(tensor=4), r"tokens.sequence_length = 18 .*: 1, 2$"),
        ({"kv_heads": 4, "sequence_length": 20}, Parallel(tensor=4, context=2), r"20 over parallel.context = 2 .*: 1, 2$"),
        ({"kv_heads": 4, "mlp_width": 49, "sequence_length": 23}, Parallel(tensor=2), r"49 .*: 1$"),
    ],
)  # fmt: skip
def test_indivisible_sizes_are_errors_that_suggest_divisible_ones(
    changes: dict[str, Any], layout: Parallel, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        require_tensor(config(**{"heads": 4, **changes}), layout)


def test_indivisible_shards_of_a_tensor_parallel_model_are_errors_before_it_is_built() -> None:
    """Only those are errors: the rule agrees with what FSDP would do to every parameter of a model."""
    for changes, layout in product(
        ({"width": 48}, {"width": 48, "qkv_bias": True}, {"width": 40, "heads": 2, "kv_heads": 2, "qkv_bias": True}),
        (Parallel(tensor=2, shard=n, context=c) for n in (1, 2, 3, 5, 6) for c in (1, 2)),
    ):
        made = config(**{"heads": 4, "kv_heads": 4, "sequence_length": 24, **changes})
        dimensions = {name: sharded_dimension(name, made) for name, _ in meta_model(made).named_parameters()}
        free = {
            name: [size for dim, size in enumerate(p.shape) if dim != dimensions[name]]
            for name, p in meta_model(made).named_parameters() if dimensions[name] == 0
        }  # fmt: skip
        does = all(any(size % layout.state_shards == 0 for size in sizes) for sizes in free.values())
        if does:
            require_valid(made, layout, 1)
        else:
            with pytest.raises(InputError, match=rf"parallel.context = {layout.state_shards}: .*: 1, 2"):
                require_valid(made, layout, 1)
