"""Tokens built by tasks with their work in a store, in a process that kills itself.

    python -m tests.tokens.build_tokens RECIPE RUN MOMENT before|after

MOMENT is the number of the write to the store or the run directory at which the process kills itself, before or after it.
"""

import os
import sys
from pathlib import Path

from bessemer.recipe import parse
from bessemer.run.directory import RunDirectory
from bessemer.storage import path
from bessemer.storage.filesystem import StorePath
from bessemer.tokens import build, tasks
from tests.kills import kill_at

if __name__ == "__main__":
    recipe, run, moment, when = sys.argv[1:]
    tasks.TASK_BYTES = 6000
    operations = (path, "copy"), (StorePath, "write_bytes"), (os, "rename"), (os, "replace"), (os, "link")
    kill_at(int(moment), when, operations)
    build.build(parse(Path(recipe).read_text(), "test"), RunDirectory(Path(run)))
