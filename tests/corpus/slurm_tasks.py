"""Small tasks for the tests of job arrays, in a module that the jobs can import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError
from bessemer.run_tasks.task import Task


@dataclass(frozen=True)
class Square(Task):
    """Task that writes its number squared, or does what `trouble` has for its number."""

    number: int
    trouble: str = ""

    @property
    def folder(self) -> Path:
        return self.work / "squares" / str(self.number)

    def __str__(self) -> str:
        return f"square {self.number}"

    def make(self, folder: Path) -> dict[str, Any]:
        with open(self.work / "made", "a") as file:
            file.write(f"{self.number}\n")
        attempt = (self.work / "made").read_text().split().count(str(self.number))
        if self.trouble == "fails":
            raise InputError(f"square {self.number}: what, where")
        if self.trouble == "dies" or (self.trouble == "dies once" and attempt == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "waits":
            time.sleep(60)
        return {"square": self.number**2}


def square(work: Path, number: int, trouble: str = "") -> Square:
    """Return the task that squares `number`."""
    return Square(work, "square", 1, number, trouble)
