"""What a block keeps of its forward pass until its backward pass, by kind, in bytes for each token of a device.

The count of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section 4.1, equations
1 to 4 and table 2), written for any number of key and value heads, gated MLPs, attention that writes no scores, and any width
of an element; for their model it gives s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.job import Recompute
from bessemer.plan.estimate.stacks import Stack


@dataclass(frozen=True)
class Split:
    """How a micro-batch's tokens are divided: over tensor ranks inside of products, between them too (sequence), over
    context ranks always."""

    tensor: int = 1
    sequence: bool = True
    context: int = 1


def full(config: ModelConfig, stack: Stack, split: Split, width: int) -> dict[str, float]:
    """Bytes that a block without recompute keeps for each token, by kind; width: bytes of an element.

    stream: the inputs of the norms; attention: what the query, key and value products read, their results, and what the
    output product reads; scores: softmax, and with dropout its mask and result; mlp: what its products read and what the
    activation reads; masks: of the dropouts on the stream; gathered: inputs of products gathered from the tensor ranks.
    """
    stream = width * config.width / (split.tensor if split.sequence else 1)  # one tensor between the products
    heads, both = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    inside = width / split.tensor
    gathers = stack.keeps.gathered and split.tensor > 1 and split.sequence
    read = 0.0 if gathers else stream  # a product's input, as it is kept
    hidden = config.mlp_width * (3 if config.gated else 2)
    if config.gated and stack.keeps.unfused_gate:
        hidden += config.mlp_width
    kinds = {
        "stream": config.norms_each * stream,
        "attention": read + inside * (heads + both + heads),
        "scores": scores(config, stack, split, width),
        "mlp": read + inside * hidden,
        "masks": 2 * stream / width if stack.dropout else 0.0,
        "gathered": 2.0 * width * config.width if gathers else 0.0,
    }
    if config.qk_norm != "none":
        kinds["attention"] += inside * (heads + both // 2)
    return kinds


def scores(config: ModelConfig, stack: Stack, split: Split, width: int) -> float:
    """Bytes that attention itself keeps for each token: a row of scores a head, or one sum a head where it is fused."""
    if stack.attention == "flash":
        return 4.0 * config.heads / split.tensor
    seen = config.sequence_length * config.heads / split.tensor
    return seen * (2 * width + 1 if stack.dropout else width)


@dataclass(frozen=True)
class Block:
    """Bytes for each token. kept: until the block's backward pass, by kind, none of them 0; working: what that pass takes on
    top, with what is computed again for it."""

    kept: tuple[tuple[str, float], ...]
    working: float


@lru_cache(maxsize=16384)
def of_a_block(
    config: ModelConfig, stack: Stack, split: Split, width: int, recompute: Recompute, copies: bool
) -> Block:
    """A block in a mode of recompute; copies: see `backward`."""
    keeps = kept(config, stack, split, width, recompute)
    again = sum(full(config, stack, split, width).values()) - sum(keeps.values())
    working = again + backward(config, stack, split, width, copies=copies)
    if stack.keeps.gathers_context and split.context > 1:
        # Keys and values of all ranks, in the forward pass that is done again and on the way back.
        working += 4 * width * config.heads * config.head_dim / split.tensor * split.context
    return Block(tuple((kind, each) for kind, each in keeps.items() if each), working)


def kept(config: ModelConfig, stack: Stack, split: Split, width: int, recompute: Recompute) -> dict[str, float]:
    """Bytes that a block keeps for each token in a mode of recompute, by kind."""
    everything = full(config, stack, split, width)
    if recompute == "none":
        return everything
    stream = width * config.width / (split.tensor if split.sequence else 1)
    if recompute == "full":
        return {"inputs": stream}
    if stack.selective == "attention":
        return everything | {"scores": everything["scores"] if stack.attention == "flash" else 0.0}
    inside = width / split.tensor
    heads, one = config.heads * config.head_dim, config.kv_heads * config.head_dim
    results = scores(config, stack, split, width)
    # torchtitan: of the products in order (q, k, v, o, gate, up, down) every second one is computed again, the odd ones and what
    # is added up over tensor ranks are kept; a compiler sees that nothing on the way back reads the last.
    attention = inside * (heads + one + heads)
    mlp = inside * config.mlp_width + (0.0 if stack.fused else stream)
    summed = 2 * stream if split.tensor > 1 else 0.0
    return {"inputs": stream + summed, "attention": attention, "scores": results, "mlp": mlp}


def backward(config: ModelConfig, stack: Stack, split: Split, width: int, *, copies: bool = False) -> float:
    """Bytes for each token that a block's way back takes on top of what it kept: gradients of its widest tensors.

    Those of the hidden units (and of scores that were written out), and of the stream, whole, going in and coming out. Where
    tensor ranks gather along a dimension that is not the first (copies), what arrives is put in order in a second block: of
    the two gathered inputs and of the two sums on the way back.
    """
    inside = width / split.tensor
    hidden = inside * config.mlp_width * (3 if config.gated else 2)
    written = 0.0 if stack.attention == "flash" else 2 * width * config.sequence_length * config.heads / split.tensor
    return max(hidden, written) + (6 if copies else 2) * width * config.width
