"""Slurm executor: run the tasks of each step as a job array.

    WORK/slurm/QUEUE/    one submission, never reused; RUN/slurm/QUEUE on a shared disk where WORK is in a store
      array.sbatch, job  the script, and the id of its array
      tasks/3            the tasks of job 3, each a line of JSON
      begun/3            exists once the job has begun its tasks
      ended/3            exists once the job has ended: the error of a task, or null
      logs/3.out         its output

Results are the tasks' own folders with receipts, as with the other engines. Tasks that a job did not finish are
submitted again, in a new array, after this one has ended. A driver that is stopped cancels its array; the array of a
killed driver runs until the next driver cancels it. The commands
are sbatch(1), squeue(1) and scancel(1) of Slurm 22.05 to 24.11; no accounting is needed.

`python -m bessemer.run_tasks.slurm QUEUE` is a job of the array.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from bessemer.common import interrupt
from bessemer.common.console import counted, duration, say, warn
from bessemer.common.environment import sbatch_path
from bessemer.common.errors import BessemerError
from bessemer.recipe import Work
from bessemer.run.files import write_atomic
from bessemer.run_tasks.local import worker_environment
from bessemer.run_tasks.task import ATTEMPTS, DONE, Task, answer, raise_error, require_receipt, worker_error
from bessemer.storage.filesystem import AnyPath, StorePath

DEFAULT_JOBS = 64
JOBS_PER_WORKER, MAX_JOBS = 4, 1000  # short jobs, so that all workers end together; MaxArraySize is 1001 by default
READ_SECONDS = 2.0  # between two checks for finished jobs
ASK_SECONDS = 15.0  # between two calls of squeue
SILENT_SECONDS = 3600.0  # without an answer from squeue before the build gives up
# Time within which files of other machines become visible here; network file systems cache listings for up to a minute.
SEEN_SECONDS = 90.0
LOG_LINES = 5
NOT_STARTED = "give the nodes this folder and this Python under the same paths, and check corpus.slurm.setup"
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip


def end_earlier(shared: Path) -> None:
    """Cancel the job arrays that earlier, killed commands left in `shared`, and remove their queue folders."""
    for earlier in (shared.absolute() / "slurm").glob("*"):
        if job := _cancel(earlier):
            say(f"  cancelled array {job} of an earlier run")
        shutil.rmtree(earlier, ignore_errors=True)


def run_on_slurm(what: str, tasks: Sequence[Task], settings: Work, shared: Path) -> Iterator[Task]:
    """Run tasks of one work folder as a Slurm job array and yield each task when it is done.

    Raises the exception of a failed task, and BessemerError if an array is rejected or cancelled, if squeue does not answer,
    or if the job of a task dies repeatedly.

    Args:
        what: Name of the step.
        tasks: The tasks.
        settings: The engine settings.
        shared: A folder that all nodes can access; task files and logs are written below it.
    """
    root, left, deaths = shared.absolute() / "slurm", list(tasks), Counter[AnyPath]()
    while left:
        array = JobArray(root / secrets.token_hex(4), tasks[0].stage)
        try:
            array.submit(what, left, settings)
            yield from array.wait()
        finally:
            # Jobs whose tasks are done end by themselves, and a cancelled job looks failed.
            if array.left or not array.job:
                _cancel(array.folder)
        if left := list(chain.from_iterable(array.left.values())):
            # A job that Slurm counts as failed may still end now, and its results are there then.
            for job in array.jobs_in("ended") & array.left.keys():
                require_receipt(array.left[job][0], array.left[job][0].receipt())
            reason, begun = array.reason_of_end(), array.jobs_in("begun")
            remedy = f"raise corpus.slurm.{'time' if 'TIMEOUT' in reason else 'memory'}" if begun else NOT_STARTED
            for job in (begun or {*array.left}) & array.left.keys():
                task = array.left[job][0]  # it was running when the job ended, or would have been
                deaths[task.folder] += 1
                if deaths[task.folder] == ATTEMPTS or ("FAILED" in reason and not begun):
                    raise worker_error(task, f"{reason}{array.end_of_log()}", remedy)
            warn(f"corpus.slurm: array {array.job} ended ({reason}); resubmitting {counted(len(left), 'task')}")
        shutil.rmtree(array.folder, ignore_errors=True)


class JobArray:
    """A job array submitted to Slurm, which runs some tasks.

    Attributes:
        folder: Folder of its task files, logs and results.
        stage: The stage, which errors name.
        job: Slurm's id of the array; empty until it is submitted.
        left: Unfinished tasks, by index of the job in the array.
        states: Last known Slurm state of each job, kept because Slurm forgets jobs some time after their end.
    """

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage, self.job = folder, stage, ""
        self.left: dict[str, list[Task]] = {}
        self.states: dict[str, str] = {}

    def submit(self, what: str, tasks: Sequence[Task], settings: Work) -> None:
        """Write the tasks and the batch script, and submit the array. `what` names the step. Raises BessemerError if rejected."""
        for name in ("tasks", "begun", "ended", "logs"):
            (self.folder / name).mkdir(parents=True)
        at_once = min(settings.workers or DEFAULT_JOBS, len(tasks))
        num_jobs = min(at_once * JOBS_PER_WORKER, len(tasks), max(MAX_JOBS, at_once))
        for job in range(num_jobs):
            some = self.left[str(job)] = list(tasks[job::num_jobs])
            (self.folder / "tasks" / str(job)).write_text("".join(f"{task.to_json()}\n" for task in some))
        script = self.folder / "array.sbatch"
        script.write_text(batch_script(what, self.folder, num_jobs, at_once, settings))
        ran = _run_command("sbatch", "--parsable", str(script))
        if ran is None or ran.returncode:
            reason = (ran.stderr or ran.stdout).strip().replace("\n", "; ") if ran else "it does not answer"
            problem = f"corpus.slurm: sbatch rejected the array of {counted(num_jobs, 'job')}: {reason}"
            raise BessemerError(f"{problem}; change [corpus.slurm], or corpus.workers for a smaller array")
        self.job = ran.stdout.strip().split(";")[0]  # JOB, or JOB;CLUSTER
        write_atomic(self.folder / "job", self.job)
        say(f"  submitted array {self.job} of {counted(num_jobs, 'job')} for {counted(len(tasks), 'task')}")

    def wait(self) -> Iterator[Task]:
        """Yield tasks as they are done, until all are done or the array has ended."""
        since = heard = time.monotonic()
        reason, end = "", float("inf")  # end of the wait for late results
        while self.left and time.monotonic() < end:
            interrupt.check()
            yield from self._collect()
            if self.left and end == float("inf") and time.monotonic() - since >= ASK_SECONDS:
                since = time.monotonic()
                jobs = ask_slurm(self.job)
                heard = since if jobs is not None else heard
                if since - heard > SILENT_SECONDS:
                    raise BessemerError(f"{self.stage}: no answer of squeue in {duration(SILENT_SECONDS)}; check Slurm")
                self.states.update({job: state for job, (state, _) in (jobs or {}).items()})
                waiting = [why for state, why in (jobs or {}).values() if state == "PENDING"]
                if waiting and waiting[0] != reason and not self.jobs_in("begun"):
                    reason = waiting[0]
                    say(f"  array {self.job} waits in the queue: {counted(len(waiting), 'job')} ({reason})")
                if jobs is not None and all(state in ENDED for state, _ in jobs.values()):
                    is_late = any(self.states.get(job, "COMPLETED") == "COMPLETED" for job in self.left)
                    end = since + SEEN_SECONDS * is_late
            elif self.left:
                time.sleep(READ_SECONDS)
        for job in list(self.left):  # jobs that ended early may have finished some tasks
            yield from self._take_finished(job)

    def _collect(self) -> Iterator[Task]:
        """Yield the tasks of jobs that have ended. Raises the exception of a task that failed."""
        for job in self.left.keys() & self.jobs_in("ended"):
            path = self.folder / "ended" / job
            try:
                raise_error(path.read_bytes())
            except ValueError:
                raise BessemerError(f"{path}: damaged; rerun the command to start the tasks again") from None
            yield from self._take_finished(job)

    def _take_finished(self, job: str) -> Iterator[Task]:
        """Yield the tasks of the job with index `job` that are finished (have a receipt), and remove them from `left`."""
        for task in self.left.pop(job):
            if task.receipt() is not None:
                yield task
                continue
            self.left.setdefault(job, []).append(task)
            if not isinstance(task.folder, StorePath):
                with contextlib.suppress(OSError):  # makes a network file system refresh the listing
                    os.listdir(task.folder.parent)

    def jobs_in(self, folder: str) -> set[str]:
        """Return the indices of the jobs with a file in `folder`: "begun" or "ended"."""
        return {path.name for path in (self.folder / folder).iterdir()}

    def reason_of_end(self) -> str:
        """Describe why the array ended: the numbers of jobs that did not complete, by state, as text.

        Raises BessemerError if the array was cancelled.
        """
        states = Counter(self.states.values())
        if "CANCELLED" in states:
            raise BessemerError(f"{self.stage}: array {self.job} was cancelled; rerun the command to resume")
        bad = [f"{counted(number, 'job')} {state}" for state, number in states.items() if state != "COMPLETED"]
        return ", ".join(bad) or "Slurm names no reason"

    def end_of_log(self) -> str:
        """Return text with the path and last lines of the newest job log that is not empty; "" if there is none."""
        for path in sorted((self.folder / "logs").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True):
            if lines := path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]:
                return f"; the end of {path}: {' | '.join(lines)}"
        return ""


def batch_script(what: str, folder: Path, num_jobs: int, at_once: int, settings: Work) -> str:
    """Return the batch script of a job array `what` with `num_jobs` jobs, `at_once` of them running at a time.

    `folder` has the tasks of each job.
    """
    options = settings.slurm
    flags = {
        "job-name": re.sub(r"\W+", "-", f"bessemer {what}"),
        "array": f"0-{num_jobs - 1}%{at_once}",
        "ntasks": 1,
        "cpus-per-task": 1,
        "mem": options.memory.removesuffix("i"),  # Slurm's G are GiB
        "time": options.time,
        "output": sbatch_path(folder / "logs", "%a.out"),
    }
    environment = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **worker_environment()}
    path = shlex.quote(environment.pop("PYTHONPATH"))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in flags.items()),
        *(f"#SBATCH {option}" for option in (*options.sbatch, "--requeue")),
        "set -eo pipefail",  # a set-up that fails ends the job in Slurm's state FAILED
        *options.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        f'export PYTHONPATH={path}"${{PYTHONPATH:+:$PYTHONPATH}}"',  # keeps additions of the set-up
        f"exec {shlex.quote(sys.executable)} -m bessemer.run_tasks.slurm {shlex.quote(str(folder))}",
    ]
    return "\n".join(lines) + "\n"


def ask_slurm(job: str) -> dict[str, tuple[str, str]] | None:
    """Return a dict from job index to (state, reason) for the job array with id `job`; None if squeue does not answer.

    Slurm lists jobs until five minutes after their end (MinJobAge).
    """
    ran = _run_command("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%K|%T|%r")
    if ran is None or (ran.returncode and "nvalid job id" not in ran.stderr):
        return None
    rows = (line.strip().split("|") for line in ran.stdout.splitlines() if "|" in line)
    return {number: (state, reason) for number, state, reason in rows}


def _cancel(folder: Path) -> str:
    """Cancel the job array whose queue is in `folder` and return its id; "" if there is none or Slurm does not answer."""
    with contextlib.suppress(FileNotFoundError):
        job = (folder / "job").read_text()
        return job if _run_command("scancel", job) else ""
    return ""


def _run_command(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a Slurm command; None if it is not installed or does not end within a minute."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None


# --- A job of the array


def main(folder: Path, job: str) -> None:
    """Run the tasks of the job with index `job`; do nothing if its files were removed because the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(FileNotFoundError):
        (folder / "begun" / job).touch()
        answered, tasks = DONE, folder / "tasks" / job
        for line in tasks.read_bytes().splitlines():
            if (answered := answer(line, tasks)) != DONE:
                break
        write_atomic(folder / "ended" / job, answered)


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["SLURM_ARRAY_TASK_ID"])
