"""What a plan takes for granted: every figure that is not counted from the job, with its value and where it is from."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.plan import failures, money
from bessemer.plan.estimate.memory import RESERVE
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
    job, asked = of.job, of.goal.recipe.cluster
    cluster, device, stack = job.cluster, job.cluster.device, job.stack
    wide = stack.master_bytes
    state = f"{stack.weight_bytes:g} bytes a weight, {stack.gradient_bytes:g} a gradient, {stack.moment_bytes:g} for both moments"
    entry = f"catalogue entry {device.name}: {device.source}"
    linked = "recipe" if asked.intra_bandwidth or asked.inter_bandwidth else entry
    rated = asked.failures_per_node_year
    record = failures.RECORDS["rsc1"]
    found = [
        Assumption("Peak of a device", f"{rate(device.peak(job.precision))} in {job.precision}, dense", entry),
        Assumption(
            "Best large product",
            f"{device.best(job.precision) / device.peak(job.precision):.0%} of the peak; {device.sustained:.0%} of it over whole steps",
            entry,
        ),
        Assumption("Memory of a device", f"{size(device.memory)} at {size(device.bandwidth)}/s; {RESERVE:.0%} left free", entry),
        Assumption(
            "Links", f"{size(cluster.intra)}/s in a node of {cluster.per_node}, {size(cluster.inter)}/s out of it, one way", linked
        ),
        Assumption(
            "Reached in a step",
            f"{PHYSICS.products:.0%} of the best product, {PHYSICS.bandwidth:.0%} of the memory's bandwidth, {PHYSICS.intra:.0%} and "
            f"{PHYSICS.inter:.0%} of the links",
            "estimate/physics.py; docs/planner-accuracy.md holds the plan against published measurements",
        ),
        Assumption(
            "Training program",
            f"{stack.name}: {state}" + (f", {wide:g} for a wider copy of the weights" if wide else "") + f"; attention {stack.attention}",
            "estimate/stacks.py",
        ),
        Assumption("FLOPs", "each product, the causal half of attention; MFU without what is recomputed", "Chowdhery et al. 2022, appendix B"),
        Assumption(
            "Failures",
            f"{rated:g} a node and year" if rated else f"{DAYS_A_YEAR * failures.DEFAULT_RATE:.2f} a node and year",
            "recipe" if rated else f"{record.name}: {record.source}",
        ),
        Assumption(
            "After a failure",
            f"{failures.DETECTION / 60:.0f} min until it is found, {failures.RESTART / 60:.0f} min to restart",
            "Jiang et al. 2024 (MegaScale), section 4; the restart is assumed",
        ),
        Assumption(
            "Checkpoints", f"storage takes {asked.storage_bandwidth:g} GB/s from a node; training waits for the copy to its host only", "recipe"
        ),
        Assumption("Price", *_price(of)),
        Assumption(
            "Energy",
            f"{device.watts:,.0f} W a device, {money.POWER_SHARE:.0%} of it drawn, PUE {money.PUE:g}",
            f"{entry}; Morrison et al. 2025; OLMo 2's report, table 19",
        ),
        Assumption(
            "Verdict on the tokens",
            f"{RULE.name}; optimal from {UNDERTRAINED_BELOW:g} to {OVERTRAINED_ABOVE:g} times that",
            RULE.source,
        ),
        Assumption("Predicted loss", REPLICATION.name, f"{REPLICATION.source}; for other text and tokenizers only differences carry over"),
    ]  # fmt: skip
    return found


def _price(of: Outcome) -> tuple[str, str]:
    bill = of.bill
    if bill.price is None:
        return "none", "the catalogue has none for this device; cluster.price sets one"
    asked = f"catalogue, asked on {bill.price_date}" if bill.price_date else "recipe"
    return f"${bill.price:.2f} a device-hour", asked
