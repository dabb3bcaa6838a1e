"""What the planner's choice of a layout costs, and how often layouts fail by the memory that they are planned to take.

Both from nanotron's H100 sweep, in which many layouts of four models were tried on 1 to 64 nodes. The rule among near-equals, the
risk of running out of memory and the default headroom were set with its 1.34B and 8.86B models; the 3.57B and 80B ones took no
part in that and are scored apart.
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
# Share of the sweep's runs that failed with memory to spare: hangs and time limits. Not part of the risk.
OTHER_FAILURES = 0.05
BANDS = (0.0, 0.5, 0.7, 0.85, 0.95, 1.05, 1.3)
EMPTY_STAGES = (
    "nanotron 1.34B",
    16,
)  # 16 blocks over 16 stages, which nanotron cuts so that four stay empty: none of 20 ran


@dataclass(frozen=True)
class Regret:
    """What the planner's choice among the layouts of a group loses against the best of all that were measured.

    layouts: that were tried, failed ones too; failed: whether a run of the chosen one failed; regret: None where none of its
    runs ended; sound: of the choice among the layouts that reached half of the best one's rate; None: there is none that fits.
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
    """For each model and number of nodes of the sweep of which at least one layout ran and one fits by plan.

    The choice is the program's own (`LayoutSearchResult.preferred`), among layouts whose tensor ranks share a node, which are
    all that it proposes. A layout that was run several times takes its best time.
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
    """The name of the layout that the planner chooses; None: none fits."""
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
    """Runs and failures by planned share of the device's memory, with what the risk says of them; models that it was fitted to
    and others apart."""
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
