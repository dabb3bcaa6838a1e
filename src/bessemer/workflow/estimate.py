"""Predictions of a run's time, memory and cost on this machine, from timed training steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from bessemer.common.console import say, silent, warn
from bessemer.common.errors import InputError
from bessemer.distributed.shards import uneven_note
from bessemer.distributed.stages import recomputed_total
from bessemer.distributed.step_flops import hardware_flops
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.plan import local_plan
from bessemer.plan.goal import export_problem
from bessemer.recipe import Parallel, Recipe, ResolvedRecipe, ResolvedTrain
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.tokens import summary
from bessemer.workflow import derive, preflight

if TYPE_CHECKING:
    from bessemer.distributed.memory import Memory
    from bessemer.train.device import Device

MEASURE_SECONDS = 8.0  # seconds of timed training steps before a run, to predict its duration
CHECK_SECONDS = 2.0  # seconds of timed training steps for `bessemer check`
MEASURABLE_SECONDS = 10.0  # a micro-batch expected to take longer is not timed
FREE_SHARE = 0.8  # share of the device's free memory that a plan uses
# Bytes that building a corpus and its tokens leaves allocated in the process that then trains, measured with 15 kB to 40 MB
# of text: Arrow, and numba with LLVM, which training on a CPU without a compiler needs anyway.
DATA_HALF, NUMBA = 220_000_000, 150_000_000
DataHalf = Literal["", "made here", "to come"]


def plan_only(
    recipe: Recipe, run: RunDirectory, measure_seconds: float = MEASURE_SECONDS
) -> tuple[dict[str, Any], ResolvedRecipe]:
    """Predict time, memory and cost of a recipe without creating a run directory, for `bessemer plan`.

    Returns the plan, a dict with the content of plan.json, and the resolved recipe. Training steps are timed for about
    `measure_seconds`.
    """
    from bessemer.workflow import extend, resume_policy

    recipe = derive.filled(recipe, run, show=True)
    vocabulary, labels = summary.vocabulary_size(recipe, run.tokens), summary.num_classes(recipe, run.tokens)
    known = derive.expected_tokens(recipe, run)
    done = checkpoint_steps(run.checkpoints)
    stored = resume_policy.stored_recipe(run) if done else None
    resolved = extend.resolve(recipe, stored, run, vocabulary, labels, known)
    preflight.check_schedule(recipe, resolved)
    if stored is not None and stored.model != resolved.model:
        resume_policy.require_resumable(stored, resolved, run, extend.checkpoints_of(run))
    if done:
        say(f"  {done[-1]:,} of its steps are done in {run.path}")
        recipe = recipe.changed(train={"steps": resolved.train.steps})
    data_half: DataHalf = "" if summary.num_tokens(run.tokens) else "to come"
    plan, final = planned_run(recipe, resolved, vocabulary, labels, known, measure_seconds, data_half)
    if recipe.export.hf and (problem := export_problem(ModelConfig.from_dict(plan["model_config"]))):
        warn(problem)
    return {**plan, **summary.packing_and_epochs(final, run.tokens)}, final


def plan_unstarted(recipe: Recipe, run: RunDirectory, reference: str) -> tuple[dict[str, Any], ResolvedRecipe]:
    """Return the plan (the content of plan.json) and the resolved recipe of a run, without starting it.

    Raises InputError if the run could not start or resume now. `reference` is the file or name that the recipe was loaded
    from.
    """
    from bessemer.workflow import resume_policy, reuse

    preflight.check(recipe, run, reference, exports=recipe.export.hf, is_trial=True)
    reuse.require_unchanged(recipe, run)
    with silent():
        plan, resolved = plan_only(recipe, run, CHECK_SECONDS)
    resume_policy.require_resumable(resume_policy.stored_recipe(run), resolved, run, checkpoint_steps(run.checkpoints))
    return plan, resolved


def planned_run(
    recipe: Recipe, resolved: ResolvedRecipe, vocabulary: int, labels: int, known: dict[str, int],
    measure_seconds: float = MEASURE_SECONDS, data_half: DataHalf = "",
) -> tuple[dict[str, Any], ResolvedRecipe]:  # fmt: skip
    """Time a few training steps, plan the run, and turn `train.minutes` into steps.

    Args:
        recipe: The recipe as the user gave it.
        resolved: The same recipe, resolved.
        vocabulary: Vocabulary size of the tokenizer.
        labels: Number of classes of a classifier; 0 for other models.
        known: The numbers of training tokens (`unique_tokens`) and held-out tokens (`held_out_tokens`); empty if unknown.
        measure_seconds: Seconds of training steps to time; 0: none.
        data_half: "made here" if corpus or tokens were made in this process, "to come" if they will be made in the process
        that trains, "" otherwise. The libraries that make them stay in memory.

    Returns:
        The plan (the content of plan.json) and the resolved recipe with its number of steps.
    """
    from bessemer.train.task import config_of

    if (precision := _precision(resolved.train)) != resolved.train.precision:
        recipe = recipe.changed(train={"precision": precision})
        resolved = derive.resolve(recipe, vocabulary, labels, resolved.train.steps, **known)
    held_out = known.get("held_out_tokens")
    planner = Planner.of(resolved, config_of(resolved, vocabulary, labels), held_out, data_half)
    timing: float | None = None
    if measure_seconds > 0:
        timing, step_bytes = planner.measured(resolved, measure_seconds)
        planner = replace(planner, step_bytes=step_bytes)
    if timing is not None and not planner.device.is_cuda:  # the machine may have been busy when its peak was measured
        rate = hardware_flops(resolved.train, planner.config, planner.recomputed_total(resolved)) / timing
        planner = replace(planner, peak=max(planner.peak, rate))
    if recipe.train.minutes is not None and recipe.train.steps is None:
        for _ in range(2):  # steps and the time of validations depend on each other
            step_seconds = planner.plan(resolved, timing)["step_seconds"]
            steps = derive.steps_of_minutes(resolved, recipe.train.minutes, step_seconds, held_out)
            resolved = derive.resolve(recipe, vocabulary, labels, steps, **known)
        preflight.require_warmup(resolved)
    plan = {
        **planner.plan(resolved, timing), "fits": planner.memory(resolved).total < planner.free,
        "precision": planner.device.precision.name, "recomputed": planner.recomputed,
        "model_config": planner.config.to_dict(), "measured_step_bytes": planner.step_bytes,
    }  # fmt: skip
    return plan, resolved


def _precision(train: ResolvedTrain) -> str:
    """Return the training precision, with `auto` replaced by its value on a CPU. Warns if fp32 is faster."""
    from bessemer.train.device import choose
    from bessemer.train.precision import is_faster

    device = choose(train)
    if device.is_cuda:
        return train.precision
    name = device.precision.name
    if train.precision == "auto":
        say(f"  train.precision = {name}: this CPU is {'' if name == 'bf16' else 'not '}faster in bf16")
    elif device.precision.autocast is not None and not is_faster(name):
        warn(f"train.precision = {name}: this CPU is faster in fp32; leave the key out to take fp32")
    return name


@dataclass(frozen=True)
class Planner:
    """A planner of trainings of one model on a device of this machine.

    Attributes:
        config: Configuration of the model.
        device: Device of this machine.
        base: Memory that the process holds before training, in bytes.
        free: Memory that a training step may use, in bytes.
        peak: Peak rate of the device in FLOP/s.
        recomputed: Number of blocks per process whose activations are recomputed.
        held_out_tokens: Number of held-out tokens; None if unknown.
        step_bytes: Measured memory of a step; None if not measured.
    """

    config: ModelConfig
    device: Device
    base: int
    free: float
    peak: float
    recomputed: int
    held_out_tokens: int | None
    step_bytes: int | None = None

    def recomputed_total(self, resolved: ResolvedRecipe) -> int:
        """Return the number of blocks of the whole model whose activations are recomputed."""
        return recomputed_total(self.config, resolved.parallel, self.recomputed)

    @classmethod
    def of(
        cls, resolved: ResolvedRecipe, config: ModelConfig, held_out_tokens: int | None, data_half: DataHalf = ""
    ) -> Planner:
        """Build the planner of a resolved recipe on this machine's device.

        Args:
            resolved: The resolved recipe.
            config: Configuration of its model.
            held_out_tokens: Number of held-out tokens; None if unknown.
            data_half: "made here" if corpus or tokens were made in this process, "to come" if they will be made in the
                process
            that trains, "" otherwise. The libraries that make them stay in memory.

        Raises:
            InputError: The layout or the memory budget is not possible.
        """
        from bessemer.train import device as devices
        from bessemer.train.parallelize import require_trainable
        from bessemer.train.recompute import base_bytes, blocks_recomputed, check_budget

        device = devices.choose(resolved.train)
        # The run may be planned on a laptop and train elsewhere.
        require_trainable(resolved.train, resolved.parallel, config, "cuda")
        if note := uneven_note(config, resolved.parallel):
            warn(note)
        if not device.is_cuda:
            devices.freeze_loaded()
            devices.release_unused(device)
            devices.keep_freed_memory()
        alone = resolved.parallel.world == 1
        base = base_bytes(resolved.train, resolved.parallel, device)
        if alone and data_half == "to come" and not device.is_cuda:
            base += DATA_HALF - (0 if device.compile else NUMBA)
        try:
            check_budget(resolved.train, resolved.parallel, config, device, base)
        except InputError as error:
            if not alone or not data_half:
                raise
            left = "this counts memory that building corpus and tokens leaves in the process; once they are built, run it again"
            raise InputError(f"{error}; {left}") from None
        peak = local_plan.peak_rate(device)
        free = FREE_SHARE * devices.available_bytes(device)
        recomputed = blocks_recomputed(resolved.train, resolved.parallel, config, device, base)
        return cls(config, device, base, free, peak, recomputed, held_out_tokens)

    def memory(self, recipe: ResolvedRecipe) -> Memory:
        from bessemer.train.recompute import memory_of

        planned = memory_of(recipe.train, recipe.parallel, self.config, self.device, self.recomputed, self.base)
        return planned if self.step_bytes is None else planned.as_measured(self.step_bytes)

    def measured(self, recipe: ResolvedRecipe, seconds: float) -> tuple[float | None, int | None]:
        """Time a training step in this process, for about `seconds`.

        Returns:
            Seconds per step, None if the model is too slow or too large to time. Then the memory of a step in bytes, None
                unless
            it was measured, which needs a CPU and a run with one process.
        """
        from bessemer.train.measure import measure_step

        if not self._can_time(recipe):
            return None, None
        timing, step_bytes = measure_step(recipe, self.config, self.device, seconds, self.recomputed)
        return timing, step_bytes if recipe.parallel.world == 1 else None

    def _can_time(self, recipe: ResolvedRecipe) -> bool:
        """Return True if the model fits in this process and a micro-batch is short enough to time."""
        memory = self.memory(recipe.changed(parallel=Parallel()))
        sequences = recipe.train.global_batch_tokens // self.config.sequence_length
        micro_batches = sequences // recipe.train.micro_batch
        flops = hardware_flops(recipe.train, self.config, self.recomputed)
        seconds = flops / micro_batches / (local_plan.ASSUMED_MFU * self.peak)  # expected time of a micro-batch
        return memory.total < self.free and seconds < MEASURABLE_SECONDS

    def plan(self, recipe: ResolvedRecipe, step_seconds: float | None) -> dict[str, Any]:
        return local_plan.make_plan(
            recipe, self.config, device=self.device.name, peak=self.peak, memory=self.memory(recipe),
            step_seconds=step_seconds, devices=recipe.parallel.num_devices(recipe.cluster.nodes, self.device.is_cuda),
            recomputed_total=self.recomputed_total(recipe),
            validation_share=recipe_defaults.validation_share(recipe, self.held_out_tokens),
        )  # fmt: skip
