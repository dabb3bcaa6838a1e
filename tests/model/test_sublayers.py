"""Formulas of sublayers compared with the modules: their parameters, and torch's counts of their passes."""

import contextlib
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bessemer.model.attention_scope import AttentionScope, AttentionSpec
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe.model import Activation
from tests.model.samples import BLOCKS, config
from tests.train.fake_step import formulas_of_gpu

LENGTH = 32
BERT = FAMILIES["bert"].options
CONFIGS: dict[str, dict[str, Any]] = {
    **BLOCKS,
    **{
        f"{family.name}: {name}": {"kv_heads": 2, "layers": 2, **family.options, **changes}
        for family in FAMILIES.values()
        for name, changes in family.examples.items()
    },
    "a key for each query": {"kv_heads": 4},
    "a norm over all heads, before the sublayer": {"qk_norm": "full"},
    "BERT, a norm before the sublayer": {**BERT, "kv_heads": 4, "norm_position": "input"},
    "BERT, fewer keys": {**BERT, "kv_heads": 2},
    **{
        f"{name}, {'gated' if gated else 'plain'}": {"gated": gated, "activation": name}
        for name in get_args(Activation)
        for gated in (True, False)
    },
}


def sublayers(
    model: ModelConfig, device: str, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], nn.Module, nn.Module]:
    """Attention over all tokens, the feed-forward sublayer, and the block with both."""
    layer = next(n for n in range(model.layers)[::-1] if model.rope_of(n) is not None or model.positions == "learned")
    built = (meta_model if device == "meta" else lambda config: build_model(config, 0))(model).to(dtype)
    block, rope = built.blocks[layer], model.rope_of(layer)
    positions = torch.arange(LENGTH, device=device)
    rotation = None if rope is None else rotary_cos_sin(positions, rope, LENGTH, dtype)
    scope = AttentionScope(AttentionSpec(causal=False), None, None)
    return lambda x: block.attention(x, rotation, scope), block.mlp, lambda x: block(x, rotation, scope)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_of_the_model(name: str) -> None:
    """Compare names, shapes and order, which exports, optimizers and tensor parallelism rely on."""
    made = config(**CONFIGS[name])
    model = meta_model(made)
    block = {name: tuple(parameter.shape) for name, parameter in model.blocks[-1].named_parameters()}
    assert block == {facts.name: facts.shape for part in made.sublayers for facts in part.parameters}
    assert sum(parameter.numel() for parameter in model.parameters()) == made.parameters


# The work and memory of experts depend on the tokens that they get.
DENSE = [name for name, options in CONFIGS.items() if not options.get("experts")]


@pytest.mark.parametrize("name", DENSE)
def test_flops_equal_those_that_torch_counts(name: str) -> None:
    """Count a forward and a backward pass on the meta device, where nothing is fused."""
    made = config(**CONFIGS[name])
    *modules, _ = sublayers(made, "meta", torch.float32)
    for module, facts in zip(modules, made.sublayers[1:], strict=True):
        with FlopCounterMode(display=False) as counter:
            module(torch.zeros(1, LENGTH, made.width, device="meta", requires_grad=True)).sum().backward()
        products = 6 * sum(parameter.size for parameter in facts.parameters if parameter.is_matrix)
        assert counter.get_total_flops() == LENGTH * (products + facts.score_flops * LENGTH)


def saved_bytes(module: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> float:
    """Return the bytes per additional token that autograd saves in a forward pass, counting each storage once.

    Weights and tensors shared by all sequences do not count.
    """

    def saved(rows: int) -> int:
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(torch.ones(rows, LENGTH, width, dtype=dtype, requires_grad=True))
        return sum(storage.nbytes() for storage in kept.values())

    return (saved(3) - saved(1)) / (2 * LENGTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", DENSE)
def test_saved_activations_equal_those_of_autograd(name: str, dtype: torch.dtype) -> None:
    """Compare to the byte, with fused operations on a CPU, and in bf16 by the formulas of a GPU."""
    made = config(**{**CONFIGS[name], "attention_soft_cap": 0.0})
    is_eager = dtype == torch.bfloat16
    formulas = formulas_of_gpu() if is_eager else contextlib.nullcontext()
    with formulas, torch.autocast("cpu", torch.bfloat16, enabled=is_eager):
        _, mlp, block = sublayers(made, "cpu", torch.float32 if is_eager else dtype)
        of_mlp, of_block = (saved_bytes(module, made.width, dtype) for module in (mlp, block))
    feed_forward = made.sublayers[-1]
    if is_eager:
        assert of_mlp == feed_forward.eager_bytes
        # On a CPU an RMS norm with a weight keeps a second fp32 copy: of the stream, and of queries and keys.
        copies = (4 if made.norm_position == "both" else 2) * made.width * (made.norm == "rms")
        copies += (made.heads + made.kv_heads) * made.head_dim * (made.qk_norm != "none")
        assert of_block == sum(part.eager_bytes for part in made.sublayers) + 4 * copies * made.norm_weight
        return
    assert of_mlp == dtype.itemsize * (feed_forward.saved_elements + made.width)  # the width of its input
    # In fp64 the queries that share a key are copied, since they are not contiguous, unless something else copies them. In
    # fp32 one kernel splits, norms and rotates the heads, and learned positions need a copy of the output, not of values.
    is_copied = made.kv_heads not in (1, made.heads) and (made.qk_norm == "head" or made.positions == "learned")
    copies = made.heads * made.head_dim * is_copied
    if dtype == torch.float32:
        copies = (made.heads - made.kv_heads) * made.head_dim * (made.positions == "learned")
    statistics = (4 if made.norm_position == "both" else 2) * (1 if made.norm == "rms" else 2) + made.heads
    of_heads = (made.heads + made.kv_heads) * (dtype == torch.float64)
    statistics += {"none": 0, "head": of_heads, "full": 2}[made.qk_norm]
    assert of_block == dtype.itemsize * (sum(part.saved_elements for part in made.sublayers) + copies + statistics)
