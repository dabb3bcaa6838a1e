"""Pipelines of 2 and 4 processes against one process: losses of each micro-batch and gradients of every weight."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from processes import run_on
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from bessemer.errors import InputError
from bessemer.model.config import FAMILIES, ModelConfig
from bessemer.model.initialisation import build, initial, shell
from bessemer.model.transformer import Transformer
from bessemer.parallel import pipeline
from bessemer.parallel.pipeline import Pipeline
from bessemer.parallel.stage import Costs, Found, Stage, cut, part_of, place_of, spans, stages_at
from bessemer.parallel.team import Team, join
from bessemer.parallel.tied import owned_parameters, whole_name
from bessemer.plan.communication_pipeline import pipeline_bytes
from bessemer.recipe import Parallel, Train
from bessemer.train import recompute
from bessemer.train.task import Causal, Classify, Masked

CPU = torch.device("cpu")
END, LENGTH, SEED = 0, 12, 7
NEEDS_213 = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="zbv and dualpipev hang on gloo before torch 2.13"
)


def config_for(family: str, layers: int, labels: int = 0) -> ModelConfig:
    options: dict[str, Any] = {"kv_heads": 2, **FAMILIES[family]}
    if family == "modernbert":
        options["window"] = 6
    return ModelConfig(
        vocabulary=61, layers=layers, width=16, heads=2, head_dim=8, mlp_width=24, sequence_length=LENGTH, labels=labels,
        **options,
    )  # fmt: skip


def task_for(name: str) -> Any:
    if name in ("classify", "frozen"):
        return Classify(Train.model_validate({"objective": "classify", "classify": {"frozen": name == "frozen"}}), END)
    settings = Train.model_validate({"objective": name, "loss_chunk": 16, "z_loss": 1e-3})
    return (Masked if name == "masked" else Causal)(settings, True, END)


def batch_for(task: str, rows: int, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Ragged documents; a different number of targets in each row, none in one of them."""
    draw = torch.Generator().manual_seed(3)
    inputs_BT = torch.randint(1, config.vocabulary, (rows, LENGTH), generator=draw)
    if config.labels:
        for row in range(rows):
            inputs_BT[row, 3 + row % (LENGTH - 3) :] = END
        inputs_BT[:, 0] = END
        return inputs_BT, torch.randint(0, config.labels, (rows, 1), generator=draw)
    inputs_BT[torch.rand(rows, LENGTH, generator=draw) < 0.2] = END
    targets_BT = torch.randint(1, config.vocabulary, (rows, LENGTH), generator=draw)
    share_B1 = torch.arange(rows)[:, None] / rows if task == "masked" else torch.full((rows, 1), 0.9)
    targets_BT[torch.rand(rows, LENGTH, generator=draw) >= share_B1] = -1
    return inputs_BT, targets_BT


def value_of(name: str, shape: torch.Size, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Its initial value and a little more, so that what starts at zero has gradients behind it too."""
    value = initial(name, shape, config, SEED).to(dtype)
    draw = torch.Generator().manual_seed(len(name))
    return value + 0.05 * torch.randn(shape, generator=draw).to(dtype)


@lru_cache(maxsize=8)
def alone(
    config: ModelConfig, task_name: str, rows: int, parts: int, dtype: torch.dtype
) -> tuple[list[Found], dict[str, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """One process: what each micro-batch gives, the sum's gradients by name, and the scores."""
    model, task = build(config, SEED).to(dtype), task_for(task_name)
    task.prepare(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(name, parameter.shape, config, dtype))
    inputs_BT, targets_BS = batch_for(task_name, rows, config)
    found, scores = [], []
    for inputs, targets in zip(inputs_BT.chunk(parts), targets_BS.chunk(parts), strict=True):
        outcome = task.loss(model, model(inputs, task.documents(inputs)), inputs, targets)
        (outcome.total / int((targets_BS >= 0).sum()) * 4.0).backward()
        found.append(Found(outcome.total.detach(), outcome.nats_B, outcome.correct_B))
        with torch.no_grad():
            scores.append(task.score(model, model(inputs, task.documents(inputs)), inputs, targets))
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, scores


def piped(team: Team, config: ModelConfig, task_name: str, dtype: torch.dtype, wrap: str) -> Pipeline:
    """This process's part of the model with the same values, as training builds it."""
    held = [spans(config, team.layout)[stage] for stage in stages_at(team.layout, team.place("pipeline"))]
    model, task = shell(config).to(dtype), task_for(task_name)
    task.prepare(model)
    cut(model, held)
    if wrap == "recompute":
        recompute.apply(model, "full", config.layers)
    stages = [Stage(part_of(model, span), span, task) for span in held]
    modules: list[torch.nn.Module] = list(stages)
    if wrap == "fsdp":
        for stage in stages:
            for block in [*stage.blocks, stage]:
                fully_shard(block, mesh=team.mesh["shard"], reshard_after_forward=False)  # type: ignore[index]
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=CPU)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = value_of(whole_name(model, name), parameter.shape, config, dtype)
            if wrap == "fsdp":
                number = team.place("shard")
                parts = whole.chunk(2)
                parameter._local_tensor.copy_(parts[number] if number < len(parts) else whole[:0])  # type: ignore[attr-defined]
            else:
                parameter.copy_(whole)
    if wrap == "ddp":
        modules = [DistributedDataParallel(stage, process_group=team.group("replicate")) for stage in stages]
    return Pipeline(model, stages, team, CPU, dtype, modules)


def against_one(
    layout: Parallel, family: str, layers: int, task_name: str, rows: int, parts: int, dtype: torch.dtype, wrap: str,
    team: Team | None = None,
) -> dict[str, float]:  # fmt: skip
    """Largest differences of losses, gradients and scores, and whether every weight was looked at."""
    team = team or join(layout, CPU)
    team = Team(layout, team.rank, team.mesh, team.control)
    config = config_for(family, layers, labels=3 if task_name in ("classify", "frozen") else 0)
    found, gradients, scores = alone(config, task_name, rows, parts, dtype)
    pipe = piped(team, config, task_name, dtype, wrap)
    inputs_BT, targets_BS = batch_for(task_name, rows, config)
    data, mine = team.size("shard") * team.size("replicate"), team.data_rank
    # Each part of the batch has every `data`-th micro-batch of it.
    pick = torch.arange(rows).view(parts, -1)[mine::data].flatten()
    here = parts // data
    worst = {"loss": 0.0, "gradient": 0.0, "score": 0.0}
    for _ in range(2):  # a schedule is used again
        for parameter in pipe.model.parameters():
            parameter.grad = None
        got = pipe.accumulate(
            inputs_BT[pick], targets_BS[pick], micro_batches=here, divisor=int((targets_BS >= 0).sum()), factor=4.0
        )
        has_last = any(stage.span.has_head for stage in pipe.stages)
        assert len(got) == (here if has_last else 0)
        for ours, theirs in zip(got, found[mine::data] if has_last else [], strict=True):
            worst["loss"] = max(worst["loss"], float((ours.total - theirs.total).abs()))
            worst["loss"] = max(worst["loss"], float((ours.nats_B - theirs.nats_B).abs().max()))
            assert theirs.correct_B is None or bool((ours.correct_B == theirs.correct_B).all())
    for name, parameter in pipe.model.named_parameters():
        whole = whole_name(pipe.model, name)
        assert (parameter.grad is not None) == (whole in gradients), name
        if parameter.grad is None:
            continue
        gradient = parameter.grad.full_tensor() if wrap == "fsdp" else parameter.grad  # type: ignore[operator]
        gradient = gradient * data if wrap == "ddp" else gradient
        difference = (gradient - gradients[whole]).abs().max()
        worst["gradient"] = max(worst["gradient"], float(difference / gradients[whole].abs().max().clamp(min=1e-3)))
    known = {name for name, parameter in owned_parameters(pipe.model) if parameter.grad is not None}
    spread = [(inputs_BT[pick].chunk(here)[n], targets_BS[pick].chunk(here)[n], None) for n in range(here)]
    scored = pipe.score([*spread, (inputs_BT[:1], targets_BS[:1], None)])[:-1]
    for (nats, right), (nats_alone, right_alone) in zip(scored, scores[mine::data] if scored else [], strict=True):
        worst["score"] = max(worst["score"], float((nats - nats_alone).abs().max()))
        assert right is None or bool((right == right_alone).all())
    everywhere = set().union(*team.gather(known))
    assert everywhere == set(gradients)
    assert team.gather(len(scored)).count(here) == team.world // team.size("pipeline")
    return worst


def several(cases: list[tuple[Any, ...]]) -> list[dict[str, float]]:
    """Several cases on one group; layouts of one mesh."""
    team = join(cases[0][0], CPU)
    return [against_one(*case, team=team) for case in cases]


def two(**options: Any) -> Parallel:
    return Parallel(pipeline=2, **options)


EVERY = [two(schedule="gpipe"), two(schedule="1f1b"), two(schedule="interleaved")]
SPLIT = [two(schedule="zbv"), two(schedule="dualpipev")]


def check(found: list[list[dict[str, float]]], limit: float) -> None:
    for of_rank in found:
        for number, worst in enumerate(of_rank):
            assert max(worst.values()) <= limit, f"case {number}: {worst}"


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [EVERY, pytest.param(SPLIT, marks=NEEDS_213)], ids=["whole", "split"])
def test_two_processes_give_the_losses_and_gradients_of_one(layouts: list[Parallel]) -> None:
    """Untied and tied, decoder, encoder and classifier, with and without recompute, in every schedule."""
    cases = []
    for layout in layouts:
        for family, task, wrap in (
            ("qwen3", "causal", "recompute"), ("gpt2", "causal", "plain"), ("modernbert", "masked", "plain"),
            ("bert", "classify", "plain"), ("bert", "frozen", "plain"),
        ):  # fmt: skip
            cases.append((layout, family, 5, task, 8, 4, torch.float64, wrap))
    found = run_on(2, several, cases)
    check(found, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [EVERY, pytest.param(SPLIT, marks=NEEDS_213)], ids=["whole", "split"])
def test_two_processes_in_fp32(layouts: list[Parallel]) -> None:
    cases = [(layout, "gpt2", 4, "causal", 8, 4, torch.float32, "plain") for layout in layouts]
    check(run_on(2, several, cases), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedules", [["gpipe", "1f1b", "interleaved"], pytest.param(["zbv", "dualpipev"], marks=NEEDS_213)], ids=["whole", "split"]
)  # fmt: skip
def test_four_processes(schedules: list[str]) -> None:
    cases = [
        (Parallel(pipeline=4, schedule=schedule), "gpt2", 9, "masked", 8, 8, torch.float64, "plain")  # type: ignore[arg-type]
        for schedule in schedules
    ]
    check(run_on(4, several, cases), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedules", [["gpipe", "1f1b", "interleaved"], pytest.param(["zbv", "dualpipev"], marks=NEEDS_213)], ids=["whole", "split"]
)  # fmt: skip
def test_pipelines_that_share_their_weights(schedules: list[str]) -> None:
    """FSDP2 over two pipelines of two stages each."""
    cases = [
        (Parallel(pipeline=2, shard=2, schedule=schedule), family, 5, task, 8, 8, torch.float64, "fsdp")  # type: ignore[arg-type]
        for schedule in schedules
        for family, task in (("qwen3", "causal"), ("gpt2", "masked"))
    ]
    check(run_on(4, several, cases), 1e-12)


@pytest.mark.slow
def test_pipelines_that_are_copies() -> None:
    """DDP over two pipelines of two stages each."""
    cases = [
        (Parallel(pipeline=2, replicate=2, schedule=schedule), "qwen3", 5, "causal", 8, 8, torch.float64, "ddp")  # type: ignore[arg-type]
        for schedule in ("gpipe", "1f1b", "interleaved")
    ]
    check(run_on(4, several, cases), 1e-12)
