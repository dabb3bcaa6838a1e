"""The pipeline diagram of a job: its own schedule with its own stage times, at a size that can be looked at."""

from __future__ import annotations

from typing import Any

from bessemer.layout.schedules import generate
from bessemer.layout.stages import stages_of
from bessemer.plan import diagram
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.estimate.step import Step
from bessemer.plan.timetable import Durations, simulate
from bessemer.recipe.parallel import V_SHAPED

CELLS = 1500  # about as many as can be drawn; more micro-batches repeat what these show
ROWS = 16


def rank_of_slowest(step: Step, layout: Layout) -> tuple[int, ...]:
    """The stages of the rank whose passes take longest."""
    return max(
        (
            stages_of(layout.schedule, rank, layout.pipeline, len(step.stages) // layout.pipeline)
            for rank in range(layout.pipeline)
        ),
        key=lambda mine: sum(step.stages[one].forward + step.stages[one].backward for one in mine),
    )


def pipeline(job: Job, step: Step) -> dict[str, Any] | None:
    """The diagram as SVG with what it leaves out: ranks beyond ROWS but the last, micro-batches beyond what CELLS hold.

    A time-step is the forward pass of the mean stage, time_step its seconds. None: there is no pipeline.
    """
    layout = job.layout
    ranks, virtual = layout.pipeline, len(step.stages) // layout.pipeline
    if ranks == 1:
        return None
    rows = list(range(ranks)) if ranks <= ROWS else [*range(ROWS - 1), ranks - 1]
    kinds = 3 if layout.schedule in V_SHAPED else 2
    most = max(
        CELLS // (len(rows) * virtual * kinds) // ranks * ranks, ranks
    )  # interleaving wants a multiple of the ranks
    if layout.schedule == "dualpipev":
        most = max(most, 2 * ranks)
    shown = min(job.micro_batches, most)
    forward, backward = (sum(getattr(one, way) for one in step.stages) for way in ("forward", "backward"))
    mean = (forward + backward) / len(step.stages)
    relative = tuple((one.forward + one.backward) / mean for one in step.stages)
    schedule = generate(layout.schedule, ranks, shown, virtual if virtual > 1 else None)
    table = simulate(schedule, Durations(1.0, backward / forward, 0.0, relative))
    return {
        "schedule": layout.schedule,
        "ranks": ranks,
        "virtual": virtual,
        "micro_batches": job.micro_batches,
        "shown_micro_batches": shown,
        "shown_ranks": rows,
        "time_step": forward / len(step.stages),
        "utilisation": table.utilisation,
        "stages": [
            {"stage": number, "layers": one.layers, "forward": one.forward, "backward": one.backward}
            for number, one in enumerate(step.stages)
        ],
        "svg": diagram.svg(table, rows),
    }
