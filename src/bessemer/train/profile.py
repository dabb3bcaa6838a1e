"""Profiling of a few training steps with torch's profiler: its table of operators, and a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from bessemer.run.files import write_atomic
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device

FIRST, COUNT = 10, 3  # the preferred first step of the window, after warm-up, and its number of steps
ROWS = 25  # the table lists this number of operators, those that take longest
TABLE, TRACE = "operators.txt", "trace.json.gz"


@dataclass(frozen=True)
class StepProfiler:
    """A wrapper around the batches that profiles COUNT steps: from step FIRST on, or the last ones of a short session.

    Attributes:
        device: The device of the steps.
        num_steps: The number of steps that this session trains.
        folder: The folder for the table and the trace.
    """

    device: Device
    num_steps: int
    folder: Path

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.is_cuda else [])]
        skipped = max(min(FIRST - 2, self.num_steps - COUNT - 1), 0)
        warmup = min(1, self.num_steps - 1)
        window = schedule(skip_first=skipped, wait=0, warmup=warmup, active=COUNT, repeat=1)
        with profile(activities=activities, schedule=window, on_trace_ready=self._write) as profiler:
            for batch in batches:
                yield batch
                profiler.step()

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.folder / TRACE))
        order = "self_device_time_total" if self.device.is_cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        write_atomic(self.folder / TABLE, table.encode())
