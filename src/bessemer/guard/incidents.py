"""The kinds of incident, each with all that the program knows of it, and the record of incidents in incidents.jsonl."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bessemer.common.log_file import LogFile, json_line

STOPPED = "run stopped"  # ends the action of an incident that did so
RECORDED = "recorded"  # the action of an incident to which there is no response


@dataclass(frozen=True)
class IncidentKind:
    """A kind of incident.

    name: as in incidents.jsonl.
    response: of the guard or the launcher; for which kinds it decides: incidents.toml.
    advice: what practitioners did, with the source.
    is_hardware_fault: the state was wrong, not the training; a rollback repeats the same batches and learning rates.
    is_minor: the report's story leaves it out where it was only recorded.
    quiet_steps: at least between two alarms that roll back, of any kind, and between two of an explosion, a plateau or a slow
    trend; the others do not read it.
    """

    name: str
    response: Literal["record", "skip", "roll back", "restart"]
    advice: str = ""
    is_hardware_fault: bool = False
    is_minor: bool = False
    quiet_steps: int = 100

    def completed_steps(self, step: int) -> int:
        """Steps whose updates were taken when `step` raised the alarm: the guard judges before an update, and compares replicas
        after it."""
        return step if self.is_hardware_fault else step - 1


def _read_kinds() -> dict[str, IncidentKind]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: IncidentKind(name, **table) for name, table in tables.items()}


INCIDENT_KINDS = _read_kinds()
NONFINITE = INCIDENT_KINDS["nonfinite"]
SPIKE = INCIDENT_KINDS["spike"]
DIVERGED = INCIDENT_KINDS["diverged"]
CORRUPTION = INCIDENT_KINDS["corruption"]
EXPLOSION = INCIDENT_KINDS["explosion"]
PLATEAU = INCIDENT_KINDS["plateau"]
ATTENTION = INCIDENT_KINDS["attention"]
ACTIVATION = INCIDENT_KINDS["activation"]
SLOW = INCIDENT_KINDS["slow"]
DATA_WAIT = INCIDENT_KINDS["data_wait"]
STRAGGLER = INCIDENT_KINDS["straggler"]
HANG = INCIDENT_KINDS["hang"]
LOST = INCIDENT_KINDS["lost"]
CHECKPOINT_FAILED = INCIDENT_KINDS["checkpoint_failed"]
CHECKPOINT_DAMAGED = INCIDENT_KINDS["checkpoint_damaged"]
MIRROR_FAILED = INCIDENT_KINDS["mirror_failed"]
RESTORED = INCIDENT_KINDS["restored"]
RECIPE_CHANGED = INCIDENT_KINDS["recipe_changed"]
FEWER_PROCESSES = INCIDENT_KINDS["fewer_processes"]


_log_file = cache(LogFile)  # one for each path, in which what a full disk rejects waits


def record(
    path: Path, kind: IncidentKind, step: int, cause: str, action: str = RECORDED, rank: int = 0, **more: Any
) -> None:
    """Append an incident, with the advice of its kind, to incidents.jsonl. cause, action: sentences for a person.

    One that cannot be written (a full disk) is written with the next one of this process.
    """
    row = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "step": step, "rank": rank, "what": kind.name,
        "cause": cause, "action": action, **({"advice": kind.advice} if kind.advice else {}), **more,
    }  # fmt: skip
    _log_file(path).append(json_line(row))
