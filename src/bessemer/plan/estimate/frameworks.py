"""Framework profiles: what differs between training programs in memory and time. The programs stand in frameworks.toml."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Literal

from bessemer.errors import InputError

# How blocks are cut into stages: balanced (`stage_cut.balanced`), even (what is left over to the first stages), ceiling (every
# stage takes the larger number while there are blocks), middle (what is left over to the stages after the first), cumulative
# (by running costs, as nanotron), ends (even, where embedding and head count as a block each: DeepSpeed's
# type:transformer|embedding).
Cut = Literal["balanced", "even", "ceiling", "middle", "cumulative", "ends"]


@dataclass(frozen=True)
class Framework:
    """The profile of a training program.

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

    What changes memory alone.

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


def _read() -> dict[str, Framework]:
    """The programs of frameworks.toml by name."""
    text = resources.files(__package__).joinpath("frameworks.toml").read_text(encoding="utf-8")
    frameworks: dict[str, Framework] = {}
    for name, keys in tomllib.loads(text).items():
        like = frameworks[keys.pop("like")] if "like" in keys else Framework(name)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()
        }
        frameworks[name] = replace(like, name=name, **values)
    return frameworks


FRAMEWORKS = _read()


def find(name: str) -> Framework:
    """A framework by name. Raises InputError with the nearest names."""
    if name not in FRAMEWORKS:
        near = difflib.get_close_matches(name.lower(), list(FRAMEWORKS), n=2, cutoff=0.4)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise InputError(f"framework {name!r}: not known; {meant}There are {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
