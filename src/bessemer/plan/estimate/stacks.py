"""How the software that runs a step behaves, where that changes memory or time: one set of habits for each."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from bessemer.errors import InputError
from bessemer.plan.estimate.keeps import KEEPS, PLAIN, Keeps


@dataclass(frozen=True)
class Stack:
    """Habits of a training program.

    weight_bytes: of the weights that the products read; master_bytes: of a second, wider copy that the optimizer keeps (0: the
    weights are it); gradient_bytes: of a gradient that waits for the optimizer; moment_bytes: of the optimizer's moments, both
    together; attention: unfused (scores and probabilities are written out) or flash (they are not; Dao et al. 2022); logits:
    whole (kept for the backward pass, in fp32) or chunked; fused: element-wise passes joined by a compiler.

    What changes time. Computing: launch: seconds of the host for a kernel; kernels: that a block's forward pass launches, the
    backward pass costs the host as much; across: host seconds of a block's pass for each further node that a tensor group spans;
    tangled: host seconds of a block's pass that tensor collectives add where a pipeline's transfers to other nodes stand in the
    same queue, and the power of the tensor ranks with which they grow; flash: FlashAttention's version (3: any that is made for
    the chip, cuDNN's too); fp8: one scale for a tensor or one for each of its rows; selective: what selective recompute
    computes again, attention's scores (Korthikanti et al. 2022, section 5) or every second product (torchtitan's per-operation
    checkpointing); early_stop: full recompute ends where the backward pass has what it needs, before a block's last product
    (torch.utils.checkpoint without re-entry); accumulate: bytes a parameter that adding a micro-batch's gradients to the sum
    moves, where no product does it by itself; balanced: pipeline stages are cut by cost, the head's included, and not by number
    of blocks; parallel_block: attention and MLP read the same input and are summed once (Wang & Komatsuzaki 2021), which halves
    the tensor communication; copies: what a tensor rank gathers along the sequence is copied into place, and what it scatters is
    laid out before, where a micro-batch has more than one sequence (torch/distributed/_functional_collectives.py: chunk, cat);
    sequence_parallel: whether a recipe's layout divides the tokens between the products (not before Korthikanti et al. 2022).

    Sending: tensor_overlap, data_overlap, pipeline_overlap: shares of that communication that run beside computation where
    there is enough of it; paired: which of the tensor communication that is, all or what PyTorch's micro-pipelining finds a
    product for; sharded_overlap: of the exchange of a step under ZeRO-1, where that differs; context: ring attention (keys go
    round, partial results are merged; Liu et al. 2023), a gather of all keys (Grattafiori et al. 2024, section 3.3.2), or an
    exchange of heads for tokens (Jacobs et al. 2023); repeats_keys: keys and values are repeated for every query head before they
    travel; reduce_bytes: of a gradient on its way; gather_bytes: of a weight on its way; scatter: when sharded gradients
    (ZeRO-2, 3) travel; sums: whether a rank receives its shard of the summed gradients, or all of them and keeps its own;
    bucket: parameters that travel together in the one exchange of a step (0: all); gathers, scatters: collectives in which ZeRO-3
    fetches a block and sends its gradients; regathers: full recompute and the backward pass fetch it each for itself; listed:
    seconds for each rank's part, where a collective is handed a list of them and copies them one by one.

    keeps: what changes memory alone.
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
    launch: float = 36e-6  # fitted to the single-node A100 set, whose small cases wait for the host
    kernels: int = 30
    across: float = 0.0
    tangled: tuple[float, float] = (0.0, 0.0)
    flash: Literal[1, 2, 3] = 2
    fp8: Literal["tensor", "row"] = "tensor"
    selective: Literal["attention", "products"] = "attention"
    early_stop: bool = False
    accumulate: float = 0.0
    balanced: bool = False
    parallel_block: bool = False
    sequence_parallel: bool = True
    copies: bool = False
    tensor_overlap: float = 0.0
    paired: Literal["all", "torch"] = "all"
    data_overlap: float = 0.0
    sharded_overlap: float | None = None
    pipeline_overlap: float = 0.0
    context: Literal["ring", "gather", "exchange"] = "gather"
    repeats_keys: bool = False
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    scatter: Literal["micro-batch", "step"] = "step"
    sums: Literal["scatter", "all"] = "scatter"
    bucket: float = 0.0
    gathers: int = 1
    scatters: int = 1
    regathers: bool = False
    listed: float = 0.0
    keeps: Keeps = PLAIN


_STACKS = (
    # This program on GPUs: fp32 weights that FSDP2 gathers in 16 bits, gradients added up in fp32, compiled blocks,
    # FlashAttention through PyTorch, keys gathered over context, chunked loss, stages cut by cost.
    Stack(
        "bessemer", weight_bytes=4.0, master_bytes=0.0, logits="chunked", fused=True, kernels=20, balanced=True,
        early_stop=True, data_overlap=0.8, scatter="micro-batch",
    ),
    # Narayanan et al. 2021: fused softmax and bias kernels, dropout, all-reduces of both kinds after what they wait for.
    Stack("megatron-lm-2021", attention="unfused", dropout=True, fused=True, sequence_parallel=False),
    # Korthikanti et al. 2022, section 6: the same with sequence parallelism and selective recompute.
    Stack("megatron-lm-2022", attention="unfused", dropout=True, fused=True),
    # Megatron-Core with --overlap-grad-reduce, --overlap-param-gather and --tp-comm-overlap (its README, "Performance"); buckets
    # as its DistributedDataParallel makes them.
    Stack(
        "megatron-core", fused=True, kernels=25, flash=3, tensor_overlap=0.6, data_overlap=0.9, pipeline_overlap=0.5,
        bucket=40e6,
    ),
    # The same with these switches off, as they are by default, and context parallelism by exchange (cp_comm_type a2a).
    Stack("megatron-core-sync", fused=True, kernels=25, flash=3, context="exchange"),
    # Megatron-DeepSpeed of BLOOM and MT-NLG: the 2021 kernels, ZeRO-1 after the backward pass, 16-bit gradients added up in fp32
    # and summed on all ranks before each keeps its part (DeepSpeed's stage_1_and_2.py of February 2022, allreduce_bucket).
    Stack(
        "megatron-deepspeed", attention="unfused", dropout=True, fused=True, reduce_bytes=2.0, gradient_bytes=2.0,
        sequence_parallel=False,
        accumulate=10.0, sums="all",
    ),
    # Jiang et al. 2024, section 3: parallel block, FlashAttention-2, all three kinds of communication beside computation.
    Stack(
        "megascale", fused=True, kernels=20, parallel_block=True, tensor_overlap=0.8, data_overlap=0.9, pipeline_overlap=0.9,
        bucket=40e6,
    ),
    # Grattafiori et al. 2024, section 3.3.2: asynchronous pipeline transfers, gathers and scatters beside computation.
    Stack("llama3", fused=True, kernels=25, flash=3, data_overlap=0.9, pipeline_overlap=0.9),
    # nanotron's scaling_benchmarks.py: REDUCE_SCATTER with async communication, FlashAttention-2, eager, fp32 gradients, which
    # travel in torch's buckets of 25 MB of bf16. kernels, across and tangled: fitted to the 1.34B and 8.86B models of its H100
    # sweep below 64 nodes. data_overlap, sharded_overlap: set by hand from rows of 1.34B, 3.57B and 8.86B. Only the 80B model is
    # left out of all of them, though it was in view.
    Stack(
        "nanotron", kernels=60, across=2e-3, tangled=(0.8e-3, 1.2), balanced=True, tensor_overlap=0.3, data_overlap=0.75,
        sharded_overlap=0.0, bucket=12.5e6,
    ),
    # torchtitan: FSDP2 with prefetching, torch.compile of each block, per-operation checkpointing, FlashAttention-2, keys
    # repeated (its models/llama/model.py, repeat_kv).
    Stack(
        "torchtitan", weight_bytes=4.0, master_bytes=0.0, fused=True, kernels=20, selective="products", early_stop=True,
        data_overlap=0.9, context="ring", repeats_keys=True, copies=True, paired="torch",
        scatter="micro-batch",
    ),
    Stack(
        "torchtitan-eager", weight_bytes=4.0, master_bytes=0.0, kernels=40, selective="products", early_stop=True,
        data_overlap=0.9, context="ring", repeats_keys=True, copies=True, paired="torch",
        scatter="micro-batch",
    ),
    # LLM Foundry: FSDP1, FlashAttention in Triton, amp (fp32 shards) or pure bf16.
    Stack(
        "fsdp", weight_bytes=4.0, master_bytes=0.0, kernels=35, flash=1, early_stop=True, data_overlap=0.9, reduce_bytes=2.0,
        scatter="micro-batch",
    ),
    # DeepSpeed ZeRO-3 of Narayanan et al. 2021, section 5.2, on Megatron's model, as DeepSpeed's partition_parameters.py of March
    # 2021 has it: the 4 matrices are fetched one by one (vectors stay, below stage3_param_persistence_threshold), all streams of
    # the device synchronised before each, so that nothing hides (pull request 1188 removed it in June); the gradients of all 12
    # tensors are scattered; each collective takes a list of one view for each rank, which torch copies one by one: 5 us of a
    # launch and 3 of a view, assumed. Recompute fetches for itself (Rajbhandari et al. 2021, section 4.1: 3 loads).
    Stack(
        "deepspeed-zero3", attention="unfused", dropout=True, fused=True, reduce_bytes=2.0,
        sequence_parallel=False, scatter="micro-batch", gathers=4,
        scatters=12, regathers=True, listed=8e-6,
    ),
)  # fmt: skip
_BY_NAME = {stack.name: stack for stack in _STACKS}
# Later versions, which differ in what they keep: DeepSpeed's BF16_Optimizer adds 16-bit gradients up in fp32; torchtitan compiles
# its loss.
_LATER = (
    replace(_BY_NAME["megatron-deepspeed"], name="megatron-deepspeed-bf16", gradient_bytes=4.0, reduce_bytes=4.0),
    replace(_BY_NAME["torchtitan"], name="torchtitan-2025"),
)
STACKS = {stack.name: replace(stack, keeps=KEEPS.get(stack.name, PLAIN)) for stack in (*_STACKS, *_LATER)}


def find(name: str) -> Stack:
    """A stack by name. Raises InputError with the nearest names."""
    if name not in STACKS:
        near = difflib.get_close_matches(name.lower(), list(STACKS), n=2, cutoff=0.4)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(f"stack {name!r}: not known; {meant}There are {', '.join(STACKS)}")
    return STACKS[name]
