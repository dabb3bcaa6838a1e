"""What a goal comes to: the layout, its memory and time, days, money, failures, and where it stands against the scaling laws."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.memory import optimizer_bytes
from bessemer.plan import failures, laws, money
from bessemer.plan.batch import BatchOutlook, batch_outlook
from bessemer.plan.estimate.job import Job, Recompute
from bessemer.plan.estimate.memory import DeviceMemory, MemoryFit, fits, memory, out_of_memory, stages, train_of
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.intervals import SOURCES, ExpectedRun, PlanInterval, evidence, expected_run, interval
from bessemer.plan.jobs import GB, Goal
from bessemer.plan.laws import Repetition, repetition
from bessemer.plan.layout_notes import layout_notes
from bessemer.plan.search import (
    RECOMPUTE,
    Candidate,
    LayoutSearchResult,
    NoLayoutError,
    search,
)
from bessemer.plan.splits import expert_ranks
from bessemer.plan.standing import KnownModel, Standing, nearest, standing
from bessemer.plan.what_divides import what_divides
from bessemer.plan.would_fit import no_layout, without_given
from bessemer.recipe.parallel import LAYOUT_KEYS
from bessemer.terminal import amount, percent, size

SHOWN = 20  # layouts of a search that --json lists of each kind
DAYS_A_YEAR = 365.25
MOST_YEARS = 2
"""Of a run, beyond which a plan says how many devices would end it in one: no published run took so long."""


@dataclass(frozen=True)
class PlanResult:
    """goal: what was asked; job: with the layout that was given or found; found: the search, where there was one; running,
    bill: of the expected run."""

    goal: Goal
    job: Job
    memory: DeviceMemory
    verdict: MemoryFit
    step: Step
    expected: ExpectedRun
    bill: money.Bill
    running: failures.Outlook
    save: failures.CheckpointCost
    loading: money.Loading
    standing: Standing | None
    batch: BatchOutlook | None
    known: tuple[KnownModel, ...]
    repeated: Repetition | None = None
    found: LayoutSearchResult | None = None

    @property
    def steps(self) -> int:
        """Steps of the full batch."""
        return round(self.goal.tokens / self.job.tokens)

    @property
    def seconds(self) -> float:
        """Of all steps at the planned time: the ideal run."""
        return self.goal.tokens / self.job.tokens * self.step.seconds

    @property
    def precision(self) -> str:
        """As the recipe has it, which says how fp8 is scaled; the job's where that is chosen for the device."""
        asked = self.goal.recipe.train.precision
        return asked if asked == "fp8-rowwise" else self.job.precision

    @property
    def intervals(self) -> dict[str, PlanInterval]:
        """80% intervals, printed and in the JSON: seconds of a step, bytes of the fullest device, and days, device-hours and
        dollars (where there is a price) of the whole run."""
        run, devices, price = self.expected.seconds, self.job.cluster.devices, self.bill.price
        found = {
            "step_seconds": interval(
                "chosen" if _is_chosen(self.goal, self.found) else "step", self.job, self.step.seconds
            ),
            "memory_bytes": interval("memory", self.job, self.memory.total),
            "days": run.times(1 / money.DAY),
            "device_hours": run.times(devices / money.HOUR),
        }
        return found if price is None else {**found, "cost": run.times(devices / money.HOUR * price)}


def of(goal: Goal, *, searched: bool = False, unique: float | None = None) -> PlanResult:
    """Work a goal out. searched: look for the best layout even where the recipe gives one; unique: tokens that differ, where
    others are seen again.

    Raises NoLayoutError where none fits (with the nearest miss), InputError where the given one cannot be; where something of
    the layout is given, what does not fit in memory is still evaluated, with fits = False.
    """
    found = search(goal.job, goal.given, goal.headroom) if goal.chooses_layout or searched else None
    if found is not None and not found.ranked and not goal.given & set(LAYOUT_KEYS):
        raise NoLayoutError(no_layout(goal, found))
    if found is None or not goal.chooses_layout:
        best = _given(goal)
        return _worked_out(_noted(goal, best), best, found, unique)
    best = _chosen(goal, found)
    goal = _noted(goal, best)
    if not found.ranked and (advice := without_given(goal)):
        goal = replace(goal, notes=(*goal.notes, advice))
    if found.ranked and not found.safe and best is not found.least:
        least = _worked_out(goal, found.least, found, unique)
        goal = replace(goal, notes=(*goal.notes, _trade(_worked_out(goal, best, found, unique), least)))
    return _worked_out(goal, best, found, unique)


def _noted(goal: Goal, best: Candidate) -> Goal:
    return replace(goal, notes=(*goal.notes, *layout_notes(goal, best)))


def _is_chosen(goal: Goal, found: LayoutSearchResult | None) -> bool:
    """Whether the planner chose the layout, from several."""
    return goal.chooses_layout and found is not None and found.is_choice


def _trade(plan: PlanResult, least: PlanResult) -> str:
    """What a layout that leaves no headroom saves over the one that takes least memory."""
    (memory, risk, cost), (least_memory, least_risk, least_cost) = (
        (
            size(one.memory.total), percent(out_of_memory(one.memory.total, one.job.cluster.device.memory)),
            f"{amount(one.bill.device_hours)} device-hours" if one.bill.cost is None else money.dollars(one.bill.cost),
        )
        for one in (plan, least)
    )  # fmt: skip
    return (
        f"no layout leaves {plan.goal.headroom:.0%} of the memory free: this one takes {memory}, with a risk of {risk}, and is "
        f"expected to take {cost}; the one with the least memory {least_memory}, {least_risk} and {least_cost}"
    )


def _worked_out(goal: Goal, best: Candidate, found: LayoutSearchResult | None, unique: float | None) -> PlanResult:
    """The plan of a layout."""
    job = best.job
    config, cluster = job.model, job.cluster
    asked, device, rate = goal.recipe.cluster, cluster.device, goal.recipe.cluster.failures_per_node_year
    storage = asked.storage_bandwidth * GB * cluster.nodes
    between = failures.mtbf(
        cluster.devices, rate / DAYS_A_YEAR if rate else failures.published_rate(device.generation)[0]
    )
    save = failures.checkpoint(checkpoint_bytes(job), cluster.devices, storage)
    if goal.recipe.checkpoint.asynchronous is False:
        save = replace(save, stall=save.write)
    ideal = goal.tokens / job.tokens * best.step.seconds
    slower = evidence(job).factor
    running = failures.outlook(ideal * slower, best.step.seconds * slower, between, save, goal.checkpoint_every)
    expected = expected_run(job, running, ideal, _is_chosen(goal, found))
    repeated = None if unique is None else repetition(goal.tokens, unique)
    if repeated is not None and repeated.last_epoch_worth < laws.WORTHLESS:
        note = "the last passes over the text add almost nothing: so many tokens cost more than this text is worth"
        goal = replace(goal, notes=(*goal.notes, note))
    if (years := expected.seconds.expected / money.DAY / DAYS_A_YEAR) > MOST_YEARS:
        note = (
            f"at this speed a device, a run of a year takes about {amount(math.ceil(years * cluster.devices))} of them"
        )
        goal = replace(goal, notes=(*goal.notes, note))
    by_laws = config.active_parameters, goal.tokens
    bill = money.bill(
        expected.seconds.expected, cluster.devices, device.watts, price=asked.price if asked.price is not None else device.price,
        price_date=None if asked.price is not None else device.price_date,
    )  # fmt: skip
    return PlanResult(
        goal=_with_time_given(goal, expected.seconds.expected), job=job, memory=best.memory,
        verdict=fits(job, best.memory), step=best.step, bill=bill, running=running, expected=expected, save=save,
        loading=money.loading(
            job.tokens / best.step.seconds, config.vocabulary, tokens=goal.tokens, readers=job.layout.data,
            storage=storage,
        ),
        standing=standing(*by_laws, repeated) if goal.recipe.is_pretraining else None,
        batch=batch_outlook(*by_laws, min(job.tokens, goal.tokens)) if goal.recipe.is_pretraining else None,
        known=nearest(*by_laws) if goal.recipe.is_pretraining else (),
        repeated=repeated,
        found=found,
    )  # fmt: skip


def _with_time_given(goal: Goal, seconds: float) -> Goal:
    """With what train.minutes are enough for: minutes become steps where a run times its own. seconds: of the plan."""
    train = goal.recipe.train
    if train.minutes is None or not goal.tokens_by_size:
        return goal
    enough = f"by the expected figure it is enough for {amount(goal.tokens * 60 * train.minutes / seconds)} (--tokens)"
    rows = [f"{row}; {enough}" if row.startswith("train.minutes ") else row for row in goal.unplanned]
    return replace(goal, unplanned=tuple(rows))


def checkpoint_bytes(job: Job) -> float:
    """Of a checkpoint: weights (the master copies where there are some), their moving average and moments, each once."""
    framework = job.framework
    if framework.name == "bessemer":
        weights = framework.weight_bytes * (1 + job.state.has_ema)
        return job.model.parameters * weights + optimizer_bytes(train_of(job), job.model)
    return job.model.parameters * ((framework.master_bytes or framework.weight_bytes) + framework.moment_bytes)


def _chosen(goal: Goal, found: LayoutSearchResult) -> Candidate:
    """The preferred layout, or the nearest miss."""
    if found.ranked:
        return found.preferred[0]
    job = replace(goal.job, layout=found.rejected[0].layout)
    return Candidate(job, memory(job), step(job))


def _given(goal: Goal) -> Candidate:
    """The recipe's own layout; where it leaves recompute open, as little as leaves the headroom; of a mixture the fastest
    division of the experts, of which a recipe says nothing, that leaves it. Where none does, what takes least memory."""
    layout = goal.job.layout
    if (why := refuse(goal.job)) is not None:
        raise InputError(f"{why}{what_divides(goal.job)}")
    modes: tuple[Recompute, ...] = (layout.recompute,) if "recompute" in goal.given else RECOMPUTE
    found: list[Candidate] = []
    for expert in expert_ranks(goal.job.model, layout.world // layout.pipeline):
        for mode in modes:
            job = goal.job.with_layout(recompute=mode, expert=expert)
            found.append(Candidate(job, memory(job), step(job)))
            if found[-1].leaves(goal.headroom):
                break
    safe = [one for one in found if one.leaves(goal.headroom)]
    return min(safe, key=lambda one: one.step.seconds) if safe else min(found, key=lambda one: one.memory.total)


def to_dict(out: PlanResult, searched: bool = False) -> dict[str, Any]:
    """Plain values, for machines. Bytes, seconds, FLOPs, dollars; shares from 0 to 1."""
    job, time, goal = out.job, out.step, out.goal
    config, devices = job.model, job.cluster.devices
    per_token = time.model_flops / job.tokens
    found: dict[str, Any] = {
        "parameters": config.parameters,
        "active_parameters": config.active_parameters,
        "parameters_by_part": {
            "embedding": config.embedding_parameters,
            "non_embedding": config.parameters - config.embedding_parameters,
        },
        "notes": list(goal.notes),
        "not_in_the_plan": list(goal.unplanned),
        "tokens": goal.tokens,
        "steps": out.steps,
        "batch_tokens": job.tokens,
        "sequence_length": config.sequence_length,
        "device": job.cluster.device.name,
        "devices": devices,
        "framework": job.framework.name,
        "precision": out.precision,
        "flops_per_token": per_token,
        "total_flops": per_token * goal.tokens,
        "six_nd_flops": laws.training_flops(config.active_parameters, goal.tokens),
        "petaflop_days": money.petaflop_days(per_token * goal.tokens),
        "model_state": [asdict(state) for state in money.states(config.parameters, job.cluster.device.memory)],
        "step_seconds": time.seconds,
        "step_seconds_by_part": {name: getattr(time, name) for name in STEP_PARTS},
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_device": time.tokens_per_second / devices,
        "model_tflops_per_device": time.model_flops / time.seconds / devices / 1e12,
        "hardware_tflops_per_device": time.hardware_flops / time.seconds / devices / 1e12,
        "mfu": time.mfu,
        "hfu": time.hfu,
        "bubble": time.bubble / time.seconds,
        **run_dict(out),
        "price": {"dollars_per_device_hour": out.bill.price, "asked": out.bill.price_date},
        "fits": out.verdict.fits,
        "reasons": list(out.verdict.reasons),
        "layout": layout_dict(job),
        "memory_bytes_per_device": out.memory.to_dict(),
        "headroom": goal.headroom,
        "out_of_memory_risk": out_of_memory(out.memory.total, job.cluster.device.memory),
        "memory_bytes_by_stage": [one.to_dict() for one in stages(job)],
        "device_memory_bytes": round(job.cluster.device.memory),
        "chinchilla": out.standing and out.standing.to_dict(),
        "known_models": [asdict(model) for model in out.known],
        "failures": asdict(out.running),
        "checkpoint": asdict(out.save),
        "loading": asdict(out.loading),
        "batch": out.batch and asdict(out.batch),
        "learning_rate": goal.recipe.train.optimizer.learning_rate,
    }
    if out.found is not None and (searched or goal.chooses_layout):
        found["search"] = {**search_dict(out.found), "given": sorted(goal.given)}
    if out.repeated is not None:
        found["repeated"] = asdict(out.repeated)
    return found


def run_dict(out: PlanResult) -> dict[str, Any]:
    """The whole run: ideal figures (every step at the planned time), expected ones with their 80% intervals, what lies between
    them, and what the intervals rest on."""
    hours, price, found = out.seconds / money.HOUR * out.job.cluster.devices, out.bill.price, evidence(out.job)
    whole = {name: one for name, one in out.intervals.items() if name in ("days", "device_hours", "cost")}
    # The entry of a user's device may lack its watts.
    energy = out.bill.megawatt_hours if out.job.cluster.device.watts else None
    return {
        "days": out.seconds / money.DAY,
        "device_hours": hours,
        "cost": None if price is None else price * hours,
        "energy_megawatt_hours": energy and energy * out.seconds / out.expected.seconds.expected,
        "expected": {
            "cost": None,
            **{name: one.expected for name, one in whole.items()},
            "energy_megawatt_hours": energy,
        },
        "interval_80": {"cost": None, **{name: [one.low, one.high] for name, one in out.intervals.items()}},
        "expected_step_seconds": out.intervals["step_seconds"].expected,
        "device_hours_by_part": {
            name: {"device_hours": seconds / money.HOUR * out.job.cluster.devices, "source": SOURCES[name]}
            for name, seconds in out.expected.parts.items()
        },
        "evidence": asdict(found),
    }


STEP_PARTS = (
    "matmuls", "attention", "elementwise", "host", "tensor", "context", "shard", "expert", "data", "pipeline", "bubble",
    "stragglers", "optimizer",
)  # fmt: skip
LAYOUT_FIGURES = (
    "replicate", "shard", "tensor", "pipeline", "virtual", "context", "expert", "micro_batch", "recompute", "zero", "schedule",
)  # fmt: skip


def layout_dict(job: Job) -> dict[str, Any]:
    """A layout's ways, with what goes with them."""
    return {name: getattr(job.layout, name) for name in LAYOUT_FIGURES} | {"micro_batches": job.micro_batches}


def search_dict(of: LayoutSearchResult) -> dict[str, Any]:
    """Best layouts in the order of choice, Pareto front of speed and memory, nearest misses, and counts of impossible splits by
    reason; the fastest of the layouts that miss by little, where it is faster than the choice."""
    miss = of.fastest_near_miss
    return {
        "fitting": len(of.ranked),
        "with_headroom": len(of.safe),
        "best": [candidate_dict(one) for one in of.preferred[:SHOWN]],
        "pareto": [candidate_dict(one) for one in of.pareto],
        "too_large": len(of.rejected),
        "nearest_misses": [
            {"layout": asdict(miss.layout), "missing_bytes": miss.missing, "reasons": list(miss.reasons)}
            for miss in of.rejected[:SHOWN]
        ],
        "fastest_near_miss": None if miss is None else {**candidate_dict(miss), "missing_bytes": miss.missing},
        "impossible": of.impossible,
    }


def candidate_dict(one: Candidate) -> dict[str, Any]:
    """A row of a search."""
    step, figures = one.step, {"memory_bytes": one.memory.total, "out_of_memory_risk": one.risk}
    speed = {"step_seconds": step.seconds, "tokens_per_second": step.tokens_per_second, "mfu": step.mfu}
    return layout_dict(one.job) | speed | figures
