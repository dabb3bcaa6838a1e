"""Memory of a run of this program, by the plan it makes for itself (layout/memory.py, plan/cost.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from bessemer.layout.memory import Held, activation_bytes, kept, kept_by_a_block, state_bytes, uses_fsdp, waiting, ways
from bessemer.layout.stages import Part
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.estimate.places import stages_each
from bessemer.recipe import Parallel


@dataclass(frozen=True)
class Parts:
    """Bytes; all weights, gradients and moments are fp32."""

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    buffers: int


def parts(job: Job, part: Part) -> Parts:
    """What a place holds, on a device of its own: without the allowance for a CPU's heap."""
    layout = parallel(job.layout)
    model, stack = job.model, job.stack
    width = 4 if job.precision in ("fp32", "tf32") else 2
    narrow = 2 if job.precision in ("bf16", "fp16") else 0  # fp8 keeps the weight
    recomputed = 0 if job.layout.recompute == "none" else model.layers
    if job.layout.devices == 1:
        return _alone(job, width, narrow, recomputed)
    own = _held(model, part, layout.tensor)
    weights, copies, gradients = state_bytes(layout, own, narrow or 4, job.micro_batches)
    tokens = job.layout.micro_batch * model.sequence_length // layout.context
    flight = waiting(layout.schedule, layout.pipeline, stages_each(job.layout), part.place, job.micro_batches)
    activations, working = activation_bytes(
        model, part, tokens, flight, width, recomputed, job.layout.recompute, layout.tensor
    )
    logits = 0
    if part.has_head and not model.labels:
        rows = -(-model.vocabulary // layout.tensor)
        logits = 8 * min(stack.keeps.loss_chunk, tokens) * rows + 4 * rows * model.width
    activations += max(working - logits, 0)
    if not uses_fsdp(layout):
        copies = max(part.blocks - recomputed, 0) * model.block_matrix_parameters // layout.tensor * narrow
    share = own.all / ways(layout) / model.parameters
    moments = round(round(stack.moment_bytes * model.parameters) * share)
    return Parts(weights, gradients, moments, activations, logits, copies)


@lru_cache(maxsize=16384)
def parallel(layout: Layout) -> Parallel:
    """A layout as a recipe's section; ranks of `shard` that divide nothing are copies."""
    zero = cast(Literal[1, 2, 3], layout.zero or 1)
    copies, shard = (layout.data, 1) if layout.zero == 0 else (layout.replicate, layout.shard)
    return Parallel.model_construct(
        replicate=copies, shard=shard, tensor=layout.tensor, pipeline=layout.pipeline, context=layout.context,
        zero=zero, schedule=layout.schedule, virtual=stages_each(layout),
    )  # fmt: skip


@lru_cache(maxsize=16384)
def _held(model: ModelConfig, part: Part, tensor: int) -> Held:
    return Held.of(model, part, tensor)


def _alone(job: Job, width: int, narrow: int, recomputed: int) -> Parts:
    """One device that holds the whole model, as `plan.whole_memory`."""
    model, stack, recompute = job.model, job.stack, job.layout.recompute
    tokens = job.layout.micro_batch * model.sequence_length
    block, selected = kept_by_a_block(model), kept(recompute, model)
    chunk = min(stack.keeps.loss_chunk, tokens)
    logits = 0 if model.labels else 8 * chunk * model.vocabulary + 4 * model.vocabulary * model.width
    whole = model.layers - recomputed
    activations = tokens * (recomputed * selected + 2 * model.width) * width + tokens * whole * block * width
    if recomputed and not whole:
        activations += max(tokens * (block - selected) * width - logits, 0)
    moments, copies = round(stack.moment_bytes * model.parameters), whole * model.block_matrix_parameters * narrow
    return Parts(4 * model.parameters, 4 * model.parameters, moments, activations, logits, copies)
