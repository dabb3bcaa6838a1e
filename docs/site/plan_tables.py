"""Tables of the planner's accuracy, from the results of benchmarks/planner_accuracy.py."""

from __future__ import annotations

from math import exp
from statistics import median
from typing import Any

from bessemer.common.console import amount

SHOWN = 2  # number of worst cases per row


def time_table(found: dict[str, Any]) -> str:
    """Return the table of step-time errors, a row per set."""
    lines = [
        "| set | cases | median | mean absolute | 90th percentile | calibrated | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["time"]:
        worst = ", ".join(f"{name} {error:+.0%}" for name, error in row["worst"][:SHOWN])
        calibrated = "" if row["calibrated"] is None else f"{row['calibrated']:.1%}"
        name = row["set"] + (" (fitted)" if row["kind"] == "fitted" else "")
        figures = f"{row['median']:+.1%} | {row['mean_absolute']:.1%} | {row['ninetieth']:.1%}"
        lines.append(f"| {name} | {row['n']} | {figures} | {calibrated} | {worst} |")
    return "\n".join(lines)


def memory_table(found: dict[str, Any]) -> str:
    """Return the table of memory errors, a row per set."""
    lines = ["| set | cases | median | mean absolute | 90th percentile | worst |", "|---|---|---|---|---|---|"]
    for name, row in found["memory"]["sets"].items():
        worst = ", ".join(f"{one['name']} {one['error']:+.0%}" for one in row["worst"][:SHOWN])
        figures = f"{row['median_signed']:+.1%} | {row['mean_absolute']:.1%} | {row['percentile_90']:.1%}"
        lines.append(f"| {name} | {row['n']} | {figures} | {worst} |")
    return "\n".join(lines)


def fits_table(found: dict[str, Any]) -> str:
    """Return the table of runs that succeeded or failed against the plan's verdict on memory."""
    keys = ("ran", "ran, said not to fit", "over the memory", "failed", "failed, said to fit")
    lines = [f"| set | {' | '.join(keys)} |", "|---|---|---|---|---|---|"]
    for name, row in found["memory"]["fits"].items():
        over = " to ".join(dict.fromkeys(f"{each:+.0%}" for each in row["excess"]))
        cells = (str(row.get(key, over)) for key in keys)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def regret_table(found: dict[str, Any]) -> str:
    """Return the table of layout regret: each choice, then median and 90th percentile by whether models set the rules."""
    rows = found["regret"]
    lines = ["| model, nodes | layouts tried | regret | among undisturbed runs |", "|---|---|---|---|"]
    for row in rows:
        failed = "failed" if row["failed"] else ""
        regret = ", ".join(filter(None, (failed, "" if row["regret"] is None else f"{row['regret']:.1%}")))
        sound = "none fits" if row["sound"] is None else f"{row['sound']:.1%}"
        lines.append(f"| {row['group']} | {row['layouts']} | {regret} | {sound} |")
    for fitted, title in ((True, "set with"), (False, "not set with")):
        chosen, every, sound = _regret_of(rows, fitted)
        lines.append(f"| {chosen} of models {title} | | {every} | {sound} |")
    return "\n".join(lines)


def _regret_of(rows: list[dict[str, Any]], fitted: bool) -> tuple[int, str, str]:
    """Return the number of choices, their regret with failures, and the regret among undisturbed runs."""
    some = [row for row in rows if row["fitted"] == fitted]
    cells = []
    for key in ("regret", "sound"):
        sizes = sorted(row[key] for row in some if row[key] is not None)
        cells.append(f"median {median(sizes):.1%}, 90th {sizes[max(-(-9 * len(sizes) // 10), 1) - 1]:.1%}")
    return len(some), f"{cells[0]}; {sum(row['failed'] for row in some)} failed", cells[1]


def sweep_table(found: dict[str, Any]) -> str:
    """Return the scores of nanotron's sweep with and without the rows left out."""
    other = found["with_rows_left_out"]
    sets = {row["set"]: row for row in other["time"]}
    lines = ["| score | without the rows left out | with them |", "|---|---|---|"]
    for row in (row for row in found["time"] if row["set"] in sets):
        cells = [
            f"{each['n']} cases, median {each['median']:+.1%}, mean {each['mean_absolute']:.1%}"
            for each in (row, sets[row["set"]])
        ]
        lines.append(f"| step, {row['set']} | {' | '.join(cells)} |")
    memory = [
        f"{row['n']} cases, median {row['median_signed']:+.1%}, mean {row['mean_absolute']:.1%}"
        for row in (found["memory"]["sets"]["nanotron"], other["memory"])
    ]
    lines.append(f"| memory | {' | '.join(memory)} |")
    for fitted, title in ((True, "set with"), (False, "not set with")):
        two = [_regret_of(rows, fitted) for rows in (found["regret"], other["regret"])]
        lines.append(f"| layout, models {title} | {' | '.join(every for _, every, _ in two)} |")
        lines.append(f"| the same, undisturbed runs | {' | '.join(sound for _, _, sound in two)} |")
    reasons = "; ".join(f"{why}: {n}" for why, n in other["left_out"].items())
    lines.append(f"| rows | {other['rows'] - sum(other['left_out'].values())} | {other['rows']}; {reasons} |")
    return "\n".join(lines)


def risk_table(found: dict[str, Any]) -> str:
    """Return the table of failures by planned share of the device's memory."""
    lines = [
        "| planned share of the memory | models set with: runs, failed, said | others: runs, failed, said |",
        "|---|---|---|",
    ]
    starts = sorted({row["from"] for row in found["failures"]})
    for low, high in zip(starts, [*starts[1:], None], strict=True):
        cells = []
        for fitted in (True, False):
            row = next((row for row in found["failures"] if row["from"] == low and row["fitted"] == fitted), None)
            cells.append("" if row is None else f"{row['runs']}, {row['failed']}, {row['expected']:.1f}")
        band = f"{low:.0%} to {high:.0%}" if high is not None else f"above {low:.0%}"
        lines.append(f"| {band} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval_table(found: dict[str, Any]) -> str:
    """Return the table of 80% intervals by question, and the coverage of cases that were left out."""
    lines = [
        "| question | cases | sources | interval | high over low | median | inside, left-out sources | inside, cases |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["intervals"]["kinds"].items():
        low, middle, high = (f"{exp(row[key]) - 1:+.0%}" for key in ("low", "middle", "high"))
        inside = f"{row['coverage_of_sources']:.0%} | {row['coverage_of_cases']:.0%}"
        width = f"{exp(row['high'] - row['low']):.2f}"
        lines.append(
            f"| {name} | {row['cases']} | {row['sources']} | {low} to {high} | {width} | {middle} | {inside} |"
        )
    return "\n".join(lines)


def score_table(found: dict[str, Any]) -> str:
    """Return the table of errors of whole runs, by half."""
    lines = [
        "| asked | runs | median error | mean error | bias | bias of the ideal | inside the interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["intervals"]["scores"].items():
        errors = (
            f"{row['median_absolute']:.0%} | {row['mean_absolute']:.0%} | {row['bias']:+.0%} | {row['ideal_bias']:+.0%}"
        )
        lines.append(f"| {name} | {row['n']} | {errors} | {row['inside']:.0%} |")
    return "\n".join(lines)


def run_table(found: dict[str, Any]) -> str:
    """Return the table of whole runs, in device-hours."""
    lines = [
        "| run | half | devices | hours | ideal | expected | error | program named | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = found["intervals"]["runs"]
    named = {row["run"]: row for row in rows if row["named"]}
    for row in rows:
        if row["named"]:
            continue
        hours, other = row["hours"], named[row["run"]]
        figures = " | ".join(amount(value) for value in (hours, row["ideal"], row["expected"]))
        errors = f"{row['expected'] / hours - 1:+.0%} | {other['program']} | {other['expected'] / hours - 1:+.0%}"
        lines.append(f"| {row['run']} | {row['half']} | {row['devices']:,} {row['device']} | {figures} | {errors} |")
    return "\n".join(lines)


TABLES = {
    "time": time_table,
    "memory": memory_table,
    "fits": fits_table,
    "regret": regret_table,
    "risk": risk_table,
    "sweep": sweep_table,
    "intervals": interval_table,
    "scores": score_table,
    "runs": run_table,
}
