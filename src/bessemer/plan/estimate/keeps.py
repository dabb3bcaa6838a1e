"""What a training program keeps in memory beside the textbook's parts: one set of habits for each, read from its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# How blocks are cut into stages: balanced (`stage_cut.balanced`), even (what is left over to the first stages), ceiling (every
# stage takes the larger number while there are blocks), middle (what is left over to the stages after the first), cumulative
# (by running costs, as nanotron), ends (even, where embedding and head count as a block each: DeepSpeed's
# type:transformer|embedding).
Cut = Literal["balanced", "even", "ceiling", "middle", "cumulative", "ends"]


@dataclass(frozen=True)
class Keeps:
    """Habits that change memory and nothing else.

    State: fully_sharded: weights are divided as they are kept, and gathered to be used (FSDP); else whole while zero < 3; cut:
    of the blocks into stages; fresh_bytes: of each gradient as the backward pass gives it, where all of them live beside those
    that wait; copy_bytes: of gradients copied for their exchange; step_bytes: for each weight whose moments are here, that the
    optimizer's step takes on top; bucket_bytes: of exchange buffers of fixed size; scratch_gradients: one 16-bit gradient of
    each shape of matrix is kept.

    Loss: logit_bytes: of each logit in its fullest moment, all copies together; split_logit_bytes: more of them where ranks
    share the vocabulary; loss_chunk: tokens of a chunk, where it is done in chunks.

    Activations: unfused_gate: a gated MLP keeps its activation's result beside the product; gathered: what tensor ranks gathered
    as a product's input waits for the backward pass; gathers_context: context ranks hold the keys and values of all, of every
    query head; pipes: what a stage holds to send and receive: one place for each way (plain), besides what it sent on, of each
    micro-batch in flight (deepspeed), a place for the gradients of every micro-batch, and on the last stage their 16-bit logits
    (torch.distributed.pipelining).

    Device: base_bytes: context, libraries and communicators; slack: share of what a step allocates that the allocator holds on
    top, in blocks that nothing fits; 5% is where the errors of torchtitan's set, the one of allocator peaks, lie around 0.
    """

    fully_sharded: bool = False
    cut: Cut = "even"
    fresh_bytes: float = 0.0
    copy_bytes: float = 0.0
    step_bytes: float = 0.0
    bucket_bytes: float = 0.0
    scratch_gradients: bool = False
    logit_bytes: float = 10.0
    split_logit_bytes: float = 0.0
    loss_chunk: int = 4096
    unfused_gate: bool = False
    gathered: bool = False
    gathers_context: bool = False
    pipes: Literal["plain", "deepspeed", "torch"] = "plain"
    base_bytes: float = 1.5e9
    slack: float = 0.05


PLAIN = Keeps()
# 16-bit logits, fp32 ones that the loss works on in place, and their 16-bit gradient (mpu/cross_entropy.py).
_MEGATRON = Keeps(logit_bytes=8.0)
# Transformer Engine hands autograd one empty gradient of each shape (`get_dummy_wgrad`, since 2.3), and its fused cross entropy
# puts the gradient where the logits were.
_CORE = Keeps(scratch_gradients=True, logit_bytes=4.0)
# CUDA 11 loads every kernel, 1 to 2 GB, and ten communicators hold some hundred MB each; 4 GB is where the median error of
# BLOOM's set is 0. Exchange in buckets of 5e8 gradients (reduce_bucket_size); the step of ZeRO 0 to 2 flattens the gradients of
# the weights it owns and copies them to fp32 (zero/stage_1_and_2.py, step).
_DEEPSPEED = replace(_MEGATRON, cut="ceiling", step_bytes=6.0, bucket_bytes=1e9, pipes="deepspeed", base_bytes=4e9)
# As of December 2024 the loss is not compiled ("compiling loss function causes CUDA errors", its train.py), so the allocator has
# 16-bit logits and three fp32 blocks, of logits, log-softmax and gradient; four where the vocabulary is shared (loss_parallel),
# which writes out the shifted logits too.
_TORCHTITAN = Keeps(
    fully_sharded=True, cut="middle", logit_bytes=14.0, split_logit_bytes=4.0, gathered=True, gathers_context=True,
    pipes="torch",
)  # fmt: skip

KEEPS = {
    "bessemer": Keeps(fully_sharded=True, cut="balanced", gathered=True),
    "megatron-lm-2021": _MEGATRON,
    "megatron-lm-2022": _MEGATRON,
    "megatron-core": _CORE,
    "megatron-core-sync": _CORE,
    "megascale": _CORE,
    "llama3": Keeps(fully_sharded=True, cut="middle", logit_bytes=8.0, gathers_context=True),
    "megatron-deepspeed": _DEEPSPEED,
    # DeepSpeed's BF16_Optimizer: fp32 sums beside the 16-bit gradients, which stay, exchanged in flat copies of 5e8
    # (MEMORY_OPT_ALLREDUCE_SIZE), and no copies in the step; BLOOM's cut from then on.
    "megatron-deepspeed-bf16": replace(_DEEPSPEED, cut="ends", step_bytes=0.0, fresh_bytes=2.0, bucket_bytes=2e9),
    "deepspeed-zero3": replace(_DEEPSPEED, step_bytes=0.0),
    # DDP's buckets hold the 16-bit gradients once more (gradient_as_bucket_view is off).
    "nanotron": Keeps(copy_bytes=2.0, unfused_gate=True, gathered=True, cut="cumulative"),
    "torchtitan": _TORCHTITAN,
    "torchtitan-eager": _TORCHTITAN,
    # As of 2025 the loss is compiled, which leaves the 16-bit logits and one fp32 block.
    "torchtitan-2025": replace(_TORCHTITAN, logit_bytes=6.0),
    # LLM Foundry's fused_crossentropy (flash-attn's), its default: 16-bit logits and their gradient.
    "fsdp": Keeps(fully_sharded=True, logit_bytes=4.0),
}
