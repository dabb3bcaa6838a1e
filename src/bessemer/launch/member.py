"""One process of a training: joins the group, trains, tells.

`python -m bessemer.launch.member RUN [profile]`, with the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT). A failure that another attempt would meet again is told and ends all members with code 0, so
that none is started anew; anything else ends this one with code 1, and the agent starts the group again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.launch import outcome
from bessemer.run import RunFolder
from bessemer.terminal import QUIET

POLL_SECONDS = 0.3
SHARED_SECONDS = 10.0  # until a file of one process must be seen by the others


def main() -> None:
    """Train, and end without Python's teardown: a thread inside a collective would keep it from ending."""
    run, profile = RunFolder(Path(sys.argv[1])), "profile" in sys.argv[2:]
    rank = int(os.environ["RANK"])
    if rank:
        os.environ[QUIET] = "1"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    code = 0
    try:
        outcome.note_pid(run, rank)
        _leave_when_told(run)
        summary = _train(run, profile)
        if rank == 0:
            outcome.tell(run, "done", summary=summary)
    except BessemerError as error:
        outcome.tell_failure(run, error)
    except KeyboardInterrupt:
        outcome.tell_failure(run, Stopped("stopped; the same command goes on from the last checkpoint"))
    except FileNotFoundError as error:
        outcome.tell_failure(run, BessemerError(f"rank {rank}: {error.filename}: not there; is the run folder shared?"))
    except BaseException as error:  # lost neighbours, lost memory, lost devices: worth another attempt
        outcome.note_crash(run, rank, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(run: RunFolder, profile: bool) -> dict[str, object]:
    from bessemer.parallel.team import join, leave
    from bessemer.recipe import load
    from bessemer.run import read_json
    from bessemer.train import device as devices
    from bessemer.train.session import train_here

    recipe = load(run.recipe)
    device = devices.choose(recipe.train, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    team = join(recipe.parallel, device.place)
    _agree(run, team)
    made = train_here(recipe, run, read_json(run.plan), profile, device, team)
    team.wait()
    leave()
    return asdict(made)


def _agree(run: RunFolder, team: Any) -> None:
    """Every process must see the same folder, recipe, tokens and program. Raises InputError that names the ranks."""
    from bessemer import __version__
    from bessemer.recipe import digest
    from bessemer.run import read_json

    mark = outcome.folder(run) / f"seen-{team.first(str(time.time_ns()))}"
    if team.is_first:
        mark.touch()
    team.wait()
    deadline = time.monotonic() + SHARED_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    seen = team.gather(mark.exists())
    if not all(seen):
        blind = [rank for rank, there in enumerate(seen) if not there]
        raise InputError(
            f"{run.path}: rank {_ranks(blind)} does not see what rank 0 writes there: the run folder has to lie on a disk that "
            "all processes share; set run.dir to one"
        )
    manifest = run.tokens / "manifest.json"
    own = {
        "recipes": digest(run.recipe.read_text()),
        "tokens": digest(read_json(manifest)["files"] if manifest.exists() else "none"),
        "versions of bessemer": __version__,
    }
    told = team.gather(own)
    for what in own:
        other = [rank for rank in range(team.world) if told[rank][what] != told[0][what]]
        if other:
            raise InputError(f"parallel: the processes have different {what}: rank {_ranks(other)} differs from rank 0")


def _ranks(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _leave_when_told(run: RunFolder) -> None:
    """Once one process has told a failure, the others would wait for it in a collective: they leave."""

    def watch() -> None:
        while True:
            time.sleep(POLL_SECONDS)
            found = outcome.told(run)
            if found is not None and found["status"] not in ("done", "stopped"):
                os._exit(0)

    threading.Thread(target=watch, name="outcome", daemon=True).start()


if __name__ == "__main__":
    main()
