"""Cost of the planner's layout choices, and how often layouts run out of memory by their planned share of it.

Both come from nanotron's H100 sweep, which tried many layouts of four models on 1 to 64 nodes. The rule among near-equal layouts,
the risk of running out of memory and the default headroom were set with its 1.34B and 8.86B models. The 3.57B and 80B models were
not used for that and are scored separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner_sets import Case

from bessemer.common.errors import InputError
from bessemer.plan.estimate.memory import HEADROOM, excess, memory, out_of_memory
from bessemer.plan.estimate.step import refuse, step
from bessemer.plan.search import Candidate, LayoutSearchResult

SWEEP = "nanotron"
SET_WITH = ("nanotron 1.34B", "nanotron 8.86B")
# Share of the sweep's runs that failed with memory to spare, by hangs and time limits. It is not part of the risk.
OTHER_FAILURES = 0.05
BANDS = (0.0, 0.5, 0.7, 0.85, 0.95, 1.05, 1.3)
EMPTY_STAGES = (
    "nanotron 1.34B",
    16,
)  # nanotron divides 16 blocks over 16 stages so that four stay empty: none of 20 runs succeeded


@dataclass(frozen=True)
class Regret:
    """Loss of the planner's layout choice in a group, compared with the best measured layout.

    Attributes:
        layouts: Number of layouts tried, including failed ones.
        failed: True if a run of the chosen layout failed.
        regret: Share of the best rate that the choice loses; None if none of its runs finished.
        sound: Regret of the choice among layouts that reached half of the best rate; None if none of them fits.
    """

    group: str
    fitted: bool
    layouts: int
    chosen: str
    best: str
    failed: bool
    regret: float | None
    sound: float | None


def regrets(cases: Iterable[Case], headroom: float = HEADROOM) -> list[Regret]:
    """Return the regret of each model and number of nodes of the sweep with at least one measured and one fitting layout.

    The choice is that of the program (`LayoutSearchResult.preferred`) among the layouts that it proposes, whose tensor ranks
    share a node. The best time counts for a layout that was run several times.
    """
    groups: dict[tuple[str, int], list[Case]] = defaultdict(list)
    for case in cases:
        if case.set.startswith(SWEEP) and not case.left_out and refuse(case.job) is None:
            groups[case.set, case.raw["nodes"]].append(case)
    rows = []
    for (name, nodes), members in sorted(groups.items()):
        measured: dict[str, float] = {}
        for case in members:
            if case.seconds is not None:
                measured[case.name] = min(case.seconds, measured.get(case.name, case.seconds))
        if not measured:
            continue
        best = min(measured, key=lambda each: measured[each])
        chosen = _choice(members, headroom)
        if chosen is None:
            continue
        sound = _choice([case for case in members if measured.get(case.name, 1e9) <= 2 * measured[best]], headroom)
        rows.append(
            Regret(
                group=f"{name}, {nodes} nodes",
                fitted=name in SET_WITH,
                layouts=len({case.name for case in members}),
                chosen=chosen,
                best=best,
                failed=any(case.seconds is None for case in members if case.name == chosen),
                regret=1 - measured[best] / measured[chosen] if chosen in measured else None,
                sound=None if sound is None else 1 - measured[best] / measured[sound],
            )
        )
    return rows


def _choice(members: Sequence[Case], headroom: float) -> str | None:
    """Return the name of the layout that the planner chooses; None if none fits."""
    found = {}
    for case in members:
        if case.name in found or case.job.layout.tensor > case.job.cluster.per_node:
            continue
        held = memory(case.job)
        if not excess(case.job, held):
            found[case.name] = Candidate(case.job, held, step(case.job))
    ranked = tuple(sorted(found.values(), key=lambda one: one.step.seconds))
    if not ranked:
        return None
    best = LayoutSearchResult(ranked, (), {}, headroom).preferred[0]
    return next(name for name, one in found.items() if one is best)


def failures(cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Return runs, failures and expected failures by planned share of the device's memory.

    Models that the risk was fitted to are separate rows.
    """
    counts: dict[tuple[float, bool], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for case in cases:
        layout = case.job.layout
        if not case.set.startswith(SWEEP) or layout.tensor > 8 or (case.set, layout.pipeline) == EMPTY_STAGES:
            continue
        if not case.has_memory_of_job:
            continue
        try:
            share = memory(case.job).total / case.job.cluster.device.memory
        except InputError:
            continue
        if refuse(case.job) is not None:
            continue
        into = counts[max(band for band in BANDS if band <= share), case.set in SET_WITH]
        into[0] += 1
        into[1] += case.raw["status"] != "ok"
        into[2] += OTHER_FAILURES + (1 - OTHER_FAILURES) * out_of_memory(share, 1.0)
    return [
        {"from": band, "fitted": fitted, "runs": runs, "failed": failed, "expected": expected}
        for (band, fitted), (runs, failed, expected) in sorted(counts.items())
    ]
