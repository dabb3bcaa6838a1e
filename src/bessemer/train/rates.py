"""How fast steps run: seconds, tokens/s, MFU and HFU, the wait for data, and the bytes communicated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from bessemer.parallel import traffic
from bessemer.parallel.team import Team
from bessemer.run import read_json, write_json
from bessemer.terminal import rate, say
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device, matmul_rate


class Rates:
    """Seconds of each step and of its wait for data, and what its processes sent each other.

    A CPU's peak is measured, and too low where other programs used the cores at that moment. A step above it shows so: the peak
    is measured again, raised to at least the step's own rate, and recorded in plan.json.
    """

    def __init__(
        self, model_flops: float, hardware_flops: float, peak: float, device: Device, team: Team, plan: Path
    ) -> None:
        """model_flops: of a token; hardware_flops: with what recompute adds; peak: FLOP/s of all processes together."""
        self.model_flops, self.hardware_flops, self.peak = model_flops, hardware_flops, peak
        self.device, self.team, self.data_wait, self._plan = device, team, 0.0, plan
        self._mark, self._sent = perf_counter(), traffic.sent()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on, and notice how long each was waited for."""
        self._mark = asked = perf_counter()
        for batch in batches:
            self.data_wait, self._sent = perf_counter() - asked, traffic.sent()
            yield batch
            asked = self._mark = perf_counter()

    def communicated(self, compiled: bool) -> dict[str, dict[str, int]]:
        """Bytes that all processes together have sent in the step in hand, by kind; nothing where there is one process, or
        where they cannot be counted. Every process calls it."""
        if self.team.is_alone or not traffic.covers(self.team.layout, compiled):
            return {}
        return {"communicated_bytes": traffic.sent_by_all(self.team.sum, self._sent)}

    def now(self, batch_tokens: int) -> dict[str, float]:
        """Rates of the step in hand, of so many tokens: its wait for data included, what comes after it not."""
        seconds = perf_counter() - self._mark
        per_second = batch_tokens / seconds
        raised = not self.device.is_cuda and self.hardware_flops * per_second > self.peak
        if raised:
            self._raise_peak(self.hardware_flops * per_second)
        return {
            "step_seconds": seconds,
            "tokens_per_second": per_second,
            "mfu": self.model_flops * per_second / self.peak,
            "hfu": self.hardware_flops * per_second / self.peak,
            "data_wait": self.data_wait,
            **({"peak_flops": self.peak} if raised else {}),
        }

    def _raise_peak(self, reached: float) -> None:
        before = self.peak
        self.peak = max(reached, matmul_rate(self.device) if self.team.is_alone else 0.0)
        if not self.team.is_first:
            return
        say(
            f"  a step ran at {rate(reached)}, above the measured peak of {rate(before)}: MFU is of {rate(self.peak)} now"
        )
        if self._plan.exists():
            plan, share = read_json(self._plan), before / self.peak
            changed = {name: plan[name] * share for name in ("mfu", "hfu") if name in plan}
            write_json(self._plan, {**plan, **changed, "peak_flops": plan["peak_flops"] / share})
