"""Pipeline parallelism: the stages of a model on several processes, run by torch's schedules.

`torch.distributed.pipelining` provides GPipe (Huang et al. 2019), 1F1B with a flush and interleaved 1F1B (both Narayanan et
al. 2021), ZBV (Qi et al. 2023) and DualPipeV (DeepSeek-AI 2024, cut in half).

Shapes: B sequences of a micro-batch, T tokens of a full sequence, L of them on this rank, D width, S targets of a sequence
(T, or 1 for a classifier).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward

from bessemer.common.errors import InputError
from bessemer.distributed import data
from bessemer.distributed.context import MicroBatchLoss, ModelWithLoss
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.shards import zero_stage
from bessemer.distributed.stages import StageSpan, rank_of_stage
from bessemer.distributed.tied_embedding import sum_tied_gradients, tie_group
from bessemer.distributed.validity import require_micro_batches
from bessemer.model.transformer import Transformer
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import SCHEDULES

BEFORE_BLOCKS = ("embedding", "position_embedding", "type_embedding", "embedding_norm")
AFTER_BLOCKS = ("norm", "head", "classifier")
TORCH_SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def require_schedule(layout: Parallel, device_type: str, torch_version: str = torch.__version__) -> None:
    """Raise InputError when a version of torch cannot run the layout's schedule on this type of device."""
    if not layout.facts.splits_backward:
        return
    version = tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2])
    if device_type != "cuda" and version < (2, 13):
        what = f"{layout.schedule} hangs on CPUs (gloo) with torch {torch_version}"
        raise InputError(f"parallel.schedule: {what}; install torch 2.13 or later, or use 1f1b or interleaved")


def keep_stages(model: Transformer, local_spans: Sequence[StageSpan]) -> None:
    """Remove the modules that the local stages do not need from a model (of `transformer.meta_model`), in place.

    Blocks of other processes become None. So do the embeddings without the first stage, and norm, head and classifier
    without the last. Names do not change, except that a tied matrix is `head.weight` on the last stage and
    `embedding.weight` on the first: two parameters even on one process (`tied_embedding`).
    """
    names = {name for name, _ in model.named_children()} - {"blocks", *BEFORE_BLOCKS, *AFTER_BLOCKS}
    assert not names, f"neither BEFORE_BLOCKS nor AFTER_BLOCKS has {names}, which every stage would keep"
    if model.config.is_tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone(), model.head.weight.requires_grad)
    for number in range(len(model.blocks)):
        if not any(span.first <= number < span.end for span in local_spans):
            model.blocks[number] = None  # type: ignore[assignment]
    has_embedding, has_head = (
        any(ends) for ends in zip(*((s.has_embedding, s.has_head) for s in local_spans), strict=True)
    )
    _remove_outer_modules(model, has_embedding, has_head)


def stage_model(model: Transformer, span: StageSpan) -> Transformer:
    """Return one stage of a model on which `keep_stages` left several, as a Transformer that shares its modules."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    part.blocks = nn.ModuleList()
    for number, block in enumerate(model.blocks):
        part.blocks.register_module(str(number), block if span.first <= number < span.end else None)
    _remove_outer_modules(part, span.has_embedding, span.has_head)
    return part


def _remove_outer_modules(model: Transformer, has_embedding: bool, has_head: bool) -> None:
    for names, stays in ((BEFORE_BLOCKS, has_embedding), (AFTER_BLOCKS, has_head)):
        for name in names:
            if not stays and name in model._modules:
                model._modules[name] = None


class Stage(ModelWithLoss):
    """A pipeline stage with its loss: the module that FSDP2 wraps and the schedule runs.

    The last stage divides its sum of losses by `divisor` and multiplies it by `factor`. `losses` has one entry per
    micro-batch, in order.
    """

    def __init__(self, span: StageSpan, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.span = span
        self.divisor, self.factor = torch.ones(()), torch.ones(())
        self.losses: list[MicroBatchLoss] = []

    def forward(self, x: Tensor, *, scored: bool = False, **batch: Tensor | None) -> Any:  # type: ignore[override]
        """Return the hidden states after this stage's last block, contiguous, or on the last stage the scaled loss.

        Args:
            x: Hidden states of the previous stage, (B, tokens of this rank, D). The first stage ignores it and embeds
                `inputs_BT`.
            scored: True makes the last stage return the result of the task's `score`.
            batch: The tensors of the micro-batch, see `ModelWithLoss.forward`.

        Returns:
            On the last stage the micro-batch's sum of losses / divisor x factor, in fp32 (fp64 for fp64).
        """
        result = super().forward(**batch, scored=scored, x_BTD=x)  # type: ignore[arg-type]
        if scored or not self.span.has_head:
            return result
        loss = MicroBatchLoss(*result)
        self.losses.append(loss.detached())
        return (loss.total / self.divisor * self.factor).to(loss.total.dtype)


class _ScheduledStage(PipelineStage):
    """A torch pipeline stage that supports ZeRO 2 and 3: it reduces gradients after each backward pass.

    ZeRO 3 also reshards weights. Torch's class keeps weights gathered and gradients unsharded over all micro-batches of a
    step, which is ZeRO 1.
    """

    def __init__(self, *arguments: Any, mesh: ProcessMesh, **options: Any) -> None:
        super().__init__(*arguments, **options)
        layout = mesh.layout
        self.reduces_early = isinstance(self.submod, FSDPModule) and zero_stage(layout) > 1
        self.mesh = mesh

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if not self.reduces_early:
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)  # type: ignore[no-untyped-call]
        assert backward_type == "full", "only schedules that split the backward pass have other kinds"
        with data.gradient_sync(self.submod, self.mesh, last=last_backward):
            return stage_backward(*(bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.reduces_early:  # otherwise the last backward pass has reduced them
            super().perform_reduce_grad(grad_scale_factor)


class Pipeline:
    """The stages of this process and the schedules that run them. Collective: every process of the run must create it.

    Zbv and dualpipev compute the gradients of inputs and of weights separately. They must not do so if blocks are
    recomputed, since the two passes would recompute a block 9 times, nor if blocks are compiled, which allows only one
    backward pass. With `split_backward=False` weight gradients are computed with those of inputs, which leaves bubbles in
    the schedule.

    Args:
        model: The modules that `keep_stages` left on this process.
        stages: The stages of this process.
        mesh: The processes of the run.
        device: The device of this process.
        dtype: Dtype of the hidden states that stages exchange.
        split_backward: False computes both kinds of gradients in one backward pass.
    """

    def __init__(
        self, model: Transformer, stages: Sequence[Stage], mesh: ProcessMesh, device: torch.device, dtype: torch.dtype, *,
        split_backward: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.stages, self.mesh, self.device, self.dtype = model, list(stages), mesh, device, dtype
        self.split_backward = split_backward
        self.tie = tie_group(mesh) if model.config.is_tied else None
        self.schedules: dict[tuple[int, ...], Any] = {}  # keyed by the arguments of `_schedule`

    def accumulate(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None = None, dropout_B: Tensor | None = None, *,
        micro_batches: int, divisor: Tensor, factor: Tensor, hidden_length: int | None = None,
    ) -> list[MicroBatchLoss]:  # fmt: skip
        """Add the gradients of sum(losses) / divisor * factor to the `.grad` of this process's parameters.

        Call it once per step, before there are any gradients: it ends by summing those of the copies of a tied matrix. All
        processes of a pipeline pass the same batch, on the device; its rows are divided evenly into micro-batches.

        `hidden_length` is the number of tokens of a sequence in this rank's hidden states, which context and tensor
        parallelism make smaller than that of `inputs_BT`. Returns each micro-batch's loss, detached, on the process of the
        last stage, and an empty list elsewhere. Raises InputError when the batch does not divide or the schedule cannot run
        this number of micro-batches.
        """
        rows, left = divmod(len(inputs_BT), micro_batches)
        if left or not rows:
            raise InputError(f"parallel.pipeline: {micro_batches} micro-batches do not divide {len(inputs_BT)} rows")
        shape = micro_batches, rows, inputs_BT.shape[1], hidden_length or inputs_BT.shape[1]
        if shape not in self.schedules:
            self.schedules[shape] = self._schedule(*shape)
        for stage in self.stages:
            stage.divisor, stage.factor, stage.losses = divisor, factor, []
        batch = {"inputs_BT": inputs_BT, "targets_BS": targets_BS, "starts_BT": starts_BT, "dropout_B": dropout_B}
        tensors = {name: tensor for name, tensor in batch.items() if tensor is not None}
        self.schedules[shape].step(inputs_BT, target=targets_BS, return_outputs=False, **tensors)
        sum_tied_gradients(self.model, self.tie)
        return [loss for stage in self.stages for loss in stage.losses]

    def _schedule(self, micro_batches: int, rows: int, length: int, hidden_length: int) -> Any:
        """Return torch's schedule of this process's stages. Passing the shapes avoids an extra pass to infer them."""
        layout = self.mesh.layout
        require_schedule(layout, self.device.type)
        require_micro_batches(layout, micro_batches)
        meta, wide = torch.device("meta"), torch.promote_types(self.dtype, torch.float32)
        size = rows, hidden_length, self.model.config.width
        hidden = torch.empty(size, dtype=self.dtype, device=meta, requires_grad=True)
        ids = torch.empty(rows, length, dtype=torch.int64, device=meta)
        loss = torch.empty((), dtype=wide, device=meta, requires_grad=True)
        joint_backward = layout.facts.splits_backward and not self.split_backward
        # With a joint backward pass, the separate pass for weight gradients does nothing.
        stages = [
            _ScheduledStage(
                stage, stage.span.stage, stage.span.count, self.device, group=self.mesh.group("pipeline"), mesh=self.mesh,
                input_args=(ids if stage.span.has_embedding else hidden,),
                output_args=(loss if stage.span.has_head else hidden,),
                dw_builder=(lambda: lambda: None) if joint_backward else None,
            )
            for stage in self.stages
        ]  # fmt: skip
        kind: Any = TORCH_SCHEDULES[layout.schedule]
        one_stage = SCHEDULES[layout.schedule].stages_per_rank == 1
        # The last stage's output is its loss; gradients are summed over micro-batches, not averaged.
        options: dict[str, Any] = {"loss_fn": lambda output, target: output, "scale_grads": False}
        return kind(stages[0] if one_stage else stages, micro_batches, **options)

    @torch.no_grad()
    def score(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, hidden_length: int | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return the task's scores of a batch on the device, (nats_BS, predicted_BS), from a forward pass only.

        All processes of a pipeline pass the same batch. Returns None except on the process of the last stage.
        """
        scores: tuple[Tensor, Tensor | None] | None = None
        output: Tensor | None = None  # the output of the previous stage, if it is on this process too
        sent: list[dist.Work] = []
        group = self.mesh.group("pipeline")
        for stage in self.stages:
            x = inputs_BT if stage.span.has_embedding else output
            if x is None:
                size = len(inputs_BT), hidden_length or inputs_BT.shape[1], self.model.config.width
                x = torch.empty(size, dtype=self.dtype, device=self.device)
                dist.recv(x, src=self._global_rank_of(stage.span.stage - 1), group=group)
            result = stage(x, inputs_BT=inputs_BT, targets_BS=targets_BS, starts_BT=starts_BT, scored=True)
            output = None
            if stage.span.has_head:
                scores = result
            elif self._global_rank_of(stage.span.stage + 1) == self.mesh.rank:
                output = result
            else:
                work = dist.isend(result, dst=self._global_rank_of(stage.span.stage + 1), group=group)
                assert work is not None
                sent.append(work)
        for work in sent:
            work.wait()
        for stage in self.stages:
            data.reshard(stage)
        return scores

    def _global_rank_of(self, stage: int) -> int:
        layout = self.mesh.layout
        return dist.get_global_rank(self.mesh.group("pipeline"), rank_of_stage(layout.schedule, stage, layout.pipeline))
