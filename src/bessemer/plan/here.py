"""What a run computes, holds in memory and takes in time on this machine, with the keys that every plan has (those of
plan/outcome.to_dict), so that who reads plan.json or `bessemer plan --json` need not ask which of the two it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.layout.flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.layout.memory import Memory
from bessemer.layout.pipeline_schedules import generate
from bessemer.model.config import ModelConfig
from bessemer.plan import here, pictures
from bessemer.plan.laws import optimal_tokens, training_flops
from bessemer.plan.standing import standing
from bessemer.plan.timetable import simulate
from bessemer.recipe import Recipe


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
    validation_seconds: float = 0.0  # within `seconds`, as those of saving
    saving_seconds: float = 0.0
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
    saving_seconds: float = 0.0,
) -> Plan:
    """Plan a resolved recipe; peak, memory: of one of `devices`. step_seconds: of a step on one device, known from `source`
    within `interval`; None: from ASSUMED_MFU of the peak. Several are said to take their share of it, with nothing for what
    processes tell each other. validation_share: time of the validations as a share of the steps'; saving_seconds: of all
    checkpoints.
    """
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None, "the recipe is resolved"
    per_token = step_flops_per_token(recipe.train, config)
    tokens = recipe.batches.tokens_before(steps)
    seconds = (step_seconds if step_seconds is not None else per_token * batch / (peak * ASSUMED_MFU)) / devices
    in_steps = seconds * tokens / batch  # a smaller batch takes its part of a full step
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
        seconds=in_steps * (1.0 + validation_share) + saving_seconds,
        validation_seconds=in_steps * validation_share,
        saving_seconds=saving_seconds,
        tokens_per_second=batch / seconds,
        mfu=per_token * batch / seconds / (peak * devices),
        step_interval=None if interval is None else (interval[0] / devices, interval[1] / devices),
    )


SURFACE_POINTS = 21  # on a side: finer than the lines that are drawn of it, and small in a file
MOST_MICRO_BATCHES = 256  # of a simulated schedule; more change nothing that is seen


def keys(recipe: Recipe, config: ModelConfig, plan: here.Plan, *, devices: int, recomputed: int) -> dict[str, Any]:
    """What a plan of a resolved recipe comes to by the common names. devices: that share its work; recomputed: blocks."""
    again = recomputed_flops_per_token(recipe.train.recompute, config, recomputed)
    hours = plan.seconds / 3600 * devices
    price = recipe.cluster.price
    model_rate = plan.flops_per_token * plan.tokens_per_second / devices
    return {
        "six_nd_flops": training_flops(plan.parameters, plan.tokens),
        "tokens_per_second_per_device": plan.tokens_per_second / devices,
        "model_tflops_per_device": model_rate / 1e12,
        "hfu": plan.mfu * (1.0 + again / plan.flops_per_token),
        "bubble": bubble(recipe),
        "days": plan.seconds / 86_400,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
        "layout": layout(recipe),
        "memory_bytes_per_device": memory(plan.memory_bytes),
        **scaling(recipe, plan.parameters, plan.tokens),
    }


def micro_batches(recipe: Recipe) -> int:
    """Forward passes of a full step on each process."""
    each = (recipe.train.micro_batch or 1) * recipe.parallel.data
    return max(recipe.batches.full // each, 1)


def bubble(recipe: Recipe) -> float:
    """Share of the passes' time in which the ranks of the pipeline wait, all stages alike."""
    layout = recipe.parallel
    if layout.pipeline == 1:
        return 0.0
    count = min(micro_batches(recipe), MOST_MICRO_BATCHES)
    return 1.0 - simulate(generate(layout.schedule, layout.pipeline, count, layout.stages_each)).utilisation


def layout(recipe: Recipe) -> dict[str, Any]:
    """The ways that divide the work, and what goes with them."""
    of, train = recipe.parallel, recipe.train
    return {
        "replicate": of.replicate,
        "shard": of.shard,
        "tensor": of.tensor,
        "pipeline": of.pipeline,
        "virtual": of.stages_each,
        "context": of.context,
        "micro_batch": train.micro_batch,
        "recompute": train.recompute,
        "zero": of.zero if of.shard * of.context > 1 else 0,
        "schedule": of.schedule,
        "micro_batches": micro_batches(recipe),
    }


def memory(parts: dict[str, int]) -> dict[str, int]:
    """Parts by the common names: narrow copies of the weights are buffers, and what is only here keeps its name."""
    named = {name: parts[name] for name in ("weights", "gradients", "optimizer", "activations", "logits")}
    rest = {name: parts[name] for name in ("average", "slack", "base")}
    return {**named, "buffers": parts["casts"], **rest, "total": parts["total"]}


def scaling(recipe: Recipe, parameters: int, tokens: int) -> dict[str, Any]:
    """Where the plan stands by the scaling laws, which are of models that predict text: nothing of a classifier."""
    if recipe.train.objective == "classify":
        return {"chinchilla": None}
    found = standing(parameters, tokens)
    return {
        "chinchilla": {
            "optimal_tokens": found.optimal_tokens,
            "ratio": found.ratio,
            "verdict": found.verdict,
            "loss": found.loss,
            "break_even_inference_tokens": found.break_even,
            "optimal_tokens_by_law": optimal_tokens(parameters),
            "sentence": found.sentence,
        }
    }


def drawn(plan: dict[str, Any]) -> dict[str, Any]:
    """What a run's report draws of a plan.json: the loss around it. Nothing where the plan has no place among the laws, or was
    written before plans had one."""
    (parameters, _), tokens = here.parameters_of(plan), plan.get("tokens")
    if not plan.get("chinchilla") or not parameters or not tokens:
        return {}
    surface = pictures.loss_surface(parameters, tokens, SURFACE_POINTS)
    return {"pictures": {"surface": surface, "laws": pictures.law_opinions(parameters, tokens)}}
