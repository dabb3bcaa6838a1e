"""Activation recompute: a block keeps little of its forward pass and computes the rest again on the way back.

The losses and gradients are bit for bit those without it; memory is traded for time (Chen et al. 2016, "Training deep
nets with sublinear memory cost"; selective: Korthikanti et al. 2022, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bessemer.errors import InputError
from bessemer.layout import memory as layout_memory
from bessemer.layout.memory import Memory
from bessemer.layout.memory import memory as whole_memory
from bessemer.layout.stages import parts_of
from bessemer.model.attention import LayerCache
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer
from bessemer.recipe import Recipe
from bessemer.terminal import size
from bessemer.train.accumulate import micro_batches_together
from bessemer.train.device import Device, available_bytes, resident_bytes

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    PRODUCTS.add(torch.ops.mkldnn._linear_pointwise.default)
PRODUCTS_OF_A_BLOCK = 4  # queries, keys and values; output; MLP in; MLP out


def memory_of(recipe: Recipe, config: ModelConfig, device: Device, recomputed: int, base: int) -> Memory:
    """What a step takes on this device when so many blocks are recomputed; base: what the process holds before. Of several
    processes the one that takes the most."""
    layout = recipe.parallel
    if layout.world > 1:
        return layout_memory.split_memory(
            recipe, config, parts_of(config, layout), base=base, recomputed=recomputed, is_cuda=device.is_cuda,
            **device.arithmetic.widths,
        )  # fmt: skip
    return whole_memory(
        recipe, config, base=base, recomputed=recomputed, is_cuda=device.is_cuda,
        together=micro_batches_together(recipe, device.place, device.compile), **device.arithmetic.widths,
    )  # fmt: skip


def blocks_recomputed(recipe: Recipe, config: ModelConfig, device: Device) -> int:
    """How many blocks, from the first, are recomputed; in a budget that is too small, all."""
    mode = recipe.train.recompute
    if mode != "budget":
        return 0 if mode == "none" else config.layers
    base, budget = base_bytes(device), budget_bytes(recipe, device)
    totals = (memory_of(recipe, config, device, blocks, base).total for blocks in range(config.layers))
    return next((blocks for blocks, total in enumerate(totals) if total <= budget), config.layers)


def check_budget(recipe: Recipe, config: ModelConfig, device: Device) -> None:
    """Refuse a given budget that cannot be kept. Raises InputError with what a step needs at the least."""
    if recipe.train.memory_budget is None:
        return
    least = memory_of(recipe, config, device, config.layers, base_bytes(device))
    budget = budget_bytes(recipe, device)
    if least.total > budget:
        raise InputError(
            f"train.memory_budget: a step takes {size(least.total)} even with every block recomputed, more than the "
            f"{size(budget)} given; give more, or lower train.micro_batch or train.loss_chunk"
        )


def base_bytes(device: Device) -> int:
    """What the process holds beside the model: on a CPU, its libraries; on a GPU, nothing that counts."""
    return 0 if device.is_cuda else resident_bytes()


def budget_bytes(recipe: Recipe, device: Device) -> int:
    """Bytes that a step may take in all, what the process holds already included."""
    asked = recipe.train.memory_budget
    if asked is not None and asked > 1:
        return int(asked)
    return int((asked or 1.0) * (base_bytes(device) + available_bytes(device)))


def apply(model: Transformer, mode: str, blocks: int) -> None:
    """Recompute the first `blocks` blocks; called before they are compiled.

    The first, not the last: on the way back the others have given their memory up by then, so that the block in hand
    is recomputed into memory that was used before.
    """
    keeps_last = model.config.norm_follows
    contexts = functools.partial(_selective_contexts, keeps_last) if mode == "selective" else None
    for block in filter(None, list(model.blocks)[:blocks]):  # one that is None lies on another process
        block.forward = _recomputed(block.forward, contexts)  # type: ignore[method-assign]


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def _recomputed(forward: Callable[..., Tensor], contexts: Contexts | None) -> Callable[..., Tensor]:
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def around(
        x_BTD: Tensor, rotation: Any, scope: Any, cache: LayerCache | None = None, masks: DropoutMasks | None = None
    ) -> Tensor:
        if cache is not None or not torch.is_grad_enabled():
            return forward(x_BTD, rotation, scope, cache, masks)
        # Blocks draw no random numbers (dropout's are a function of its keys), so there is no generator's state to keep.
        kept: Tensor = checkpoint(  # type: ignore[no-untyped-call]
            forward, x_BTD, rotation, scope, None, masks, use_reentrant=False, preserve_rng_state=False, **options
        )
        return kept

    return around


def _selective_contexts(keeps_last: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keep what products and attention give; compute norms, activations and rotations again.

    The MLP's last product is needed by the backward pass only where a norm follows it.
    """
    counted = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator not in PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counted[context.is_recompute] += 1
        last = counted[context.is_recompute] == PRODUCTS_OF_A_BLOCK
        return CheckpointPolicy.PREFER_RECOMPUTE if last and not keeps_last else CheckpointPolicy.MUST_SAVE

    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = create_selective_checkpoint_contexts(
        policy
    )  # type: ignore[no-untyped-call]
    return contexts
