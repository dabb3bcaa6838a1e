"""The running pipeline: micro-batches through stages on several processes, by torch's own schedules.

What each stage computes is in `parallel.stage`; what is waited for and when is the schedule's
(`torch.distributed.pipelining`): GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, PipeDream), interleaved 1F1B
(Narayanan et al. 2021), ZBV (Qi et al. 2024) and DualPipeV (DeepSeek-AI 2024, cut in half).

Shapes: B sequences, T tokens, D width, S targets of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward
from torch.nn.parallel import DistributedDataParallel

from bessemer.errors import InputError
from bessemer.layout.stages import rank_of
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.stage import Found, Stage
from bessemer.parallel.team import Team
from bessemer.parallel.tied import is_tied, sum_tied_gradients, tie_group
from bessemer.recipe import Parallel


def require_schedule(layout: Parallel, device: torch.device) -> None:
    """Raise InputError when this torch on this device cannot run the layout's schedule."""
    if not layout.is_v_shaped:
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if device.type != "cuda" and version < (2, 13):
        raise InputError(
            f"parallel.schedule: {layout.schedule} hangs on CPUs (gloo) with torch {torch.__version__}; it needs 2.13 or "
            "later, or take 1f1b or interleaved"
        )


def require_micro_batches(layout: Parallel, count: int) -> None:
    """Raise InputError, with the nearest numbers that fit, when a schedule cannot run so many micro-batches a step."""
    if layout.fits_micro_batches(count):
        return
    below = next((n for n in range(count - 1, 0, -1) if layout.fits_micro_batches(n)), None)
    above = next(n for n in range(count + 1, count + 2 * layout.pipeline + 1) if layout.fits_micro_batches(n))
    nearest = f"{above}" if below is None else f"{below} or {above}"
    raise InputError(
        f"parallel.schedule: {layout.schedule} over {layout.pipeline} processes cannot run {count} micro-batches a step (of "
        f"each part of the batch), but {nearest}; change train.micro_batch or train.global_batch_tokens, or take gpipe"
    )


@dataclass(frozen=True)
class MicroBatches:
    """How a step's batch is divided, and what passes between stages: hidden states (rows, tokens, width) of `dtype`.

    length: tokens of a whole sequence, which each stage reads; tokens: as many as the hidden states of this process have,
    fewer where sequences are divided.
    """

    count: int
    rows: int
    length: int
    tokens: int
    width: int
    dtype: torch.dtype


def build(
    modules: Sequence[nn.Module],
    stages: Sequence[Stage],
    team: Team,
    device: torch.device,
    of: MicroBatches,
    *,
    split_backward: bool = True,
) -> Any:
    """The schedule object of the layout for this process's stages.

    modules: each stage, or what wraps it (FSDP2 wraps in place; DDP does not). Shapes are given, so that nothing is run to
    learn them. Gradients are added up over the micro-batches, never divided. split_backward: zbv and dualpipev compute the
    gradients of inputs and of weights apart; else both where the first would be, which leaves bubbles where the second
    would. Raises InputError when the schedule does not fit the number of micro-batches, the device or DDP.
    """
    layout = team.layout
    require_schedule(layout, device)
    require_micro_batches(layout, of.count)
    if layout.is_v_shaped and any(isinstance(module, DistributedDataParallel) for module in modules):
        raise InputError(
            f"parallel.schedule: with {layout.schedule} DDP never sees a gradient; copies go through FSDP2, or take 1f1b"
        )
    meta = torch.device("meta")
    hidden = torch.empty(of.rows, of.tokens, of.width, dtype=of.dtype, device=meta, requires_grad=True)
    ids = torch.empty(of.rows, of.length, dtype=torch.int64, device=meta)
    wide = torch.promote_types(of.dtype, torch.float32)
    loss = torch.empty((), dtype=wide, device=meta, requires_grad=True)
    runs = [
        _Stage(
            module,
            stage.span.stage,
            stage.span.count,
            device,
            input_args=(ids if stage.span.has_embedding else hidden,),
            output_args=(loss if stage.span.has_head else hidden,),
            group=team.group("pipeline"),
            dw_builder=None if split_backward or not layout.is_v_shaped else _nothing_left,
            team=team,
        )
        for module, stage in zip(modules, stages, strict=True)
    ]
    options: dict[str, Any] = {"n_microbatches": of.count, "loss_fn": _own_loss, "scale_grads": False}
    if layout.schedule == "gpipe":
        return ScheduleGPipe(runs[0], **options)
    if layout.schedule == "1f1b":
        return Schedule1F1B(runs[0], **options)
    if layout.schedule == "interleaved":
        return ScheduleInterleaved1F1B(runs, **options)  # type: ignore[arg-type]
    from torch.distributed.pipelining import schedules

    kind = schedules.ScheduleZBVZeroBubble if layout.schedule == "zbv" else schedules.ScheduleDualPipeV
    return kind(runs, **options)  # type: ignore[arg-type]


class _Stage(PipelineStage):
    """torch's own stage, which keeps the weights gathered and the gradients whole over all micro-batches of a step: that is
    zero 1. Here zero 2 divides the gradients after each backward pass, and zero 3 gives the weights back as well.

    Not where backward passes come in two parts, whose second one FSDP2 does not see.
    """

    def __init__(self, *arguments: Any, team: Team, **options: Any) -> None:
        super().__init__(*arguments, **options)
        layout = team.layout
        self.divides = isinstance(self.submod, FSDPModule) and layout.zero > 1 and not layout.is_v_shaped
        self.team = team

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not self.divides:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)  # type: ignore[no-untyped-call]
        assert backward_type == "full", "only schedules in a V have other kinds"
        with data.micro_batch(self.submod, self.team, last=last_backward):
            given = (bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))
            return stage_backward(*given), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.divides:  # else done with the last backward pass
            super().perform_reduce_grad(grad_scale_factor)


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage's output is its loss."""
    return output


def _nothing_left() -> Callable[..., None]:
    """For a stage whose backward pass computes the weights' gradients together with the inputs': what is left of them."""
    return lambda: None


class Pipeline:
    """This process's stages and what it needs to run them with the others of its pipeline.

    model: what `cut` left of the model on this process; stages: its stages, in order; modules: what wraps them, if not they
    themselves. dtype: of the hidden states between stages: the type that autocast narrows to, else the weights'.
    split_backward: as in `build`; to be False where blocks are recomputed, since each of the many walks through a block that
    a backward pass in two is made of would recompute it (9 times a block where once is enough), and where they are compiled,
    which allows no second walk.
    Every process of the run must make it, at the same time.
    """

    def __init__(
        self,
        model: Transformer,
        stages: Sequence[Stage],
        team: Team,
        device: torch.device,
        dtype: torch.dtype,
        modules: Sequence[nn.Module] | None = None,
        *,
        split_backward: bool = True,
    ) -> None:
        self.model, self.stages, self.team, self.device, self.dtype = model, list(stages), team, device, dtype
        self.modules, self.split_backward = list(modules or stages), split_backward
        self.tie = tie_group(team) if is_tied(model) else None
        self.schedules: dict[MicroBatches, Any] = {}

    def accumulate(
        self,
        inputs_BT: Tensor,
        targets_BS: Tensor,
        starts_BT: Tensor | None = None,
        dropout_B: Tensor | None = None,
        *,
        micro_batches: int,
        divisor: int,
        factor: float = 1.0,
        tokens: int | None = None,
    ) -> list[Found]:
        """Put the gradients of sum(losses) / divisor * factor into the `.grad` of this process's parameters, None before.

        All processes of a pipeline give the same batch, on the device; its rows are divided evenly. tokens: of the hidden
        states between stages, when not those of inputs_BT; dropout_B: as of a
        MicroBatch. Returns what was found of each micro-batch, in order, on the process that has the last stage, nothing
        elsewhere. Raises InputError when the batch does not divide or the schedule
        cannot run so many micro-batches.
        """
        rows, left = divmod(len(inputs_BT), micro_batches)
        if left or not rows:
            raise InputError(
                f"parallel.pipeline: {len(inputs_BT)} sequences do not divide into {micro_batches} micro-batches"
            )
        length = inputs_BT.shape[1]
        of = MicroBatches(micro_batches, rows, length, tokens or length, self.model.config.width, self.dtype)
        if of not in self.schedules:
            self.schedules[of] = build(
                self.modules, self.stages, self.team, self.device, of, split_backward=self.split_backward
            )
        for stage in self.stages:
            stage.divisor, stage.factor, stage.found = divisor, factor, []
        batch = {"inputs_BT": inputs_BT, "targets_BS": targets_BS}
        batch |= {} if starts_BT is None else {"starts_BT": starts_BT}
        batch |= {} if dropout_B is None else {"dropout_B": dropout_B}
        self.schedules[of].step(inputs_BT, target=targets_BS, return_outputs=False, **batch)
        sum_tied_gradients(self.model, self.tie)
        return [found for stage in self.stages for found in stage.found]

    @torch.no_grad()
    def score(
        self, parts: Sequence[tuple[Tensor, Tensor, Tensor | None]], tokens: int | None = None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """What the task scores of each (inputs_BT, targets_BS, starts_BT), on the device; forward only.

        All processes of a pipeline give the same parts, which need not have the same number of rows. Each stage sends its
        hidden states on as soon as it has them. Returns one (nats_BS, predicted_BS) a part on the process that has the last
        stage, nothing elsewhere.
        """
        found: list[tuple[Tensor, Tensor | None]] = []
        here: list[Tensor] = []  # what the stage before left, when it lies on this process too
        sent: list[dist.Work] = []
        for stage, module in zip(self.stages, self.modules, strict=True):
            given, here = here, []
            for number, (inputs_BT, targets_BS, starts_BT) in enumerate(parts):
                if stage.span.has_embedding:
                    x = inputs_BT
                elif given:
                    x = given[number]
                else:
                    shape = (len(inputs_BT), tokens or inputs_BT.shape[1], self.model.config.width)
                    x = torch.empty(shape, dtype=self.dtype, device=self.device)
                    dist.recv(x, src=self._rank_of(stage.span.stage - 1), group=self.team.group("pipeline"))
                output = module(x, inputs_BT=inputs_BT, targets_BS=targets_BS, starts_BT=starts_BT, scored=True)
                if stage.span.has_head:
                    found.append(output)
                elif self._rank_of(stage.span.stage + 1) == self.team.rank:
                    here.append(output)
                else:
                    work = dist.isend(
                        output, dst=self._rank_of(stage.span.stage + 1), group=self.team.group("pipeline")
                    )
                    assert work is not None
                    sent.append(work)
        for work in sent:
            work.wait()
        self._reshard()
        return found

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(
            self.team.group("pipeline"), rank_of(self.team.layout.schedule, stage, self.team.layout.pipeline)
        )

    def _reshard(self) -> None:
        """Give gathered weights back: what is gathered would stay as it is when the shards change (an average of weights is
        put in their place for a validation)."""
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # type: ignore[no-untyped-call]
