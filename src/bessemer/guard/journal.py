"""The journal of a run: the guard's decisions, which a rerun repeats.

    {"kind": "skip", "step": 57, "rollbacks": 0}          the update of step 57 was skipped, with no rollback before it
    {"kind": "rollback", "number": 1, "at": 120, "to": 80, ...}

Recipe, tokens and journal determine a run bit for bit, even if a hardware fault caused a decision. A changed value would
silently train another model, so each line ends with `check`, a hash of the line and of all lines before it. Steps are 1-based.
An entry is durable before its decision is carried out; if a kill interrupts that, the resumed run carries it out again.
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
    """A return to an earlier checkpoint.

    Attributes:
        number: The number of the rollback, from 1.
        at: The step that raised the alarm (1-based); `completed` tells if its update was applied.
        to: The step of the checkpoint.
        what: The kind of the alarm.
        onset: The first bad step.
        omitted: The range of samples that the run skips from then on.
        rewarm_steps: The number of steps over which the learning rate warms up again; 0 after a hardware fault.
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
        """True if the hardware was at fault and not the training, so that the same steps are repeated."""
        return INCIDENT_KINDS[self.what].is_hardware_fault

    @property
    def completed(self) -> int:
        """The number of updates applied before the rollback."""
        return INCIDENT_KINDS[self.what].completed_steps(self.at)


@dataclass
class Journal:
    """The decisions of the guard so far, equal on every process. Only rank 0 writes them.

    Attributes:
        path: The path of journal.jsonl; None on other ranks.
        rollbacks: The rollbacks in order.
        skips: (step, number of rollbacks before it) of each skipped update.
        check: The `check` of the last line.
    """

    path: Path | None = None
    rollbacks: list[Rollback] = field(default_factory=list)
    skips: set[tuple[int, int]] = field(default_factory=set)
    """(step, number of rollbacks before it)"""
    check: str = ""
    """The `check` of the last line."""

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read a journal; a missing file is an empty journal.

        A torn last line is ignored, because its decision was not carried out.

        Raises:
            InputError: The file is damaged in any other way.
        """
        journal = cls(path)
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                check, journal.check = row.pop("check"), _check(journal.check, row)
                if check != journal.check:
                    raise ValueError
                if row["kind"] == "skip":
                    journal.skips.add((int(row["step"]), int(row["rollbacks"])))
                    continue
                rollback = _rollback(row)
                if row["kind"] != "rollback" or rollback.number != journal.num_rollbacks + 1:
                    raise ValueError
            except (ValueError, KeyError, TypeError, IndexError):
                what = f"line {number} is damaged or edited, or the line before it is missing"
                raise InputError(f"{path}: {what}; restore the file, or start over with --restart") from None
            journal.rollbacks.append(rollback)
        return journal

    @classmethod
    def read_run(cls, run: RunDirectory) -> Journal:
        """Read the journal of a run. Raises InputError if the run's logs record more rollbacks, and as `read`."""
        journal = cls.read(run.journal)
        for path, key in ((run.incidents, "rollback"), (run.forks, "fork")):
            if (recorded := max((row.get(key, 0) for row in read_json_lines(path)), default=0)) > journal.num_rollbacks:
                journal.raise_incomplete(f"{path.name} records", recorded)
        return journal

    def raise_incomplete(self, who: str, recorded: int) -> NoReturn:
        """Raise InputError because the journal has fewer than `recorded` rollbacks.

        `who` begins the message with what records them and a verb, such as "metrics.jsonl records".
        """
        known = f"{who} {counted(recorded, 'rollback')}, but this file only {self.num_rollbacks}"
        raise InputError(f"{self.path}: lines are missing: {known}; restore the file, or start over with --restart")

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
        """Return the number of rollbacks decided in the last `steps` steps before `step`."""
        return sum(step - steps < rollback.at for rollback in self.rollbacks)

    def rollback_before(self, step: int) -> Rollback | None:
        """Return the rollback whose learning rate applies at update `step` (0-based); None if none does.

        It is the last rollback to that step or an earlier one, hardware faults excluded.
        """
        earlier = (rollback for rollback in reversed(self.rollbacks) if rollback.to <= step)
        return next((rollback for rollback in earlier if not rollback.is_hardware_fault), None)

    def keeps(self, step: int, num_rollbacks: int) -> bool:
        """Return True if no later rollback undid the state after `step` steps and `num_rollbacks` rollbacks."""
        return all(step <= rollback.to for rollback in self.rollbacks[num_rollbacks:])

    def skips_step(self, step: int) -> bool:
        """Return True if the update of `step` (1-based) was skipped and no rollback undid that."""
        return any((step, n) in self.skips and self.keeps(step, n) for n in range(self.num_rollbacks + 1))

    def add_skip(self, step: int) -> None:
        """Record that the update of `step` (1-based) is skipped."""
        if not self.skips_step(step):
            self.skips.add((step, self.num_rollbacks))
            self._append({"kind": "skip", "step": step, "rollbacks": self.num_rollbacks})

    def add_rollback(self, rollback: Rollback) -> None:
        """Record a rollback before it is carried out."""
        self.rollbacks.append(rollback)
        self._append({"kind": "rollback", **asdict(rollback)})

    def after(self, num_rollbacks: int) -> Journal:
        """Return a read-only copy of the journal as of its first `num_rollbacks` rollbacks."""
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
    """Return the hash of a line, which includes the hash of the line before it."""
    return digest(before, row)[:16]
