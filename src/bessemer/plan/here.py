"""What a run computes, holds in memory and takes in time on this machine, with the keys that every plan has (those of
plan/outcome.to_dict), so that who reads plan.json or `bessemer plan --json` need not ask which of the two it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.distributed.memory import Memory
from bessemer.distributed.schedules import generate
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import FP32
from bessemer.model.flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.plan.devices import peak_flops
from bessemer.plan.laws import compare, training_flops
from bessemer.plan.timetable import simulate
from bessemer.recipe import Parallel, ResolvedRecipe
from bessemer.recipe.parallel import AXES

if TYPE_CHECKING:
    from bessemer.train.device import Device

# Shares of the peak that well-tuned runs reach on one device, for a plan without a measurement: published MFU of dense
# models of 1B to 70B on A100 and H100 lies at 0.38 to 0.55.
ASSUMED_MFU = 0.40


def plan(
    recipe: ResolvedRecipe, config: ModelConfig, *, device: str, peak: float, memory: Memory, step_seconds: float | None,
    devices: int = 1, validation_share: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Plan a resolved recipe; peak, memory: of one of `devices`. step_seconds: of a step on one device, measured;
    None: from ASSUMED_MFU of the peak. Several are said to take their share of it, with nothing for their communication.
    validation_share: time of the validations as a share of the steps'.
    """
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    per_token = step_flops_per_token(recipe.train, config)
    tokens = recipe.batches.tokens_before(steps)
    if step_seconds is None:
        basis = f"{ASSUMED_MFU:.0%} of the peak" + (f" of each of {devices:,} devices" if devices > 1 else "")
        step_seconds = per_token * batch / (peak * ASSUMED_MFU)
    else:
        basis = "measured on this machine" + (f", over {devices:,} devices" if devices > 1 else "")
    seconds = step_seconds / devices
    in_steps = seconds * tokens / batch  # a smaller batch takes its part of a full step
    return {
        "device": device,
        "parameters": config.parameters,
        "parameters_by_part": {
            "embedding": config.embedding_parameters,
            "non_embedding": config.parameters - config.embedding_parameters,
        },
        "flops_per_token": per_token,
        "total_flops": per_token * tokens,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / config.parameters,
        "memory_bytes": memory.to_dict(),
        "peak_flops": peak,
        "step_seconds": seconds,
        "step_seconds_from": basis,
        "seconds": in_steps * (1.0 + validation_share),
        "tokens_per_second": batch / seconds,
        "mfu": per_token * batch / seconds / (peak * devices),
        "validation_seconds": in_steps * validation_share,
    }


def peak_rate(device: Device) -> float:
    """Return the FLOP/s that MFU refers to: the published dense bf16 peak of a GPU, also for fp16, which is as fast, and for fp8,
    so that its gain is visible; else the measured matmul rate."""
    from bessemer.train.device import matmul_rate

    published = peak_flops(device.name) if device.is_cuda and device.dtype.itemsize != FP32 else None
    return published or matmul_rate(device)


MAX_MICRO_BATCHES = 256  # of a simulated schedule; more change nothing that is seen


def keys(
    recipe: ResolvedRecipe, config: ModelConfig, plan: dict[str, Any], *, devices: int, recomputed_total: int
) -> dict[str, Any]:
    """What a plan of a resolved recipe comes to by the common names. devices: that share its work."""
    again = recomputed_flops_per_token(recipe.train.recompute, config, recomputed_total)
    hours = plan["seconds"] / 3600 * devices
    price, of, train = recipe.cluster.price, recipe.parallel, recipe.train
    micro_batches = of.micro_batches(recipe.batches.full, train.micro_batch) or 1
    layout = {name: getattr(of, name) for name in AXES}
    layout |= {"virtual": of.stages_per_rank, "micro_batch": train.micro_batch}
    layout |= {"recompute": train.recompute, "zero": of.zero if of.state_shards > 1 else 0}
    return {
        "six_nd_flops": training_flops(plan["parameters"], plan["tokens"]),
        "tokens_per_second_per_device": plan["tokens_per_second"] / devices,
        "model_tflops_per_device": plan["flops_per_token"] * plan["tokens_per_second"] / devices / 1e12,
        "hfu": plan["mfu"] * (1.0 + again / plan["flops_per_token"]),
        "bubble": bubble(of, micro_batches),
        "days": plan["seconds"] / 86_400,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
        "layout": layout | {"schedule": of.schedule, "micro_batches": micro_batches},
        "memory_bytes_per_device": plan["memory_bytes"],
        "chinchilla": compare(plan["parameters"], plan["tokens"]) if recipe.is_pretraining else None,
    }


def bubble(layout: Parallel, micro_batches: int) -> float:
    """The share of a pipeline's time that it idles, with stages that are all alike."""
    if layout.pipeline == 1:
        return 0.0
    few = range(min(micro_batches, MAX_MICRO_BATCHES), 0, -1)
    count = next((number for number in few if layout.fits_micro_batches(number)), micro_batches)
    return 1.0 - simulate(generate(layout.schedule, layout.pipeline, count, layout.stages_per_rank)).utilisation
