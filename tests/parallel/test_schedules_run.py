"""Our lists run: torch's runtime takes each on two processes and gives the gradients of the model in one piece."""

from __future__ import annotations

from typing import Any

import torch
from processes import run_on
from torch import Tensor, nn

from bessemer.layout.pipeline_schedules import NAMES, actions, generate, to_csv_rows
from bessemer.recipe.parallel import SCHEDULES

RANKS, MICRO_BATCHES, WIDTH = 2, 6, 8


def layer(stage: int) -> nn.Module:
    """A stage of the model, its weights a function of its number; fp64."""
    with torch.random.fork_rng():
        torch.manual_seed(stage)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())


def inputs() -> Tensor:
    return torch.randn(MICRO_BATCHES * 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(9))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def step(names: list[str]) -> dict[str, Any]:
    """On one of the processes: gradients of its stages by schedule, and the actions in the order in which they were done."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name in names:
        schedule = generate(name, RANKS, MICRO_BATCHES)
        mine = schedule.stage_ids_of_rank(dist.get_rank())
        device = torch.device("cpu")
        stages = [PipelineStage(layer(stage), stage, schedule.stages, device) for stage in mine]
        done: list[str] = []
        for stage in stages:
            note(stage, done)
        runtime: Any = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
        rows = enumerate(to_csv_rows(schedule))
        runtime.pipeline_order = {rank: [_Action.from_str(one) for one in row] for rank, row in rows}
        runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        first, last = 0 in mine, schedule.stages - 1 in mine
        runtime.step(*([inputs()] if first else []), target=torch.zeros_like(inputs()) if last else None)
        gradients = {
            stage.stage_index: [parameter.grad.numpy() for parameter in stage.submod.parameters()] for stage in stages
        }
        found[name] = (done, gradients)
    dist.destroy_process_group()
    return found


def note(stage: Any, done: list[str]) -> None:
    """Write down what a stage computes, as its runtime tells it to."""
    forward, backward, weight = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk

    def forward_noted(number: int, *args: Any, **keywords: Any) -> Any:
        done.append(f"{stage.stage_index}F{number}")
        return forward(number, *args, **keywords)

    def backward_noted(number: int, *args: Any, full_backward: bool = True, **keywords: Any) -> Any:
        done.append(f"{stage.stage_index}{'B' if full_backward else 'I'}{number}")
        return backward(number, *args, full_backward=full_backward, **keywords)

    def weight_noted(number: int, *args: Any, **keywords: Any) -> Any:
        done.append(f"{stage.stage_index}W{number}")
        return weight(number, *args, **keywords)

    stage.forward_one_chunk, stage.backward_one_chunk = forward_noted, backward_noted
    stage.backward_weight_one_chunk = weight_noted


def test_what_runs_is_the_list_and_its_gradients_are_right() -> None:
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
    names = [
        name for name in NAMES if not (old and SCHEDULES[name].is_v_shaped)
    ]  # those hang on gloo before torch 2.13
    by_rank = run_on(RANKS, step, names)
    for name in names:
        schedule = generate(name, RANKS, MICRO_BATCHES)
        whole = nn.Sequential(*(layer(stage) for stage in range(schedule.stages)))
        loss(whole(inputs()), torch.zeros_like(inputs())).backward()
        for rank, found in enumerate(by_rank):
            done, gradients = found[name]
            assert done == [str(action) for action in actions(schedule.steps[rank])], name
            assert tuple(gradients) == schedule.stage_ids_of_rank(rank)
            for stage, parts in gradients.items():
                for got, parameter in zip(parts, whole[stage].parameters(), strict=True):
                    torch.testing.assert_close(torch.from_numpy(got), parameter.grad, rtol=0, atol=1e-12)
