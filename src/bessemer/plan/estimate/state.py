"""What a device holds of weights, gradients and optimizer state, and the buffers in which they are gathered and exchanged.

ZeRO (Rajbhandari et al. 2020, section 5): with N ranks stage 1 divides the optimizer's part by N, stage 2 the gradients too,
stage 3 the weights too; with 2 bytes a weight, 2 a gradient and 12 of optimizer, 16 bytes a parameter in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.layout.memory import Held
from bessemer.layout.stages import Part
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.places import stages_each
from bessemer.plan.estimate.stacks import Stack


@dataclass(frozen=True)
class State:
    """Bytes of a device. master: fp32 copies of the weights; buffers: gathered weights, and gradients on their way."""

    weights: float
    master: float
    gradients: float
    moments: float
    buffers: float


def ways(job: Job) -> int:
    """Devices that divide what ZeRO divides: those of `shard`, and of a context group, which hold the same weights."""
    return job.layout.shard * job.layout.context


def each(stack: Stack, zero: int, ranks: int) -> tuple[float, float, float, float]:
    """Bytes for each parameter of a device's part: of weights, master copies, gradients and moments, in ZeRO's stages 0 to 3
    over so many ranks (Rajbhandari et al. 2020, figure 1)."""
    one, two, three = (ranks if zero >= stage else 1 for stage in (1, 2, 3))
    return stack.weight_bytes / three, stack.master_bytes / one, stack.gradient_bytes / two, stack.moment_bytes / one


def least_devices(parameters: float, stack: Stack, memory: float) -> int:
    """Devices of so many bytes that hold a model's state, divided among them, and nothing else."""
    return math.ceil(parameters * sum(each(stack, 0, 1)) / memory)


@lru_cache(maxsize=16384)
def held(config: ModelConfig, part: Part, tensor: int) -> Held:
    """Parameters of a place after tensor parallelism, with the tables of learned positions on the first."""
    found = Held.of(config, part, tensor)
    if config.positions == "learned" and part.has_embedding:
        rows = config.position_rows + config.token_types
        return Held(found.block, found.root + rows * config.width, found.blocks)
    return found


def state(job: Job, part: Part) -> State:
    """What a place of the pipeline holds between and during the passes of a step."""
    stack, layout = job.stack, job.layout
    own = held(job.model, part, layout.tensor)
    n = ways(job)
    wide = job.precision in ("fp32", "tf32")
    if stack.keeps.fully_sharded:
        return _fully_sharded(job, own, n if layout.zero else 1, 4 if wide else 2)
    stack = _wide(stack) if wide else stack
    weight, master, gradient, moment = each(stack, layout.zero, n)
    everything = own.all
    buffers = stack.keeps.bucket_bytes
    fresh = everything if layout.zero < 2 else 2 * own.block
    buffers += stack.keeps.fresh_bytes * fresh + stack.keeps.copy_bytes * everything * (layout.data > 1)
    buffers += stack.keeps.step_bytes * everything / (n if layout.zero else 1)
    if layout.zero == 3 and n > 1:
        buffers += stack.weight_bytes * (2 * own.block + own.root)
    if stack.keeps.scratch_gradients and not wide:
        buffers += 2.0 * scratch(job.model, part, layout.tensor)
    return State(weight * everything, master * everything, gradient * everything, moment * everything, buffers)


@lru_cache(maxsize=64)
def _wide(stack: Stack) -> Stack:
    """The same program in fp32: the weights are their own master copies."""
    return replace(
        stack, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0, keeps=replace(stack.keeps, fresh_bytes=0.0)
    )


def scratch(config: ModelConfig, part: Part, tensor: int) -> float:
    """Numbers of one matrix of each kind: Transformer Engine keeps an empty gradient of each shape (`get_dummy_wgrad`, since
    2.3), which autograd is handed where the sum goes to the fp32 buffer."""
    heads, both = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    attention = config.width * (2 * heads + both)
    mlp = config.width * config.mlp_width * (3 if config.gated else 2)
    return (attention + mlp) / tensor * (part.blocks > 0)


def _fully_sharded(job: Job, own: Held, n: int, narrow: int) -> State:
    """FSDP: everything is kept divided by n; a block is whole, in the products' width, while it is used.

    Stage 3: gathered blocks are given back after each pass, but for two (one in use, one on its way) and what lies outside
    of blocks; else, and in a pipeline (whose micro-batches would gather again and again), they stay. Gradients are whole, in
    fp32, until the last micro-batch of a step where there are several.
    """
    stack, layout = job.stack, job.layout
    # In one round of an interleaved schedule a stage has all its backward passes before the device's next one begins.
    one_round = layout.schedule == "interleaved" and job.micro_batches <= layout.pipeline
    at_once = own.all / stages_each(layout) if one_round else own.all
    several = at_once if layout.pipeline > 1 or (job.micro_batches > 1 and layout.zero < 2) else 0.0
    buffers = 0.0
    if n > 1:
        whole = own.all if layout.zero < 3 or layout.pipeline > 1 else own.root + min(2, own.blocks) * own.block
        buffers = narrow * whole
        fresh = narrow * (own.block + own.root / 2) + stack.gradient_bytes * own.block
        buffers += max(fresh, stack.gradient_bytes * several)
    return State(
        weights=stack.weight_bytes * own.all / n,
        master=stack.master_bytes * own.all / n,
        gradients=stack.gradient_bytes * own.all / n,
        moments=stack.moment_bytes * own.all / n,
        buffers=buffers,
    )
