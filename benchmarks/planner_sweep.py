"""What layouts_h100.json does not say of its rows: the version of nanotron that each run is of, and which are to be left out.

planner_sweep.toml has it, from the sweep's whole table; marked() merges it into the rows of the file.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError

FILE = "layouts_h100.json"
TABLE = Path(__file__).with_suffix(".toml")
DEEP = 4  # pipeline stages from which on the last version keeps what it gathers
BEFORE_FIX = "a pipeline before the fix of the program's pipeline"


def marked(rows: Sequence[dict[str, Any]], table: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The rows with `gathered` (what is kept of gathered inputs) and `left_out` (why, "": it is not) of each.

    A pipeline's time before the fix is left out, a failure is not. Raises InputError where the table and the rows are not of
    one sweep: another number of rows, a layout that none of them has, a row that is named twice.
    """
    table = table or tomllib.loads(TABLE.read_text(encoding="utf-8"))
    if len(rows) != table["rows"]:
        raise InputError(
            f"{FILE} has {len(rows)} rows and {TABLE.name} is of {table['rows']}: it is for another version of that file"
        )
    versions = table["version"]
    (default,) = [number for number, version in enumerate(versions) if "layouts" not in version]
    named = _named(rows, ((number, version["layouts"]) for number, version in enumerate(versions) if number != default))
    reasons = _named(rows, ((each["why"], each["layouts"]) for each in table["left_out"]))
    found = []
    for at, row in enumerate(rows):
        version = versions[named.get(at, default)]
        before_fix = row["pp"] > 1 and not version["fixed"] and row["status"] == "ok"
        gathered = version["gathered"][row["pp"] >= DEEP]
        found.append({**row, "gathered": gathered, "left_out": reasons.get(at, BEFORE_FIX if before_fix else "")})
    return found


def _named(rows: Sequence[dict[str, Any]], lists: Iterable[tuple[Any, dict[str, str]]]) -> dict[int, Any]:
    """What is listed for each of the rows, by their places. A name is tensor-pipeline-micro_batch-zero, of several runs of one
    layout with @ and a rate or @failed."""
    places: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, row in enumerate(rows):
        group = f"{row['model_b']}B, {row['nodes']} nodes"
        name = "-".join(str(row[key]) for key in ("tp", "pp", "mbs", "zero"))
        rate = "failed" if row["tok_s_gpu"] is None else f"{row['tok_s_gpu']:.0f}"
        for each in (name, f"{name}@{rate}"):
            places[group, each].append(at)
    found: dict[int, Any] = {}
    for value, layouts in lists:
        for group, names in layouts.items():
            for name in names.split():
                matching = places[group, name]
                if not matching:
                    raise InputError(f"{TABLE.name} names {name} of {group}, which {FILE} does not have")
                if twice := [at for at in matching if at in found]:
                    raise InputError(f"{TABLE.name} names {name} of {group} twice, row {twice[0]} of {FILE}")
                found.update(dict.fromkeys(matching, value))
    return found
