"""Seconds of computation of a block, the embedding and the head on one device, by roofline.

Legend: T tokens of a micro-batch on a device, W width, M MLP width, H heads, K KV heads, D head size, all as a device holds
them after the split over tensor and context. Functions return seconds, those named _bytes bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from bessemer.distributed.stages import rank_rows
from bessemer.model.element_bytes import FP32
from bessemer.model.flops import tokens_seen
from bessemer.plan.devices import DeviceSpec
from bessemer.plan.estimate import experts
from bessemer.plan.estimate.experts import BlockMatmul
from bessemer.plan.estimate.job import ELEMENT_BYTES, Job, Physics
from bessemer.plan.mixture_of_experts import MixtureConfig

# Tiles that cuBLAS and CUTLASS make of a matmul, rows x columns, and what the inner loop reaches of the best: a tile of half
# the size reads its operands twice as often from shared memory (CUTLASS's "Efficient GEMM" notes).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))


# FlashAttention's causal forward and backward together at long sequences and heads of 128, over the best matmul. Version 2 on
# an A100: 182 TFLOP/s at 8,192 tokens and 189 at 16,384 (Dao-AILab/flash-attention's README, its A100 figure; heads of 64 reach
# a tenth less: 165 and 171). Version 3 on an H100: forward 602 and 616 at those lengths (its H100 figure), both passes assumed
# to reach 540. Versions before 3 use Ampere's instructions, with which an H100 reaches 294 to 328 TFLOP/s (its H100 figure of
# version 2; PyTorch's own build 288 to 304 forward, pytorch/benchmark's pull request 2296), too little to be held back by the
# power. Version 1's share is no published figure (its A100 figure has 80 TFLOP/s, which is 0.30): it and the power of the head
# size were set with MPT's A100 rows in view.
FLASH = {1: 0.41, 2: 0.67, 3: 0.68}
OLD_KERNELS, AMPERE = 0.56, 400e12


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of a piece of work on the device by kind, and the kernels that it launches."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmuls + self.attention + self.elementwise

    def __add__(self, other: WorkSeconds) -> WorkSeconds:
        matmuls, attention = self.matmuls + other.matmuls, self.attention + other.attention
        return WorkSeconds(matmuls, attention, self.elementwise + other.elementwise, self.kernels + other.kernels)

    def times(self, factor: float) -> WorkSeconds:
        """So many times the work."""
        matmuls, attention = self.matmuls * factor, self.attention * factor
        return WorkSeconds(matmuls, attention, self.elementwise * factor, self.kernels * factor)


# A side that is no multiple of 16 bytes keeps a matmul off the matrix units or makes them load number by number (NVIDIA, "Matrix
# Multiplication Background", section 5); the plain units' 16-bit rate is a quarter of an A100's peak.
MISALIGNED = 0.25


@lru_cache(maxsize=65_536)
def matmul(
    rows: int, columns: int, inner: int, precision: str, device: DeviceSpec, physics: Physics, batches: int = 1,
    is_grouped: bool = False, sums: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of matmuls (rows x inner) by (inner x columns): the slower of multiplying and reading.

    Grouped ones have a matrix each and little to do with it: both times add (docs/background/plan-accuracy.md compares).
    With `sums` the result is added to one in fp32.

    Multiplying: whole tiles, whole waves of tiles over the device's units, the best of the tiles, less what a short inner
    dimension and sides of odd length lose.
    """
    best = device.achievable_flops(precision) * device.sustained * physics.matmuls
    fill = inner / (inner + physics.depth)
    flops = 2.0 * batches * rows * columns * inner
    size = ELEMENT_BYTES[precision]
    if size < FP32 and (inner * size % 16 or columns * size % 16):
        fill *= MISALIGNED
    share = 0.0
    for high, wide, reach in TILES:
        tiles = batches * ceil(rows / high) * ceil(columns / wide)
        used = batches * rows * columns / (tiles * high * wide)
        if device.multiprocessors:
            used *= tiles / (ceil(tiles / device.multiprocessors) * device.multiprocessors)
        share = max(share, used * reach)
    moved = batches * (size * (rows * inner + inner * columns) + (8 if sums else size) * rows * columns)
    multiplying, reading = flops / (best * share * fill), moved / (device.bandwidth * physics.bandwidth)
    return (multiplying + reading if is_grouped else max(multiplying, reading)) + physics.start


@dataclass(frozen=True)
class BlockWork:
    """Forward and backward work of a block for a micro-batch, and what recompute does again of it: all, all that the backward
    pass needs, the scores, or every second matmul."""

    forward: WorkSeconds
    backward: WorkSeconds
    needed: WorkSeconds
    scores: WorkSeconds
    matmuls_again: WorkSeconds


# fp8 matmuls with a scale for each row, over those with one for a tensor: set so that Llama 3 8B on 8 H100s makes 0.886 of the
# tokens, casts included; torchtitan's commit 7a04053 has 6,412 of 7,186 a second, torchao's training benchmarks 6,768 of 7,690.
ROWS = 0.83
# Bytes an element of attention's output that merging a ring step's part into the sum moves: output and part read in fp32, the
# difference, the weighted sum and their logarithms each written and read (torch.distributed's _SDPAMerger, eager).
MERGE = 40.0


@lru_cache(maxsize=16_384)
def block(job: Job, physics: Physics) -> BlockWork:
    """One block's work on one device, all layers alike (windows, and layers with and without experts, on their average).

    backward: two matmuls for each of the forward's; element-wise passes read what arrives besides what was kept.
    """
    model, layout, precision, framework = job.model, job.layout, job.precision, job.framework
    device, tokens, tensor = job.cluster.device, job.micro_batch_tokens, layout.tensor
    split = tensor if layout.sequence_parallel else 1
    shapes = experts.block_matmuls(model, tensor, tokens, split, layout.expert, framework.imbalance)

    def seconds(one: BlockMatmul, rows: int, columns: int, inner: int, *, sums: bool = False) -> float:
        each = matmul(
            rows, columns, inner, precision, device, physics, one.batches, one.is_grouped, sums and one.is_grouped
        )
        return one.share * each

    forward = sum(seconds(one, one.rows, one.columns, one.inner) for one in shapes)
    is_stopped = model.norm_position == "input" and not model.expert_parameters
    last = seconds(shapes[-1], shapes[-1].rows, shapes[-1].columns, shapes[-1].inner) if is_stopped else 0.0
    backward = sum(
        seconds(one, one.rows, one.inner, one.columns) + seconds(one, one.inner, one.columns, one.rows, sums=True)
        for one in shapes
    )
    if precision == "fp8":
        share = (ROWS if framework.fp8 == "row" else 1.0) / (device.sustained if framework.fp8_sustained else 1.0)
        forward, last, backward = forward / share, last / share, backward / share
    scores = attention(job, physics)
    qkv, hidden, copied = experts.hidden_widths(model, tensor, split)
    kept = elementwise_bytes(job, qkv, hidden * (2 if model.gated else 1), hidden, split)
    kept += tokens * copied * ELEMENT_BYTES[precision] * experts.COPIES_MOVED
    if layout.context > 1 and framework.context == "ring":
        kept += MERGE * layout.context * tokens * experts.heads_of_rank(model, tensor)[0] * model.head_dim
    passes = kept / (device.bandwidth * physics.bandwidth)
    kernels = framework.kernels + (2 if tensor > 1 else 0)
    if isinstance(model, MixtureConfig):
        kernels += round(model.mixture_share * framework.expert_kernels)
    cast = cast_bytes(tokens, shapes, model.width, split, framework.fp8) if precision == "fp8" else (0.0, 0.0)
    cast_forward, cast_backward = (each / (device.bandwidth * physics.bandwidth) for each in cast)
    return BlockWork(
        WorkSeconds(forward, scores[0], passes + cast_forward, kernels),
        WorkSeconds(backward, scores[1], passes * BACKWARD_PASSES + cast_backward, kernels),
        WorkSeconds(forward - last, scores[0], passes + cast_forward, kernels),
        WorkSeconds(0.0, scores[0], 0.0, 6.0 if framework.attention == "unfused" else 1.0),
        WorkSeconds(forward / 2, 0.0, passes + cast_forward / 2, kernels / 2),
    )


def cast_bytes(
    tokens: int, shapes: Sequence[BlockMatmul], width: int, split: int, scales: str
) -> tuple[float, float]:  # fmt: skip
    """Bytes that casting a block's operands to 8 bits moves, forward and backward (torchao's float8_linear.py). split: over how
    many tensor ranks sequence parallelism divides what is W wide.

    Weights of experts are cast once a step, which is left out (Transformer Engine, is_first_microbatch): there are many for a
    token. Each operand is read for its largest number, read again and written. A scale for each tensor: once, on a rank's own
    tokens, since what is gathered is cast before; for the weights' gradients both operands are transposed in 8 bits. A scale for
    each row: every operand twice from 16 bits, along either side, and what is gathered only after it (torchtitan's
    parallelize_llama.py gathers 8 bits for tensor scales alone)."""
    sizes = [(one.share * one.rows * one.batches / tokens, one.share * one.batches, one) for one in shapes]
    inner, outer = sum(each * one.inner for each, _, one in sizes), sum(each * one.columns for each, _, one in sizes)
    weights = sum(count * one.inner * one.columns for _, count, one in sizes if not one.is_grouped)
    if scales == "row":
        return 5.0 * (tokens * inner + weights), 10.0 * tokens * outer + 5.0 * (tokens * inner + weights)
    elsewhere = 2 * (width - width / split)  # of the two matmuls that read, and of the two that write, what is W wide
    return (
        5.0 * (tokens * (inner - elsewhere) + weights),
        5.0 * tokens * (outer - elsewhere) + 2.0 * tokens * (outer + inner) + 2.0 * weights,
    )


# Element-wise passes of a backward read the gradient besides what was kept: 3 movements for 2 (norms, activations).
BACKWARD_PASSES = 1.6
# Kernels of a backward pass are launched by autograd's C++ threads: twice as many at less than half the cost each, counted as
# those of the forward pass.


def elementwise_bytes(job: Job, qkv: float, up: float, mlp: float, split: int) -> float:
    """Bytes that the element-wise passes of a block's forward read and write: two norms, two sums with the residual (with
    dropout where the framework has it), positions, the activation. split: how sequence parallelism divides the first two.

    Narayanan et al. 2021, section 4.2, name the kernels that are fused; unfused, each step reads and writes by itself.
    """
    model, framework, size = job.model, job.framework, ELEMENT_BYTES[job.precision]
    norm = 2 * size if framework.fused or model.norm == "layer" else 6 * size
    residual = 3 * size + (1 if framework.dropout else 0) + (0 if framework.fused else 2 * size)
    positions = 0 if model.positions == "learned" else 2 * size if framework.fused else 6 * size
    layout = 2 * size if framework.attention == "unfused" else size
    activation = size * (up + mlp) if framework.fused else size * (up + 4 * mlp)
    return job.micro_batch_tokens * (
        2 * (norm + residual) * model.width / split + (positions + layout) * qkv + activation
    )


def attention(job: Job, physics: Physics) -> tuple[float, float]:
    """Seconds of a block's attention on one device, forward and backward.

    Flash (Dao 2023, section 4.1): the causal half of 4 T s H D FLOPs, 2.5 times in the backward pass, at the framework's share of
    the peak. Unfused: the whole square; the scores are written, read by the softmax, written, dropped out, read by the second
    matmul, in 16 bits; the backward pass reads and writes each again besides its own.
    """
    model, framework, device, tokens = job.model, job.framework, job.cluster.device, job.micro_batch_tokens
    size, length, context = ELEMENT_BYTES[job.precision], model.sequence_length, job.layout.context
    heads = experts.heads_of_rank(model, job.layout.tensor)[0]
    wide = "bf16" if job.precision == "fp8" else job.precision  # attention's matmuls stay in 16 bits
    period = model.layers if model.global_layers else min(model.layers, 2 * (model.global_every or 1))
    seen = sum(tokens_seen(model, layer) for layer in range(period)) / period
    if framework.attention == "flash":
        ramp = seen / (seen + 256)  # short sequences fill few blocks of a head
        old = framework.flash < 3 and device.peak(wide) > AMPERE
        rate = device.achievable_flops(wide) * FLASH[framework.flash] * (OLD_KERNELS if old else device.sustained)
        rate *= ramp * min(model.head_dim / 128, 1.0) ** 0.2
        flops = 4.0 * tokens * seen * heads * model.attention_width
        moved = size * tokens * 4 * heads * model.head_dim / (device.bandwidth * physics.bandwidth)
        forward = max(flops / rate, moved)
        return forward + physics.start, max(2.5 * flops / rate, 2 * moved) + physics.start
    batches = max(tokens * context // length, 1) * heads
    rows = length // context
    one = matmul(rows, length, model.head_dim, wide, device, physics, batches)
    other = matmul(rows, model.head_dim, length, wide, device, physics, batches)
    elements = float(batches) * rows * length
    drop = 1 if framework.dropout else 0
    soft = elements * (2 * size + drop * (2 * size + 1)) / (device.bandwidth * physics.bandwidth)
    back = elements * (3 * size + drop * (2 * size + 1)) / (device.bandwidth * physics.bandwidth)
    forward = (one + other) / physics.attention + soft + 3 * physics.start
    backward = 2 * (one + other) / physics.attention + back + 4 * physics.start
    return forward, backward


def embedding(job: Job, physics: Physics) -> WorkSeconds:
    """Looking rows up, and adding their gradients up in fp32: a row read and written, then read twice and written."""
    moved = job.micro_batch_tokens * job.model.width * (3 * ELEMENT_BYTES[job.precision] + 8)
    return WorkSeconds(0.0, 0.0, moved / (job.cluster.device.bandwidth * physics.bandwidth), 3)


def head(job: Job, physics: Physics) -> tuple[WorkSeconds, WorkSeconds]:
    """The last norm, the logits and the loss, forward and backward; in fp8 too the logits stay in 16 bits.

    The loss in fp32 (Shoeybi et al. 2019, section 3): cast, largest, exponential and sum each pass over the logits; fused, one
    reads and one writes.
    """
    model, framework, device, tokens = job.model, job.framework, job.cluster.device, job.micro_batch_tokens
    precision = "bf16" if job.precision == "fp8" else job.precision
    columns = rank_rows(model.vocabulary, job.layout.tensor)
    forward = matmul(tokens, columns, model.width, precision, device, physics)
    backward = matmul(tokens, model.width, columns, precision, device, physics)
    backward += matmul(model.width, columns, tokens, precision, device, physics)
    logits = float(tokens) * columns / (device.bandwidth * physics.bandwidth)
    passes = (6, 6) if framework.logits == "chunked" or framework.fused else (18, 14)
    return (WorkSeconds(forward, 0.0, logits * passes[0], 12), WorkSeconds(backward, 0.0, logits * passes[1], 12))
