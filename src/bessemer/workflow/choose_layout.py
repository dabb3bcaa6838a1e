"""Plans of recipes, and the parallel layout that the planner chooses for `parallel.auto = true`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.plan import devices, plan_request, plan_result, search
from bessemer.plan.goal import MORE_SEQUENCES, Goal, fewer_devices, goal_of
from bessemer.plan.plan_request import PlanRequest
from bessemer.plan.plan_result import PlanResult
from bessemer.recipe import Recipe, load
from bessemer.recipe.parallel import AXES
from bessemer.run.directory import RunDirectory
from bessemer.tokens import summary
from bessemer.tokens.tokenizer.choice import resolve_tokenizer


def with_chosen_layout(recipe: Recipe, run: RunDirectory) -> Recipe:
    """Replace `parallel.auto` by the layout that the planner prefers.

    The same recipe gives the same layout on every process. On CPU each node runs one process, because several processes would
    share the node's cores. The planner also chooses the micro-batch and recomputation if the recipe does not set them, except
    that an existing run keeps its micro-batch. Raises InputError if no layout fits.
    """
    device, count = _local_devices(recipe)
    if device is None and recipe.cluster.device is None:
        shards = {} if recipe.parallel.given_layout & {*AXES} else {"shard": recipe.cluster.nodes}
        return recipe.changed(parallel={"auto": False, **shards})
    if run.recipe.exists() and recipe.train.micro_batch is None:
        recipe = recipe.changed(train={"micro_batch": load(run.recipe).train.micro_batch})
    if recipe.cluster.device is None:
        recipe = recipe.changed(cluster={"devices_per_node": count, "device": device.name if device else None})
    from bessemer.train.parallelize import require_trainable

    goal = planning_goal(recipe)
    refusal: InputError | None = None
    search = plan_result.make_plan(goal).found
    for candidate in search.preferred if search is not None else ():
        chosen = _with_layout(recipe, goal, candidate)
        try:
            resolved = recipe_defaults.resolve(chosen, goal.job.model.vocabulary)
            require_trainable(resolved.train, resolved.parallel, goal.job.model, "cuda")
        except InputError as error:
            refusal = refusal or error
            continue
        return chosen
    raise refusal or InputError("parallel.auto: no layout fits; `bessemer plan RECIPE --search` says why")


def planning_goal(recipe: Recipe, model: ModelConfig | None = None, *, is_open: bool = False) -> Goal:
    """Return the planner's input for a recipe.

    The vocabulary size and the number of classes come from the run's tokens or, before these exist, from the recipe.

    Args:
        recipe: The recipe.
        model: Model to plan instead of the recipe's.
        is_open: True if there is no recipe file, so the planner may choose settings that a run would choose.
    """
    folder = RunDirectory(recipe.run.folder).tokens
    vocabulary, labels = summary.vocabulary_size(recipe, folder, is_planned=True), summary.num_classes(recipe, folder)
    return goal_of(recipe, vocabulary, labels, model=model, is_open=is_open)


def plan_request_of(
    reference: str | Path | None, options: Mapping[str, str], overrides: tuple[str, ...] = ()
) -> PlanRequest:
    """Build a plan request from a recipe or, without one (None), from the options alone.

    `options` are short names of `bessemer plan` with their values, and `overrides` recipe keys as `key=value`. Raises
    InputError for an invalid name or value.
    """
    if reference is None:
        return plan_request.from_options(options, overrides)

    def read(all_overrides: Sequence[str], is_draft: bool) -> Recipe:
        return resolve_tokenizer(load(reference, all_overrides, may_be_unnamed=True, is_draft=is_draft))

    return plan_request.from_recipe(read, options, overrides)


def planned(request: PlanRequest, **how: Any) -> PlanResult:
    """Plan a request, leaving some devices unused if no good layout uses all of them.

    If the recipe fixes the layout, all devices are used. Otherwise up to a tenth of them stay unused, with a note in the
    plan, if all devices have no layout or only one with a far larger global batch. `how` are keyword arguments of
    `make_plan`. Raises InputError if no layout fits.
    """
    goal = planning_goal(request.recipe, request.model, is_open=request.is_open)
    goals = [replace(goal, notes=(*request.notes, *goal.notes))]
    if not goal.chooses_layout:
        return plan_result.make_plan(goals[0], **how)
    cluster = goal.job.cluster
    for count in fewer_devices(cluster.devices, cluster.per_node):
        fewer = request.recipe.changed(cluster={"devices": count})
        one = planning_goal(fewer, request.model, is_open=request.is_open)
        note = f"{count:,} of the {cluster.devices:,} devices are planned, which more layouts divide"
        goals.append(replace(one, notes=(*request.notes, note, *one.notes)))
    limit = MORE_SEQUENCES * min(one.job.batch for one in goals)
    plans, refusal = list[PlanResult](), None
    for one in [one for one in goals if one.job.batch <= limit] or goals:
        try:
            plans.append(plan_result.make_plan(one, **how))
        except search.NoLayoutError as error:
            refusal = refusal or error
        if plans and one is goals[0]:
            break
    if not plans:
        raise refusal or InputError("plan: no layout fits; `bessemer plan RECIPE --search` says why")
    return max(plans, key=lambda plan: plan.step.tokens_per_second)


def _with_layout(recipe: Recipe, goal: Goal, candidate: search.Candidate) -> Recipe:
    """Return the recipe with the layout, micro-batch and recomputation of a candidate that the planner found."""
    layout = candidate.job.layout
    parallel = {
        "auto": False, **{axis: getattr(layout, axis) for axis in AXES}, "zero": max(layout.zero, 1), "schedule": layout.schedule,
        "virtual": layout.virtual if layout.virtual > 1 else None,
    }  # fmt: skip
    recompute = {} if "recompute" in goal.fixed else {"recompute": layout.recompute}
    batch = {"global_batch_tokens": goal.recipe.train.global_batch_tokens}  # the planner may have proposed it
    return recipe.changed(parallel=parallel, train={"micro_batch": layout.micro_batch, **recompute, **batch})


def _local_devices(recipe: Recipe) -> tuple[devices.DeviceSpec | None, int]:
    """Return the catalogue entry and the number of this machine's accelerators; (None, 0) on a CPU."""
    import torch

    if recipe.train.device == "cpu" or not torch.cuda.is_available():
        return None, 0
    name, catalogue = torch.cuda.get_device_name(), recipe.cluster.catalogue
    device = devices.match(name, devices.catalogue(Path(catalogue) if catalogue else None))
    if device is None and recipe.cluster.device is None:
        raise InputError(f"parallel.auto: {name!r} is not in the catalogue; set cluster.device or cluster.catalogue")
    return device, torch.cuda.device_count()
