"""The watchdog of a node: it ends processes that hang, so that the agent starts the group again.

It runs in the command's process, which does nothing else, and so sees also a process that holds the interpreter or was stopped. A
collective that waits for such a process would otherwise time out after ten minutes, without saying for whom it waited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

from bessemer.guard import heartbeat
from bessemer.guard.incidents import HANG, LOST, IncidentKind, record
from bessemer.launch import status
from bessemer.run import RunFolder
from bessemer.terminal import warn

LOOK_SECONDS = 1.0
AGENT_SECONDS = 120.0  # for the agent to end the rest of a group, before they are judged again
STACK_SECONDS = 1.0  # for the processes to write their stacks
STOPPED_LOOKS = 10  # at which the agent was found stopped, before it is continued
STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "blocked in the system, as by a disk or a device",
}


class Watchdog:
    """Looks at the heartbeats of the processes of a node, and at its agent."""

    def __init__(self, place: Path, run: RunFolder | None, agent: int) -> None:
        """place: the node's folder; run: where incidents and stacks go; agent: its pid."""
        self._place, self._run, self._agent, self._times_stopped = place, run, agent, 0
        self._looked, self._suspects = 0.0, set[int]()
        self._ended, self._ended_at = set[int](), 0.0  # the group of which processes were ended last
        self._num_notes = 0  # of the agent, that were reported
        self._hung: set[int] = set()  # ranks that were ended for it, until the agent has noted their loss

    def look(self) -> None:
        """End the processes that hang, if they did so at the last look too; continue an agent that was stopped."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._continue_agent()
        self.note_losses()
        running = set(status.pids(self._place))
        found = map(heartbeat.read, sorted(self._place.glob("*.heartbeat")))
        readings = [one for one in found if one is not None and one.pid in running]
        if self._ended & running and time.monotonic() - self._ended_at < AGENT_SECONDS:
            return  # those who waited for the one that was ended: the agent is ending them too
        guilty = culprits(readings)
        pids = {one.pid for one in guilty}
        is_sure, self._suspects = bool(pids) and pids == self._suspects, pids
        if is_sure:
            self._hung = {one.rank for one in guilty}
            self._end(guilty, readings)
            self._ended, self._ended_at = {one.pid for one in readings}, time.monotonic()

    def _continue_agent(self) -> None:
        """A stopped agent sees neither the loss of a process nor the end of the training, and the command would wait for ever."""
        self._times_stopped = self._times_stopped + 1 if _state(self._agent) == "T" else 0
        if self._times_stopped < STOPPED_LOOKS:
            return
        self._times_stopped = 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._agent, signal.SIGCONT)
        cause = self._record_of_agent(HANG, "was stopped by a signal", "continued")
        warn(f"{cause}; continued")

    def note_losses(self) -> None:
        """Report and record what the agent noted since the last call, except for hung processes, reported before."""
        for rows in status.notes(self._place, self._num_notes):
            self._num_notes += 1
            for row in rows:
                if row.get("rank") in self._hung:
                    continue
                warn(f"{row['cause']}; {row['action']}")
                if self._run is None or "step" not in row:
                    continue
                if "rank" in row or status.claim(self._run, "node-lost"):  # which all other nodes see
                    record(self._run.incidents, LOST, **row)
            self._hung = set()

    def record_end_of_agent(self, signal_name: str) -> None:
        """Record that the node's agent was killed, which the command then shows as its error."""
        action = "stop; the same command goes on from the last checkpoint"
        self._record_of_agent(LOST, f"was ended by {signal_name}, and the processes with it", action)

    def _record_of_agent(self, kind: IncidentKind, what: str, action: str) -> str:
        """Record what happened to the agent of this node. Returns the cause."""
        host, step = socket.gethostname(), heartbeat.last_step(self._place)
        cause = f"the agent of {host} {what}"
        if self._run is not None:
            record(self._run.incidents, kind, step=step, cause=cause, action=action, host=host)
        return cause

    def _end(self, guilty: list[heartbeat.Reading], readings: list[heartbeat.Reading]) -> None:
        names, cause = ", ".join(f"rank {one.rank}" for one in guilty), "; ".join(map(_said, guilty))
        action = f"{names} ended; the group starts again from the newest checkpoint"
        kept = self._stacks(readings)
        warn(f"{cause}; {action}; stacks of all: {kept}")
        if self._run is not None:
            step, rank = min(one.step for one in guilty) + 1, guilty[0].rank
            record(self._run.incidents, HANG, step=step, cause=cause, rank=rank, action=action, stacks=str(kept))
        for one in guilty:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _stacks(self, readings: list[heartbeat.Reading]) -> Path:
        """Have all processes write their stacks, and collect them. A stopped one cannot."""
        for one in readings:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGUSR2)
        time.sleep(STACK_SECONDS)
        kept = (self._place if self._run is None else self._run.path) / "stacks.txt"
        with open(kept, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            for path in sorted(self._place.glob("*.stacks")):
                stacks = path.read_text(errors="replace") or "nothing: it did not answer"
                file.write(f"--- local rank {path.stem}\n{stacks}\n")
        return kept


def culprits(readings: list[heartbeat.Reading]) -> list[heartbeat.Reading]:
    """The processes that keep the others waiting: those that do not beat; else, where the processes make no progress, those
    that are behind the others, or all of them."""
    if silent := [one for one in readings if one.is_silent]:
        return silent
    places = [((one.step, heartbeat.PHASES.index(one.phase)), one) for one in readings if one.hangs]
    behind = min((place for place, _ in places), default=None)
    return [one for place, one in places if place == behind]


def _said(one: heartbeat.Reading) -> str:
    state = _state(one.pid)
    if one.is_silent:
        why = STATES.get(state, "it holds the interpreter")
        return f"rank {one.rank} has not answered for {one.silence:.0f} s in {one.activity}: {why}"
    return f"rank {one.rank} has made no progress for {one.waiting:.0f} s in {one.activity}"


def _state(pid: int) -> str:
    """The kernel's letter for a process's state; empty where it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
