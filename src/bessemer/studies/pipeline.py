"""Pipeline schedules: what the bubble costs, and what each schedule gives for a smaller one.

First the textbook's table, each action a time-step, by simulation beside the formula m / (p + m - 1). Then all schedules
on the same model: a forward of a rank's whole part is 1, whatever number of stages it is cut into, and its backward 2. Numbers
only: nothing is trained, and the lists simulated are the ones that run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.pipeline_schedules import NAMES, generate
from bessemer.plan.timetable import Durations, simulate
from bessemer.recipe.parallel import SCHEDULES
from bessemer.report.static import bar_chart
from bessemer.terminal import text_table

expected = (
    "With p ranks and m micro-batches gpipe and 1f1b use m / (p + m - 1) of the time (Huang et al. 2019, section 2.3; "
    "Narayanan et al. 2021, section 2.2); V-shaped schedules that split backwards leave a smaller bubble (Qi et al. 2024)."
)


@dataclass(frozen=True)
class ScheduleSizes:
    """sizes: (ranks, micro-batches). send: from a rank to another, in forwards of a rank's part."""

    sizes: tuple[tuple[int, int], ...] = ((4, 4), (4, 8), (4, 16), (8, 16))
    backward: float = 2.0
    send: float = 0.1


def run(settings: ScheduleSizes | None = None) -> dict[str, Any]:
    """Simulate them.

    Returns `settings`; `textbook`, a row a size and schedule of gpipe and 1f1b, with timesteps, active, idle (of all ranks
    together), utilisation and formula; `schedules`, a row a size and schedule of all, with stages on a rank, time (of a
    step, in forwards of a rank's part), idle (of a rank, on average), utilisation, held (micro-batches' activations on
    the fullest rank) and with_send (utilisation when results travel). A schedule that a size does not fit has `why` instead.
    """
    sizes = settings or ScheduleSizes()
    textbook, schedules = [], []
    for p, m in sizes.sizes:
        for name in ("gpipe", "1f1b"):
            table = simulate(generate(name, p, m), Durations(1.0, 1.0))
            textbook.append({
                "stages": p, "micro_batches": m, "schedule": name, "timesteps": table.timesteps, "active": table.active,
                "idle": table.idle, "utilisation": table.utilisation, "formula": m / (p + m - 1),
            })  # fmt: skip
        for name in NAMES:
            stages = (2, 4) if name == "interleaved" else (None,)
            schedules += [_row(sizes, name, p, m, virtual) for virtual in stages]
    return {"settings": asdict(sizes), "textbook": textbook, "schedules": schedules}


def shows(results: dict[str, Any]) -> list[str]:
    apart = max(abs(row["utilisation"] - row["formula"]) for row in results["textbook"])
    rows = {f"{row['schedule']} {row['virtual']}": row for row in _largest(results)}
    best, worst = (pick(rows, key=lambda name: rows[name]["utilisation"]) for pick in (max, min))
    lean = min(rows, key=lambda name: rows[name]["held"])
    ranks, count = _largest(results)[0]["ranks"], _largest(results)[0]["micro_batches"]
    fit = "fit the formula exactly" if apart < 1e-12 else f"differ from the formula by up to {apart:.1e}"
    return [
        f"The simulated textbook schedules {fit}.",
        f"With {ranks} ranks and {count} micro-batches {best} uses most of the time, {rows[best]['utilisation']:.0%}, and "
        f"{worst} least, {rows[worst]['utilisation']:.0%}; where results travel, {rows[best]['with_send']:.0%} and "
        f"{rows[worst]['with_send']:.0%}.",
        f"{lean} holds the activations of the fewest micro-batches, {rows[lean]['held']:g}; {best} holds {rows[best]['held']:g}.",
    ]


def plot(results: dict[str, Any]) -> str:
    """Utilisation by schedule at the largest size, as SVG."""
    rows = _largest(results)
    title = f"Utilisation with {rows[0]['ranks']} ranks and {rows[0]['micro_batches']} micro-batches"
    bars = [(f"{row['schedule']} {row['virtual']}", row["utilisation"], f"{row['utilisation']:.1%}") for row in rows]
    return bar_chart(title, bars)


def _largest(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The schedules that fit the largest size."""
    rows, size = results["schedules"], tuple(results["settings"]["sizes"][-1])
    return [row for row in rows if (row["ranks"], row["micro_batches"]) == size and "why" not in row]


def _row(sizes: ScheduleSizes, name: str, p: int, m: int, virtual: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": p, "micro_batches": m, "schedule": name}
    try:
        schedule = generate(name, p, m, virtual)
    except InputError as error:
        return {**row, "why": str(error)}
    v = schedule.virtual
    table = simulate(schedule, Durations(1.0 / v, sizes.backward / v))
    sent = simulate(schedule, Durations(1.0 / v, sizes.backward / v, sizes.send))
    held = max(schedule.peak_in_flight(rank) for rank in range(p))
    return {**row, "virtual": v, "time": table.timesteps, "idle": table.idle / p, "utilisation": table.utilisation,
            "held": held, "with_send": sent.utilisation}  # fmt: skip


def table(results: dict[str, Any]) -> str:
    sizes = results["settings"]
    textbook = [
        (str(row["stages"]), str(row["micro_batches"]), row["schedule"], f"{row['timesteps']:g}", f"{row['active']:g}",
         f"{row['idle']:g}", f"{row['utilisation']:.1%}", f"{row['formula']:.1%}")
        for row in results["textbook"]
    ]  # fmt: skip
    schedules = [
        (str(row["ranks"]), str(row["micro_batches"]), row["schedule"],
         *(("-",) * 6 if "why" in row else (str(row["virtual"]), f"{row['time']:.4g}", f"{row['idle']:.3g}",
           f"{row['utilisation']:.1%}", f"{row['with_send']:.1%}", f"{row['held']:g}")))
        for row in results["schedules"]
    ]  # fmt: skip
    titles: tuple[str, ...] = (
        "stages", "micro-batches", "schedule", "timesteps", "active", "idle", "utilisation", "m / (p + m - 1)",
    )  # fmt: skip
    lines = ["The textbook: forward and backward of a micro-batch are one time-step each"]
    lines += text_table(titles, textbook, "rrl")
    titles = (
        "ranks", "micro-batches", "schedule", "stages a rank", "time", "idle", "utilisation", f"and sends of {sizes['send']:g}",
        "held",
    )  # fmt: skip
    lines += ["", f"All schedules on one model: the forward of a rank's part is 1, its backward {sizes['backward']:g}"]
    lines += [*text_table(titles, schedules, "rrl"), ""]
    lines += [row["why"] for row in results["schedules"] if "why" in row]
    split = [name for name, facts in SCHEDULES.items() if facts.splits_backward]
    lines += [
        "time: of a step, where a rank without a bubble takes "
        f"{1 + sizes['backward']:g} for each micro-batch; idle: of a rank; held: micro-batches whose",
        f"activations the fullest rank holds, in units of its part of the model. {' and '.join(split)} split backwards.",
    ]
    return "\n".join(lines)
