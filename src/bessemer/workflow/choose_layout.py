"""`parallel.auto = true`: replace it by the layout that the planner prefers, before anything starts."""

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
    """Return a recipe of `parallel.auto` with the layout that the planner prefers.

    The same recipe gives the same layout on every process. On a CPU each node is one process, since the processes of a node
    would share its cores. Micro-batch and recompute are chosen too where the recipe leaves them open, but for the micro-batch
    of a run that has begun. Raises InputError where nothing fits.
    """
    device, count = _local_devices(recipe)
    if device is None and recipe.cluster.device is None:
        shards = {} if recipe.parallel.given_layout & {*AXES} else {"shard": recipe.cluster.nodes}
        return recipe.changed(parallel={"auto": False, **shards})
    if run.recipe.exists() and recipe.train.micro_batch is None:
        recipe = recipe.changed(train={"micro_batch": load(run.recipe).train.micro_batch})
    if recipe.cluster.device is None:
        recipe = recipe.changed(cluster={"devices_per_node": count, "device": device.name if device else None})
    import torch

    from bessemer.train.parallelize import require_trainable

    goal = planning_goal(recipe)
    refusal: InputError | None = None
    found = plan_result.make_plan(goal).found
    for candidate in found.preferred if found is not None else ():
        chosen = _with_layout(recipe, goal, candidate)
        try:
            resolved = recipe_defaults.resolve(chosen, goal.job.model.vocabulary)
            require_trainable(resolved.train, resolved.parallel, goal.job.model, torch.device("cuda"))
        except InputError as error:
            refusal = refusal or error
            continue
        return chosen
    raise refusal or InputError("parallel.auto: no layout fits; `bessemer plan RECIPE --search` says why")


def planning_goal(recipe: Recipe, model: ModelConfig | None = None, *, is_open: bool = False) -> Goal:
    """Return what the planner needs of a recipe (see `goal_of`)."""
    return goal_of(recipe, *planned_sizes(recipe), model=model, is_open=is_open)


def planned_sizes(recipe: Recipe) -> tuple[int, int]:
    """Return vocabulary and classes from the recipe alone, since its data may be elsewhere."""
    folder = RunDirectory(recipe.run.folder).tokens
    return summary.vocabulary_size(recipe, folder, is_planned=True), summary.num_classes(recipe, folder)


def plan_request_of(
    reference: str | Path | None, asked: Mapping[str, str], overrides: tuple[str, ...] = ()
) -> PlanRequest:
    """Build the request of a recipe, or of no recipe, with short names and `key=value` overrides. Raises InputError."""
    if reference is None:
        return plan_request.from_options(asked, overrides)

    def read(some: Sequence[str], is_draft: bool) -> Recipe:
        return resolve_tokenizer(load(reference, some, may_be_unnamed=True, is_draft=is_draft))

    return plan_request.from_recipe(read, asked, overrides)


def planned(request: PlanRequest, **how: Any) -> PlanResult:
    """Build the plan of a request. Where the planner chooses the layout and none is of all devices, or only a far larger batch
    than is proposed divides over them, up to a tenth of them are left as spares, and a note says so. how: of `make_plan`.
    Raises InputError."""
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
        raise refusal or InputError("plan: no layout")
    return max(plans, key=lambda plan: plan.step.tokens_per_second)


def _with_layout(recipe: Recipe, goal: Goal, candidate: search.Candidate) -> Recipe:
    layout = candidate.job.layout
    parallel = {
        "auto": False, **{axis: getattr(layout, axis) for axis in AXES}, "zero": max(layout.zero, 1), "schedule": layout.schedule,
        "virtual": layout.virtual if layout.virtual > 1 else None,
    }  # fmt: skip
    recompute = {} if "recompute" in goal.given else {"recompute": layout.recompute}
    batch = {"global_batch_tokens": goal.recipe.train.global_batch_tokens}  # which the planner may have proposed
    return recipe.changed(parallel=parallel, train={"micro_batch": layout.micro_batch, **recompute, **batch})


def _local_devices(recipe: Recipe) -> tuple[devices.DeviceSpec | None, int]:
    """This machine's accelerators, as the catalogue has them, and their number; None: it computes on its CPU."""
    import torch

    if recipe.train.device == "cpu" or not torch.cuda.is_available():
        return None, 0
    name, catalogue = torch.cuda.get_device_name(), recipe.cluster.catalogue
    device = devices.match(name, devices.catalogue(Path(catalogue) if catalogue else None))
    if device is None and recipe.cluster.device is None:
        raise InputError(f"parallel.auto: {name!r} is not in the catalogue; set cluster.device or cluster.catalogue")
    return device, torch.cuda.device_count()
