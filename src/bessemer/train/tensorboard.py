"""TensorBoard event files, written by the training itself.

torch's SummaryWriter hands events to a thread of its own, which dies with a traceback when the disk is full and takes the
training with it. An event file is a sequence of records, so it is appended to like the other logs of a run.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from bessemer.logfile import LogFile

VERSION = "brain.Event:2"  # the first record of every event file


class EventFile:
    """A new event file in a folder. resumed_at: TensorBoard drops events of later steps that older files hold."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        self.file = LogFile(folder / name)
        events = [Event(wall_time=time.time(), file_version=VERSION)]
        if resumed_at:
            start = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time.time(), step=resumed_at + 1, session_log=start))
        self.file.append(_records(events))

    def write(self, step: int, scalars: dict[str, float], seconds: float) -> None:
        """Write the scalars of a step. seconds: wall time since the epoch."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self.file.append(_records([Event(wall_time=seconds, step=step, summary=Summary(value=values))]))


def _records(events: list[Event]) -> bytes:
    held = io.BytesIO()
    writer = RecordWriter(held)
    for event in events:
        writer.write(event.SerializeToString())
    return held.getvalue()
