"""The journal of a run: what the guard decided and a repeated run could not find out again by itself.

    {"kind": "skip", "step": 57, "rollbacks": 0}          the update of step 57 was skipped, with no rollback before it
    {"kind": "rollback", "number": 1, "at": 120, "to": 80, ...}

Recipe, tokens and journal give the whole run bit for bit, also where the trouble was a fault of the machine. Steps are 1-based.
An entry is durable before it is acted on, so that a kill at any time leaves either none of it or all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError
from bessemer.recipe.batches import Range
from bessemer.run import sync_folder, write_atomic


@dataclass(frozen=True)
class Rollback:
    """One return to a checkpoint.

    number: from 1; at: the step whose gradients raised the alarm (1-based), of a corruption the last step that was taken; to:
    step of the checkpoint; what, onset: of the alarm; omitted: samples of the run's order that are not read from then on;
    rate_factor: on the learning rate after it; rewarm_from, rewarm_steps: its warm-up.
    """

    number: int
    at: int
    to: int
    what: str
    onset: int
    omitted: Range
    rate_factor: float
    rewarm_from: float
    rewarm_steps: int


@dataclass
class Journal:
    """The decisions so far; the same on every process, of which rank 0 writes. path: None on the others."""

    path: Path | None = None
    rollbacks: list[Rollback] = field(default_factory=list)
    skips: set[tuple[int, int]] = field(default_factory=set)
    """(step, num_rollbacks)"""

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal of a run; empty where there is none. A last line that a kill cut short was not acted on and is left
        out. Raises BessemerError for any other damage."""
        rollbacks: list[Rollback] = []
        skips: set[tuple[int, int]] = set()
        lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
                if row["kind"] == "skip":
                    skips.add((int(row["step"]), int(row["rollbacks"])))
                    continue
                values = {name: row[name] for name in Rollback.__dataclass_fields__}
                rollback = Rollback(**{**values, "omitted": (int(row["omitted"][0]), int(row["omitted"][1]))})
                if row["kind"] != "rollback" or rollback.number != len(rollbacks) + 1:
                    raise ValueError
            except (ValueError, KeyError, TypeError, IndexError):
                raise BessemerError(
                    f"{path}: line {number} is damaged, or one before it is missing: this run cannot be continued as it was. "
                    "Put the file back from a backup, or start over with --restart"
                ) from None
            rollbacks.append(rollback)
        return cls(path, rollbacks, skips)

    def drop_torn_line(self) -> None:
        """Remove what a kill left of an unfinished last line, so that the next one begins a line."""
        data = self.path.read_bytes() if self.path is not None and self.path.exists() else b""
        if self.path is not None and data and not data.endswith(b"\n"):
            write_atomic(self.path, data[: data.rfind(b"\n") + 1].decode())

    @property
    def num_rollbacks(self) -> int:
        """The number of rollbacks."""
        return len(self.rollbacks)

    @property
    def omitted(self) -> tuple[Range, ...]:
        """The samples that are not read."""
        return tuple(rollback.omitted for rollback in self.rollbacks)

    def governing(self, step: int) -> Rollback | None:
        """The rollback whose learning rate holds at update `step` (0-based): the last one to that step or an earlier one."""
        # After silent corruption the same steps are repeated: the state was wrong, not the training.
        changed = (one for one in reversed(self.rollbacks) if one.to <= step and one.what != "corruption")
        return next(changed, None)

    def keeps(self, step: int, num_rollbacks: int) -> bool:
        """Whether the state after `step` steps after so many rollbacks is part of the path that the run took in the end."""
        return all(step <= rollback.to for rollback in self.rollbacks[num_rollbacks:])

    def skips_step(self, step: int) -> bool:
        """Whether the update of a step (1-based) of the path was skipped."""
        return any((step, n) in self.skips and self.keeps(step, n) for n in range(self.num_rollbacks + 1))

    def add_skip(self, step: int) -> None:
        """Note that the update of `step` (1-based) is skipped."""
        if not self.skips_step(step):
            self.skips.add((step, self.num_rollbacks))
            self._append({"kind": "skip", "step": step, "rollbacks": self.num_rollbacks})

    def add_rollback(self, rollback: Rollback) -> None:
        """Note a rollback before anything is changed."""
        self.rollbacks.append(rollback)
        self._append({"kind": "rollback", **asdict(rollback)})

    def after(self, num_rollbacks: int) -> Journal:
        """The journal as it was after so many rollbacks; nothing is written to it."""
        skips = {(step, before) for step, before in self.skips if before <= num_rollbacks}
        return Journal(None, self.rollbacks[:num_rollbacks], skips)

    def _append(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        is_new = not self.path.exists()
        with open(self.path, "ab") as file:
            file.write((json.dumps(row) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self.path.parent)


def within(rollbacks: Iterable[Rollback], step: int, steps: int) -> int:
    """How many of the rollbacks were decided in the last `steps` steps."""
    return sum(step - steps < rollback.at for rollback in rollbacks)
