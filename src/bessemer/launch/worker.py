"""One process of a training on several: it joins the others, trains, and reports how it ended.

`python -m bessemer.launch.worker RECIPE [--set KEY=VALUE]...`, started by torchrun, is `bessemer train RECIPE` as one process: an
end that a restart would meet again is reported in a file, and the exit code is 0 (launch/outcome.py). Under another launcher,
whose environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, `bessemer train RECIPE` does the same with
exit codes of its own.
"""

from __future__ import annotations

import contextlib
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
from bessemer.launch import losses, reports
from bessemer.logfile import write_waiting
from bessemer.run import RunFolder
from bessemer.terminal import QUIET, SILENT, printable

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
    if os.environ["RANK"] != "0":
        os.environ[QUIET] = SILENT
    sys.argv[1:1] = ["train"]
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)


def run_worker(task: WorkerTask) -> NoReturn:
    """Train, report, and exit without Python's teardown, which a thread inside a collective would block."""
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
        self.is_joining = False  # an error is raised on all processes
        self.run: RunFolder | None = None  # once its folder for reports is that of this start

    def work(self) -> int:
        """Train. Returns the exit code."""
        if self.rank:
            os.environ[QUIET] = SILENT
        # Until the loop handles them. SIGTERM ends it: torchrun sends it also where it gives a group up.
        interrupt.handle(interrupt.stop)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Without the launcher nobody would restart or stop this process.
        interrupt.end_with_parent(signal.SIGKILL)
        try:
            self._train()
            return 0
        except BessemerError as error:
            return self._failed(error)
        except KeyboardInterrupt:  # outside of the loop: nothing has to be saved, and the others do not learn of it
            then = "the same command continues" if self.run is None else reports.goes_on(self.run)
            return self._failed(Stopped(f"stopped; {then}"), early=True)
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

        store = rendezvous.join()
        with contextlib.ExitStack() as lock:
            self.is_joining = True
            run, layout = rendezvous.agree(lambda: self._open(lock), self.task.prepare)
            self.is_joining, self.run = False, run
            self._exit_when_reported(run, is_spare=self.rank >= layout.world)
            recipe = load(run.recipe)
            recipe = recipe.model_copy(update={"parallel": layout})
            device = devices.choose(recipe.train, local_rank=self.local_rank)
            files = reports.folder(run) / f"rank-{self.rank}"
            beating = Heartbeat(
                files.with_suffix(".json"), self.rank, files.with_suffix(".stacks"), recipe.guard.hang_seconds
            )

            def train() -> TrainSummary:
                with beating as heartbeat:
                    mesh = join(layout, device.torch_device, store=dist.PrefixStore("group", store))
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
        recipe, run = self.task.open()
        if self.rank == 0:
            if self.task.prepare is not None:
                lock.enter_context(run.writing())
            losses.begin(run)
            self.run = run
        return recipe, run

    def _failed(self, error: BessemerError, early: bool = False) -> int:
        """Report an end that is not worth a restart. Returns the exit code."""
        speaks = self.rank == 0 or not self.is_joining
        if self.run is not None:
            speaks = reports.report(self.run, reports.status_of(error), message=str(error), early=early)
        if speaks and not (self.reports and self.run is not None):
            print(f"bessemer: {printable(str(error))}", file=sys.stderr)
        return 0 if self.reports else error.exit_code

    def _crashed(self, error: BaseException) -> int:
        """Note an unexpected failure, or the consequence of another process's end. Returns the exit code."""
        deadline = time.monotonic() + REPORT_SECONDS
        if self.run is not None:
            reports.note_crash(self.run, self.rank, error)  # at once: torchrun may end this process
        while self.run is not None and time.monotonic() < deadline:
            if (report := reports.reported(self.run)) is not None:
                return self._follow(report)
            time.sleep(POLL_SECONDS)
        if self.run is None or not self.reports:
            message = f"rank {self.rank}: {type(error).__name__}: {reports.first_line(error)}"
            print(f"bessemer: {printable(message)}", file=sys.stderr)
        return 1

    def _follow(self, report: dict[str, Any]) -> int:
        """Return the exit code for the end that another process has reported."""
        is_done = report["status"] == "done" or self.reports
        return 0 if is_done else reports.FAILURES[report["status"]].exit_code

    def _exit_when_reported(self, run: RunFolder, is_spare: bool) -> None:
        """Exit once a process has reported a failure, since the others would wait for it in a collective.

        A spare process, one more than the layout uses, waits here until any end, or until a lost one has torchrun restart all.
        """

        def watch() -> None:
            while True:
                time.sleep(POLL_SECONDS)
                report = reports.reported(run)
                is_stop = report is not None and report["status"] in ("done", "stopped") and not report.get("early")
                if report is not None and (is_spare or not is_stop):
                    os._exit(self._follow(report))

        if is_spare:
            interrupt.handle(lambda *_: None)  # the others stop, and report it
            watch()
        threading.Thread(target=watch, name="outcome", daemon=True).start()


if __name__ == "__main__":
    main()
