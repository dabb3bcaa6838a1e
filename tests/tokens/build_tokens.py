"""Tokens built by tasks with their work in a store, in a process that kills itself.

    python build_tokens.py RECIPE RUN MOMENT before|after

MOMENT is the number of the write to the store or the run directory at which the process kills itself, before or after it.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory
from bessemer.storage import path
from bessemer.storage.filesystem import StorePath
from bessemer.tokens import build, tasks

moments = 0


def counted(operation: Callable[..., Any], target: int, when: str) -> Callable[..., Any]:
    def done(*given: Any, **named: Any) -> Any:
        global moments
        moments += 1
        number = moments  # threads count too
        if number == target and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = operation(*given, **named)
        if number == target:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return done


if __name__ == "__main__":
    recipe, run, moment, when = sys.argv[1:]
    tasks.TASK_BYTES = 6000
    for owner, name in ((path, "copy"), (StorePath, "write_bytes"), (os, "rename"), (os, "replace"), (os, "link")):
        setattr(owner, name, counted(getattr(owner, name), int(moment), when))
    build.build(parse(Path(recipe).read_text(), "test"), RunDirectory(Path(run)))
