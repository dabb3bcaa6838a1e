"""Facts about the rows of layouts_h100.json that the file lacks: nanotron's version per run, and rows to leave out.

planner_sweep.toml has them, from the sweep's whole table; `marked()` merges them into the rows of the file.
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
DEEP = 4  # pipeline stages from which on the last version keeps gathered inputs
BEFORE_FIX = "a pipeline before the fix of the program's pipeline"


def marked(rows: Sequence[dict[str, Any]], table: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the rows with `gathered`, the share of gathered inputs that is kept, and `left_out`, the reason or "".

    The time of a pipeline before the fix is left out; a failure is not.

    Raises:
        InputError: Table and rows are not from the same sweep: the number of rows differs, a layout is missing, or a row is named
            twice.
    """
    table = table or tomllib.loads(TABLE.read_text(encoding="utf-8"))
    if len(rows) != table["rows"]:
        raise InputError(f"{FILE} has {len(rows)} rows, but {TABLE.name} is for a version with {table['rows']} rows")
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
    """Return the listed value of each row, by row index.

    A name is tensor-pipeline-micro_batch-zero; @ and a rate or @failed selects one of several runs of a layout.
    """
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
