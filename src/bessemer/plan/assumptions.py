"""What a plan takes for granted: every figure that is not counted from the job, with its value and where it is from."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.plan import failures, money
from bessemer.plan.estimate.memory import ROOM
from bessemer.plan.estimate.physics import PHYSICS
from bessemer.plan.laws.chinchilla import REPLICATION, RULE
from bessemer.plan.laws.standing import OVERTRAINED_ABOVE, UNDERTRAINED_BELOW
from bessemer.plan.outcome import DAYS_A_YEAR, Outcome
from bessemer.terminal import rate, size


@dataclass(frozen=True)
class Assumption:
    """what: for whom it is read; value: with its unit; source: where it is from, with a date where it ages."""

    what: str
    value: str
    source: str


def assumptions(of: Outcome) -> list[Assumption]:
    """All of a plan, in the order in which they enter."""
    return [*_machine(of), *_program(of), *_running(of), *_laws()]


def _machine(of: Outcome) -> list[Assumption]:
    job, asked = of.job, of.goal.recipe.cluster
    cluster, device = job.cluster, job.cluster.device
    entry = f"the catalogue's entry for {device.name}"
    peak = device.peak(job.precision)
    links = f"{size(cluster.intra)}/s in a node of {cluster.per_node}, {size(cluster.inter)}/s out of it, one way"
    reached = (
        f"{PHYSICS.products:.0%} of the best product, {PHYSICS.bandwidth:.0%} of the memory's bandwidth, "
        f"{PHYSICS.intra:.0%} and {PHYSICS.inter:.0%} of the links"
    )
    best = f"{device.best(job.precision) / peak:.0%} of the peak; {device.sustained:.0%} of that over whole steps"
    return [
        Assumption("Peak of a device", f"{rate(peak)} in {job.precision}, dense", f"{entry}: {device.source}"),
        Assumption("Best large product", best, entry),
        Assumption(
            "Memory of a device",
            f"{size(device.memory)} at {size(device.bandwidth)}/s; {size(device.memory * ROOM)} of it taken to be usable",
            entry,
        ),
        Assumption("Links", links, "the recipe" if asked.intra_bandwidth or asked.inter_bandwidth else entry),
        Assumption("Reached in a step", reached, "plan/estimate/physics.py"),
    ]


def _program(of: Outcome) -> list[Assumption]:
    stack = of.job.stack
    state = [f"{stack.weight_bytes:g} bytes a weight", f"{stack.gradient_bytes:g} a gradient"]
    state += [f"{stack.master_bytes:g} for its wider copy"] if stack.master_bytes else []
    state += [f"{stack.moment_bytes:g} for both moments", f"attention {stack.attention}"]
    flops = "every product, and the causal half of attention; MFU without what is recomputed, HFU with it"
    return [
        Assumption("Training program", f"{stack.name}: {', '.join(state)}", "plan/estimate/stacks.py"),
        Assumption("FLOPs", flops, "Chowdhery et al. 2022, appendix B"),
    ]


def _running(of: Outcome) -> list[Assumption]:
    device, asked, bill = of.job.cluster.device, of.goal.recipe.cluster, of.bill
    entry = f"the catalogue's entry for {device.name}"
    rated, record = asked.failures_per_node_year, failures.RECORDS["rsc1"]
    price = "none" if bill.price is None else f"${bill.price:.2f} a device-hour"
    priced = f"the catalogue, asked on {bill.price_date}" if bill.price_date else "the recipe"
    wait = f"{failures.DETECTION / 60:.0f} min until it is found, {failures.RESTART / 60:.0f} min to restart"
    storage = f"{asked.storage_bandwidth:g} GB/s from a node; training waits for the copy to its host only"
    energy = f"{device.watts:,.0f} W a device, {money.POWER_SHARE:.0%} of it drawn, PUE {money.PUE:g}"
    return [
        Assumption(
            "Failures",
            f"{rated or DAYS_A_YEAR * failures.DEFAULT_RATE:.3g} of a node in a year",
            "the recipe" if rated else f"{record.name}: {record.source}",
        ),
        Assumption("After a failure", wait, "Jiang et al. 2024 (MegaScale), section 4; the restart is assumed"),
        Assumption("Storage of checkpoints", storage, "the recipe's cluster.storage_bandwidth, or its default"),
        Assumption("Price", price, "cluster.price sets one" if bill.price is None else priced),
        Assumption("Energy", energy, f"{entry}; Morrison et al. 2025; OLMo 2's report, table 19"),
    ]


def _laws() -> list[Assumption]:
    optimal = f"{RULE.name}; optimal from {UNDERTRAINED_BELOW:g} to {OVERTRAINED_ABOVE:g} times that"
    carried = "on other text, and with another tokenizer, only differences carry over"
    return [
        Assumption("Verdict on the tokens", optimal, RULE.source),
        Assumption("Predicted loss", REPLICATION.name, f"{REPLICATION.source}; {carried}"),
    ]
