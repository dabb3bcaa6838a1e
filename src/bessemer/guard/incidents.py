"""The kinds of incident, and the record of incidents in incidents.jsonl."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from bessemer.common.log_file import append_entry, json_line

STOPPED = "run stopped"  # the end of the action of an incident that stopped the run
RECORDED = "recorded"  # the action of an incident without a response


@dataclass(frozen=True)
class IncidentKind:
    """A kind of incident.

    Attributes:
        name: The name in incidents.jsonl.
        response: The response of the guard or the launcher. incidents.toml lists for which kinds it decides.
        advice: What practitioners did, with the source.
        is_hardware_fault: True if the hardware and not the training was at fault; a rollback then repeats the same batches and
            learning rates.
        is_minor: True if the report omits incidents that were only recorded.
        quiet_steps: The least number of steps between two alarms that roll back, of any kind, and between two explosions,
            plateaus or slow trends. Other kinds ignore it.
    """

    name: str
    response: Literal["record", "skip", "roll back", "restart"]
    advice: str = ""
    is_hardware_fault: bool = False
    is_minor: bool = False
    quiet_steps: int = 100

    def completed_steps(self, step: int) -> int:
        """Return how many updates were applied when `step` raised the alarm.

        The guard judges a step before its update, but compares replicas after it.
        """
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
COLLAPSE = INCIDENT_KINDS["collapse"]
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


def record(
    path: Path, kind: IncidentKind, step: int, cause: str, action: str = RECORDED, rank: int = 0, **more: Any
) -> None:
    """Append an incident, with the advice of its kind, to incidents.jsonl.

    If the disk is full, the line is written with the next one of this process.

    Args:
        path: The path of incidents.jsonl.
        kind: The kind of incident.
        step: The step that it is about.
        cause: A sentence that describes the cause.
        action: A sentence that describes the response.
        rank: The rank that it is about.
        more: Further values of the line.
    """
    row = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "step": step, "rank": rank, "what": kind.name,
        "cause": cause, "action": action, **({"advice": kind.advice} if kind.advice else {}), **more,
    }  # fmt: skip
    append_entry(path, json_line(row))
