"""The facts of a block's parts: parameters, FLOPs, saved activations, tensor parallelism, recomputation. No torch.

One function per part derives them from the options of the model. `attention.py` and `feed_forward.py` implement the maths
and take their shapes from here. Formulas of memory, time and communication sum over the parts (`ModelConfig.sublayers`).

Shapes: G key/value heads, R query heads for each, K width of a head, D width, F hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from bessemer.model.options import ModelOptions

FP32 = 4  # bytes per element
ROUTED = "mlp.experts."  # prefix of the parameters of routed experts in a block
Access = Literal["partial", "slice", "deferred"]
"""How a rank of a tensor group reads a parameter that is not sharded: "partial" reads the full parameter and "slice" the rank's
rows of it, both with a partial gradient; "deferred" does not read it, because it is added after the reduction."""

# The index of each matrix in a joint parameter, and in its bias, by the names of families.toml:
# `qkv` is (G, R + 2, K, D), `gate_up` is (2, F, D), and that of E experts (E, 2, F, D).
JOINT: dict[str, dict[str, Any]] = {
    "attention.qkv": {"q": (slice(None), slice(-2)), "k": (slice(None), -2), "v": (slice(None), -1)},
    "mlp.gate_up": {"gate": 0, "up": 1},
    "mlp.shared.gate_up": {"gate": 0, "up": 1},
    "mlp.experts.gate_up": {"gate": (slice(None), 0), "up": (slice(None), 1)},
}


@dataclass(frozen=True)
class Parameter:
    """A description of a parameter of a block.

    Attributes:
        name: Its name in the block.
        shape: Its shape.
        tensor_dim: The dimension along which tensor parallelism shards it; None if it is replicated.
        access: What a rank reads of a replicated parameter in tensor parallelism (`Access`): all of it ("partial"), its
            own rows ("slice"), or nothing, because it is added after the reduction ("deferred").
        initial: Its initial value; None for a normal distribution with the standard deviation 1 / sqrt(fan-in).
    """

    name: str
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    access: Access = "partial"
    initial: float | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True for weights that multiply activations, with the input in the last dimension."""
        return len(self.shape) > 1 and not self.name.endswith("bias")

    @property
    def is_routed(self) -> bool:
        """True for the weights of routed experts, of which a token uses some. Their first dimension is the expert."""
        return self.name.startswith(ROUTED)


@dataclass(frozen=True)
class Sublayer:
    """A description of one part of a block: its parameters, FLOPs and memory.

    All numbers except those of parameters are per token.

    Attributes:
        parameters: The parameters, in the order of the module.
        output: Name of the linear layer that writes into the residual stream.
        tensor_units: Maps the recipe keys of the units that tensor parallelism divides, such as heads, to their
            numbers.
        score_flops: FLOPs without parameters, forward and backward, for each token that a token attends to.
        saved_elements: Elements that autograd saves for the backward pass if element-wise operations are fused.
        eager_bytes: Bytes that autograd saves in 16-bit training on a GPU without a compiler. A norm then saves its
            input in fp32, the joint matmul stays in memory because the values are a view of it, and the gate's
            activation is saved separately. A compiler would recompute cheap operations.
        selective_elements: Elements that selective recompute saves: the results of matmuls and of attention.
        gradient_elements: Elements of gradients that the backward pass holds at once inside the sublayer.
    """

    parameters: tuple[Parameter, ...]
    output: str = ""
    tensor_units: dict[str, int] = field(default_factory=dict)
    score_flops: float = 0.0
    saved_elements: int = 0
    eager_bytes: float = 0.0
    selective_elements: int = 0
    gradient_elements: int = 0

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its name."""
        return {parameter.name: parameter.shape for parameter in self.parameters}


def norm_facts(options: ModelOptions) -> Sublayer:
    """Describe a block's norms over the width, before or after its sublayers."""
    is_both, width = options.norm_position == "both", options.width
    names = ["attention_norm", "mlp_norm"] + ["attention_output_norm", "mlp_output_norm"] * is_both
    starts = [("weight", options.norm_start), ("bias", 0.0)][: options.norm_parameters // width]
    statistics = 1 if options.norm == "rms" else 2
    return Sublayer(
        tuple(Parameter(f"{name}.{kind}", (width,), initial=start) for name in names for kind, start in starts),
        # A norm before a sublayer saves its input and its result, which the sublayer reads; one after it saves its input.
        saved_elements=(6 if is_both else 4) * width,
        eager_bytes=float(FP32 * len(names) * (width + statistics)),  # a copy widened to fp32
    )


def attention_facts(options: ModelOptions) -> Sublayer:
    """Describe grouped-query attention, which tensor parallelism shards by key/value heads."""
    width, heads, kv_heads, head_dim = options.width, options.heads, options.kv_heads, options.head_dim
    queries, keys, joint = heads * head_dim, kv_heads * head_dim, (kv_heads, heads // kv_heads + 2, head_dim)
    has_norm, is_full = options.qk_norm != "none", options.qk_norm == "full"
    norm_sizes = {"q_norm": queries if is_full else head_dim, "k_norm": keys if is_full else head_dim}
    access: Access = "slice" if is_full else "partial"
    norms = [
        Parameter(f"attention.{name}.weight", (size,), access=access, initial=options.norm_start)
        for name, size in norm_sizes.items()
    ]

    # Saved are rotated queries and keys, values, and the output by head and by token. Without rotation, attention reads the
    # parts of the joint matmul in place. QK-norm saves its inputs and thus the full joint matmul.
    saved = queries + 2 * keys + 2 * queries
    if options.positions == "learned":
        saved += keys - queries  # attention then returns its output by token
    elif options.qk_norm == "head":
        saved += queries + 2 * keys
    if is_full:  # the norm over all heads joins the heads first
        saved += queries + keys

    wide = heads  # one softmax sum per head
    # The input of the matmul; queries, keys and values jointly, since the values are a view of that; the output of attention.
    narrow = width + (queries + 2 * keys) + queries
    if has_norm:
        wide += queries + keys + (2 if is_full else heads + kv_heads)
    if options.positions == "rotary" or has_norm:
        narrow += queries + keys  # normalised or rotated, as attention reads them
    elif heads != kv_heads:
        narrow += queries  # copied, since the queries of a key/value head are not in order in memory
    return Sublayer(
        (
            Parameter("attention.qkv", (*joint, width), 0),
            *[Parameter("attention.qkv_bias", joint, 0, initial=0.0)] * options.qkv_bias,
            Parameter("attention.out.weight", (width, queries), 1, initial=options.output_start),
            *[Parameter("attention.out.bias", (width,), access="deferred", initial=0.0)] * options.out_bias,
            *norms * (has_norm and options.norm_weight),
        ),
        output="out",
        tensor_units={f"model.{'heads' if kv_heads == heads else 'kv_heads'}": kv_heads},
        score_flops=12 * heads * options.attention_width,
        saved_elements=saved,
        eager_bytes=FP32 * wide + 2.0 * narrow,
        selective_elements=(queries + 2 * keys) + queries + width,
    )


def feed_forward_facts(options: ModelOptions, path: str = "mlp", units: int | None = None) -> Sublayer:
    """Describe the MLP, gated or not, which tensor parallelism shards by hidden units.

    `path` is its name in the block, and `units` its hidden width if that is not `mlp_width`.
    """
    width, hidden, is_gated, has_bias = options.width, units or options.mlp_width, options.gated, options.mlp_bias
    if is_gated:
        up = Parameter(f"{path}.gate_up", (2, hidden, width), 1)
        bias = Parameter(f"{path}.gate_up_bias", (2, hidden), 1, initial=0.0)
    else:
        up = Parameter(f"{path}.up.weight", (hidden, width), 0)
        # This vector is replicated, because FSDP would have no other dimension to shard.
        bias = Parameter(f"{path}.up.bias", (hidden,), access="slice", initial=0.0)
    # Gated: gate, up, the activation's output and the product. Otherwise: the activation's input and output; ReLU saves only the
    # output.
    activation = options.activation
    eager = (4 if is_gated else 1 if activation == "relu" else 2) + (activation == "gelu_quick")
    eager += is_gated and activation == "relu2"
    saved = eager - (is_gated and activation == "silu")  # silu(gate) * up is one operation
    return Sublayer(
        (
            up,
            *[bias] * has_bias,
            Parameter(f"{path}.down.weight", (width, hidden), 1, initial=options.output_start),
            *[Parameter(f"{path}.down.bias", (width,), access="deferred", initial=0.0)] * has_bias,
        ),
        output="down",
        tensor_units={"model.mlp_width": hidden},
        saved_elements=saved * hidden,
        eager_bytes=2.0 * (width + eager * hidden),
        # The result of the last matmul is saved only if a norm reads it.
        selective_elements=hidden * (1 + is_gated) + width * options.recomputes_mlp_output,
        # Gradients of gate, up and their product, or of the activation's input and output.
        gradient_elements=(3 if is_gated else 2) * hidden,
    )


def mixture_facts(options: ModelOptions) -> Sublayer:
    """Describe a mixture of experts: its router, routed experts and shared experts."""
    width, experts, each, active = options.width, options.experts, options.expert_width, options.experts_per_token
    # The experts of a token together save and compute what an MLP with as many hidden units does.
    parts = [feed_forward_facts(options, "mlp.experts", active * each)]
    if options.shared_experts:
        parts.append(feed_forward_facts(options, "mlp.shared", options.shared_experts * each))
    copied = 2 * active * width  # the tokens in the order of experts, and the results of the experts
    chosen = 2 * experts + 4 * active  # scores of the router, weights, and order of the tokens
    return Sublayer(
        (
            Parameter("mlp.router.weight", (experts, width)),
            *[Parameter("mlp.router.bias", (experts,), initial=0.0)] * options.has_balance_bias,
            Parameter("mlp.experts.gate_up", (experts, 2, each, width)),
            Parameter("mlp.experts.down", (experts, width, each), initial=options.output_start),
            *(parameter for shared in parts[1:] for parameter in shared.parameters),
        ),
        output="down",
        # Each rank of a tensor group applies whole routed experts to its tokens.
        tensor_units={"model.shared_experts x expert_width": options.shared_experts * each},
        saved_elements=sum(part.saved_elements for part in parts) + copied + chosen,
        eager_bytes=sum(part.eager_bytes for part in parts) + 2.0 * copied + FP32 * (width + chosen),
        selective_elements=sum(part.selective_elements for part in parts) + experts + active * width,
        gradient_elements=max(part.gradient_elements for part in parts) + active * width,
    )
