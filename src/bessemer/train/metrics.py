"""The metrics of a training: metrics.jsonl, TensorBoard event files, and the speed of its steps."""

from __future__ import annotations

import math
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any, Self

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from bessemer.common.log_file import append_entry, close_logs, json_line
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, read_steps, write_atomic
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device
from bessemer.train.trackers import Tracker

EVENT_FILE_VERSION = "brain.Event:2"  # the first record of every event file


class MetricsLog:
    """The log of a run's metrics: metrics.jsonl, trackers and, with report.tensorboard, an event file. Only rank 0 writes.

    A resumed run removes the lines after its checkpoint, so that every step is logged once. The lines that a rollback undid are
    moved to forks.jsonl.
    """

    def __init__(
        self, run: RunDirectory, rows: Sequence[dict[str, Any]], resumed_at: int, tensorboard: bool, rollbacks: int = 0, *,
        writes: bool = True, trackers: Sequence[Tracker] = (),
    ) -> None:  # fmt: skip
        """Open the log at the step where the training starts.

        Args:
            run: The run directory.
            rows: The current rows of metrics.jsonl.
            resumed_at: The step of the checkpoint; 0 for a fresh start.
            tensorboard: Write an event file too.
            rollbacks: The number of rollbacks so far, the last of which may not be logged yet.
            writes: True on rank 0.
            trackers: Experiment trackers to report to.
        """
        self._trackers = trackers
        self._run, self._writes = run, writes
        self._events: EventFile | None = None
        self._before = {(row.get("kind"), row.get("step")) for row in rows}
        if not writes:
            return
        if rollbacks and not any(row.get("number") == rollbacks for row in rows):
            self._set_fork_aside(rows, rollbacks, resumed_at)
        _rewind(run.metrics, rows, resumed_at)
        if tensorboard:
            self._events = EventFile(run.tensorboard, resumed_at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        close_logs()
        for tracker in self._trackers:
            tracker.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Write one line. Values that are not finite become null, since JSON has no NaN."""
        if not self._writes:
            return
        now = datetime.now(UTC)
        row = {"kind": kind, "step": step, **_finite(values), "time": now.isoformat(timespec="milliseconds")}
        append_entry(self._run.metrics, json_line(row))
        scalars = dict(_scalars(kind, {key: value for key, value in values.items() if key != "content"}))
        if self._events is not None:
            self._events.write(step, scalars, now.timestamp())
        for tracker in self._trackers:
            tracker.log(step, scalars)

    def lacks(self, kind: str, step: int) -> bool:
        """Return True on rank 0 if this kind of line was not logged for this step before the training started."""
        return self._writes and (kind, step) not in self._before

    def roll_back(self, number: int, step: int) -> None:
        """Move the lines after `step` to forks.jsonl, as fork `number` (from 1)."""
        if not self._writes:
            return
        rows = read_steps(self._run.metrics)
        self._set_fork_aside(rows, number, step)
        _rewind(self._run.metrics, rows, step)
        if self._events is not None:
            self._events.restart(step)

    def _set_fork_aside(self, rows: Sequence[dict[str, Any]], number: int, step: int) -> None:
        undone = [row for row in rows if row.get("step", 0) > step]
        is_there = any(row.get("fork") == number for row in read_json_lines(self._run.forks))
        if undone and not is_there:
            append_entry(self._run.forks, b"".join(json_line({"fork": number, **row}) for row in undone))


def _rewind(path: Path, rows: Sequence[dict[str, Any]], step: int) -> None:
    """Rewrite metrics.jsonl with the rows up to `step`, which also removes a torn last line.

    For step 0, all lines are removed, since a fresh start validates at step 0 again.
    """
    rest = b"".join(json_line(row) for row in rows if step and row.get("step", 0) <= step)
    if path.exists() and path.read_bytes() != rest:
        write_atomic(path, rest)


def _scalars(name: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for TensorBoard; tags are name/key, or name/key/key for a nested table."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _scalars(f"{name}/{key}", value)
        elif isinstance(value, int | float):
            yield f"{name}/{key}", float(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class EventFile:
    """A new TensorBoard event file, to which events are appended directly.

    torch's SummaryWriter passes events to a thread, which dies with a traceback when the disk is full and ends the training.
    After `resumed_at`, TensorBoard drops the events of later steps in older files.
    """

    def __init__(self, folder: Path, resumed_at: int) -> None:
        name = f"events.out.tfevents.{time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self._path = folder / name
        self._append(Event(wall_time=time(), file_version=EVENT_FILE_VERSION))
        if resumed_at:
            self.restart(resumed_at)

    def restart(self, step: int) -> None:
        """Make TensorBoard drop the events after `step`."""
        self._append(Event(wall_time=time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, scalars: dict[str, float], seconds: float) -> None:
        """Write the scalars of a step, with the wall time in seconds since the epoch."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(wall_time=seconds, step=step, summary=Summary(value=values)))

    def _append(self, event: Event) -> None:
        append_entry(self._path, record(event.SerializeToString()))


def record(data: bytes) -> bytes:
    """Encode a TFRecord: the length, its masked CRC-32C, the data, its masked CRC-32C.

    TensorBoard's own writer is not used because it loads its plugins.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", len(data))
    return b"".join(part + struct.pack("<I", masked_crc32c(part)) for part in (length, data))


class Rates:
    """The mean speed of the steps since the last call of `mark`: seconds per step, waiting for data, tokens/s, MFU and HFU.

    A CPU's peak FLOP/s is measured, and is too low if other programs used the cores then. If steps exceed that peak, their
    FLOP/s become the new peak.
    """

    def __init__(self, model_flops: float, hardware_flops: float, peak: float, device: Device) -> None:
        """Start to measure.

        Args:
            model_flops: The model FLOPs per token.
            hardware_flops: The FLOPs per token including recomputation.
            peak: The peak FLOP/s of all processes together.
            device: The device.
        """
        self.model_flops, self.hardware_flops, self.peak = model_flops, hardware_flops, peak
        self.device, self.num_steps, self._waits, self._mark = device, 0, 0.0, perf_counter()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, and time the wait for each."""
        self._mark = started = perf_counter()
        for batch in batches:
            self._waits += perf_counter() - started
            self.num_steps += 1
            yield batch
            started = perf_counter()

    def mark(self) -> None:
        """Forget the steps so far, so that the rates are those of the next steps."""
        self._mark, self.num_steps, self._waits = perf_counter(), 0, 0.0

    @property
    def seconds(self) -> float:
        """The mean seconds of a step since the mark."""
        return (perf_counter() - self._mark) / max(self.num_steps, 1)

    @property
    def data_wait(self) -> float:
        """The mean seconds for which a step waited for data since the mark."""
        return self._waits / max(self.num_steps, 1)

    def now(self, batch_tokens: int) -> dict[str, float]:
        """Return the mean rates since the mark of steps with `batch_tokens` tokens each, by their names in metrics.jsonl.

        They are step_seconds (including the wait for data), tokens_per_second, mfu, hfu and data_wait (seconds per step).
        """
        seconds = self.seconds
        per_second = batch_tokens / seconds
        if not self.device.is_cuda:
            self.peak = max(self.peak, self.hardware_flops * per_second)
        return {
            "step_seconds": seconds,
            "tokens_per_second": per_second,
            "mfu": self.model_flops * per_second / self.peak,
            "hfu": self.hardware_flops * per_second / self.peak,
            "data_wait": self.data_wait,
        }
