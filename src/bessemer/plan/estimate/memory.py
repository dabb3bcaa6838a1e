"""Peak memory of a device in a step, by part, and the risk of running out of it.

For Bessemer, the plan uses the same formulas as the run itself (distributed/memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import log
from statistics import NormalDist

from bessemer.common.console import size
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.memory import rank_memory
from bessemer.distributed.schedules import micro_batches_in_flight
from bessemer.distributed.stages import PipelineRank, rank_rows
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.experts import by_kind, kinds
from bessemer.plan.estimate.frameworks import ranks_by_cut
from bessemer.plan.estimate.job import ELEMENT_BYTES, Job, Recompute, parallel
from bessemer.plan.estimate.memory_parts import Split, block_activation_bytes, state, state_job
from bessemer.recipe import ResolvedTrain, Train
from bessemer.recipe.parallel import SCHEDULES


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on a device at the peak of a step, by part.

    Attributes:
        place: The pipeline rank of the device, from 0.
        weights: Weights that the matmuls read, or their shards.
        gradients: Gradients that wait for the optimizer.
        optimizer: Moments, and master copies or the moving average of the weights.
        activations: Activations saved for the backward passes of all micro-batches in flight, and what one block's
            backward allocates.
        logits: Logits, and the working memory of the loss.
        buffers: Unsharded weights, gradients in reduction and pipeline buffers.
        fragmentation: Allocator blocks that nothing fits.
        before_model: Device context, libraries and communicators.
        kinds: The activations by kind.
    """

    place: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    fragmentation: int
    before_model: int
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def allocated(self) -> int:
        """Bytes of tensors, as in torch.cuda.max_memory_allocated."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.buffers

    @property
    def reserved(self) -> int:
        """Bytes that the allocator reserves, as in torch.cuda.max_memory_reserved."""
        return self.allocated + self.fragmentation

    @property
    def total(self) -> int:
        """Bytes in use on the device, as nvidia-smi shows."""
        return self.reserved + self.before_model

    def to_dict(self) -> dict[str, int]:
        """Return the bytes of each part and the total, by name."""
        names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation")
        return {name: getattr(self, name) for name in (*names, "before_model", "total")}


def memory(job: Job) -> DeviceMemory:
    """Return the peak memory of the fullest device of a job. Raises InputError for more stages than blocks."""
    ranks, layout = ranks_by_cut(job.model, parallel(job.layout), job.framework.cut), job.layout
    # With this many micro-batches, every rank reaches its maximum in flight. With fewer, a later rank of a V may hold more.
    is_full = job.micro_batches >= 2 * layout.pipeline - 1
    if is_full or not SCHEDULES[layout.schedule].is_v_shaped:
        ranks = _undominated(job.model, ranks)
    still = state_job(job)
    return max((_of(job, rank, still) for rank in ranks), key=lambda peak: peak.total)


def stages(job: Job) -> list[DeviceMemory]:
    """Return the peak memory of each pipeline rank, all its stages together."""
    return [_of(job, rank, state_job(job)) for rank in ranks_by_cut(job.model, parallel(job.layout), job.framework.cut)]


@lru_cache(maxsize=4096)
def _undominated(model: ModelConfig, ranks: tuple[PipelineRank, ...]) -> tuple[PipelineRank, ...]:
    """Return the pipeline ranks that may be the fullest.

    A rank is left out if an earlier one, which has at least as many micro-batches in flight, holds at least as much of
    each kind.
    """
    blocks = [dict(by_kind(model, rank.blocks, rank.has_embedding)) for rank in ranks]
    held = [
        (*(has.get(kind, 0) for kind in kinds(model)), rank.has_embedding, rank.has_head)
        for rank, has in zip(ranks, blocks, strict=True)
    ]
    return tuple(
        rank for at, rank in enumerate(ranks)
        if not any(all(one >= mine for one, mine in zip(before, held[at], strict=True)) for before in held[:at])
    )  # fmt: skip


def _of(job: Job, rank: PipelineRank, still: Job) -> DeviceMemory:
    """Return the memory of a pipeline rank; `still` is the job that determines its model state (`state_job`)."""
    if job.framework.name == "bessemer":
        return _bessemer_memory(job, rank)
    model, layout, framework = job.model, job.layout, job.framework
    width = ELEMENT_BYTES[job.precision]
    split = Split(layout.tensor, layout.sequence_parallel, layout.context)
    tokens = layout.micro_batch * model.sequence_length / layout.context
    flight = micro_batches_in_flight(
        layout.schedule, layout.pipeline, layout.stages_per_rank, rank.pipeline_rank, max(job.micro_batches, 1)
    )
    stream = width * model.width / (layout.tensor if layout.sequence_parallel else 1)
    copies = framework.gathered if layout.tensor > 1 and layout.micro_batch > 1 else 0.0
    kinds: dict[str, float] = {}
    working = 0.0
    for config, count in by_kind(model, rank.blocks, rank.has_embedding):
        block = block_activation_bytes(config, framework, split, width, layout.recompute, copies)
        for kind, each in block.kept:
            kinds[kind] = kinds.get(kind, 0.0) + tokens * flight * count * each
        working = max(working, tokens * block.working)
    if rank.has_embedding and framework.dropout:
        kinds["embedding"] = tokens * flight * stream / width  # the mask of its dropout
    if rank.has_head:  # inputs of the last norm and of the output matmul
        kinds["head"] = 2 * tokens * stream
    logits, outputs = _loss(job, rank, tokens)
    kinds["backward"] = max(working - logits, 0.0)  # blocks reuse the memory of the logits
    parts = state(still, rank)
    buffers = parts.buffers + outputs
    if layout.pipeline > 1:  # receive buffers in both directions, and sent activations
        sent = 0.0 if framework.pipes == "plain" or rank.has_head else flight
        received = job.micro_batches if framework.pipes == "torch" and not rank.has_head else 1
        buffers += (sent + received + 1) * tokens * stream
    activations = sum(kinds.values())
    return DeviceMemory(
        place=rank.pipeline_rank, weights=round(parts.weights), gradients=round(parts.gradients),
        optimizer=round(parts.master) + round(parts.moments), activations=round(activations), logits=round(logits),
        buffers=round(buffers), fragmentation=round(framework.slack * (activations + logits + buffers)),
        before_model=round(framework.base_bytes), kinds={kind: round(each) for kind, each in kinds.items()},
    )  # fmt: skip


def _loss(job: Job, rank: PipelineRank, tokens: float) -> tuple[float, float]:
    """Return the peak bytes of the loss, and the bytes of logits that are held until the end of the step."""
    if not rank.has_head:
        return 0.0, 0.0
    framework, layout = job.framework, job.layout
    rows = rank_rows(job.model.vocabulary, layout.tensor)
    every = framework.pipes == "torch" and layout.pipeline > 1
    outputs = 2.0 * tokens * rows * (job.micro_batches - 1) if every else 0.0
    if framework.logits == "chunked":
        return 8 * min(float(framework.loss_chunk), tokens) * rows + 4.0 * rows * job.model.width, outputs
    each = framework.logit_bytes + (framework.split_logit_bytes if layout.tensor > 1 else 0.0)
    whole = 2.0 * job.model.width * tokens  # the gathered input of the output matmul, or its gradient
    gathered = framework.gathered * (1 + (layout.micro_batch > 1)) * whole if layout.tensor > 1 else 0.0
    scratch = 2.0 * rows * job.model.width if framework.scratch_gradients else 0.0  # output matrix
    return each * tokens * rows + 2 * gathered + scratch, outputs


def excess(job: Job, need: DeviceMemory) -> tuple[str, ...]:
    """Explain why a job does not fit its device's nominal memory; empty if it fits.

    The first string has the planned and the available bytes, the others each part over a tenth of the plan, largest
    first.
    """
    room = job.cluster.device.memory
    missing = -round(room - need.total)
    if missing <= 0:
        return ()
    parts = {name: value for name, value in need.to_dict().items() if name != "total"}
    largest = sorted(parts, key=lambda name: parts[name], reverse=True)
    where = f" on stage {need.place + 1}" if job.layout.pipeline > 1 else ""
    shown = (f"{name.replace('_', ' ')} {size(parts[name])}" for name in largest if parts[name] > 0.1 * need.total)
    return f"{size(need.total)}{where}, {size(missing)} more than the {size(round(room))} there are", *shown


def _bessemer_memory(job: Job, rank: PipelineRank) -> DeviceMemory:
    """Return the memory of one pipeline rank of a Bessemer run on a GPU, without the allowance for a CPU's heap."""
    layout, framework = job.layout, job.framework
    width = ELEMENT_BYTES[job.precision]
    element_bytes = ElementBytes(width, cast=2 if job.precision in ("bf16", "fp16") else 0)  # fp8 keeps the weight
    recomputed = 0 if layout.recompute == "none" else job.model.layers
    split = parallel(layout)
    if job.offload:
        split = split.model_copy(update={"offload": True})
    held = rank_memory(
        train_of(job), split, job.model, rank, element_bytes, recomputed_per_rank=recomputed, is_cuda=True,
    )  # fmt: skip
    return DeviceMemory(
        place=rank.pipeline_rank, weights=held.weights, gradients=held.gradients, optimizer=held.ema + held.optimizer,
        activations=held.activations, logits=held.logits, buffers=held.unsharded_weights,
        fragmentation=round(framework.slack * (held.activations + held.logits + held.unsharded_weights)),
        before_model=round(framework.base_bytes),
    )  # fmt: skip


def train_of(job: Job) -> ResolvedTrain:
    """Return the training settings that determine the memory of a Bessemer run."""
    return _train(job.train, job.layout.micro_batch, job.tokens, job.layout.recompute)


@lru_cache(maxsize=4096)
def _train(train: Train, micro_batch: int, tokens: int, recompute: Recompute) -> ResolvedTrain:
    sizes = {"micro_batch": micro_batch, "global_batch_tokens": tokens, "recompute": recompute}
    return ResolvedTrain.model_construct(**{**dict(train), **sizes})  # type: ignore[arg-type]


# The ratio of measured to planned peak memory is modelled as lognormal, and a run fails if its peak exceeds the device's real
# memory. Median and spread were fitted to the 271 runs of the 1.34B and 8.86B models of nanotron's H100 sweep with at most 8
# tensor ranks: to the peaks of those that ran (1.05 at most) and to the failures of the 100 others. The 316 runs of its 3.57B
# and 80B models, which were not used, fit best with 1.02 and a spread of 0.08 (docs/background/plan-accuracy.md#risk). The
# median is above 1 because devices have slightly more memory than their data sheet says: an H100 of 80 GB has 81,559 MiB,
# 85.5e9 bytes.
MEDIAN_LIMIT = 1.06
"""Ratio of planned to nominal bytes at which half of the runs fail."""
SPREAD = 0.12
"""Standard deviation of the logarithm of measured over planned bytes."""
HEADROOM = 0.15
"""Default share of a device's memory that a chosen layout leaves free. Of the sweep's runs that were planned to leave more,
fewer than 5% failed, including hangs."""


def out_of_memory(planned_bytes: float, device_bytes: float) -> float:
    """Return the probability, from 0 to 1, that a layout with these planned bytes runs out of a device's memory."""
    if planned_bytes <= 0:
        return 0.0
    return NormalDist(log(MEDIAN_LIMIT), SPREAD).cdf(log(planned_bytes / device_bytes))
