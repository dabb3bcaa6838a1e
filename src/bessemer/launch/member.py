"""One process of a training: meets the others, joins the group, trains, tells.

`python -m bessemer.launch.member RUN [profile]` trains a run that is prepared; `bessemer train RECIPE` with the environment
of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) also prepares it, in its first process.

Under our own agent ($BESSEMER_NODE is set) an end that another attempt would meet again is told in files, and the process
ends with code 0, so that it is not started anew; anything else ends it with code 1, and the agent starts the group again.
Under another launcher the exit code is the training's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from bessemer.errors import BessemerError, Stopped
from bessemer.launch import outcome
from bessemer.run import RunFolder
from bessemer.terminal import QUIET, silence_libraries, working

POLL_SECONDS = 0.3
LAST_WORD_SECONDS = (
    3.0  # for a failure that another process is about to tell, before a lost neighbour counts as a crash
)
SLOTS = "BESSEMER_SLOTS"  # which devices of the node its processes take, where some are left out


@dataclass(frozen=True)
class Part:
    """What a process takes part in. opened: gives the recipe as asked for and the run folder; prepare: what the first
    process does to make the run ready to train, holding its lock; None where the command has done so."""

    opened: Callable[[], tuple[Any, RunFolder]]
    prepare: Callable[[], None] | None = None
    profile: bool = False
    as_json: bool = False


def main() -> NoReturn:
    """Take part in a run that is prepared."""
    run, profile = RunFolder(Path(sys.argv[1])), "profile" in sys.argv[2:]

    def opened() -> tuple[Any, RunFolder]:
        from bessemer.recipe import load

        return load(run.recipe), run

    take_part(Part(opened, None, profile))


def take_part(part: Part) -> NoReturn:
    """Train, tell how it ended, and end without Python's teardown: a thread inside a collective would keep it from ending."""
    member = Member(part)
    code = member.work()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Member:
    """This process. run: known once all agree on it and see it."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        self.node = Path(os.environ[outcome.NODE]) if outcome.NODE in os.environ else None
        self.run: RunFolder | None = None

    def work(self) -> int:
        """Train. Returns the exit code."""
        from bessemer.launch.meeting import Settled

        if self.rank:
            os.environ[QUIET] = "1"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        silence_libraries()
        # Until the loop listens for itself: a launcher that gives up on the group sends SIGTERM, the command SIGUSR1.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, _stop)
        _stop_although_blocked(self)
        if self.node is not None:
            outcome.note_pid(self.node, self.local_rank)
        try:
            with working("train"):
                made = self._train()
            return self._done(made)
        except Settled as error:
            return self._told(error.error, says=self.rank == 0)
        except BessemerError as error:
            return self._told(error)
        except KeyboardInterrupt:
            return self.stopped_early()
        except FileNotFoundError as error:
            return self._told(
                BessemerError(f"rank {self.rank}: {error.filename}: not there; is the run folder shared?")
            )
        except BaseException as error:  # lost neighbours, lost memory, lost devices: worth another attempt
            return self._crashed(error)

    def _train(self) -> dict[str, object]:
        import torch.distributed as dist

        from bessemer.launch import agreement
        from bessemer.launch.meeting import meet
        from bessemer.parallel.team import join, leave
        from bessemer.recipe import load
        from bessemer.run import read_json
        from bessemer.train import device as devices
        from bessemer.train.session import train_here

        meeting = meet()
        run = agreement.on_the_recipe(meeting, self.part.opened)
        with contextlib.ExitStack() as held:
            meeting.publish("prepared", lambda: self._prepare(run, held))
            layout = agreement.on_the_folder(meeting, run)
            self.run = run  # from here on nothing of an earlier start is told there
            outcome.note_rank(run, self.rank)
            _leave_when_told(self, spare=self.rank >= layout.world)
            if self.rank >= layout.world:
                _wait_as_spare()
            recipe = load(run.recipe)
            recipe = recipe.model_copy(update={"parallel": layout})
            device = devices.choose(recipe.train, local_rank=_slot(self.local_rank))
            team = join(layout, device.place, store=dist.PrefixStore("group", meeting.store))
            made = train_here(recipe, run, read_json(run.plan), self.part.profile, device, team)
            team.wait()
            leave()
        return asdict(made)

    def _prepare(self, run: RunFolder, held: contextlib.ExitStack) -> None:
        if self.part.prepare is not None:
            held.enter_context(run.writing())
            outcome.begin(run)
            self.part.prepare()

    def _done(self, summary: dict[str, object]) -> int:
        assert self.run is not None
        if self.rank == 0:
            outcome.tell(outcome.folder(self.run), "done")
            if self.node is None and self.part.as_json:
                print(json.dumps({"run": str(self.run.path), **summary}, indent=2, default=str))
        if self.node is not None and (self.rank == 0 or outcome.told(self.node) is None):
            outcome.tell(self.node, "done", summary=summary)
        return 0

    def _told(self, error: BessemerError, says: bool | None = None, early: bool = False) -> int:
        """Tell the others and the command an end that is not worth another attempt.

        says: whether this process's node says it to the person; None: when no other process has told an end before.
        early: stopped outside of the loop, so that the others do not hear of it there.
        """
        status = outcome.status_of(error)
        if says is None:
            place = None if self.run is None else outcome.folder(self.run)
            says = place is None or not place.exists() or outcome.tell(place, status, message=str(error), early=early)
        if self.node is None:
            if says:
                line = json.dumps({"error": str(error), "exit": error.exit_code})
                print(
                    line if self.part.as_json else f"bessemer: {error}", file=None if self.part.as_json else sys.stderr
                )
            return error.exit_code
        if says:
            outcome.say(self.node, status, str(error))
        outcome.tell(self.node, status, message=str(error))
        return 0

    def stopped_early(self) -> int:
        """Tell a stop outside of the loop, where nothing is to be saved."""
        return self._told(Stopped("stopped; the same command goes on from the last checkpoint"), early=True)

    def _crashed(self, error: BaseException) -> int:
        """Something that may not happen again, or what another process's end looks like from here."""
        deadline = time.monotonic() + LAST_WORD_SECONDS
        while self.run is not None and time.monotonic() < deadline:
            if self.leave(outcome.told(outcome.folder(self.run))) is not None:
                return self.left
            time.sleep(POLL_SECONDS)
        if self.node is not None:
            outcome.note_crash(self.node, self.rank, self.local_rank, error)
        else:
            first = (str(error).strip().splitlines() or [""])[0]
            print(f"bessemer: rank {self.rank}: {type(error).__name__}: {first}", file=sys.stderr)
        return 1

    left = 0

    def leave(self, found: dict[str, Any] | None) -> int | None:
        """The exit code with which to leave because another process has told the training's end; None: it goes on."""
        if found is None:
            return None
        if self.node is not None:
            outcome.tell(self.node, found["status"], **{key: found[key] for key in ("message",) if key in found})
        elif found["status"] != "done":
            self.left = outcome.FAILURES[found["status"]].exit_code
        return self.left


def _leave_when_told(member: Member, spare: bool) -> None:
    """Once one process has told a failure, the others would wait for it in a collective: they leave. spare: at any end."""
    assert member.run is not None
    place = outcome.folder(member.run)

    def watch() -> None:
        while True:
            time.sleep(POLL_SECONDS)
            found = outcome.told(place)
            if found is None:
                continue
            if spare or found.get("early") or found["status"] not in ("done", "stopped"):
                os._exit(member.leave(found) or 0)

    threading.Thread(target=watch, name="outcome", daemon=True).start()


def _stop_although_blocked(member: Member) -> None:
    """Python hears no signal while it waits in C++ for its neighbours, which may have stopped already: a thread does."""
    hears, is_told = os.pipe()
    os.set_blocking(is_told, False)
    signal.set_wakeup_fd(is_told, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            if signal.SIGUSR1 in os.read(hears, 64):
                time.sleep(POLL_SECONDS)
                if signal.getsignal(signal.SIGUSR1) is _stop:  # else the loop listens, or a spare does not
                    os._exit(member.stopped_early())

    threading.Thread(target=listen, name="stop", daemon=True).start()


def _wait_as_spare() -> NoReturn:
    """More processes were started than the layout takes: wait until a lost one makes the launcher start all anew."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the others stop, and tell so
    while True:
        time.sleep(POLL_SECONDS)


def _slot(local_rank: int) -> int:
    """The number of this process's device among those of its node."""
    slots = os.environ.get(SLOTS)
    return local_rank if slots is None else int(slots.split(",")[local_rank])


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
