"""One process of a training on several processes: it joins the others, trains, and reports how it ended.

`python -m bessemer.launch.worker RECIPE [--set KEY=VALUE]...`, started by torchrun, runs `bessemer train RECIPE` in one
process. If a restart would fail in the same way, it reports the error in a file and exits with 0 (launch/outcome.py). Under
another launcher, whose environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, `bessemer train RECIPE` does
the same with the usual exit codes.
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
from typing import TYPE_CHECKING, NoReturn

from bessemer.common import interrupt
from bessemer.common.console import QUIET, SILENT, printable
from bessemer.common.errors import BessemerError, Stopped, first_line
from bessemer.common.log_file import close_logs
from bessemer.launch import outcome, status_files
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory

if TYPE_CHECKING:
    from bessemer.train.loop import TrainSummary
    from bessemer.train.setup import Observer

POLL_SECONDS = 0.3
REPORT_SECONDS = 3.0  # time for another process to report an error, before a lost neighbour counts as a crash
REPORTS = "BESSEMER_WORKER"  # environment variable: errors are reported only in a file
PREPARED = "BESSEMER_PREPARED"  # environment variable: the command has prepared the run and holds its lock


def main() -> None:
    """Run `bessemer train` with the arguments of this process."""
    os.environ[REPORTS] = "1"
    sys.argv[1:1] = ["train"]
    runpy.run_module("bessemer", run_name="__main__", alter_sys=True)


@dataclass
class Worker:
    """One process of the training.

    Attributes:
        open_run: Function that returns the requested recipe and the run directory.
        prepare: Function that prepares the run for training on rank 0. None if the command that started the processes has
            done so and holds the run's lock.
        show: Function that is called with the training on rank 0, calls it and prints its result; None to train silently.
        profile: True to train only a few steps under the profiler.
        observe: Function that wraps the iterator of batches; None to leave it as it is.
    """

    open_run: Callable[[], tuple[Recipe, RunDirectory]]
    prepare: Callable[[], object] | None = None
    show: Callable[[Callable[[], TrainSummary]], object] | None = None
    profile: bool = False
    observe: Observer | None = None

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.rank, self.local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
        self.reports = REPORTS in os.environ
        if PREPARED in os.environ:  # the command that prepared the run also shows the result
            self.prepare = self.show = None
        self.run: RunDirectory | None = None  # set once the folder for the reports of this start exists
        self.is_waiting = False  # True while this process waits for the report of another one

    def work(self) -> NoReturn:
        """Train, report, and exit without Python's teardown, which a thread inside a collective would block."""
        if self.rank:
            os.environ[QUIET] = SILENT
        # SIGTERM must end the process before the loop handles signals: torchrun also sends it to give up a group.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Without the launcher, nothing would restart or stop this process.
        interrupt.end_with_parent(signal.SIGKILL)
        code = 0
        try:
            self._train()
        except BessemerError as error:
            code = self._report_error(error)
        except KeyboardInterrupt:  # raised outside of the loop: nothing has to be saved, and the others do not notice
            code = self._report_error(Stopped("stopped; run the same command again to continue"), early=True)
        except BaseException as error:  # lost neighbours, memory or devices, which a restart may fix
            code = self._report_crash(error)
        close_logs()
        sys.stdout.flush()
        os._exit(code)

    def _train(self) -> None:
        import torch.distributed as dist

        from bessemer.distributed.mesh import SINGLE_PROCESS, join, leave
        from bessemer.evaluate.task_scorer import task_scorer
        from bessemer.guard.heartbeat import Heartbeat
        from bessemer.launch import rendezvous
        from bessemer.train import device as devices
        from bessemer.train.loop import train_process
        from bessemer.train.recompute import blocks_recomputed
        from bessemer.train.run_spec import RunSpec

        with contextlib.ExitStack() as lock:
            store, run, layout = rendezvous.prepare_run(lambda: self._open(lock), self.prepare)
            self.run = run
            threading.Thread(target=self._exit_when_reported, args=[run], name="outcome", daemon=True).start()
            if self.rank >= layout.world:  # a spare process waits until the others stop, or torchrun restarts all
                interrupt.handle(lambda *_: None)
                self.is_waiting = True
                threading.Event().wait()
            spec = RunSpec.read(run)
            device = devices.choose(spec.recipe.train, local_rank=self.local_rank)
            beat, stacks = (run.status / f"rank-{self.rank}.{suffix}" for suffix in ("json", "stacks"))

            def train() -> TrainSummary:
                nonlocal spec
                with Heartbeat(beat, self.rank, stacks, spec.recipe.guard.hang_seconds) as heartbeat:
                    mesh = SINGLE_PROCESS  # one process computes the same losses however it was started
                    if layout.world > 1:
                        mesh = join(layout, device.torch_device, store=dist.PrefixStore("group", store))
                    if layout != spec.recipe.parallel:  # with fewer processes than planned, each holds more
                        blocks = blocks_recomputed(spec.recipe.train, layout, spec.config, device)
                        spec = spec.with_layout(layout, max(mesh.gather(blocks)))
                    summary = train_process(
                        spec, run, device, mesh, heartbeat, self.profile, self.observe, task_scorer(spec.recipe.evaluate),
                        started=self.started,
                    )  # fmt: skip
                    mesh.barrier()
                leave()
                if self.rank == 0:
                    status_files.write_report(run, 0, summary=asdict(summary))
                return summary

            if self.show is None or self.rank:
                train()
            else:
                self.show(train)

    def _open(self, lock: contextlib.ExitStack) -> tuple[Recipe, RunDirectory]:
        """Return the requested recipe and the run. Rank 0 also takes its lock and creates the folder for reports."""
        recipe, run = self.open_run()
        if self.rank == 0:
            if self.prepare is not None:
                lock.enter_context(run.lock())
            outcome.record_lost_ranks(run)
            self.run = run
        return recipe, run

    def _report_error(self, error: BessemerError, early: bool = False) -> int:
        """Report an error that a restart would not fix, and return the exit code.

        `early` is True for an error before the training began, at which all other processes exit too.
        """
        speaks = self.rank == 0  # an error before the run is opened is raised on all processes
        if self.run is not None:
            speaks = status_files.write_report(self.run, error.exit_code, message=str(error), early=early)
        if speaks and not (self.run and self.reports):  # otherwise launch/outcome.py prints the message
            print(f"bessemer: {printable(str(error))}", file=sys.stderr)
        return 0 if self.reports else error.exit_code

    def _report_crash(self, error: BaseException) -> int:
        """Write an unexpected error of this process to the run's files, and return exit code 1.

        The error may be the consequence of another process's end.
        """
        if self.run is not None:
            status_files.write_crash(self.run, self.rank, error)  # before torchrun ends this process
            self.is_waiting = True
            time.sleep(REPORT_SECONDS)
        if self.run is None or not self.reports:
            what = printable(f"{type(error).__name__}: {first_line(error)}")
            print(f"bessemer: rank {self.rank}: {what}", file=sys.stderr)
        return 1

    def _exit_when_reported(self, run: RunDirectory) -> None:
        """Exit once another process has reported a failure; this one would otherwise wait for it in a collective.

        After a stop, each process saves and exits by itself. A process that waits exits on any report.
        """
        while True:
            time.sleep(POLL_SECONDS)
            report = status_files.read_report(run)
            if report and (self.is_waiting or report["code"] not in (0, Stopped.exit_code) or report.get("early")):
                os._exit(0 if self.reports else report["code"])


if __name__ == "__main__":
    main()
