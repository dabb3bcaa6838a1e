"""`parallel.auto = true`: replace it by the layout that the planner prefers, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.defaults import derived_keys
from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.model.config import ModelConfig
from bessemer.plan import jobs, outcome, search
from bessemer.plan.jobs import Goal, goal_of
from bessemer.plan.money import DAY, dollars
from bessemer.plan.outcome import PlanResult
from bessemer.plan.request import PlanRequest
from bessemer.recipe import Recipe, load
from bessemer.recipe.parallel import AXES
from bessemer.run import RunFolder
from bessemer.terminal import amount, duration
from bessemer.tokens import outlook


def with_chosen_layout(recipe: Recipe, run: RunFolder) -> Recipe:
    """The recipe with the layout that the planner prefers in place of `parallel.auto`; one with a layout of its own as it is.

    The same recipe gives the same layout on every process. On a CPU each node is one process, since the processes of a node
    would share its cores. Micro-batch and recompute are chosen too where the recipe leaves them open, but for the micro-batch
    of a run that has begun. Raises InputError where nothing fits.
    """
    if not recipe.parallel.auto:
        return recipe

    device, count = _local_devices(recipe)
    if device is None and recipe.cluster.device is None:
        if given := sorted(recipe.parallel.given_layout):
            raise InputError(
                f"parallel.auto: on a CPU every node is a data-parallel process and nothing is searched, so that "
                f"{' and '.join(given)} cannot be kept; leave auto out, or name the device to plan for (cluster.device)"
            )
        return recipe.changed(parallel={"auto": False, "shard": recipe.cluster.nodes})
    if run.recipe.exists() and recipe.train.micro_batch is None:
        recipe = recipe.changed(train={"micro_batch": load(run.recipe).train.micro_batch})
    if recipe.cluster.device is None:
        recipe = recipe.changed(cluster={"devices_per_node": count, "device": device.name if device else None})
    goal = planning_goal(recipe)
    refusal: InputError | None = None
    found = outcome.of(goal).found
    for candidate in found.preferred if found is not None else ():
        chosen = _with_layout(recipe, goal, candidate)
        try:
            _require_fit(chosen, goal)
        except InputError as error:
            refusal = refusal or error
            continue
        return chosen
    raise refusal or InputError("parallel.auto: no layout fits; `bessemer plan RECIPE --search` says why")


def planning_goal(recipe: Recipe, model: ModelConfig | None = None, *, is_open: bool = False) -> Goal:
    """What the planner needs of a recipe (see `goal_of`); vocabulary and classes from the recipe alone, since its data may lie
    elsewhere."""
    folder = RunFolder(recipe.run.folder).tokens
    vocabulary = outlook.planned_vocabulary(recipe, folder)
    return goal_of(recipe, vocabulary, outlook.labels(recipe, folder), model=model, is_open=is_open)


def planned(request: PlanRequest, *, is_advised: bool = True, **how: Any) -> PlanResult:
    """What a request comes to. Where the planner chooses the layout, and none is of all devices (as of 100,003) or only a far
    larger batch than is proposed divides over them, the fastest plan with up to a tenth of them as spares, and it notes so.

    is_advised: with notes of a better batch or number of devices, which take several plans more; how: of `outcome.of`. Raises
    InputError.
    """
    goal = planning_goal(request.recipe, request.model, is_open=request.is_open)
    own = (*request.notes, *request.own_notes)
    goal = replace(goal, notes=(*own, *goal.notes))
    if not goal.chooses_layout:
        return outcome.of(goal, **how)
    cluster = goal.job.cluster
    fewer = [
        planning_goal(request.recipe.changed(cluster={"devices": devices}), request.model, is_open=request.is_open)
        for devices in jobs.fewer_devices(cluster.devices, cluster.per_node)
    ]
    has_batch = request.recipe.train.global_batch_tokens is not None
    limit = jobs.MORE_SEQUENCES * min(each.job.batch for each in (goal, *fewer))
    plans, refusal = [], None
    for each in (goal, *(one for one in fewer if one.job.batch <= limit)):
        devices = each.job.cluster.devices
        why = f": no layout of all divides {each.job.batch:,} sequences" if has_batch else ", which more layouts divide"
        spares = cluster.devices - devices
        others = "the other one is" if spares == 1 else f"the other {spares:,} are"
        note = f"{devices:,} of the {cluster.devices:,} devices are used and paid for{why}; {others} not in the figures"
        try:
            plans.append(
                outcome.of(
                    each if each is goal else replace(each, notes=(*own, note, *each.notes)),
                    **how,
                )
            )
        except search.NoLayoutError as error:
            refusal = refusal or error
            continue
        if each is goal and goal.job.batch <= limit:
            better = _better_batch(request, plans[0], goal) if is_advised and has_batch else None
            return _advised(plans[0], cluster.devices, better, fewer if is_advised else ())
    small = [plan for plan in plans if plan.job.batch <= limit] or plans
    if not small:
        raise refusal or InputError("plan: no layout")
    fastest = max(small, key=lambda plan: plan.step.tokens_per_second)
    better = _better_batch(request, fastest, goal) if is_advised and has_batch else None
    return _advised(fastest, cluster.devices, better)


def unadvised(request: PlanRequest) -> PlanResult:
    """`planned` without advice, for those that only a budget's search sees."""
    return planned(request, is_advised=False)


WORTH_SAYING = 0.05  # share of the device-hours that a better batch or number of devices saves
AS_GOOD = 0.02  # of them, by which the batch nearest to the given one may take more than the best


def _advised(plan: PlanResult, devices: int, batch: PlanResult | None, fewer: Sequence[Goal] = ()) -> PlanResult:
    """The plan, with a note where a batch near the given one takes far fewer hours, and where some devices idle costs less still
    and ends no later: more layouts divide the rest. devices: all that are asked for; batch: the plan with such a
    batch; fewer: goals of some of the devices."""
    if batch is not None:
        on = f" on {batch.job.cluster.devices:,} devices" if batch.job.cluster.devices < devices else ""
        plan = _noted(
            plan,
            f"the batch divides badly: with {batch.job.tokens:,} tokens a step ({batch.job.batch:,} sequences){on} the run is "
            f"expected to take {_cost(batch)} and not {_cost(plan)}",
        )
    other = _better_devices(plan, fewer)
    if other is None or (batch is not None and other.bill.device_hours >= batch.bill.device_hours):
        return plan
    days, other_days = (duration(DAY * one.bill.days) for one in (plan, other))
    return _noted(
        plan,
        f"{plan.job.cluster.devices:,} devices divide badly: on {other.job.cluster.devices:,} of them the run is expected to "
        f"take {_cost(other)} and not {_cost(plan)}, and {other_days} and not {days}",
    )


def _better_batch(request: PlanRequest, plan: PlanResult, goal: Goal) -> PlanResult | None:
    """The plan with a batch near the given one that takes far fewer hours, if there is one. goal: of all devices, of which the
    plan may leave some."""
    everyone, used, best = goal.job.cluster.devices, plan.job.cluster.devices, plan
    for job in (goal.job,) if used == everyone else (goal.job, plan.job):  # batches for all devices are preferred
        cluster, others = {"devices": job.cluster.devices}, list[PlanResult]()
        for better in jobs.better_batches(job):
            train = {"global_batch_tokens": better * job.model.sequence_length}
            recipe = request.recipe.changed(train=train, cluster=cluster)
            with suppress(search.NoLayoutError):
                others.append(outcome.of(planning_goal(recipe, request.model, is_open=request.is_open)))
        fitting = [one for one in others if one.verdict.fits]
        limit = (1 + AS_GOOD) * min((one.bill.device_hours for one in fitting), default=0.0)
        good = [one for one in fitting if one.bill.device_hours <= limit]
        other = min(good, key=lambda one: abs(one.job.batch - goal.job.batch), default=best)
        if other.bill.device_hours <= (1 - WORTH_SAYING) * best.bill.device_hours:
            best = other
    return None if best is plan else best


def _better_devices(plan: PlanResult, fewer: Sequence[Goal]) -> PlanResult | None:
    """The plan on some of the devices, where that costs far less and ends no later."""
    others: list[PlanResult] = []
    for goal in fewer:
        with suppress(InputError):
            others.append(outcome.of(goal))
    limit = (1 - WORTH_SAYING) * plan.bill.device_hours
    cheaper = [one for one in others if one.verdict.fits and one.bill.device_hours <= limit]
    other = min(cheaper, key=lambda one: one.bill.days, default=plan)
    return None if other is plan or other.bill.days > plan.bill.days else other


def _cost(plan: PlanResult) -> str:
    return f"{amount(plan.bill.device_hours)} device-hours" if plan.bill.cost is None else dollars(plan.bill.cost)


def _noted(plan: PlanResult, note: str) -> PlanResult:
    return replace(plan, goal=replace(plan.goal, notes=(*plan.goal.notes, note)))


def _with_layout(recipe: Recipe, goal: Goal, candidate: search.Candidate) -> Recipe:
    layout = candidate.job.layout
    parallel = {
        "auto": False, **{axis: getattr(layout, axis) for axis in AXES}, "zero": max(layout.zero, 1), "schedule": layout.schedule,
        "virtual": layout.virtual if layout.virtual > 1 else None,
    }  # fmt: skip
    recompute = {} if "recompute" in goal.given else {"recompute": layout.recompute}
    batch = {"global_batch_tokens": goal.recipe.train.global_batch_tokens}  # which the planner may have proposed
    return recipe.changed(parallel=parallel, train={"micro_batch": layout.micro_batch, **recompute, **batch})


def _require_fit(recipe: Recipe, goal: Goal) -> None:
    import torch

    from bessemer.train.split import require_trainable

    resolved = derived_keys.resolve(recipe, goal.job.model.vocabulary)
    require_trainable(resolved.train, resolved.parallel, goal.job.model, torch.device("cuda"))


def _local_devices(recipe: Recipe) -> tuple[devices.DeviceSpec | None, int]:
    """This machine's accelerators, as the catalogue has them, and their number; None: it computes on its CPU."""
    import torch

    if recipe.train.device == "cpu" or not torch.cuda.is_available():
        return None, 0
    name, catalogue = torch.cuda.get_device_name(), recipe.cluster.catalogue
    device = devices.match(name, devices.catalogue(Path(catalogue) if catalogue else None))
    if device is None and recipe.cluster.device is None:
        raise InputError(
            f"parallel.auto: {name!r} is not in the catalogue of devices; name one with cluster.device, or add it "
            "in a file of your own (cluster.catalogue)"
        )
    return device, torch.cuda.device_count()
