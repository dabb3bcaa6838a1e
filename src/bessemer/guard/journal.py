"""The journal of a run: the guard's decisions, which a repetition of the run takes over.

    {"kind": "skip", "step": 57, "rollbacks": 0}          the update of step 57 was skipped, with no rollback before it
    {"kind": "rollback", "number": 1, "at": 120, "to": 80, ...}

Each line ends with `check`, a hash of it and of all lines before it, since a changed value would silently train another model.
Recipe, tokens and journal determine the run bit for bit, also where the cause of a decision was a hardware fault. Steps are
1-based. An entry is durable before the decision is carried out, which a resumed run does again where a kill interrupted it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.guard.incidents import INCIDENT_KINDS
from bessemer.recipe.batches import Range
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, sync_folder, write_atomic


@dataclass(frozen=True)
class Rollback:
    """A return to a checkpoint.

    Attributes:
        number: From 1.
        at: The step that raised the alarm (1-based); `completed` says whether its update was taken.
        to: The step of the checkpoint.
        what: The kind of the alarm.
        onset: The first bad step.
        omitted: The samples of the run's order that are skipped from then on.
        rewarm_steps: The steps of the re-warm-up of the learning rate; 0 after a hardware fault.
    """

    number: int
    at: int
    to: int
    what: str
    onset: int
    omitted: Range
    rewarm_steps: int

    @property
    def is_hardware_fault(self) -> bool:
        """Whether the same steps are repeated, since not the training was at fault."""
        return INCIDENT_KINDS[self.what].is_hardware_fault

    @property
    def completed(self) -> int:
        """Steps whose updates were taken before it."""
        return INCIDENT_KINDS[self.what].completed_steps(self.at)


@dataclass
class Journal:
    """The decisions so far; the same on every process, of which rank 0 writes. path: None on the others."""

    path: Path | None = None
    rollbacks: list[Rollback] = field(default_factory=list)
    skips: set[tuple[int, int]] = field(default_factory=set)
    """(step, num_rollbacks)"""
    check: str = ""
    """Of the last line."""

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal of a run; empty where there is none. A torn last line is ignored: its decision was not carried out.
        Raises InputError for any other damage."""
        journal = cls(path)
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                found, journal.check = row.pop("check"), _check(journal.check, row)
                if found != journal.check:
                    raise ValueError
                if row["kind"] == "skip":
                    journal.skips.add((int(row["step"]), int(row["rollbacks"])))
                    continue
                rollback = _rollback(row)
                if row["kind"] != "rollback" or rollback.number != journal.num_rollbacks + 1:
                    raise ValueError
            except (ValueError, KeyError, TypeError, IndexError):
                what = f"line {number} is damaged or was changed, or one before it is missing"
                raise InputError(f"{path}: {what}; put the file back, or start over with --restart") from None
            journal.rollbacks.append(rollback)
        return journal

    @classmethod
    def of_run(cls, run: RunDirectory) -> Journal:
        """The journal of a run. Raises InputError where the run's logs record more rollbacks, and as `read`."""
        journal = cls.read(run.journal)
        for path, key in ((run.incidents, "rollback"), (run.forks, "fork")):
            if (recorded := max((row.get(key, 0) for row in read_json_lines(path)), default=0)) > journal.num_rollbacks:
                journal.refuse(f"{path.name} records", recorded)
        return journal

    def refuse(self, who: str, recorded: int) -> NoReturn:
        """Raise InputError, since `who` has `recorded` rollbacks and the journal fewer."""
        known = f"{who} {counted(recorded, 'rollback')}, the journal {self.num_rollbacks}"
        raise InputError(f"{self.path}: {known}: lines are missing; put the file back, or start over with --restart")

    def drop_torn_line(self) -> None:
        """Remove a last line that a kill cut short."""
        data = self.path.read_bytes() if self.path is not None and self.path.exists() else b""
        if self.path is not None and data and not data.endswith(b"\n"):
            write_atomic(self.path, data[: data.rfind(b"\n") + 1].decode())

    @property
    def num_rollbacks(self) -> int:
        return len(self.rollbacks)

    @property
    def omitted(self) -> tuple[Range, ...]:
        return tuple(rollback.omitted for rollback in self.rollbacks)

    def num_rollbacks_within(self, step: int, steps: int) -> int:
        """Return the number of rollbacks that were decided in the last `steps` steps."""
        return sum(step - steps < rollback.at for rollback in self.rollbacks)

    def governing(self, step: int) -> Rollback | None:
        """The rollback whose learning rate holds at update `step` (0-based): the last one to that step or an earlier one, other
        than those after hardware faults."""
        earlier = (rollback for rollback in reversed(self.rollbacks) if rollback.to <= step)
        return next((rollback for rollback in earlier if not rollback.is_hardware_fault), None)

    def keeps(self, step: int, num_rollbacks: int) -> bool:
        """Whether no later rollback undid the state after `step` steps and `num_rollbacks` rollbacks."""
        return all(step <= rollback.to for rollback in self.rollbacks[num_rollbacks:])

    def skips_step(self, step: int) -> bool:
        """Whether the update of `step` (1-based) was skipped, and no rollback undid that."""
        return any((step, n) in self.skips and self.keeps(step, n) for n in range(self.num_rollbacks + 1))

    def add_skip(self, step: int) -> None:
        """Write that the update of `step` (1-based) is skipped."""
        if not self.skips_step(step):
            self.skips.add((step, self.num_rollbacks))
            self._append({"kind": "skip", "step": step, "rollbacks": self.num_rollbacks})

    def add_rollback(self, rollback: Rollback) -> None:
        """Write a rollback, before it is carried out."""
        self.rollbacks.append(rollback)
        self._append({"kind": "rollback", **asdict(rollback)})

    def after(self, num_rollbacks: int) -> Journal:
        """The journal as it was after its first `num_rollbacks` rollbacks; nothing is written to it."""
        skips = {(step, before) for step, before in self.skips if before <= num_rollbacks}
        return Journal(None, self.rollbacks[:num_rollbacks], skips)

    def _append(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        is_new = not self.path.exists()
        self.check = _check(self.check, row)
        with open(self.path, "ab") as file:
            file.write((json.dumps({**row, "check": self.check}) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path.parent)


def _rollback(row: dict[str, Any]) -> Rollback:
    omitted = int(row["omitted"][0]), int(row["omitted"][1])
    return Rollback(**{**{name: row[name] for name in Rollback.__dataclass_fields__}, "omitted": omitted})


def _check(before: str, row: dict[str, Any]) -> str:
    """Of a line, from that of the line before it."""
    return digest(before, row)[:16]
