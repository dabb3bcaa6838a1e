"""What a run computes, holds in memory and takes in time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.model.config import ModelConfig
from bessemer.recipe import Recipe

# Dense bf16 tensor-core rates without sparsity, FLOP/s (NVIDIA data sheets: A100 2021, L40S 2023, H100 2023, H200 2024,
# B200 2025). A device that is not listed is measured.
PEAK_FLOPS = {
    "A100": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Published dense bf16 peak of a device by the name its driver gives it; None when it is not listed."""
    fitting = [name for name in PEAK_FLOPS if all(word in device_name for word in name.split())]
    return PEAK_FLOPS[max(fitting, key=len)] if fitting else None


def flops_per_token(config: ModelConfig) -> float:
    """FLOPs of forward and backward for one token.

    6 per parameter that multiplies the token (the embedding is looked up, so it counts once, as the head), plus the
    scores and the weighted values of attention over, on average, half the sequence (Chowdhery et al. 2022, appendix
    B, with the causal half).
    """
    context = (config.sequence_length + 1) / 2
    attention = 12 * config.layers * config.heads * config.head_dim * context
    return 6.0 * config.matrix_parameters + attention


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at the peak of a training step, by part."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    base: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.base

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def memory(recipe: Recipe, config: ModelConfig, bytes_per_activation: int, base: int) -> Memory:
    """Memory of one device that holds the whole model.

    Weights, gradients and both moments are fp32: 16 bytes a parameter. Activations, in elements per token and block,
    are what autograd keeps of the operations in `model/decoder.py`; a test counts them on a CPU in fp32.
    bytes_per_activation: 4 for fp32, 2 for bf16; base: what the process holds before the model.
    """
    train = recipe.train
    assert train.micro_batch is not None, "the recipe is resolved"
    tokens = train.micro_batch * config.sequence_length
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    norms = 4 * config.width  # of two: input and output
    # Rotated queries and keys, values, the output by head and by token; what QK-norm normalises keeps the whole product.
    attention = (heads + kv_heads) + kv_heads + 2 * heads
    if config.qk_norm:
        attention += heads + 2 * kv_heads
    mlp = 3 * config.mlp_width  # gate and up, silu(gate) * up
    per_block = norms + attention + mlp
    activations = tokens * (config.layers * per_block + 2 * config.width) * bytes_per_activation
    chunk = min(train.loss_chunk, tokens)
    logits = 2 * 4 * chunk * config.vocabulary + 4 * config.vocabulary * config.width
    return Memory(
        weights=4 * config.parameters,
        gradients=4 * config.parameters,
        optimizer=8 * config.parameters,
        activations=activations,
        logits=logits,
        base=base,
    )


@dataclass(frozen=True)
class Plan:
    """What a run is said to take, before it starts."""

    device: str
    parameters: dict[str, int]
    flops_per_token: float
    total_flops: float
    steps: int
    tokens: int
    tokens_per_parameter: float
    memory_bytes: dict[str, int]
    peak_flops: float
    step_seconds: float
    step_seconds_from: str
    seconds: float
    tokens_per_second: float
    mfu: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Shares of the peak that well-tuned runs reach on one device, for a plan without a measurement: published MFU of dense
# models of 1B to 70B on A100 and H100 lies at 0.38 to 0.55.
ASSUMED_MFU = 0.40


def plan(
    recipe: Recipe, config: ModelConfig, *, device: str, peak: float, base: int, bf16: bool, step_seconds: float | None
) -> Plan:
    """Plan a resolved recipe on one device. step_seconds: a measured step; None: from ASSUMED_MFU of the peak."""
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None, "the recipe is resolved"
    per_token = flops_per_token(config)
    seconds = step_seconds if step_seconds is not None else per_token * batch / (peak * ASSUMED_MFU)
    return Plan(
        device=device,
        parameters={
            "total": config.parameters,
            "embedding": config.embedding_parameters,
            "non_embedding": config.parameters - config.embedding_parameters,
        },
        flops_per_token=per_token,
        total_flops=per_token * batch * steps,
        steps=steps,
        tokens=batch * steps,
        tokens_per_parameter=batch * steps / config.parameters,
        memory_bytes=memory(recipe, config, 2 if bf16 else 4, base).to_dict(),
        peak_flops=peak,
        step_seconds=seconds,
        step_seconds_from="measured on this machine" if step_seconds is not None else f"{ASSUMED_MFU:.0%} of the peak",
        seconds=seconds * steps,
        tokens_per_second=batch / seconds,
        mfu=per_token * batch / seconds / peak,
    )
