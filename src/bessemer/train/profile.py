"""Where the time of a training step goes: a few steps under torch's profiler, as a trace and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bessemer.layout.flops import recomputed_flops_per_token
from bessemer.model.config import ModelConfig
from bessemer.recipe import Batches, Train
from bessemer.run import write_json
from bessemer.terminal import amount, rate
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device, synchronize

FIRST, COUNT = 10, 3  # preferred first step of the window, after warm-up, and its number of steps
DATA_WAIT = "wait for data"

# An enclosing event decides before the operator: the head's matmul belongs to the loss.
ENCLOSING = {
    "data wait": re.compile(DATA_WAIT),
    "optimizer": re.compile(r"Optimizer\.step|clip_grad|foreach_norm|fused_adam"),
    "loss": re.compile(r"CrossEntropy|NllLoss|nll_loss"),
}
OPERATORS = {
    "communication": re.compile(r"^c10d|^_c10d|nccl"),  # that the host waits for, or the device works on
    "attention": re.compile(r"attention|flash_(fwd|bwd)|fmha", re.IGNORECASE),
    "matmuls": re.compile(
        r"^aten::(_?addmm_?|mm|bmm|baddbmm|_scaled_mm|mkldnn_\w*linear|_weight_int\w*)$|^mkldnn::_linear|gemm|cutlass"
    ),
    "norms and elementwise": re.compile(
        r"^aten::(add|sub|mul|div|neg|exp|silu|gelu|sigmoid|tanh|pow|mean|sum|rsqrt|sqrt|clamp|where|copy|cat|fill|zero|"
        r"native_layer_norm|_fused_rms_norm|rms_norm|cos|sin|abs|amax|norm|_foreach|embedding|index|scatter|gather)|^triton_"
    ),
}
CATEGORIES = (
    "matmuls", "attention", "loss", "norms and elementwise", "optimizer", "data wait", "communication", "other",
)  # fmt: skip
HOST_COLLECTIVE = re.compile(r"^gloo:")  # torch's name for a gloo collective in its thread
DEVICE_COLLECTIVE = re.compile(r"nccl", re.IGNORECASE)
# Host events that wait for a collective, or only enclose other events.
NO_COMPUTE = re.compile(r"^c10d|^_c10d|^FSDP::|wait|record_param_comms|^gloo:|^nccl:")

IsPlain = Callable[[int], bool]
Span = tuple[float, float]  # begin and end, microseconds


def plain_steps(steps: int, intervals: tuple[int, ...]) -> IsPlain:
    """Predicate of steps (1-based) after which nothing else happens. intervals: of validations, checkpoints and watching; the
    run's last step ends with all of them."""
    return lambda number: number < steps and all(number % every for every in intervals if every)


def window(start: int, steps: int, is_plain: IsPlain) -> range:
    """The steps after `start` to profile: COUNT plain ones from FIRST on, else the nearest such, else fewer."""
    for num_steps in range(COUNT, 0, -1):
        firsts = range(start + 1, min(steps, start + 1000) - num_steps + 2)
        possible = [first for first in firsts if all(map(is_plain, range(first, first + num_steps)))]
        if possible:
            first = min(possible, key=lambda first: abs(first - start - FIRST))
            return range(first, first + num_steps)
    return range(start + 1, start + 2)


@dataclass(frozen=True)
class Communication:
    """Of one step, in seconds. total: with at least one collective running, waits for other ranks included; exposed: the part
    not overlapped with compute on this process."""

    total: float
    exposed: float


@dataclass
class StepProfiler:
    """Passes batches to the loop and profiles the steps of `window` meanwhile. start: steps done before.

    trace: the file that the trace is written to; seconds: of a profiled step by category, once it is over; profiled, plain:
    seconds of profiled steps, and of others that are plain.
    """

    device: Device
    start: int
    window: range
    is_plain: IsPlain
    trace: Path
    seconds: dict[str, float] = field(default_factory=dict)
    communication: Communication | None = None
    profiled: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.is_cuda else [])]
        profiler, running = profile(activities=activities), False
        try:
            for number in count(self.start + 1):
                if number == self.window.start:
                    synchronize(self.device)
                    profiler.start()
                    running = True
                mark = perf_counter()
                with record_function(DATA_WAIT):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                if running:
                    synchronize(self.device)
                if running or self.is_plain(number):
                    (self.profiled if running else self.plain).append(perf_counter() - mark)
                if running and number == self.window.stop - 1:
                    profiler.stop()
                    running = False
                    self._read(profiler)
        finally:
            if running:
                profiler.stop()

    def _read(self, profiler: profile) -> None:
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.trace))
        events, steps = profiler.events(), len(self.profiled)  # type: ignore[no-untyped-call]
        totals = by_category(events, self.device.is_cuda)
        self.seconds = {name: totals.get(name, 0.0) / steps for name in CATEGORIES}
        if self.seconds["communication"]:
            self.communication = communication(events, self.device.is_cuda, steps)
        else:
            del self.seconds["communication"]
        known = sum(seconds for name, seconds in self.seconds.items() if name != "other")
        self.seconds["other"] = max(sum(self.profiled) / steps - known, 0.0)


def by_category(events: Any, cuda: bool) -> dict[str, float]:
    """Seconds of each category, by the operators' own time: on CUDA, of the kernels they started."""
    totals: dict[str, float] = {}
    for event in events:
        on_host = event.device_type == torch.autograd.DeviceType.CPU
        if not on_host or event.is_async:
            continue  # kernels count with the operator that started them; a process group's threads overlap the step
        name = category(event)
        own = event.self_device_time_total if cuda and name != "data wait" else event.self_cpu_time_total
        totals[name] = totals.get(name, 0.0) + own / 1e6
    return totals


def category(event: Any) -> str:
    """By an enclosing event, else by the operator or the nearest enclosing one that has a category."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for kind, pattern in ENCLOSING.items():
        if any(pattern.search(name) for name in names):
            return kind
    return next((kind for name in names for kind, pattern in OPERATORS.items() if pattern.search(name)), "other")


def communication(events: Iterable[Any], cuda: bool, steps: int) -> Communication:
    """From the profiler's events of `steps` steps of one process: on CUDA from kernels, else from host events."""
    collectives: list[Span] = []
    compute: list[Span] = []
    for event in events:
        if (event.device_type != torch.autograd.DeviceType.CPU) != cuda:
            continue
        span = (event.time_range.start, event.time_range.end)
        if (DEVICE_COLLECTIVE if cuda else HOST_COLLECTIVE).search(event.name):
            collectives.append(span)
        elif cuda or not (event.cpu_children or NO_COMPUTE.search(event.name)):
            compute.append(span)
    running, computing = length(union(collectives)), length(union(compute))
    exposed = length(union([*collectives, *compute])) - computing
    return Communication(running / 1e6 / steps, exposed / 1e6 / steps)


def union(spans: list[Span]) -> list[Span]:
    """The same instants as disjoint spans, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def of(train: Train, checkpoint_every: int | None, folder: Path, device: Device, start: int) -> StepProfiler:
    """The profiler of a run at step `start`, for steps without a validation, checkpoint or watching."""
    assert train.steps is not None, "the recipe is resolved"
    intervals = (train.validate_every or 0, checkpoint_every or 0, train.watch_every)
    is_plain = plain_steps(train.steps, intervals)
    return StepProfiler(device, start, window(start, train.steps, is_plain), is_plain, folder / "trace.json.gz")


def write(
    profiler: StepProfiler, train: Train, plan: dict[str, Any], config: ModelConfig, recomputed_total: int
) -> dict[str, Any]:
    """Write profile.json next to the trace and return its contents. plan: the run's.

    MFU and HFU are of the median step that was not profiled, where there is one: profiling takes time.
    """
    tokens = Batches.of(train, config.sequence_length).tokens(profiler.window.start - 1)
    peak, flops = plan["peak_flops"], plan["flops_per_token"]
    recomputed_flops = recomputed_flops_per_token(train.recompute, config, recomputed_total)
    profiled = sum(profiler.profiled) / len(profiler.profiled)
    seconds = median(profiler.plain[1:] or profiler.plain or [profiled])
    result = {
        "steps": [profiler.window.start, profiler.window.stop - 1],
        "device": profiler.device.name,
        "precision": profiler.device.precision.name,
        "profiled_step_seconds": profiled,
        "step_seconds": seconds,
        "seconds": profiler.seconds,
        **({"communication": asdict(profiler.communication)} if profiler.communication else {}),
        "tokens": tokens,
        "flops_per_token": flops,
        "recomputed_flops_per_token": recomputed_flops,
        "peak_flops": peak,
        "mfu": flops * tokens / seconds / peak,
        "hfu": (flops + recomputed_flops) * tokens / seconds / peak,
        "trace": str(profiler.trace),
    }
    write_json(profiler.trace.parent / "profile.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    (first, last), profiled = result["steps"], result["profiled_step_seconds"]

    def row(name: str, seconds: float, share: bool = True) -> str:
        return f"  {name:<22}{1e3 * seconds:>10.2f} ms" + (f"{seconds / profiled:>8.1%}" if share else "")

    by_time = sorted(result["seconds"].items(), key=lambda item: (item[0] == "other", -item[1]))
    lines = [f"Where the time of a step goes (steps {first} to {last}, {result['device']}, {result['precision']})", ""]
    lines += [row(name, seconds) for name, seconds in by_time]
    lines += [row("the profiled step", profiled, False), row("a step as it is", result["step_seconds"], False)]
    if (collectives := result.get("communication")) is not None:
        lines += [row("collectives running", collectives["total"])]
        lines += [row("  not overlapped", collectives["exposed"]) + "  (rank 0)"]
    recomputed = result["recomputed_flops_per_token"]
    again = f", {recomputed:.4g} recomputed" if recomputed else ""
    per_second = amount(result["tokens"] / result["step_seconds"])
    lines += [
        "",
        f"  {result['flops_per_token']:.4g} FLOP a token by the model's formula{again}; {per_second} tokens/s",
        f"  MFU {result['mfu']:.1%}, HFU {result['hfu']:.1%} of {rate(result['peak_flops'])}",
        "",
        f"  trace: {result['trace']} (chrome://tracing or ui.perfetto.dev)",
    ]
    return "\n".join(lines)
