"""Pipelines of 2 and 4 processes compared with one: losses of each micro-batch and gradients of every weight."""

import itertools
import math
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from bessemer.common.errors import InputError
from bessemer.distributed import pipeline
from bessemer.distributed.context import LocalBatch, MicroBatchLoss
from bessemer.distributed.mesh import MESH_AXES, ProcessMesh, join
from bessemer.distributed.pipeline import Pipeline, Stage, keep_stages, stage_model
from bessemer.distributed.stages import stage_spans, stages_at
from bessemer.distributed.tied_embedding import owned_parameters, whole_name
from bessemer.distributed.validity import require_micro_batches
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.kernels import linear
from bessemer.model.transformer import build_model, initial_tensor, meta_model
from bessemer.recipe import Parallel, Train
from bessemer.train import recompute
from bessemer.train.loss import chunked_cross_entropy
from bessemer.train.task import ClassifyTask, ObjectiveTask
from tests.distributed.processes import run_on

CPU = torch.device("cpu")
END, LENGTH, SEED = 0, 12, 7
HAS_213 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
NEEDS_213 = pytest.mark.skipif(not HAS_213, reason="zbv and dualpipev hang on gloo before torch 2.13")


def config_for(family: str, layers: int, labels: int = 0) -> ModelConfig:
    options: dict[str, Any] = {"kv_heads": 2, **FAMILIES[family].options}
    if "window" in options:
        options["window"] = 6
    for every in ("global_every", "unrotated_every"):
        if every in options:  # layers of both kinds on each stage
            options[every] = min(options[every], 3)
    return ModelConfig(
        vocabulary=61, layers=layers, width=16, heads=2, head_dim=8, mlp_width=24, sequence_length=LENGTH, labels=labels,
        **options,
    )  # fmt: skip


def task_for(name: str) -> Any:
    if name in ("classify", "frozen"):
        return ClassifyTask(
            Train.model_validate({"objective": "classify", "classify": {"frozen": name == "frozen"}}), END
        )
    settings = Train.model_validate({"objective": name, "loss_chunk": 16, "z_loss": 1e-3})
    return ObjectiveTask(settings, END, True, is_encoder=name == "masked")


def batch_for(task: str, rows: int, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ragged documents with a different number of targets per row, and none in one row for the masked objective."""
    draw = torch.Generator().manual_seed(3)
    inputs_BT = torch.randint(1, config.vocabulary, (rows, LENGTH), generator=draw)
    if config.labels:
        for row in range(rows):
            inputs_BT[row, 3 + row % (LENGTH - 3) :] = END
        inputs_BT[:, 0] = END
        return inputs_BT, torch.randint(0, config.labels, (rows, 1), generator=draw), None
    inputs_BT[torch.rand(rows, LENGTH, generator=draw) < 0.2] = END
    targets_BT = torch.randint(1, config.vocabulary, (rows, LENGTH), generator=draw)
    share_B1 = torch.arange(rows)[:, None] / rows if task == "masked" else torch.full((rows, 1), 0.9)
    targets_BT[torch.rand(rows, LENGTH, generator=draw) >= share_B1] = -1
    # Documents other than those separated by end-of-text tokens.
    starts_BT = torch.rand(rows, LENGTH, generator=draw) < 0.25
    starts_BT[:, 0] = True
    return inputs_BT, targets_BT, starts_BT if task == "causal" else None


def value_of(name: str, shape: torch.Size, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return a parameter's initial value plus an offset, so that parameters that start at zero have gradients too."""
    value = initial_tensor(name, shape, config, SEED).to(dtype)
    draw = torch.Generator().manual_seed(len(name))
    return value + 0.05 * torch.randn(shape, generator=draw).to(dtype)


@lru_cache(maxsize=8)
def alone(
    config: ModelConfig, task_name: str, rows: int, parts: int, dtype: torch.dtype, narrow: bool
) -> tuple[list[MicroBatchLoss], dict[str, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """Return the results of one process: output of each micro-batch, gradients of the sum by name, and scores."""
    model, task = build_model(config, SEED).to(dtype), task_for(task_name)
    task.prepare(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(name, parameter.shape, config, dtype))
    inputs_BT, targets_BS, starts_BT = batch_for(task_name, rows, config)
    starts = [None] * parts if starts_BT is None else starts_BT.chunk(parts)
    found, scores = [], []
    for inputs, targets, start in zip(inputs_BT.chunk(parts), targets_BS.chunk(parts), starts, strict=True):
        batch = LocalBatch(inputs, targets)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            outcome = task.loss(model, model(inputs, task.documents(inputs, start)), batch)
        (outcome.total / int((targets_BS >= 0).sum()) * 4.0).backward()
        found.append(MicroBatchLoss(outcome.total.detach(), outcome.nats_B, outcome.correct_B))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            scores.append(task.score(model, model(inputs, task.documents(inputs, start)), batch))
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, scores


def piped(mesh: ProcessMesh, config: ModelConfig, task_name: str, dtype: torch.dtype, wrap: str) -> Pipeline:
    """Return this process's part of the model with the same values, built as training builds it."""
    held = [stage_spans(config, mesh.layout)[stage] for stage in stages_at(mesh.layout, mesh.coordinate("pipeline"))]
    model, task = meta_model(config).to(dtype), task_for(task_name)
    task.prepare(model)
    keep_stages(model, held)
    if wrap == "recompute":
        model.use_linear(Counted())
        recompute.apply_recompute(model, "full", config.layers)
    autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False) if wrap == "bf16" else nullcontext

    def read(inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, dropout_B: Tensor | None) -> LocalBatch:
        return LocalBatch(inputs_BT, targets_BS, task.documents(inputs_BT, starts_BT))

    stages = [Stage(span, stage_model(model, span), task, autocast, read) for span in held]
    if wrap == "fsdp":
        for stage in stages:
            for block in [*filter(None, stage.model.blocks), stage]:
                fully_shard(block, mesh=mesh.device_mesh["shard"], reshard_after_forward=False)  # type: ignore[index]
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = value_of(whole_name(model, name), parameter.shape, config, dtype)
            if wrap == "fsdp":
                number = mesh.coordinate("shard")
                parts = whole.chunk(2)
                parameter._local_tensor.copy_(parts[number] if number < len(parts) else whole[:0])  # type: ignore[attr-defined]
            else:
                parameter.copy_(whole)
    between = torch.bfloat16 if wrap == "bf16" else dtype
    return Pipeline(model, stages, mesh, CPU, between, split_backward=wrap != "recompute")


class Counted:
    """Counter of the matrix products of blocks."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.number += 1
        return linear(x, weight, bias)


def against_one(
    mesh: ProcessMesh, family: str, layers: int, task_name: str, rows: int, parts: int, dtype: torch.dtype, wrap: str
) -> dict[str, float]:
    """Return the largest differences of losses, gradients and scores from one process, and whether all weights and sequences
    were present.
    """
    config = config_for(family, layers, labels=3 if task_name in ("classify", "frozen") else 0)
    found, gradients, scores = alone(config, task_name, rows, parts, dtype, wrap == "bf16")
    pipe = piped(mesh, config, task_name, dtype, wrap)
    inputs_BT, targets_BS, starts_BT = batch_for(task_name, rows, config)
    data, mine = mesh.layout.data, mesh.data_rank
    here = parts // data
    pick = torch.arange(rows).view(parts, -1)[mine::data].flatten()  # every `data`-th micro-batch
    starts = None if starts_BT is None else starts_BT[pick]
    has_last = any(stage.span.has_head for stage in pipe.stages)
    worst = {"loss": 0.0, "gradient": 0.0, "score": 0.0}

    def compare(kind: str, ours: Tensor, theirs: Tensor) -> None:
        scale = theirs.abs().max().clamp(min=1e-3) if kind == "gradient" else 1.0
        worst[kind] = max(worst[kind], float((ours - theirs).abs().max() / scale))

    for _ in range(2):  # a schedule is used again
        for parameter in pipe.model.parameters():
            parameter.grad = None
        got = pipe.accumulate(
            inputs_BT[pick],
            targets_BS[pick],
            starts,
            micro_batches=here,
            divisor=(targets_BS >= 0).sum(),
            factor=torch.tensor(4.0),
        )
        assert len(got) == (here if has_last else 0)
        for ours, theirs in zip(got, found[mine::data] if has_last else [], strict=True):
            compare("loss", ours.total, theirs.total)
            compare("loss", ours.nats_B, theirs.nats_B)
            assert theirs.correct_B is None or bool((ours.correct_B == theirs.correct_B).all())
    if wrap == "recompute":  # each block runs exactly once more; the last of its 4 products is not needed
        here_blocks = [block for stage in pipe.stages for block in filter(None, stage.model.blocks)]
        passes = 2 * here * len(here_blocks)
        assert passes * 7 <= here_blocks[0].attention.project.number <= passes * 8
    for name, parameter in pipe.model.named_parameters():
        whole = whole_name(pipe.model, name)
        assert (parameter.grad is not None) == (whole in gradients), name
        if parameter.grad is not None:
            gradient = parameter.grad.full_tensor() if wrap == "fsdp" else parameter.grad  # type: ignore[operator]
            compare("gradient", gradient, gradients[whole])
    known = {name for name, parameter in owned_parameters(pipe.model) if parameter.grad is not None}
    assert sorted(itertools.chain(*mesh.gather(known))) == sorted(list(gradients) * data)

    chunks = zip(inputs_BT[pick].chunk(here), targets_BS[pick].chunk(here), [None] * here if starts is None else starts.chunk(here), strict=True)  # fmt: skip
    parts_here = [*chunks, (inputs_BT[:1], targets_BS[:1], None)]
    scored = [pipe.score(*part) for part in parts_here]
    assert all((one is not None) == has_last for one in scored)
    for one, (nats_alone, right_alone) in zip(scored[:-1], scores[mine::data], strict=True):
        if one is None:
            continue
        nats, right = one
        compare("score", nats, nats_alone)
        assert right is None or bool((right == right_alone).all())
    with torch.no_grad():  # replaced weights take effect at once; zeros give a uniform prediction
        for parameter in pipe.model.parameters():
            parameter.zero_()
    if (uniform_scores := pipe.score(*parts_here[0])) is not None:
        uniform = math.log(config.labels or config.vocabulary)
        compare("score", uniform_scores[0], (parts_here[0][1] >= 0).to(nats.dtype) * uniform)
    return worst


def several(cases: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    """Run several cases on the processes of one group."""
    mesh = join(cases[0][0], CPU)
    meshes = {tuple(getattr(cases[0][0], axis) for axis in MESH_AXES): mesh.device_mesh}
    found = []
    for layout, *case in cases:
        sizes = tuple(getattr(layout, axis) for axis in MESH_AXES)
        if sizes not in meshes:
            meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_AXES)
        found.append(against_one(ProcessMesh(layout, mesh.rank, meshes[sizes], mesh.control), *case))
    return found


def check(cases: list[tuple[Any, ...]], world: int) -> None:
    for of_rank in run_on(world, several, cases):
        for case, worst in zip(cases, of_rank, strict=True):
            limit = {torch.float64: 1e-12, torch.float32: 1e-5}[case[-2]]
            if case[-1] == "bf16":  # one process adds the same numbers in the same order
                limit = 1e-6
            assert max(worst.values()) <= limit, f"{case}: {worst}"


WHOLE = ("1f1b", "interleaved")
IN_TWO = ("zbv", "dualpipev")


@pytest.mark.parametrize(
    "schedules", [WHOLE, pytest.param(IN_TWO, marks=[NEEDS_213, pytest.mark.long])], ids=["whole", "in-two"]
)
def test_two_processes_give_the_losses_and_gradients_of_one(schedules: tuple[Any, ...]) -> None:
    """Cover untied and tied weights, decoder, encoder, classifier and a frozen model; recompute; fp64, fp32, bf16."""
    wide, narrow = torch.float64, torch.float32
    each = (
        ("qwen3", 5, "causal", 8, 4, wide, "recompute"), ("gpt2", 5, "causal", 8, 4, wide, "plain"),
        ("modernbert", 5, "masked", 8, 4, wide, "plain"), ("bert", 4, "classify", 8, 4, wide, "plain"),
        ("bert", 4, "frozen", 8, 4, wide, "plain"), ("gpt2", 4, "causal", 8, 4, narrow, "plain"),
        ("gpt2", 4, "causal", 8, 4, narrow, "bf16"),
    )  # fmt: skip
    # The first schedule with every case, and each other schedule with the cases that its passes treat differently.
    cases = [
        (Parallel(pipeline=2, schedule=schedule), *case)
        for number, schedule in enumerate(schedules)
        for case in (each if number == 0 else each[:2] + each[3:4])
    ]
    if schedules == WHOLE:  # attention pattern and rotation depend on the layer's index in the whole model
        layout = Parallel(pipeline=2, schedule="interleaved")
        cases += [(layout, "gemma3", 7, "causal", 8, 4, wide, "plain"), (layout, "smollm3", 7, "causal", 8, 4, wide, "plain"),
                  (layout, "roberta", 4, "masked", 8, 4, wide, "plain")]  # fmt: skip
    check(cases, 2)


@pytest.mark.long
@NEEDS_213
def test_four_processes_give_the_losses_and_gradients_of_one() -> None:
    """Cover a pipeline of four stages, and two pipelines that shard their weights (FSDP2)."""
    wide, cases = torch.float64, []
    for schedule in ("interleaved", *IN_TWO):
        cases += [
            (Parallel(pipeline=4, schedule=schedule), "gpt2", 9, "masked", 8, 8, wide, "plain"),
            (Parallel(pipeline=2, shard=2, schedule=schedule), "qwen3", 5, "causal", 8, 8, wide, "fsdp"),
            (Parallel(pipeline=2, shard=2, schedule=schedule), "gpt2", 5, "masked", 8, 8, wide, "fsdp"),
        ]
    check(cases, 4)


@pytest.mark.parametrize(
    ("layout", "count", "says"),
    [
        (Parallel(pipeline=4), 3, "parallel.schedule: .* only 4;"),
        (Parallel(pipeline=4, schedule="interleaved"), 9, "only 8 or 10;"),
        (Parallel(pipeline=4, schedule="zbv"), 2, "only 4;"),
        (Parallel(pipeline=4, schedule="dualpipev"), 5, "only 8;"),
    ],
)
def test_too_few_micro_batches_are_an_error_with_advice(layout: Parallel, count: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        require_micro_batches(layout, count)
    require_micro_batches(layout, 8)


def test_unusable_schedules_are_errors() -> None:
    layout = Parallel(pipeline=2, schedule="zbv")
    with pytest.raises(InputError, match=r"parallel.schedule: zbv"):
        pipeline.require_schedule(layout, "cpu", "2.11.0+cpu")
    pipeline.require_schedule(layout, "cuda", "2.11.0+cpu")
    pipeline.require_schedule(Parallel(pipeline=2), "cpu", "2.11.0+cpu")
    pipeline.require_schedule(layout, "cpu", "2.13.1")


def test_a_second_backward_pass_through_the_loss_has_the_same_gradient() -> None:
    """The backward pass may be split in two: the inputs' part first, the weights' part later."""
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, generator=draw, dtype=torch.float64, requires_grad=True) for n in (6, 11))
    loss = chunked_cross_entropy(hidden, head, torch.arange(6), chunk=4).total / 3.0
    first = torch.autograd.grad(loss, [hidden, head], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, head])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden @ head.T, torch.arange(6)) * 2.0, [hidden, head]
    )
    for one, other in zip(first, expected, strict=True):
        torch.testing.assert_close(one, other)
