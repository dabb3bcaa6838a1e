"""Computation time of a block, the embedding and the head on one device, by a roofline model.

Symbols: T tokens of a micro-batch on a device, W width, M MLP width, H heads, K KV heads, D head size, all as a device
holds them after the tensor and context splits. Functions return seconds, or bytes if their name ends in _bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from bessemer.distributed.stages import rank_rows
from bessemer.model.flops import tokens_seen
from bessemer.model.sublayers import FP32
from bessemer.plan.devices import DeviceSpec
from bessemer.plan.estimate import experts
from bessemer.plan.estimate.experts import BlockMatmul
from bessemer.plan.estimate.job import ELEMENT_BYTES, Job, Physics

# Tiles of a matmul in cuBLAS and CUTLASS (rows, columns), and the inner loop's rate relative to the best tile. A tile of half
# the size reads its operands twice as often from shared memory (CUTLASS's "Efficient GEMM" notes).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))


# Rate of FlashAttention's causal forward and backward at long sequences and heads of 128, over the best matmul. Version 2 on
# an A100: 182 TFLOP/s at 8,192 tokens and 189 at 16,384 (Dao-AILab/flash-attention's README, its A100 figure; heads of 64 reach
# a tenth less: 165 and 171). Version 3 on an H100: forward 602 and 616 at those lengths (its H100 figure), both passes assumed
# to reach 540. Versions before 3 use Ampere's instructions, with which an H100 reaches 294 to 328 TFLOP/s (its H100 figure of
# version 2; PyTorch's own build 288 to 304 forward, pytorch/benchmark's pull request 2296). That is too slow to reach the power
# limit. Version 1's share is not a published value (its A100 figure has 80 TFLOP/s, which is 0.30). It and the exponent of the
# head size were chosen with MPT's A100 rows in view.
FLASH = {1: 0.41, 2: 0.67, 3: 0.68}
OLD_KERNELS, AMPERE = 0.56, 400e12


@dataclass(frozen=True)
class WorkSeconds:
    """Device seconds of a piece of work by kind, and the number of kernels that it launches."""

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
        """Return the work multiplied by a factor."""
        matmuls, attention = self.matmuls * factor, self.attention * factor
        return WorkSeconds(matmuls, attention, self.elementwise * factor, self.kernels * factor)


# A dimension that is not a multiple of 16 bytes prevents the use of tensor cores, or makes them load single elements (NVIDIA,
# "Matrix Multiplication Background", section 5). The 16-bit rate of an A100 without tensor cores is a quarter of its peak.
MISALIGNED = 0.25


@lru_cache(maxsize=65_536)
def matmul(
    rows: int, columns: int, inner: int, precision: str, device: DeviceSpec, physics: Physics, batches: int = 1,
    is_grouped: bool = False, sums: bool = False,
) -> float:  # fmt: skip
    """Return the seconds of matmuls (rows x inner) by (inner x columns): the slower of computing and reading.

    Grouped matmuls have a separate matrix each and few rows for it, so the two times add
    (docs/background/plan-accuracy.md has the comparison). With `sums`, the result is added to an fp32 tensor. Computing
    counts whole tiles and whole waves of tiles over the multiprocessors, with the best tile size, and loses rate for a
    short inner dimension and misaligned sides.
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
    """Seconds that one block takes for a micro-batch, by part of a step.

    Attributes:
        forward: Forward pass. Full recomputation takes the same time.
        backward: Backward pass.
        needed: Recomputation of only what the backward pass reads.
        scores: Recomputation of attention scores.
        matmuls_again: Recomputation of every second matmul.
    """

    forward: WorkSeconds
    backward: WorkSeconds
    needed: WorkSeconds
    scores: WorkSeconds
    matmuls_again: WorkSeconds


# Rate of fp8 matmuls with row scales over those with tensor scales. Chosen so that Llama 3 8B on 8 H100s runs at 0.886 of the
# speed, casts included. torchtitan's commit 7a04053 has 6,412 and 7,186 tokens/s, torchao's training benchmarks 6,768 and 7,690.
ROWS = 0.83
# Bytes moved for each element of attention's output to merge the result of a ring step: output and result are read in fp32,
# and the difference, the weighted sum and their logarithms are each written and read (torch.distributed's _SDPAMerger, eager).
MERGE = 40.0


@lru_cache(maxsize=16_384)
def block(job: Job, physics: Physics) -> BlockWork:
    """Return the work of one block on one device, averaged over windows and over layers with and without experts.

    The backward pass has two matmuls for each one of the forward pass. Its element-wise passes read the incoming
    gradient in addition to the saved activations.
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
    kernels += round(experts.mixture_share(model) * framework.expert_kernels)
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
    """Return the bytes moved to cast a block's matmul operands to fp8, forward and backward.

    The casts are those of torchao's float8_linear.py. Each operand is read for its maximum, read again and written.
    With tensor scales this happens once, on a rank's own tokens, because data is cast before it is gathered; both
    operands of weight gradients are then transposed in 8 bits. With row scales, every operand is cast twice from 16
    bits, along each side, and gathered data only after the gather (torchtitan's parallelize_llama.py gathers 8 bits for
    tensor scales only). Expert weights are left out: they are cast once a step and serve many tokens (Transformer
    Engine, is_first_microbatch).

    Args:
        tokens: Tokens of a micro-batch on a device.
        shapes: Matmuls of the block's forward pass.
        width: Elements of a token's hidden state.
        split: Tensor ranks over which sequence parallelism divides hidden states.
        scales: "tensor" or "row".
    """
    sizes = [(one.share * one.rows * one.batches / tokens, one.share * one.batches, one) for one in shapes]
    inner, outer = sum(each * one.inner for each, _, one in sizes), sum(each * one.columns for each, _, one in sizes)
    weights = sum(count * one.inner * one.columns for _, count, one in sizes if not one.is_grouped)
    if scales == "row":
        return 5.0 * (tokens * inner + weights), 10.0 * tokens * outer + 5.0 * (tokens * inner + weights)
    elsewhere = 2 * (width - width / split)  # two matmuls read and two write a tensor of width W
    return (
        5.0 * (tokens * (inner - elsewhere) + weights),
        5.0 * tokens * (outer - elsewhere) + 2.0 * tokens * (outer + inner) + 2.0 * weights,
    )


# Element-wise passes of the backward pass also read the gradient: 3 movements instead of 2 (norms, activations).
BACKWARD_PASSES = 1.6
# Autograd's C++ threads launch twice as many kernels in the backward pass, at less than half the cost each, so the number of
# the forward pass is used for both.


def elementwise_bytes(job: Job, qkv: float, up: float, mlp: float, split: int) -> float:
    """Return the bytes that the element-wise passes of a block's forward pass read and write.

    These are two norms, two residual additions (with dropout where the framework has it), positions and the activation.
    Per token, attention's projections have `qkv` elements, the up (and gate) projections `up` and the MLP's activation
    `mlp`. Sequence parallelism divides norms and residuals over `split` ranks. Narayanan et al. 2021, section 4.2, lists
    the fused kernels; unfused, each operation reads and writes separately.
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
    """Return the seconds of a block's attention on one device, forward and backward.

    FlashAttention computes the causal half of 4 T s H D FLOPs, and 2.5 times that in the backward pass (Dao 2023,
    section 4.1), at the framework's share of the peak. Unfused attention computes the whole square. It writes the
    scores, reads and writes them in the softmax, applies dropout, and reads them in the second matmul, in 16 bits. Its
    backward pass reads and writes each of them again in addition to its own gradients.
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
    """Return the work of the embedding: reading and writing a row, and adding its gradient in fp32."""
    moved = job.micro_batch_tokens * job.model.width * (3 * ELEMENT_BYTES[job.precision] + 8)
    return WorkSeconds(0.0, 0.0, moved / (job.cluster.device.bandwidth * physics.bandwidth), 3)


def head(job: Job, physics: Physics) -> tuple[WorkSeconds, WorkSeconds]:
    """Return the work of the last norm, the logits and the loss, forward and backward; logits are 16-bit also in fp8.

    The loss is in fp32 (Shoeybi et al. 2019, section 3). Its cast, maximum, exponential and sum each pass over the
    logits; fused, there is one read and one write.
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
