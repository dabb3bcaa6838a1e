"""How the software that runs a step behaves, where that changes memory or time: one set of habits for each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from bessemer.errors import InputError

# How blocks are cut into stages: balanced (`stage_cut.balanced`), even (what is left over to the first stages), ceiling (every
# stage takes the larger number while there are blocks), middle (what is left over to the stages after the first), cumulative
# (by running costs, as nanotron), ends (even, where embedding and head count as a block each: DeepSpeed's
# type:transformer|embedding).
Cut = Literal["balanced", "even", "ceiling", "middle", "cumulative", "ends"]


@dataclass(frozen=True)
class Stack:
    """Habits of a training program.

    weight_bytes: of the weights that the products read; master_bytes: of a second, wider copy that the optimizer keeps (0: the
    weights are it); gradient_bytes: of a gradient that waits for the optimizer; moment_bytes: of the optimizer's moments, both
    together; attention: unfused (scores and probabilities are written out) or flash (they are not; Dao et al. 2022); logits:
    whole (kept for the backward pass, in fp32) or chunked; fused: element-wise passes joined by a compiler.

    Time. launch: seconds of the host for a kernel; kernels: that a block's forward pass launches (its backward pass twice as
    many); tensor_overlap, data_overlap, pipeline_overlap: shares of that communication that run beside computation where there
    is enough of it; reduce_bytes: of a gradient on its way to others; gather_bytes: of a weight on its way; selective: what
    selective recompute computes again: attention (scores and softmax; Korthikanti et al. 2022, section 5) or every second
    product (torchtitan's per-operation checkpointing); parallel_block: attention and MLP read the same input and are summed
    once (Wang & Komatsuzaki 2021), which halves the tensor communication.

    Memory. fully_sharded: weights are divided as they are kept, and gathered to be used (FSDP); else whole while zero < 3;
    cut: of the blocks into stages; fresh_bytes: of each gradient as the backward pass gives it, where all of them live beside
    those that wait; copy_bytes: of gradients copied for their exchange; step_bytes: for each weight whose moments are here,
    that the optimizer's step takes on top; bucket_bytes: of exchange buffers of fixed size; logit_bytes: of each logit in the
    fullest moment of the loss, all copies together; split_logit_bytes: more of them where ranks share the vocabulary;
    loss_chunk: tokens of a chunk; unfused_gate: a gated MLP keeps its activation's result beside the product;
    keeps_gathered: what tensor ranks gathered as a product's input waits for the backward pass; gathers_context: context ranks
    hold the keys and values of all; pipes: what a stage holds to send and receive: one place for each way (plain), besides what
    it sent on, of each micro-batch in flight (deepspeed), a place for the gradients of every micro-batch, and on the last
    stage their 16-bit logits (torch.distributed.pipelining); scratch_gradients: one 16-bit gradient of each shape of matrix is
    kept; base_bytes: device context, libraries and communicators; slack: share of what a step allocates that the allocator
    holds on top, in blocks that nothing fits.
    """

    name: str
    weight_bytes: float = 2.0
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    moment_bytes: float = 8.0
    attention: Literal["unfused", "flash"] = "flash"
    logits: Literal["whole", "chunked"] = "whole"
    dropout: bool = False
    fused: bool = False
    launch: float = 10e-6
    kernels: int = 30
    flash: float = 0.45
    balanced: bool = False
    regather: bool = True
    tensor_overlap: float = 0.0
    data_overlap: float = 0.0
    pipeline_overlap: float = 0.0
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    selective: Literal["attention", "products"] = "attention"
    parallel_block: bool = False
    fully_sharded: bool = False
    cut: Cut = "even"
    fresh_bytes: float = 0.0
    copy_bytes: float = 0.0
    step_bytes: float = 0.0
    bucket_bytes: float = 0.0
    logit_bytes: float = 10.0
    split_logit_bytes: float = 0.0
    loss_chunk: int = 4096
    unfused_gate: bool = False
    keeps_gathered: bool = False
    gathers_context: bool = False
    pipes: Literal["plain", "deepspeed", "torch"] = "plain"
    scratch_gradients: bool = False
    base_bytes: float = 1.5e9
    slack: float = 0.05


# torchtitan: FSDP2 with prefetching, torch.compile of each block, per-operation checkpointing.
# Memory, as of December 2024: the loss is not compiled ("compiling loss function causes CUDA errors", its train.py), so the
# allocator has 16-bit logits and three fp32 blocks: logits, log-softmax, gradient; four where the vocabulary is shared
# (loss_parallel), which writes out the shifted logits too.
_TORCHTITAN = Stack(
    "torchtitan",
    weight_bytes=4.0,
    master_bytes=0.0,
    fused=True,
    data_overlap=0.9,
    selective="products",
    kernels=20,
    fully_sharded=True,
    logit_bytes=14.0,
    split_logit_bytes=4.0,
    keeps_gathered=True,
    gathers_context=True,
    pipes="torch",
    cut="middle",
)
_STACKS = (
    # This program: fp32 weights under autocast, FlashAttention through PyTorch, chunked loss, no master copy.
    Stack(
        "bessemer",
        weight_bytes=4.0,
        master_bytes=0.0,
        logits="chunked",
        fused=True,
        data_overlap=0.8,
        gather_bytes=4.0,
        fully_sharded=True,
        cut="balanced",
        keeps_gathered=True,
    ),
    # Narayanan et al. 2021: fused softmax and bias kernels, dropout, all-reduces of both kinds after what they wait for.
    # Memory: 16-bit logits, fp32 ones that the loss works on in place, and their 16-bit gradient.
    Stack("megatron-lm-2021", attention="unfused", dropout=True, fused=True, logit_bytes=8.0),
    # Korthikanti et al. 2022, section 6: the same with sequence parallelism and selective recompute.
    Stack("megatron-lm-2022", attention="unfused", dropout=True, fused=True, logit_bytes=8.0),
    # Megatron-Core with --overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap (its README, "Performance").
    # Memory: Transformer Engine hands autograd one empty gradient of each shape (`get_dummy_wgrad`, since 2.3), and its fused
    # cross entropy puts the gradient where the logits were.
    Stack(
        "megatron-core",
        fused=True,
        tensor_overlap=0.6,
        data_overlap=0.9,
        pipeline_overlap=0.5,
        kernels=25,
        scratch_gradients=True,
        logit_bytes=4.0,
    ),
    # The same with these switches off, as they are by default.
    Stack("megatron-core-sync", fused=True, kernels=25, scratch_gradients=True, logit_bytes=4.0),
    # Megatron-DeepSpeed of BLOOM and MT-NLG: the 2021 kernels, ZeRO-1 after the backward pass.
    # Memory: 16-bit gradients, in buckets of 5e8 (DeepSpeed's reduce_bucket_size); the step of stages 0 to 2 flattens the
    # gradients of the weights it owns and copies them to fp32 (`stage_1_and_2.py`, step). base_bytes: CUDA 11 loads every
    # kernel, 1 to 2 GB, and ten communicators hold some hundred MB each; 4 GB is where the median error of BLOOM's set is 0.
    Stack(
        "megatron-deepspeed",
        attention="unfused",
        dropout=True,
        fused=True,
        logit_bytes=8.0,
        reduce_bytes=2.0,
        gradient_bytes=2.0,
        step_bytes=6.0,
        bucket_bytes=1e9,
        pipes="deepspeed",
        cut="ceiling",
        base_bytes=4e9,
    ),
    # The same with DeepSpeed's BF16_Optimizer: fp32 sums beside the 16-bit gradients, which stay, exchanged in flat copies of
    # 5e8 (MEMORY_OPT_ALLREDUCE_SIZE); embedding and head count as blocks (--pp-partition-method type:transformer|embedding).
    Stack(
        "megatron-deepspeed-bf16",
        attention="unfused",
        dropout=True,
        fused=True,
        logit_bytes=8.0,
        reduce_bytes=4.0,
        fresh_bytes=2.0,
        bucket_bytes=2e9,
        pipes="deepspeed",
        cut="ends",
        base_bytes=4e9,
    ),
    # Jiang et al. 2024, section 3: parallel block, FlashAttention-2, all three kinds of communication beside computation.
    Stack(
        "megascale",
        fused=True,
        parallel_block=True,
        tensor_overlap=0.8,
        data_overlap=0.9,
        pipeline_overlap=0.9,
        kernels=20,
    ),
    # nanotron's scaling_benchmarks.py: REDUCE_SCATTER with async communication, FlashAttention-2, eager, fp32 gradients.
    # Memory: DDP's buckets hold the 16-bit gradients once more.
    Stack(
        "nanotron",
        tensor_overlap=0.3,
        data_overlap=0.3,
        kernels=40,
        copy_bytes=2.0,
        unfused_gate=True,
        keeps_gathered=True,
        cut="cumulative",
    ),
    _TORCHTITAN,
    replace(_TORCHTITAN, name="torchtitan-eager", fused=False, kernels=40),
    # As of 2025: the loss is compiled, which leaves the 16-bit logits and one fp32 block.
    replace(_TORCHTITAN, name="torchtitan-2025", logit_bytes=6.0),
    # LLM Foundry: FSDP1, FlashAttention in Triton, amp (fp32 shards) or pure bf16.
    Stack(
        "fsdp",
        weight_bytes=4.0,
        master_bytes=0.0,
        data_overlap=0.9,
        reduce_bytes=2.0,
        kernels=35,
        fully_sharded=True,
        logit_bytes=14.0,
    ),
    # DeepSpeed ZeRO-3 of Narayanan et al. 2021, section 5.2, on Megatron's model.
    Stack("deepspeed-zero3", attention="unfused", dropout=True, fused=True, reduce_bytes=2.0, data_overlap=0.5),
)
STACKS = {stack.name: stack for stack in _STACKS}


def find(name: str) -> Stack:
    """A stack by name. Raises InputError with the nearest names."""
    if name not in STACKS:
        near = difflib.get_close_matches(name.lower(), list(STACKS), n=2, cutoff=0.4)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(f"stack {name!r}: not known; {meant}There are {', '.join(STACKS)}")
    return STACKS[name]
