"""Plan of a run on this machine: compute, memory and time, with the same keys as plan_result.to_dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.distributed.memory import Memory
from bessemer.distributed.shards import divides_state
from bessemer.distributed.step_flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.model.config import ModelConfig
from bessemer.model.sublayers import FP32
from bessemer.plan.devices import peak_flops
from bessemer.plan.plan_result import parameters_by_part
from bessemer.plan.run_cost import DAY, HOUR
from bessemer.plan.scaling_laws import compare, training_flops
from bessemer.plan.timetable import pipeline_seconds
from bessemer.recipe import Parallel, ResolvedRecipe
from bessemer.recipe.parallel import AXES

if TYPE_CHECKING:
    from bessemer.train.device import Device

# MFU for a plan without a measurement. Published MFU of well-tuned dense models of 1B to 70B on A100 and H100 is 0.38 to 0.55.
ASSUMED_MFU = 0.40


def make_plan(
    recipe: ResolvedRecipe, config: ModelConfig, *, device: str, peak: float, memory: Memory, step_seconds: float | None,
    devices: int = 1, validation_share: float = 0.0, recomputed_total: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Plan the size, time, memory and price of a resolved recipe on this machine's devices, as a dict for plan.json.

    Args:
        device: Name of the device.
        peak: Peak FLOP/s of one device.
        memory: Peak memory of one device.
        step_seconds: Measured seconds of a step on one device, or None to assume `ASSUMED_MFU`. Several devices divide
            the time equally, without communication.
        validation_share: Time of validations as a share of the time of the steps.
        recomputed_total: Blocks of the whole model that are recomputed.
    """
    train, batch = recipe.train, recipe.train.global_batch_tokens
    per_token, tokens = step_flops_per_token(train, config), recipe.batches.tokens_before(train.steps)
    if step_seconds is None:
        basis = f"{ASSUMED_MFU:.0%} of the peak" + (f" of each of {devices:,} devices" if devices > 1 else "")
        step_seconds = per_token * batch / (peak * ASSUMED_MFU)
    else:
        basis = "measured on this machine" + (f", over {devices:,} devices" if devices > 1 else "")
    step_seconds /= devices
    in_steps = step_seconds * tokens / batch  # a partial batch takes a proportional part of a step
    seconds, speed = in_steps * (1.0 + validation_share), batch / step_seconds
    again = recomputed_flops_per_token(train.recompute, config, recomputed_total)
    hours, price, held = seconds / HOUR * devices, recipe.cluster.price, memory.to_dict()
    mfu = per_token * batch / step_seconds / (peak * devices)
    layout = _layout(recipe)
    return {
        "device": device,
        "parameters": config.parameters,
        "active_parameters": config.active_parameters,
        "model_size": config.size,
        "parameters_by_part": parameters_by_part(config),
        "flops_per_token": per_token,
        "total_flops": per_token * tokens,
        "six_nd_flops": training_flops(config.active_parameters, tokens),
        "steps": train.steps,
        "tokens": tokens,
        "tokens_per_parameter": tokens / config.active_parameters,
        "memory_bytes": held,
        "memory_bytes_per_device": held,
        "peak_flops": peak,
        "step_seconds": step_seconds,
        "step_seconds_from": basis,
        "seconds": seconds,
        "days": seconds / DAY,
        "device_hours": hours,
        "cost": None if price is None else hours * price,
        "tokens_per_second": speed,
        "tokens_per_second_per_device": speed / devices,
        "model_tflops_per_device": per_token * speed / devices / 1e12,
        "mfu": mfu,
        "hfu": mfu * (1.0 + again / per_token),
        "bubble": bubble(recipe.parallel, layout["micro_batches"]),
        "validation_seconds": in_steps * validation_share,
        "layout": layout,
        "chinchilla": compare(config.active_parameters, tokens) if recipe.is_pretraining else None,
    }


def _layout(recipe: ResolvedRecipe) -> dict[str, Any]:
    """Return the `layout` of a plan: sizes of the parallel axes, micro-batches, recomputation, ZeRO stage and schedule."""
    layout, train = recipe.parallel, recipe.train
    return {
        **{name: getattr(layout, name) for name in AXES},
        "virtual": layout.stages_per_rank,
        "micro_batch": train.micro_batch,
        "micro_batches": layout.micro_batches(recipe.batches.full, train.micro_batch) or 1,
        "recompute": train.recompute,
        "zero": layout.zero if divides_state(layout) else 0,
        "schedule": layout.schedule,
    }


def peak_rate(device: Device) -> float:
    """Return the peak FLOP/s that MFU refers to.

    For a GPU it is the published dense bf16 peak. fp16 has the same peak, and fp8 uses it too, so that its gain shows
    in MFU. Other devices, and fp32, use the measured matmul rate.
    """
    from bessemer.train.device import matmul_rate

    published = peak_flops(device.name) if device.is_cuda and device.dtype.itemsize != FP32 else None
    return published or matmul_rate(device)


def bubble(layout: Parallel, micro_batches: int) -> float:
    """Return the share of time that a pipeline of equal stages is idle, with backward passes of two forward passes."""
    stages = layout.pipeline * layout.stages_per_rank
    seconds = pipeline_seconds(
        layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches, (1.0,) * stages, (2.0,) * stages
    )
    return 1.0 - 3.0 * micro_batches * layout.stages_per_rank / seconds
