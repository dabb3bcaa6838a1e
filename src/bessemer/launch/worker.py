"""One process of a training on several: it joins the others, trains, and reports how it ended.

`python -m bessemer.launch.worker RECIPE [--set KEY=VALUE]...`, started by torchrun, is `bessemer train RECIPE` as one process: an
end that a restart would meet again is reported in a file, and the exit code is 0 (launch/outcome.py). Under another launcher,
whose environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, `bessemer train RECIPE` does the same with
exit codes of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from bessemer import interrupt
from bessemer.environment import process_age
from bessemer.errors import BessemerError, Stopped
from bessemer.launch import reports
from bessemer.logfile import write_waiting
from bessemer.run import RunFolder
from bessemer.terminal import QUIET, SILENT, keep_streams, printable, silence_libraries, working

if TYPE_CHECKING:
    from bessemer.recipe import Recipe
    from bessemer.train.loop import TrainSummary

POLL_SECONDS = 0.3
REPORT_SECONDS = 3.0  # for another process to report a failure, before a lost neighbour counts as a crash
REPORTS = "BESSEMER_WORKER"  # environment: the end is reported in a file alone
PREPARED = "BESSEMER_PREPARED"  # environment: the command has prepared the run and holds its lock


@dataclass(frozen=True)
class WorkerTask:
    """The work of a process.

    Attributes:
        open: returns the requested recipe and the run folder.
        prepare: makes the run ready to train, on rank 0; None where the command has done so and holds the lock.
        train: calls the training on rank 0 and shows its result.
        profile: profile a few steps.
    """

    open: Callable[[], tuple[Recipe, RunFolder]]
    prepare: Callable[[], None] | None
    train: Callable[[Callable[[], TrainSummary]], object]
    profile: bool = False


def main() -> None:
    """Run `bessemer train` with the arguments of this process."""
    os.environ[REPORTS] = "1"
    sys.argv[1:1] = ["train"]
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)


def run_worker(task: WorkerTask) -> NoReturn:
    """Train, report, and exit without Python's teardown, which a thread inside a collective would block."""
    keep_streams()
    faulthandler.enable()
    code = Worker(task).work()
    write_waiting()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Worker:
    """This process."""

    def __init__(self, task: WorkerTask) -> None:
        self.task = task
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        self.reports = REPORTS in os.environ
        self.run: RunFolder | None = None
        self.has_begun = False  # the folder of reports is this start's

    def work(self) -> int:
        """Train. Returns the exit code."""
        from bessemer.launch.rendezvous import CommonError

        if self.rank:
            os.environ[QUIET] = SILENT
        silence_libraries()
        # Until the loop handles them. SIGTERM ends it: torchrun sends it also where it gives a group up.
        interrupt.handle(interrupt.stop)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._stop_when_blocked()
        if self.reports:
            interrupt.end_with_parent(signal.SIGKILL)  # torchrun, without which nobody would restart or stop it
        try:
            with working("train"):
                self._train()
            return 0
        except CommonError as error:
            return self._failed(error.error, is_common=True)
        except BessemerError as error:
            return self._failed(error)
        except KeyboardInterrupt:
            return self._stopped_early()
        except FileNotFoundError as error:
            message = f"rank {self.rank}: {error.filename}: not there; is the run folder shared?"
            return self._failed(BessemerError(message))
        except BaseException as error:  # lost neighbours, memory or devices: worth a restart
            return self._crashed(error)

    def _train(self) -> None:
        import torch.distributed as dist

        from bessemer.guard.heartbeat import Heartbeat
        from bessemer.launch import rendezvous
        from bessemer.parallel.mesh import join, leave
        from bessemer.recipe import load
        from bessemer.run import read_json
        from bessemer.train import device as devices
        from bessemer.train.loop import train_here

        group = rendezvous.join()
        with contextlib.ExitStack() as lock:
            layout = rendezvous.agree(group, lambda: self._open(lock), self.task.prepare)
            run = self.run
            assert run is not None
            self.has_begun = True
            is_spare = self.rank >= layout.world
            self._exit_when_reported(is_spare)
            if is_spare:
                _wait_as_spare()
            recipe = load(run.recipe)
            recipe = recipe.model_copy(update={"parallel": layout})
            device = devices.choose(recipe.train, local_rank=self.local_rank)
            files = reports.folder(run) / f"rank-{self.rank}"

            def train() -> TrainSummary:
                with Heartbeat(
                    files.with_suffix(".json"), self.rank, files.with_suffix(".stacks"), recipe.guard.hang_seconds
                ) as heartbeat:
                    mesh = join(layout, device.torch_device, store=dist.PrefixStore("group", group.store))
                    summary = train_here(
                        recipe, run, read_json(run.plan), self.task.profile, device, mesh, heartbeat,
                        started=time.perf_counter() - process_age(),
                    )  # fmt: skip
                    mesh.barrier()
                leave()
                if self.rank == 0:
                    reports.report(run, "done", summary=asdict(summary))
                return summary

            if self.rank == 0:
                self.task.train(train)
            else:
                train()

    def _open(self, lock: contextlib.ExitStack) -> tuple[Recipe, RunFolder]:
        """Return the requested recipe and the run; on rank 0, with its lock and a folder for reports."""
        from bessemer.launch import losses

        recipe, self.run = self.task.open()
        if self.rank == 0:
            if self.task.prepare is not None:
                lock.enter_context(self.run.writing())
            losses.begin(self.run)
            self.has_begun = True
        return recipe, self.run

    def _failed(self, error: BessemerError, is_common: bool = False, early: bool = False) -> int:
        """Report an end that is not worth a restart. Returns the exit code.

        is_common: all processes have received the error; early: stopped outside of the loop, where the others do not learn of it.
        """
        speaks, status = self.rank == 0 or not is_common, reports.status_of(error)
        if self.has_begun and self.run is not None:
            speaks = reports.report(self.run, status, message=str(error), early=early)
            if self.reports:
                return 0
        if speaks:
            print(f"bessemer: {printable(str(error))}", file=sys.stderr)
        if not self.reports:
            return error.exit_code
        return 0 if is_common else 1

    def _stopped_early(self) -> int:
        """Report a stop outside of the loop, where nothing has to be saved."""
        then = "the same command continues" if self.run is None else reports.goes_on(self.run)
        return self._failed(Stopped(f"stopped; {then}"), early=True)

    def _crashed(self, error: BaseException) -> int:
        """Note an unexpected failure, or the consequence of another process's end. Returns the exit code."""
        if self.has_begun and self.run is not None:
            deadline = time.monotonic() + REPORT_SECONDS
            while time.monotonic() < deadline:
                if (report := reports.reported(self.run)) is not None:
                    return self._follow(report)
                time.sleep(POLL_SECONDS)
            reports.note_crash(self.run, self.rank, error)
            if self.reports:
                return 1
        message = f"rank {self.rank}: {type(error).__name__}: {reports.first_line(error)}"
        print(f"bessemer: {printable(message)}", file=sys.stderr)
        return 1

    def _follow(self, report: dict[str, Any]) -> int:
        """Return the exit code for the end that another process has reported."""
        is_done = report["status"] == "done" or self.reports
        return 0 if is_done else reports.FAILURES[report["status"]].exit_code

    def _exit_when_reported(self, is_spare: bool) -> None:
        """Exit once a process has reported a failure, since the others would wait for it in a collective; a spare process
        exits at any end."""
        run = self.run
        assert run is not None

        def watch() -> None:
            while True:
                time.sleep(POLL_SECONDS)
                report = reports.reported(run)
                if report is None:
                    continue
                if is_spare or report.get("early") or report["status"] not in ("done", "stopped"):
                    os._exit(self._follow(report))

        threading.Thread(target=watch, name="outcome", daemon=True).start()

    def _stop_when_blocked(self) -> None:
        """Handle a stop in a thread while the main thread waits in C++ for neighbours, which may have stopped already."""
        readable, writable = os.pipe()
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)

        def listen() -> None:
            while True:
                received = set(os.read(readable, 64)) & {*interrupt.SIGNALS}
                if received:
                    time.sleep(POLL_SECONDS)
                    # Else the loop handles it, or a spare ignores it.
                    if any(signal.getsignal(number) is interrupt.stop for number in received):
                        os._exit(self._stopped_early())

        threading.Thread(target=listen, name="stop", daemon=True).start()


def _wait_as_spare() -> NoReturn:
    """Wait until a lost process makes torchrun restart all: more processes were started than the layout uses."""
    interrupt.handle(lambda *_: None)  # the others stop, and report it
    while True:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
