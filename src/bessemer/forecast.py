"""What a run will take on this machine: a few of its steps timed where that is quick, else predicted from a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer import derived, preflight
from bessemer.checkpoint.protocol import published
from bessemer.recipe import Batches, Parallel, Recipe, load
from bessemer.run import RunFolder
from bessemer.terminal import say

MEASURE_SECONDS = 8.0  # of training steps before a run, to say how long it will take
MEASURABLE_SECONDS = 10.0  # micro-batches predicted to take longer are not measured
PREDICTED = "predicted from this machine's calibration"


def plan_only(
    recipe: Recipe, run: RunFolder, calibration: Path | None = None, measure: bool = True
) -> tuple[dict[str, Any], Recipe]:
    """What a recipe will take, without a run folder: for `bessemer plan`. calibration: a file, in the place of the user's;
    measure: time a step where that is quick."""
    from bessemer import longer
    from bessemer.layout import dial
    from bessemer.tokens import outlook

    has_horizon = recipe.train.has_horizon
    recipe = derived.filled(recipe, run, show=True)
    vocabulary, labels = outlook.vocabulary(recipe, run.tokens), outlook.labels(recipe, run.tokens)
    known, seconds = derived.expected_tokens(recipe, run), MEASURE_SECONDS if measure else 0.0

    def resolve(one: Recipe, steps: int | None) -> Recipe:
        return dial.resolve(one, vocabulary, steps, micro_batch_tokens(one), labels, **known)

    stored, done = load(run.recipe) if run.recipe.exists() else None, published(run.checkpoints)
    held_out_tokens = known.get("held_out_tokens", 0)
    recipe, resolved = longer.resolved_for(recipe, stored, run, done, held_out_tokens, has_horizon, resolve)
    if done:
        say(f"  {done[-1]:,} of its steps are done in {run.path}")
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": resolved.train.steps})})
    told, final = planned_run(recipe, resolved, vocabulary, labels, known, calibration, seconds)
    return {**told, **outlook.outlook(final, run.tokens)}, final


def planned_run(
    recipe: Recipe,
    resolved: Recipe,
    vocabulary: int,
    labels: int,
    known: dict[str, int],
    calibration: Path | None = None,
    measure_seconds: float = MEASURE_SECONDS,
) -> tuple[dict[str, Any], Recipe]:
    """Measure steps for `measure_seconds` (0: none) where that is quick, else predict one where this machine is calibrated; plan
    the run, and turn train.minutes into steps. known: numbers of tokens, as outlook.num_tokens gives them."""
    import torch

    from bessemer.layout import dial
    from bessemer.layout.flops import devices_of, hardware_flops
    from bessemer.measure.known import machine_of
    from bessemer.plan import cost, here
    from bessemer.plan.estimate import cpu
    from bessemer.train import device as devices
    from bessemer.train.metrics import planned_bytes, step_seconds
    from bessemer.train.recompute import base_bytes, blocks_recomputed, check_budget, memory_of
    from bessemer.train.split import require_fit
    from bessemer.train.task import config_of

    config = config_of(resolved, vocabulary, labels)
    device = devices.choose(resolved.train)
    if resolved.parallel.world > 1:
        require_fit(resolved, config, torch.device("cuda"))  # who plans on a laptop may train elsewhere
    if not device.is_cuda:
        devices.release_unused(device)
        devices.keep_freed_memory()
    check_budget(resolved, config, device)
    base, peak = base_bytes(device), devices.peak_rate(device)
    blocks = blocks_recomputed(resolved, config, device)

    def planned(of: Recipe, seconds: float | None) -> cost.Plan:
        memory = memory_of(of, config, device, blocks, base)
        share = devices_of(of, device.is_cuda)
        return cost.plan(
            of,
            config,
            device=device.name,
            peak=peak,
            memory=memory,
            step_seconds=seconds,
            devices=share,
            source="measured on this machine" if predicted is None else PREDICTED,
            interval=None if predicted is None else (predicted.low, predicted.high),
            validation_share=dial.validation_share(of, known.get("held_out_tokens")),
        )

    predicted = None
    first = planned(resolved, None)
    free = 0.8 * devices.available_bytes(device)
    fits = first.memory_bytes["total"] < free
    alone = memory_of(_on_one_process(resolved), config, device, blocks, base)  # who measures a step holds all of it
    micro_batches = (
        (resolved.train.global_batch_tokens or 1) // config.sequence_length // (resolved.train.micro_batch or 1)
    )
    each = first.step_seconds * devices_of(resolved, device.is_cuda) / micro_batches
    quick = measure_seconds > 0 and fits and alone.total < free and each < MEASURABLE_SECONDS
    measured = step_seconds(resolved, config, device, measure_seconds, blocks) if quick else None
    if measured is not None and not device.is_cuda:  # the peak's measurement may have met a busy moment
        peak = max(peak, hardware_flops(resolved, config, blocks) / measured)
    if measured is None and not device.is_cuda and (machine := machine_of(device, calibration)) is not None:
        predicted = None if cpu.why_not(resolved, config) else cpu.step(resolved, config, machine)
        if predicted is not None:
            measured, peak = predicted.seconds, max(peak, machine.peak("fp32"))  # a busy moment must not be the peak
    if recipe.train.minutes is not None and recipe.train.steps is None and resolved.train.steps is not None:
        seconds, batches = planned(resolved, measured).step_seconds, Batches.of(resolved)
        for _ in range(2):  # the steps follow from the time of the validations, and these from the steps
            beside = dial.validation_share(resolved, known.get("held_out_tokens"))
            full_steps = recipe.train.minutes * 60 * (1.0 - dial.SAVING_SHARE) / (seconds * (1.0 + beside))
            steps = max(batches.step_of(int(full_steps * batches.full)), 1)
            resolved = dial.resolve(recipe, vocabulary, steps, micro_batch_tokens(recipe), labels, **known)
        preflight.require_warmup(resolved)
    final = planned(resolved, measured)
    share = devices_of(resolved, device.is_cuda)
    told = {**final.to_dict(), "fits": fits, **here.keys(resolved, config, final, devices=share, recomputed=blocks)}
    if resolved.parallel.world > 1:
        told["communicated_bytes"] = planned_bytes(resolved, config, device.precision, recomputed=blocks)
    return told, resolved


def _on_one_process(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"parallel": Parallel()})


def micro_batch_tokens(recipe: Recipe) -> int:
    from bessemer.layout import dial
    from bessemer.train import device as devices

    return dial.MICRO_BATCH_TOKENS if devices.choose(recipe.train).is_cuda else dial.CPU_MICRO_BATCH_TOKENS
