"""What a run computes, holds in memory and takes in time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.layout.flops import step_flops_per_token
from bessemer.layout.memory import Memory
from bessemer.model.config import ModelConfig
from bessemer.recipe import Batches, Recipe


@dataclass(frozen=True)
class Plan:
    """What a run is said to take, before it starts."""

    device: str
    parameters: int
    parameters_by_part: dict[str, int]
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
    validation_seconds: float = 0.0  # within `seconds`
    step_interval: tuple[float, float] | None = None  # seconds, in which a predicted step is expected

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parameters_of(plan: dict[str, Any]) -> tuple[int | None, int | None]:
    """All parameters, and those without embeddings, of a plan.json; of one written before 2026-11 too, where both stood under
    `parameters`. None for what is missing or no number."""
    whole = plan.get("parameters")
    parts = whole if isinstance(whole, dict) else plan.get("parameters_by_part")
    inner = parts.get("non_embedding") if isinstance(parts, dict) else None
    if isinstance(whole, dict):
        whole = whole.get("total")
    numbers = (each if isinstance(each, int) and not isinstance(each, bool) else None for each in (whole, inner))
    return next(numbers), next(numbers)


# Shares of the peak that well-tuned runs reach on one device, for a plan without a measurement: published MFU of dense
# models of 1B to 70B on A100 and H100 lies at 0.38 to 0.55.
ASSUMED_MFU = 0.40


def plan(
    recipe: Recipe,
    config: ModelConfig,
    *,
    device: str,
    peak: float,
    memory: Memory,
    step_seconds: float | None,
    devices: int = 1,
    source: str = "measured on this machine",
    interval: tuple[float, float] | None = None,
    validation_share: float = 0.0,
) -> Plan:
    """Plan a resolved recipe; peak, memory: of one of `devices`. step_seconds: of a step on one device, known from `source`
    within `interval`; None: from ASSUMED_MFU of the peak. Several are said to take their share of it, with nothing for what
    processes tell each other. validation_share: time of the validations as a share of the steps'.
    """
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None, "the recipe is resolved"
    per_token = step_flops_per_token(recipe, config)
    tokens = Batches.of(recipe).tokens_before(steps)
    seconds = (step_seconds if step_seconds is not None else per_token * batch / (peak * ASSUMED_MFU)) / devices
    each = f" of each of {devices:,} devices" if devices > 1 else ""
    return Plan(
        device=device,
        parameters=config.parameters,
        parameters_by_part={
            "embedding": config.embedding_parameters,
            "non_embedding": config.parameters - config.embedding_parameters,
        },
        flops_per_token=per_token,
        total_flops=per_token * tokens,
        steps=steps,
        tokens=tokens,
        tokens_per_parameter=tokens / config.parameters,
        memory_bytes=memory.to_dict(),
        peak_flops=peak,
        step_seconds=seconds,
        step_seconds_from=f"{ASSUMED_MFU:.0%} of the peak{each}"
        if step_seconds is None
        else source + (f", over {devices:,} devices" if devices > 1 else ""),
        seconds=seconds * tokens / batch * (1.0 + validation_share),  # a smaller batch takes its part of a full step
        validation_seconds=seconds * tokens / batch * validation_share,
        tokens_per_second=batch / seconds,
        mfu=per_token * batch / seconds / (peak * devices),
        step_interval=None if interval is None else (interval[0] / devices, interval[1] / devices),
    )
