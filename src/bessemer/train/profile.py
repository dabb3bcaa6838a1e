"""Where a training step's time goes: a few steps under torch's profiler, as a trace and as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bessemer.layout.flops import recomputed_flops_per_token
from bessemer.model.config import ModelConfig
from bessemer.recipe import Batches, Recipe
from bessemer.run import write_json
from bessemer.terminal import amount, rate
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device, synchronize
from bessemer.train.exposed import Communication, communication

# The steps that are profiled when nothing speaks against it: past the start, few enough to look at.
FIRST, COUNT = 10, 3
DATA_WAIT = "wait for data"

# What stands around an operator says more than the operator: the head's product belongs to the loss.
AROUND = {
    "data wait": re.compile(DATA_WAIT),
    "optimizer": re.compile(r"Optimizer\.step|clip_grad|foreach_norm|fused_adam"),
    "loss": re.compile(r"CrossEntropy|NllLoss|nll_loss"),
}
OPERATORS = {
    "communication": re.compile(r"^c10d|^_c10d|nccl"),  # that the host waits for, or the device works on
    "attention": re.compile(r"attention|flash_(fwd|bwd)|fmha", re.IGNORECASE),
    "matrix products": re.compile(
        r"^aten::(_?addmm_?|mm|bmm|baddbmm|_scaled_mm|mkldnn_\w*linear|_weight_int\w*)$|^mkldnn::_linear|gemm|cutlass"
    ),
    "norms and elementwise": re.compile(
        r"^aten::(add|sub|mul|div|neg|exp|silu|gelu|sigmoid|tanh|pow|mean|sum|rsqrt|sqrt|clamp|where|copy|cat|fill|zero|"
        r"native_layer_norm|_fused_rms_norm|rms_norm|cos|sin|abs|amax|norm|_foreach|embedding|index|scatter|gather)|^triton_"
    ),
}
CATEGORIES = (
    "matrix products",
    "attention",
    "loss",
    "norms and elementwise",
    "optimizer",
    "data wait",
    "communication",
    "other",
)


Quiet = Callable[[int], bool]


def quiet_of(steps: int, busy: tuple[int, ...]) -> Quiet:
    """Whether a step (1-based) is nothing but a step. busy: at whose multiples something else happens (a validation, a
    checkpoint, a look inside), which would be measured too; the last step of the run ends with all of it."""
    return lambda number: number < steps and all(number % every for every in busy if every)


def window(start: int, steps: int, quiet: Quiet) -> range:
    """The steps to profile of those after `start`: COUNT from FIRST on, else the nearest such, else fewer."""
    for count in range(COUNT, 0, -1):
        firsts = sorted(
            range(start + 1, min(steps, start + 1000) - count + 2), key=lambda f: (abs(f - start - FIRST), f)
        )
        for first in firsts:
            if all(quiet(number) for number in range(first, first + count)):
                return range(first, first + count)
    return range(start + 1, start + 2)


@dataclass
class Profile:
    """Passes the loop's batches on and profiles the steps of `window` on the way. start: steps done before.

    traced: the file that the trace is written to; found: seconds of a profiled step by category, once it is over.
    """

    device: Device
    start: int
    window: range
    quiet: Quiet
    traced: Path
    found: dict[str, float] = field(default_factory=dict)
    communication: Communication | None = None
    profiled: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.is_cuda else [])]
        profiler = profile(activities=activities)
        running, number = False, self.start
        try:
            while True:
                number += 1
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
                if running or self.quiet(number):
                    (self.profiled if running else self.plain).append(perf_counter() - mark)
                if running and number == self.window.stop - 1:
                    profiler.stop()
                    running = False
                    self._read(profiler)
        finally:
            if running:
                profiler.stop()

    def _read(self, profiler: profile) -> None:
        self.traced.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self.traced))
        events = profiler.events()  # type: ignore[no-untyped-call]
        totals = by_category(events, self.device.is_cuda)
        steps, wall = len(self.profiled), sum(self.profiled)
        self.found = {name: totals.get(name, 0.0) / steps for name in CATEGORIES}
        if self.found["communication"]:
            self.communication = communication(events, self.device.is_cuda, steps)
        else:
            del self.found["communication"]
        self.found["other"] = max(wall / steps - sum(v for name, v in self.found.items() if name != "other"), 0.0)


def by_category(events: Any, cuda: bool) -> dict[str, float]:
    """Seconds of each category, by the operators' own time: on CUDA, of the kernels they started."""
    totals: dict[str, float] = {}
    for event in events:
        on_host = event.device_type == torch.autograd.DeviceType.CPU
        if not on_host or event.is_async:
            continue  # kernels are counted with the operator that started them, a group's threads work beside the step
        name = category(event)
        own = event.self_device_time_total if cuda and name != "data wait" else event.self_cpu_time_total
        totals[name] = totals.get(name, 0.0) + own / 1e6
    return totals


def category(event: Any) -> str:
    """By what stands around the operator, else by the operator or the nearest one around it that has a category."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    for kind, pattern in AROUND.items():
        if any(pattern.search(name) for name in names):
            return kind
    for name in names:
        for kind, pattern in OPERATORS.items():
            if pattern.search(name):
                return kind
    return "other"


def of(recipe: Recipe, folder: Path, device: Device, start: int) -> Profile:
    """What profiles a run that stands at step `start`, away from validations, checkpoints and looks inside."""
    settings = recipe.train
    assert settings.steps is not None, "the recipe is resolved"
    busy = (settings.validate_every or 0, recipe.checkpoint.every or 0, settings.watch_every)
    quiet = quiet_of(settings.steps, busy)
    return Profile(device, start, window(start, settings.steps, quiet), quiet, folder / "trace.json.gz")


def write(
    profile: Profile, recipe: Recipe, plan: dict[str, Any], config: ModelConfig, recomputed: int
) -> dict[str, Any]:
    """Write profile.json beside the trace and return what it holds.

    plan: the run's; recomputed: blocks that are. MFU and HFU are of the median step that was not profiled, where there
    is one: the profiler takes time of its own.
    """
    tokens, peak = Batches.of(recipe).tokens(profile.window.start - 1), plan["peak_flops"]
    model_flops = plan["flops_per_token"]
    recomputed_flops = recomputed_flops_per_token(recipe, config, recomputed)
    profiled = sum(profile.profiled) / len(profile.profiled)
    seconds = median(profile.plain[1:] or profile.plain or [profiled])
    result = {
        "steps": [profile.window.start, profile.window.stop - 1],
        "device": profile.device.name,
        "precision": profile.device.precision,
        "profiled_step_seconds": profiled,
        "step_seconds": seconds,
        "seconds": profile.found,
        **({"communication": asdict(profile.communication)} if profile.communication else {}),
        "tokens": tokens,
        "flops_per_token": model_flops,
        "recomputed_flops_per_token": recomputed_flops,
        "peak_flops": peak,
        "mfu": model_flops * tokens / seconds / peak,
        "hfu": (model_flops + recomputed_flops) * tokens / seconds / peak,
        "trace": str(profile.traced),
    }
    write_json(profile.traced.parent / "profile.json", result)
    return result


def show(result: dict[str, Any]) -> str:
    """The table for a person."""
    first, last = result["steps"]
    profiled = result["profiled_step_seconds"]
    lines = [f"Where the time of a step goes (steps {first} to {last}, {result['device']}, {result['precision']})", ""]
    for name, seconds in sorted(result["seconds"].items(), key=lambda item: (item[0] == "other", -item[1])):
        lines.append(f"  {name:<22}{1e3 * seconds:>10.2f} ms{seconds / profiled:>8.1%}")
    lines += [
        f"  {'the profiled step':<22}{1e3 * profiled:>10.2f} ms",
        f"  {'a step as it is':<22}{1e3 * result['step_seconds']:>10.2f} ms",
        *_communication(result, profiled),
        "",
        f"  {result['flops_per_token']:.4g} FLOP a token by the model's formula"
        + (
            f", {result['recomputed_flops_per_token']:.4g} computed again"
            if result["recomputed_flops_per_token"]
            else ""
        )
        + f"; {amount(result['tokens'] / result['step_seconds'])} tokens/s",
        f"  MFU {result['mfu']:.1%}, HFU {result['hfu']:.1%} of {rate(result['peak_flops'])}",
        "",
        f"  trace: {result['trace']} (chrome://tracing or ui.perfetto.dev)",
    ]
    return "\n".join(lines)


def _communication(result: dict[str, Any], profiled: float) -> list[str]:
    told = result.get("communication")
    if told is None:
        return []
    return [
        f"  {'collectives under way':<22}{1e3 * told['total']:>10.2f} ms{told['total'] / profiled:>8.1%}",
        f"  {'  nothing beside them':<22}{1e3 * told['exposed']:>10.2f} ms{told['exposed'] / profiled:>8.1%}  (rank 0)",
    ]
