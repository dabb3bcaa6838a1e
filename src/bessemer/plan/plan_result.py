"""Plan of a goal on a cluster: layout, memory, step time, days, cost and failures, and its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bessemer.common.console import size
from bessemer.common.errors import InputError
from bessemer.distributed.optimizer_bytes import optimizer_bytes, undivided_state_bytes
from bessemer.model.config import ModelConfig
from bessemer.plan import failures, run_cost, scaling_laws
from bessemer.plan.estimate.job import Job, Recompute
from bessemer.plan.estimate.memory import HEADROOM, DeviceMemory, excess, memory, out_of_memory, stages, train_of
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.goal import Goal
from bessemer.plan.intervals import ExpectedRun, PlanInterval, evidence, expected_run, interval
from bessemer.plan.layouts import expert_ranks
from bessemer.plan.scaling_laws import critical_batches, learning_rates, optimal_batches
from bessemer.plan.search import RECOMPUTE, Candidate, LayoutSearchResult, NoLayoutError, search
from bessemer.recipe.parallel import LAYOUT_KEYS

SHOWN = 20  # layouts of each kind that --json lists for a search
DAYS_A_YEAR = 365.25


@dataclass(frozen=True)
class PlanResult:
    """The plan of a run: layout, memory, step time, duration, cost and failures.

    Attributes:
        goal: The goal that was planned.
        job: The job with the layout of the recipe or of the search.
        memory: Peak memory of the fullest device.
        step: Planned step time, by part.
        expected: Expected duration of the run, with its interval.
        bill: Device-hours, price and energy of the expected run.
        running: Effect of failures and checkpoints on the run.
        save: Cost of a checkpoint.
        loading: Storage traffic of the run.
        found: The layout search, or None if the recipe gives the layout.
    """

    goal: Goal
    job: Job
    memory: DeviceMemory
    step: Step
    expected: ExpectedRun
    bill: run_cost.Bill
    running: failures.Outlook
    save: failures.CheckpointCost
    loading: run_cost.Loading
    found: LayoutSearchResult | None = None

    @property
    def excess(self) -> tuple[str, ...]:
        """Reasons why the job does not fit in memory; empty if it fits."""
        return excess(self.job, self.memory)

    @property
    def fits(self) -> bool:
        return not self.excess

    @property
    def steps(self) -> int:
        """Steps of the run at the full batch."""
        return round(self.goal.tokens / self.job.tokens)

    @property
    def seconds(self) -> float:
        """Seconds of all steps at the planned step time (the ideal run)."""
        return self.goal.tokens / self.job.tokens * self.step.seconds

    @property
    def precision(self) -> str:
        """Name of the precision for output: "fp8-rowwise" if the recipe selects it (the job then has "fp8"), else the job's."""
        name = self.goal.recipe.train.precision
        return name if name == "fp8-rowwise" else self.job.precision

    @property
    def intervals(self) -> dict[str, PlanInterval]:
        """80% intervals for output and JSON, by name.

        They cover seconds of a step, bytes of the fullest device, and days, device-hours and (with a price) dollars of
        the run.
        """
        run, devices, price = self.expected.seconds, self.job.cluster.devices, self.bill.price
        ranges = {
            "step_seconds": interval(_question(self.goal, self.found), self.job, self.step.seconds),
            "memory_bytes": interval("memory", self.job, self.memory.total),
            "days": run.times(1 / run_cost.DAY),
            "device_hours": run.times(devices / run_cost.HOUR),
        }
        return ranges if price is None else {**ranges, "cost": run.times(devices / run_cost.HOUR * price)}


def make_plan(goal: Goal, *, searched: bool = False) -> PlanResult:
    """Build the plan of a goal.

    If parts of the layout are given, a layout that does not fit in memory is still evaluated, with `fits` = False.

    Args:
        goal: The goal to plan.
        searched: True to search for layouts even if the recipe gives one.

    Raises:
        NoLayoutError: No layout fits; the message has the nearest miss.
        InputError: The given layout is impossible.
    """
    result = search(goal.job, goal.fixed) if goal.chooses_layout or searched else None
    if result is not None and not result.ranked and not goal.fixed & set(LAYOUT_KEYS):
        miss, cluster = result.rejected[0], goal.job.cluster
        where, reasons = f"{cluster.devices:,} x {cluster.device.name}", "; ".join(miss.reasons)
        raise NoLayoutError(f"plan: no layout of {where} fits; the nearest misses by {size(miss.missing)}: {reasons}")
    best = _given(goal) if result is None or not goal.chooses_layout else _chosen(goal, result)
    return _worked_out(goal, best, result)


def _question(goal: Goal, result: LayoutSearchResult | None) -> Literal["step", "chosen"]:
    """Return the question of `intervals.interval`: "chosen" if the planner chose the layout from several, else "step"."""
    return "chosen" if goal.chooses_layout and result is not None and result.is_choice else "step"


def _worked_out(goal: Goal, best: Candidate, result: LayoutSearchResult | None) -> PlanResult:
    """Build the plan of a goal with the layout `best`; `result` is the search that found it, if any."""
    job = best.job
    config, cluster = job.model, job.cluster
    request, device, rate = goal.recipe.cluster, cluster.device, goal.recipe.cluster.failures_per_node_year
    storage = device.storage_bandwidth * cluster.nodes
    between = failures.mtbf(cluster.devices, rate / DAYS_A_YEAR if rate else failures.published_rate(device.generation))
    save = failures.checkpoint(checkpoint_bytes(job), cluster.devices, storage)
    if goal.recipe.checkpoint.asynchronous is False:
        save = replace(save, stall=save.write)
    ideal = goal.tokens / job.tokens * best.step.seconds
    slower = evidence(job).factor
    running = failures.outlook(ideal * slower, best.step.seconds * slower, between, save, goal.checkpoint_every)
    expected = expected_run(job, running, ideal, _question(goal, result))
    price, asked_at = (device.price, device.price_date) if request.price is None else (request.price, None)
    bill = run_cost.bill(expected.seconds.expected, cluster.devices, device.watts, price=price, price_date=asked_at)
    return PlanResult(
        goal=goal, job=job, memory=best.memory, step=best.step, bill=bill, running=running, expected=expected, save=save,
        loading=run_cost.loading(job.tokens / best.step.seconds, config.vocabulary, tokens=goal.tokens, storage=storage),
        found=result,
    )  # fmt: skip


def checkpoint_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint: weights (master copies if any), their moving average, and moments."""
    framework = job.framework
    if framework.name == "bessemer":
        weights = framework.weight_bytes * (1 + (job.train.ema > 0))
        train = train_of(job)
        state = optimizer_bytes(train, job.model) + undivided_state_bytes(train, job.model, job.model.layers)
        return job.model.parameters * weights + state
    return job.model.parameters * ((framework.master_bytes or framework.weight_bytes) + framework.moment_bytes)


def _chosen(goal: Goal, result: LayoutSearchResult) -> Candidate:
    """Return the preferred layout of a search, or the nearest miss."""
    if result.ranked:
        return result.preferred[0]
    job = replace(goal.job, layout=result.rejected[0].layout)
    return Candidate(job, memory(job), step(job))


def _given(goal: Goal) -> Candidate:
    """Return the recipe's own layout as a candidate.

    If the recipe leaves recomputation open, the least that leaves the headroom is used, and if it leaves the placement of
    experts open, the fastest one. If nothing leaves the headroom, the result is the candidate that needs least memory.
    Raises InputError if the layout is impossible.
    """
    layout = goal.job.layout
    if (why := refuse(goal.job)) is not None:
        raise InputError(why)
    modes: tuple[Recompute, ...] = (layout.recompute,) if "recompute" in goal.fixed else RECOMPUTE
    candidates: list[Candidate] = []
    for expert in expert_ranks(goal.job, layout.stage_ranks, goal.fixed):
        for mode in modes:
            job = goal.job.with_layout(recompute=mode, expert=expert)
            candidates.append(Candidate(job, memory(job), step(job)))
            if candidates[-1].leaves(HEADROOM):
                break
    safe = [one for one in candidates if one.leaves(HEADROOM)]
    return min(safe, key=lambda one: one.step.seconds) if safe else min(candidates, key=lambda one: one.memory.total)


def to_dict(out: PlanResult, searched: bool = False) -> dict[str, Any]:
    """Return a plan as plain values for JSON: bytes, seconds, FLOPs, dollars, and shares from 0 to 1.

    If `searched`, the layout search is included even if the recipe gives the layout.
    """
    job, time, goal = out.job, out.step, out.goal
    config, devices = job.model, job.cluster.devices
    per_token = time.model_flops / job.tokens
    by_laws, is_pretraining = (config.active_parameters, goal.tokens), goal.recipe.is_pretraining
    facts: dict[str, Any] = {
        "parameters": config.parameters,
        "active_parameters": config.active_parameters,
        "parameters_by_part": parameters_by_part(config),
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
        "six_nd_flops": scaling_laws.training_flops(config.active_parameters, goal.tokens),
        "petaflop_days": run_cost.petaflop_days(per_token * goal.tokens),
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
        "fits": out.fits,
        "reasons": list(out.excess),
        "layout": layout_dict(job),
        "memory_bytes_per_device": out.memory.to_dict(),
        "headroom": HEADROOM,
        "out_of_memory_risk": out_of_memory(out.memory.total, job.cluster.device.memory),
        "memory_bytes_by_stage": [one.to_dict() for one in stages(job)],
        "device_memory_bytes": round(job.cluster.device.memory),
        "chinchilla": scaling_laws.compare(*by_laws) if is_pretraining else None,
        "failures": asdict(out.running),
        "checkpoint": asdict(out.save),
        "loading": asdict(out.loading),
        "batch": batch_by_laws(out) if is_pretraining else None,
        "learning_rate": goal.recipe.train.optimizer.learning_rate,
    }
    if out.found is not None and (searched or goal.chooses_layout):
        facts["search"] = {**search_dict(out.found), "given": sorted(goal.fixed)}
    return facts


def parameters_by_part(config: ModelConfig) -> dict[str, int]:
    """Return the number of parameters in embeddings and of all others, as {"embedding": ..., "non_embedding": ...}."""
    embedding = config.embedding_parameters
    return {"embedding": embedding, "non_embedding": config.parameters - embedding}


def batch_by_laws(out: PlanResult) -> dict[str, Any]:
    """Return the planned batch in tokens and its number of steps, compared with scaling laws.

    The entries "optimal", "critical" (batches in tokens) and "learning_rates" are dicts from the name of a law to its
    value.
    """
    size_and_tokens, batch = (out.job.model.active_parameters, out.goal.tokens), min(out.job.tokens, out.goal.tokens)
    return {
        "batch": batch,
        "steps": out.goal.tokens / batch,
        "optimal": optimal_batches(*size_and_tokens),
        "critical": critical_batches(*size_and_tokens),
        "learning_rates": learning_rates(*size_and_tokens),
    }


def run_dict(out: PlanResult) -> dict[str, Any]:
    """Return the figures of the whole run as plain values.

    They are the ideal figures (every step at the planned time), the expected ones with 80% intervals, the difference by
    cause, and the evidence behind the intervals.
    """
    hours, price, facts = out.seconds / run_cost.HOUR * out.job.cluster.devices, out.bill.price, evidence(out.job)
    whole = {name: one for name, one in out.intervals.items() if name in ("days", "device_hours", "cost")}
    # The catalogue entry of a user's device may have no watts.
    energy = out.bill.megawatt_hours if out.job.cluster.device.watts else None
    return {
        "days": out.seconds / run_cost.DAY,
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
            name: seconds / run_cost.HOUR * out.job.cluster.devices for name, seconds in out.expected.parts.items()
        },
        "evidence": asdict(facts),
    }


STEP_PARTS = (
    "matmuls", "attention", "elementwise", "host", "tensor", "context", "shard", "expert", "data", "pipeline", "bubble",
    "stragglers", "optimizer",
)  # fmt: skip
LAYOUT_FIGURES = (
    "replicate", "shard", "tensor", "pipeline", "virtual", "context", "expert", "micro_batch", "recompute", "zero", "schedule",
)  # fmt: skip


def layout_dict(job: Job) -> dict[str, Any]:
    """Return the fields of a layout, with its number of micro-batches, as plain values."""
    return {name: getattr(job.layout, name) for name in LAYOUT_FIGURES} | {"micro_batches": job.micro_batches}


def search_dict(result: LayoutSearchResult) -> dict[str, Any]:
    """Return the result of a layout search as plain values.

    It has the best layouts in order of preference, the Pareto front of speed and memory, the nearest misses, and the
    number of impossible splits by reason.
    """
    return {
        "fitting": len(result.ranked),
        "with_headroom": len(result.safe),
        "best": [candidate_dict(one) for one in result.preferred[:SHOWN]],
        "pareto": [candidate_dict(one) for one in result.pareto],
        "too_large": len(result.rejected),
        "nearest_misses": [
            {"layout": asdict(miss.layout), "missing_bytes": miss.missing, "reasons": list(miss.reasons)}
            for miss in result.rejected[:SHOWN]
        ],
        "impossible": result.impossible,
    }


def candidate_dict(one: Candidate) -> dict[str, Any]:
    """Return a layout of a search with its speed, memory and risk as plain values."""
    step, figures = one.step, {"memory_bytes": one.memory.total, "out_of_memory_risk": one.risk}
    speed = {"step_seconds": step.seconds, "tokens_per_second": step.tokens_per_second, "mfu": step.mfu}
    return layout_dict(one.job) | speed | figures
