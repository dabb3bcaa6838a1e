"""One process of a training: joins the rendezvous and the process group, trains, and reports how it ended.

`python -m bessemer.launch.member RUN [profile]` trains a prepared run; `bessemer train RECIPE` in the environment of torchrun
(RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) also prepares it, on rank 0.

Under our own agent ($BESSEMER_NODE is set) an end that a restart would meet again is reported in files, and the process exits
with 0, so that it is not restarted; any other end exits with 1, and the agent restarts the group. Under another launcher the
exit code is the training's own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bessemer import interrupt
from bessemer.environment import process_age
from bessemer.errors import BessemerError, Stopped
from bessemer.launch import status
from bessemer.logfile import write_waiting
from bessemer.run import RunFolder
from bessemer.terminal import QUIET, SILENT, keep_streams, printable, silence_libraries, working

if TYPE_CHECKING:
    from bessemer.guard.heartbeat import Heartbeat

POLL_SECONDS = 0.3
REPORT_SECONDS = 3.0  # for another process to report a failure, before a lost neighbour counts as a crash
SLOTS = "BESSEMER_SLOTS"  # the node's devices that its processes use, where some are left out


@dataclass(frozen=True)
class MemberTask:
    """What a process does. opened: returns the requested recipe and the run folder; prepare: on rank 0, makes the run ready to
    train, holding its lock; None where the command has done so."""

    opened: Callable[[], tuple[Any, RunFolder]]
    prepare: Callable[[], None] | None = None
    profile: bool = False
    as_json: bool = False


def main() -> NoReturn:
    run, profile = RunFolder(Path(sys.argv[1])), "profile" in sys.argv[2:]

    def opened() -> tuple[Any, RunFolder]:
        from bessemer.recipe import load

        return load(run.recipe), run

    run_member(MemberTask(opened, None, profile))


def run_member(task: MemberTask) -> NoReturn:
    """Train, report, and exit without Python's teardown, which a thread inside a collective would block."""
    keep_streams()
    faulthandler.enable()
    code = LaunchedProcess(task).work()
    write_waiting()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class LaunchedProcess:
    """This process. node: the folder of its node's files, None under another launcher; run: known once all agree on it."""

    def __init__(self, task: MemberTask) -> None:
        self.task = task
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        self.node = Path(os.environ[status.NODE]) if status.NODE in os.environ else None
        self.run: RunFolder | None = None

    def work(self) -> int:
        """Train. Returns the exit code."""
        from bessemer.launch.rendezvous import CommonError

        if self.rank:
            os.environ[QUIET] = SILENT
        interrupt.name_process(f"rank {self.rank}")
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        silence_libraries()
        # Until the loop handles them: a launcher that gives the group up sends SIGTERM, which ends it; the command sends SIGUSR1.
        interrupt.handle(interrupt.stop)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stop_when_blocked()
        if self.node is not None:
            interrupt.end_with_parent(signal.SIGKILL)  # the agent, without which nobody would restart or stop it
            if not status.has_agent():  # it ended before
                return Stopped.exit_code
            try:
                status.note_pid(self.node, str(self.local_rank))
            except FileNotFoundError:  # the command has ended meanwhile, and its folder with it
                return Stopped.exit_code
        try:
            with working("train"):
                summary = self._train()
            return self._done(summary)
        except CommonError as error:
            return self._failed(error.error, shows=self.rank == 0)
        except BessemerError as error:
            return self._failed(error)
        except KeyboardInterrupt:
            return self.stopped_early()
        except FileNotFoundError as error:
            message = f"rank {self.rank}: {error.filename}: not there; is the run folder shared?"
            return self._failed(BessemerError(message))
        except BaseException as error:  # lost neighbours, memory or devices: worth a restart
            return self._crashed(error)

    def _train(self) -> dict[str, object]:
        import torch.distributed as dist

        from bessemer.launch import rendezvous as rendezvous_module
        from bessemer.parallel.mesh import join, leave
        from bessemer.recipe import load
        from bessemer.run import read_json
        from bessemer.train import device as devices
        from bessemer.train.loop import train_here

        rendezvous = rendezvous_module.join()
        run = rendezvous_module.agree_on_recipe(rendezvous, self.task.opened)
        with contextlib.ExitStack() as lock:
            rendezvous.broadcast("prepared", lambda: self._prepare(run, lock))
            layout = rendezvous_module.agree_on_folder(rendezvous, run)
            self.run = run  # its folder has no reports of an earlier start any more
            status.note_pid(status.folder(run), f"rank-{self.rank}")
            is_spare = self.rank >= layout.world
            self._exit_when_reported(is_spare)
            if is_spare:
                _wait_as_spare()
            recipe = load(run.recipe)
            recipe = recipe.model_copy(update={"parallel": layout})
            slots = os.environ.get(SLOTS)
            slot = self.local_rank if slots is None else int(slots.split(",")[self.local_rank])
            device = devices.choose(recipe.train, local_rank=slot)
            with self._heartbeat(run, recipe.guard.hang_seconds) as heartbeat:
                mesh = join(layout, device.torch_device, store=dist.PrefixStore("group", rendezvous.store))
                summary = train_here(
                    recipe, run, read_json(run.plan), self.task.profile, device, mesh, heartbeat,
                    started=time.perf_counter() - process_age(),
                )  # fmt: skip
            mesh.barrier()
            leave()
        return asdict(summary)

    def _heartbeat(self, run: RunFolder, hang_seconds: float | None) -> Heartbeat:
        """What the node's watchdog sees of this process; under another launcher, what it sees of itself."""
        from bessemer.guard.heartbeat import Heartbeat, unwatched_heartbeat

        if self.node is None:
            return unwatched_heartbeat(run, self.rank, hang_seconds)
        name = str(self.local_rank)
        return Heartbeat(self.node / f"{name}.heartbeat", self.rank, self.node / f"{name}.stacks", hang_seconds)

    def _prepare(self, run: RunFolder, lock: contextlib.ExitStack) -> None:
        if self.task.prepare is not None:
            lock.enter_context(run.writing())
            status.begin(run)
            self.task.prepare()

    def _done(self, summary: dict[str, object]) -> int:
        assert self.run is not None
        if self.rank == 0:
            status.report(status.folder(self.run), "done")
            if self.node is None and self.task.as_json:
                print(json.dumps({"run": str(self.run.path), **summary}, indent=2, default=str))
        if self.node is not None and (self.rank == 0 or status.reported(self.node) is None):
            status.report(self.node, "done", summary=summary)
        return 0

    def _failed(self, error: BessemerError, shows: bool | None = None, early: bool = False) -> int:
        """Report an end that is not worth a restart. Returns the exit code.

        shows: whether this process's node shows it to the user; None: if no other process has reported before. early: stopped
        outside of the loop, where the others do not learn of it.
        """
        kind = status.status_of(error)
        if shows is None:
            place = None if self.run is None else status.folder(self.run)
            shows = place is None or not place.exists() or status.report(place, kind, message=str(error), early=early)
        if self.node is None:
            if shows and self.task.as_json:
                print(json.dumps({"error": str(error), "exit": error.exit_code}))
            elif shows:
                print(f"bessemer: {printable(str(error))}", file=sys.stderr)
            return error.exit_code
        if shows:
            status.write(self.node, status.SHOWN, {"status": kind, "message": str(error)})
        status.report(self.node, kind, message=str(error))
        return 0

    def stopped_early(self) -> int:
        """Report a stop outside of the loop, where nothing has to be saved."""
        return self._failed(Stopped(f"stopped; {status.goes_on(self.run)}"), early=True)

    def _crashed(self, error: BaseException) -> int:
        """An unexpected failure, or the consequence of another process's end."""
        deadline = time.monotonic() + REPORT_SECONDS
        while self.run is not None and time.monotonic() < deadline:
            report = status.reported(status.folder(self.run))
            if report is not None:
                return self._follow(report)
            time.sleep(POLL_SECONDS)
        if self.node is not None:
            status.note_crash(self.node, self.rank, self.local_rank, error)
        else:
            message = f"rank {self.rank}: {type(error).__name__}: {status.first_line(error)}"
            print(f"bessemer: {printable(message)}", file=sys.stderr)
        return 1

    def _follow(self, report: dict[str, Any]) -> int:
        """Pass another process's report on to this node. Returns the exit code."""
        if self.node is not None:
            status.report(self.node, report["status"], **{key: report[key] for key in ("message",) if key in report})
            return 0
        return 0 if report["status"] == "done" else status.FAILURES[report["status"]].exit_code

    def _exit_when_reported(self, is_spare: bool) -> None:
        """Exit once a process has reported a failure, since the others would wait for it in a collective; a spare process exits
        at any end."""
        assert self.run is not None
        place = status.folder(self.run)

        def watch() -> None:
            while True:
                time.sleep(POLL_SECONDS)
                report = status.reported(place)
                if report is None:
                    continue
                if is_spare or report.get("early") or report["status"] not in ("done", "stopped"):
                    os._exit(self._follow(report))

        threading.Thread(target=watch, name="outcome", daemon=True).start()

    def _stop_when_blocked(self) -> None:
        """Handle SIGUSR1 in a thread while the main thread waits in C++ for neighbours, which may have stopped already."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)

        def listen() -> None:
            while True:
                if signal.SIGUSR1 in os.read(readable, 64):
                    time.sleep(POLL_SECONDS)
                    # Else the loop handles it, or a spare ignores it.
                    if signal.getsignal(signal.SIGUSR1) is interrupt.stop:
                        os._exit(self.stopped_early())

        threading.Thread(target=listen, name="stop", daemon=True).start()


def _wait_as_spare() -> NoReturn:
    """More processes were started than the layout uses: wait until a lost one makes the launcher restart all."""
    interrupt.handle(lambda *_: None)  # the others stop, and report it
    while True:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
