"""What a run that has begun left in its folder: its newest checkpoint, its journal and its logs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bessemer.check.rows import CheckRow
from bessemer.checkpoint import latest
from bessemer.checkpoint.protocol import Damage
from bessemer.errors import BessemerError, InputError
from bessemer.guard.journal import Journal
from bessemer.logfile import is_torn
from bessemer.longer import checkpoints_of, refuse_stopped
from bessemer.recipe import load
from bessemer.report.data import missing_lines, trained_steps
from bessemer.run import RunFolder, read_steps
from bessemer.terminal import counted
from bessemer.train.session import require_journal

SAVED, LOGS = "checkpoint", "logs"
WHOLE, FITS = "the run's newest checkpoint is whole", "the journal fits the checkpoints"


def begun_rows(run: RunFolder) -> Iterator[CheckRow]:
    """The rows of a run that has begun; none of another one."""
    try:
        steps = checkpoints_of(run)
    except InputError as error:
        yield CheckRow(SAVED, WHOLE, "FAIL", str(error))
        return
    if not steps:
        return
    damages, failed = list[Damage](), ""
    try:
        found = latest(run.checkpoints, on_damage=damages.append)
    except BessemerError as error:
        found, damages, failed = None, [], str(error)
    if found is not None and damages and all(damage.of_pointer for damage in damages):
        yield CheckRow(SAVED, WHOLE, "warn", f"{damages[0]}, that of step {found.step}, every byte verified")
    elif found is None or damages:
        said = failed or "; ".join(damages) or f"{run.checkpoints}: none is whole"
        if found is not None:
            said += f". The newest whole one is that of step {found.step}: a run that is not finished goes on from there; of a "
            said += "finished one remove the damaged ones first, and `bessemer run` trains the steps after it again"
        yield CheckRow(SAVED, WHOLE, "FAIL", said)
    else:
        yield CheckRow(SAVED, WHOLE, "ok", f"step {found.step}, every byte verified; there are {len(steps)}")
    if found is not None:
        try:
            journal = Journal.of_run(run)
            known = require_journal(journal, found)
            said = f"{counted(journal.num_rollbacks, 'rollback')}, {known} of them before step {found.step}"
            torn = "; its last line is cut short: it was not acted on" if is_torn(run.journal) else ""
            yield CheckRow(LOGS, FITS, "ok", said + torn)
        except BessemerError as error:
            yield CheckRow(LOGS, FITS, "FAIL", str(error))
        try:
            if run.recipe.exists():
                refuse_stopped(load(run.recipe), run, found.step)
        except InputError as error:
            yield CheckRow(LOGS, "the guard did not stop the run", "warn", str(error))
        except BessemerError:  # of the journal, which has a row of its own
            pass
    for path in (run.metrics, run.incidents):
        yield _log_row(path, steps[-1] if path == run.metrics else 0)


def _log_row(path: Path, step: int) -> CheckRow:
    """Whether a log is whole. step: the one that it must have come to."""
    name = f"{path.name} is whole"
    rows = read_steps(path)
    lines = [line for line in path.read_bytes().split(b"\n") if line] if path.exists() else []
    damaged = _damaged(lines[: len(lines) - is_torn(path)])
    problems = [f"{counted(len(damaged), 'line')} damaged, the first is line {damaged[0]}"] if damaged else []
    last = max((row.get("step", 0) for row in rows), default=0)
    if last < step:
        problems.append(f"it ends at step {last}, the newest checkpoint is of step {step}: lines are missing")
    elif step and (lost := missing_lines(trained_steps(rows), step)):
        problems.append(lost)
    if problems:
        said = f"{path}: {'; '.join(problems)}; training goes on without them, the report lacks them"
        return CheckRow(LOGS, name, "warn", said)
    torn = "; its last line is cut short, as by a kill, which is harmless: it is left out" if is_torn(path) else ""
    return CheckRow(LOGS, name, "ok", f"{counted(len(rows), 'line')}{torn}")


def _damaged(lines: Sequence[bytes]) -> list[int]:
    """Numbers of the lines that are no object, or whose `kind` of metrics has a key of no other line in place of a usual
    one: a byte of its name was changed."""
    rows = [_object(line) for line in lines]
    kinds = Counter[object](row.get("kind") for row in rows if row is not None)
    keys = Counter[tuple[object, str]]((row.get("kind"), key) for row in rows if row is not None for key in row)
    usual = {of: {key for (kind, key), n in keys.items() if kind == of and 2 * n > kinds[of]} for of in kinds}

    def is_damaged(row: dict[str, Any] | None) -> bool:
        if row is None or "step" not in row:
            return True
        if (kind := row.get("kind")) is None:  # of incidents, which have keys of their own
            return False
        return not usual[kind] <= row.keys() and any(keys[kind, key] == 1 for key in row)

    return [number for number, row in enumerate(rows, 1) if is_damaged(row)]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
