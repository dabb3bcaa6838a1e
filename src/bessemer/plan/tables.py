"""Terminal tables of a plan and a layout search."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bessemer.common.console import amount, counted, duration, percent, rate, size, text_table
from bessemer.model.config import ModelConfig
from bessemer.plan import run_cost, scaling_laws, shapes
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.estimate.memory import out_of_memory
from bessemer.plan.intervals import PlanInterval, evidence, extrapolation
from bessemer.plan.latent_attention import latent_of
from bessemer.plan.layouts import describe_fixed
from bessemer.plan.plan_result import STEP_PARTS, PlanResult, batch_by_laws
from bessemer.plan.run_cost import dollars
from bessemer.plan.search import Candidate, LayoutSearchResult, layout_line, layout_parts
from bessemer.recipe import ResolvedRecipe

LISTED = 10
MOST_NOTES = 5
PART_NAMES = {"host": "waiting for launches", "shard": "sharded weights", "data": "gradients"}


def plan_table(plan: PlanResult) -> str:
    """Format a plan as a table with one row per result."""
    return named_rows(plan_rows(plan))


def named_rows(rows: Mapping[str, str]) -> str:
    """Format a dict of row names and texts as lines, each starting with the name of its row."""
    width = max(10, *map(len, rows))
    return "\n".join(f"{name:<{width}} {line}" for name, value in rows.items() for line in value.splitlines())


def plan_rows(plan: PlanResult) -> dict[str, str]:
    """Return a plan as a dict from the name of a row to its text; a row of several notes has one line for each."""
    job, step, config = plan.job, plan.step, plan.job.model
    cluster, device, goal = job.cluster, job.cluster.device, plan.goal
    parts = {name: getattr(step, name) for name in STEP_PARTS}
    shown = sorted((name for name in parts if parts[name] > 0.005 * step.seconds), key=lambda name: -parts[name])
    memory = plan.memory.to_dict()
    where = f" on stage {plan.memory.place + 1} of {job.layout.pipeline}" if job.layout.pipeline > 1 else ""
    run, bill = plan.running, plan.bill
    chosen = _chosen(plan) if plan.found and goal.chooses_layout else ""
    split = ", ".join(f"{PART_NAMES.get(name, name)} {short(parts[name], 3)}" for name in shown)
    per_token = step.model_flops / job.tokens
    ranges, own = plan.intervals, cluster.per_node
    domain = f", {cluster.near:,} in a domain" if cluster.near > own else ""
    notes = {"note": goal.notes[:MOST_NOTES], "not in the plan": goal.unplanned}
    return {
        "evidence": evidence_line(job),
        "model": model_line(config),
        **{name: "\n".join(lines) for name, lines in notes.items() if lines},
        "training": f"{amount(goal.tokens)} tokens in {counted(plan.steps, 'step')} of {amount(job.tokens)}"
        f", sequences of {config.sequence_length:,}, {plan.precision}",
        "cluster": f"{cluster.devices:,} x {device.name}, {own} a node{domain}; "
        f"{size(cluster.intra_bandwidth)}/s within, {size(cluster.inter_bandwidth)}/s out of it",
        "layout": layout_line(job) + chosen,
        "step": f"{_seconds(step.seconds)} ideal, {_range(ranges['step_seconds'], _seconds)}; ideal: {split}",
        "speed": f"ideal: {amount(step.tokens_per_second / cluster.devices)} tokens/s a device, {amount(step.tokens_per_second)} "
        f"in all; {rate(step.model_flops / step.seconds / cluster.devices)} a device, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}",
        "memory": f"{size(memory['total'])} of {size(device.memory)}{where} ({_ends(ranges['memory_bytes'], size)}): "
        f"{_memory_parts(memory)}",
        "fits": _fits(plan),
        "compute": f"{per_token * goal.tokens:.3g} FLOP, {per_token:.3g} a token (6 N D: "
        f"{6 * config.active_parameters * goal.tokens:.3g})",
        "time": f"{duration(plan.seconds)} ideal, {_range(plan.expected.seconds, duration)}",
        "hours": _range(ranges["device_hours"], amount),
        "failures": f"{short(run.failures, 3)} expected, one in {duration(run.mtbf)}; a checkpoint every "
        f"{counted(run.every, 'step')} ({duration(run.interval)}): {run.effective:.1%} effective",
        "money": _money(plan)
        + (f"{energy(bill.megawatt_hours)} of devices with cooling, expected" if device.watts else "no watts known"),
        **_by_laws(plan),
        "storage": f"tokens at {size(plan.loading.rate)}/s, checkpoints of {size(plan.save.bytes)} in "
        f"{duration(plan.save.write)} at {size(device.storage_bandwidth)}/s a node",
        "framework": job.framework.name,
    }


def local_plan_rows(plan: Mapping[str, Any], recipe: ResolvedRecipe) -> dict[str, str]:
    """Return a plan of this machine as a dict from the name of a row to its text.

    `plan` is the content of plan.json.
    """
    memory = plan["memory_bytes_per_device"]
    validation = f"; {duration(plan['validation_seconds'])} of it validation" if plan["validation_seconds"] else ""
    by_laws, epochs = plan.get("chinchilla"), plan.get("epochs") or {}
    each = "an active parameter" if plan["active_parameters"] < plan["parameters"] else "a parameter"
    too_large = "no: this device has less free memory than that; --gpus NxDEVICE (or cluster.device) plans for others"
    rows = {
        "device": f"{plan['device']} ({rate(plan['peak_flops'])})",
        "model": model_line(ModelConfig.from_dict(plan["model_config"])),
        "training": f"{plan['steps']:,} steps of {amount(recipe.train.global_batch_tokens)} tokens = "
        f"{amount(plan['tokens'])} tokens, {plan['tokens_per_parameter']:.1f} {each}",
        "learning rate": f"{recipe.train.optimizer.learning_rate}",
        "compute": f"{plan['total_flops']:.3g} FLOP, {plan['flops_per_token']:.3g} a token",
        "time": f"{duration(plan['seconds'])}: {plan['step_seconds']:.3g} s a step ({plan['step_seconds_from']}), "
        f"{amount(plan['tokens_per_second'])} tokens/s, MFU {plan['mfu']:.0%}{validation}",
        "memory": f"{size(memory['total'])}: {_memory_parts(memory)}",
        "fits": "yes" if plan["fits"] else too_large,
        "scaling": f"{amount(by_laws['ratio'])}x the compute-optimal tokens" if by_laws else "",
        "not in the plan": "; ".join(plan["not_in_the_plan"]),
        "epochs": ", ".join(f"{name} {turns:.2f}" for name, turns in epochs.items()),
    }
    return {name: text for name, text in rows.items() if text}


def _memory_parts(memory: Mapping[str, float]) -> str:
    kept = {name.replace("_", " "): value for name, value in memory.items() if name != "total" and value}
    return ", ".join(f"{name} {size(value)}" for name, value in kept.items())


def _by_laws(plan: PlanResult) -> dict[str, str]:
    """Return the rows, name to text, on scaling laws; for other training than pretraining, one on batch and learning rate."""
    if not plan.goal.recipe.is_pretraining:
        rate = plan.goal.recipe.train.optimizer.learning_rate
        return {"batch": f"{amount(plan.job.tokens)} tokens; learning rate {rate:.2g}"}
    parameters, batch = plan.job.model.active_parameters, batch_by_laws(plan)
    by_laws = scaling_laws.compare(parameters, plan.goal.tokens)
    optimal = by_laws["optimal_tokens_by_law"].values()
    critical, rates = batch["critical"].values(), batch["learning_rates"].values()
    each = "an active parameter" if plan.job.model.experts else "a parameter"
    return {
        "scaling": f"{plan.goal.tokens / parameters:,.3g} tokens {each}, {amount(by_laws['ratio'])}x the compute-optimal; the "
        f"laws ask for {amount(min(optimal))} to {amount(max(optimal))} tokens",
        "batch": f"{amount(batch['batch'])} tokens, critical from {amount(min(critical))} to {amount(max(critical))}; "
        f"learning rate {min(rates):.2g} to {max(rates):.2g} by the published laws",
    }


def _chosen(plan: PlanResult) -> str:
    """Describe in a few words how the search chose the layout: how many fit, how much memory stays free, the given fields."""
    result, goal = plan.found, plan.goal
    assert result is not None
    kept = describe_fixed(goal.job.layout, goal.fixed)
    kept = f", with {kept} as given" if kept else ""
    if not result.ranked:
        return f"; the nearest miss of {len(result.rejected):,}{kept}"
    safe = f"{len(result.safe):,} of {len(result.ranked):,}"
    return f"; {safe} that fit leave {result.headroom:.0%} of the memory free{kept}"


def _fits(plan: PlanResult) -> str:
    if not plan.fits:
        return "NO: " + "; ".join(plan.excess)
    device_bytes = plan.job.cluster.device.memory
    risk = out_of_memory(plan.memory.total, device_bytes)
    return f"yes, {1 - plan.memory.total / device_bytes:.0%} free; risk of running out of memory {percent(risk)}"


def model_line(config: ModelConfig) -> str:
    """Describe a model's size and dimensions in one line."""
    hidden = f"hidden {config.mlp_width:,}"
    heads = f"{config.kv_heads} key/value"
    if config.experts:
        hidden = f"experts of {config.expert_width:,}"
    if (latent := latent_of(config)) is not None:
        heads = f"latents of {latent.kv_rank}"
    return (
        f"{config.size}, {amount(config.parameters - config.embedding_parameters)} without embeddings: "
        f"{counted(config.layers, 'layer')}, width {config.width:,}, {counted(config.heads, 'head')} ({heads}), {hidden}, "
        f"vocabulary {config.vocabulary:,}"
    )


def short(number: float, digits: int = 2) -> str:
    """Format a number with `digits` significant digits and without an exponent: 0.0052, 4.2, 160."""
    return f"{float(f'{number:.{digits}g}'):,.10g}" if number < 1000 else f"{number:,.0f}"


def _seconds(seconds: float) -> str:
    return f"{short(seconds, 3)} s"


def energy(megawatt_hours: float) -> str:
    """Format an energy in readable units: 156 kWh, 462 MWh."""
    return f"{megawatt_hours * 1000:,.0f} kWh" if megawatt_hours < 10 else f"{megawatt_hours:,.0f} MWh"


def _money(plan: PlanResult) -> str:
    if plan.bill.price is None:
        return "no price known (cluster.price); "
    date = f" ({plan.bill.price_date})" if plan.bill.price_date else ""
    ideal = plan.bill.price * plan.seconds / run_cost.HOUR * plan.job.cluster.devices
    return f"{dollars(ideal)} ideal, {_range(plan.intervals['cost'], dollars)}, at ${plan.bill.price:.2f} a device-hour{date}; "


def _range(span: PlanInterval, shown: Callable[[float], str]) -> str:
    return f"{shown(span.expected)} expected, {_ends(span, shown)}"


def _ends(span: PlanInterval, shown: Callable[[float], str]) -> str:
    low, high = shown(span.low).split(), shown(span.high).split()
    if len(low) == len(high) == 2 and low[1] == high[1]:
        low = low[:1]
    return f"{' '.join(low)} to {' '.join(high)}"


def evidence_line(job: Job) -> str:
    """Describe the measurements behind a plan and the ratio of expected to ideal step time."""
    facts, mixture = evidence(job), " with mixtures of experts" if job.model.expert_parameters else ""
    where = f"{job.framework.name} on devices of this kind in {job.precision}{mixture}"
    cases = counted(facts.cases, "published step") if facts.program else "no published step"
    return (
        f"{cases} of {where}; a step is expected to take {facts.factor:.2f} times the ideal; ranges are 80% intervals"
        f"{', widened' if extrapolation(job) else ''}"
    )


def search_table(result: LayoutSearchResult, devices: int) -> str:
    """Format a layout search: the best layouts, the Pareto front of speed and memory, and the nearest misses."""
    spare = f"{len(result.safe):,} of them with {result.headroom:.0%} of the memory free"
    lines = [f"{counted(len(result.ranked), 'layout')} fit, {spare}; {len(result.rejected):,} do not.", ""]
    lines += _layouts("best", result.preferred, devices)
    if len(result.pareto) > 1:
        lines += ["", *_layouts("least memory for its speed", result.pareto, devices)]
    if result.rejected:
        lines += ["", "nearest misses"]
        for miss in result.rejected[:3]:
            named = ", ".join(layout_parts(miss.layout))
            lines.append(f"  {named}, micro-batch {miss.layout.micro_batch}: {'; '.join(miss.reasons)}")
    if result.impossible:
        reasons = sorted(result.impossible.items(), key=lambda item: -item[1])
        lines += ["", "not possible", *(f"  {count:>6,} {reason}" for reason, count in reasons)]
    return "\n".join(lines)


def _layouts(title: str, rows: Sequence[Candidate], devices: int) -> list[str]:
    # The placement of experts follows from the layout, so one line is enough for all placements.
    distinct: dict[Layout, Candidate] = {}
    for one in rows:
        distinct.setdefault(replace(one.job.layout, expert=1), one)
    cells = [
        (f"  {_short(one.job)}", short(one.step.seconds, 3), amount(one.step.tokens_per_second / devices), f"{one.step.mfu:.1%}",
         f"{one.memory.total / 1e9:.1f}", percent(one.risk), layout_line(one.job))
        for one in [*distinct.values()][:LISTED]
    ]  # fmt: skip
    return text_table((title, "s a step", "a device", "MFU", "GB", "out of memory", ""), cells, "lrrrrrl")


def _short(job: Job) -> str:
    layout = job.layout
    return f"dp{layout.data} tp{layout.tensor} pp{layout.pipeline} cp{layout.context}"


def models_table() -> str:
    """Format the published shapes with their other names."""
    also = {
        name: ", ".join(alias for alias, known in shapes.ALIASES.items() if known == name) for name in shapes.shapes()
    }
    rows = [
        (name, shape.config.size, f"{shape.config.sequence_length:,}", also[name])
        for name, shape in shapes.shapes().items()
    ]
    return "\n".join(text_table(("model", "size", "sequence", "also"), rows, "llrl"))
