"""Activation checkpointing: which blocks recompute their activations in the backward pass.

Losses and gradients are bit-identical with and without it; it trades time for memory (Chen et al. 2016, "Training deep nets
with sublinear memory cost"; selective: Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, create_selective_checkpoint_contexts

from bessemer.common.console import size
from bessemer.common.errors import InputError
from bessemer.distributed.memory import Memory, peak_memory
from bessemer.model.attention import LayerKVCache, recompute
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer, build_model
from bessemer.recipe import Parallel, ResolvedTrain
from bessemer.train.device import Device, available_bytes, resident_bytes
from bessemer.train.engine import concurrent_micro_batches
from bessemer.train.loss import chunked_cross_entropy

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten._grouped_mm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    MATMULS.add(torch.ops.mkldnn._linear_pointwise.default)


def memory_of(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, device: Device, blocks: int, base: int
) -> Memory:
    """Return the peak memory of a step on this device if `blocks` blocks are recomputed, for the process that needs the most.

    `base` is the number of bytes that the process holds before its model.
    """
    concurrent = 1
    if layout.world == 1:
        concurrent = concurrent_micro_batches(train, config.sequence_length, device.torch_device, device.compile)
    return peak_memory(
        train, layout, config, device.precision.element_bytes, before_model=base, recomputed_per_rank=blocks,
        is_cuda=device.is_cuda, concurrent=concurrent,
    )  # fmt: skip


def blocks_recomputed(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, device: Device, base: int | None = None
) -> int:
    """Return the number of blocks that each process recomputes, starting with its first block.

    `train.recompute = "budget"` recomputes the fewest blocks with which a step fits into `train.memory_budget`, or all if none
    fits. "none" recomputes none, as does a frozen transformer, and other modes recompute all. `base` is as for `memory_of`; None
    measures this process.
    """
    mode = "none" if train.is_frozen else train.recompute
    if mode != "budget":
        return 0 if mode == "none" else config.layers
    base, budget = base if base is not None else base_bytes(train, layout, device), budget_bytes(train, layout, device)
    totals = (memory_of(train, layout, config, device, blocks, base).total for blocks in range(config.layers))
    return next((blocks for blocks, total in enumerate(totals) if total <= budget), config.layers)


def check_budget(train: ResolvedTrain, layout: Parallel, config: ModelConfig, device: Device, base: int) -> None:
    """Raise InputError if a step needs more than `train.memory_budget` even with every block recomputed.

    The error states the smallest budget that works. `base` is the number of bytes that the process holds before its model.
    """
    if train.memory_budget is None:
        return
    memory = memory_of(train, layout, config, device, config.layers, base)
    budget, least = budget_bytes(train, layout, device), memory.total - memory.fragmentation
    if least > budget:
        raise InputError(
            f"train.memory_budget: {size(budget)} are too few: a step takes {size(least)} with every block recomputed, "
            f"{size(base)} of them without a model; increase it, or lower train.micro_batch or train.loss_chunk"
        )


def base_bytes(train: ResolvedTrain, layout: Parallel, device: Device) -> int:
    """Return the bytes of a process without its model.

    On a CPU these are its libraries, including those that the first step loads. On a GPU it is 0.
    """
    if device.is_cuda:
        return 0
    if device.compile:
        import torch._inductor.compile_fx
    else:
        _load_fused_kernels(device.precision.autocast)
    if layout.world > 1 or (train.recompute != "none" and not train.is_frozen):
        import torch._dynamo  # noqa: F401 (DDP, FSDP2 and torch's checkpoint load it, which takes 70 to 80 MB)
    return resident_bytes()


@functools.lru_cache(maxsize=1)
def _load_fused_kernels(autocast: torch.dtype | None) -> None:
    """Run the fused kernels on a tiny model: with numba and their machine code they take 150 MB of a process."""
    config = ModelConfig(16, layers=1, width=16, heads=2, kv_heads=2, head_dim=8, mlp_width=16, sequence_length=16)
    model, tokens_BT = build_model(config, 0), torch.zeros(1, 16, dtype=torch.int64)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        hidden_BTD = model(tokens_BT)
    loss = chunked_cross_entropy(hidden_BTD[0], model.head.weight, tokens_BT[0], chunk=16)
    torch.autograd.backward(loss.total)


def budget_bytes(train: ResolvedTrain, layout: Parallel, device: Device) -> int:
    """Return the bytes that a step may use by train.memory_budget, including the base of the process."""
    budget = train.memory_budget
    if budget is not None and budget > 1:
        return int(budget)
    return int((budget or 1.0) * (base_bytes(train, layout, device) + available_bytes(device)))


def apply_recompute(model: Transformer, mode: str, blocks: int) -> None:
    """Make the first `blocks` blocks of this process recompute activations in the backward pass. Call it before compilation.

    In mode "selective" they keep the outputs of matmuls and attention, in other modes only the input of the block.

    The first blocks are chosen because the backward pass frees the others' activations before it recomputes these.
    """
    keeps_last = model.config.recomputes_mlp_output
    # A joint parameter counts as one matmul, and so do the experts of a layer.
    held = [block for block in model.blocks if block is not None]  # None is a block of another pipeline stage
    for block in held[:blocks]:
        parts: tuple[Any, ...] = block.attention, block.mlp
        facts = [parameter for part in parts for parameter in part.facts.parameters]
        matmuls = sum(parameter.is_matrix for parameter in facts)
        has_hooks = any(hasattr(module, "fsdp_mesh") for module in block.modules())
        selective = functools.partial(_selective_contexts, matmuls, keeps_last, has_hooks)
        contexts = selective if mode == "selective" else None
        block.forward = _recomputed(block.forward, contexts)  # type: ignore[method-assign]


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def _recomputed(forward: Callable[..., Tensor], contexts: Contexts | None) -> Callable[..., Tensor]:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def recomputed(
        x_BTD: Tensor, rotation: Any, scope: Any, cache: LayerKVCache | None = None, masks: DropoutMasks | None = None
    ) -> Tensor:
        if cache is not None or not torch.is_grad_enabled():
            return forward(x_BTD, rotation, scope, cache, masks)
        return recompute(forward, x_BTD, rotation, scope, None, masks, **options)  # type: ignore[no-any-return]

    return recomputed


def _selective_contexts(
    matmuls: int, keeps_last: bool, has_hooks: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of the forward pass and its recomputation that save the outputs of matmuls and attention only.

    A block has `matmuls` matmuls. The output of its last one is saved only if `keeps_last`. With `has_hooks` FSDP2 gathers
    weights inside the block.
    """
    counted = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator not in MATMULS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counted[context.is_recompute] += 1
        last = counted[context.is_recompute] == matmuls
        return CheckpointPolicy.PREFER_RECOMPUTE if last and not keeps_last else CheckpointPolicy.MUST_SAVE

    forward, recomputation = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, _ReadSaved(policy, recomputation.storage) if has_hooks else recomputation  # type: ignore[no-untyped-call]


class _ReadSaved(_CachedTorchDispatchMode):
    """The context of a recomputation that may run other operations than the forward pass did, except those that are saved.

    torch's own context needs the same operations, but FSDP2's hooks do not gather and free weights at the same places.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MATMULS or func in ATTENTION:
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
