"""Which rule detects a diverging or damaged run, how soon, and with how many false alarms: recorded losses through several rules.

A small byte model is trained on Python's standard library, from several seeds as it should be and then with one fault each.
The rules only look on: none of them acts on the run. `folder` may hold runs of one's own, whose losses are replayed too.

| rule | what it says |
|---|---|
| guard | the rules of guard/detection.py, with the guard's defaults |
| mean + 6 sigma | loss or gradient norm above the mean of the last 128 + 6 standard deviations (OLMo-core's SkipStepOptimizer) |
| 10 x largest | loss above ten times the largest of the last 100 (Megatron-LM's rerun_state_machine) |
| 1.5 x mean | loss above 1.5 times the mean of the last 128 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from time import perf_counter
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.guard.detection import GuardReference, History, observe
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model
from bessemer.run import read_json_lines
from bessemer.studies import text
from bessemer.studies.base import line_chart
from bessemer.terminal import progress, warn
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.trainer import Trainer

expected = (
    "A rule that compares with the last steps notices a jump at once and gets used to what comes slowly; only one that "
    "remembers the level "
    "reached notices decay."
)
WINDOW, MIN_WINDOW = 128, 64  # of OLMo-core's rule
LARGEST_OF = 100
ENOUGH = 10_000  # steps that false alarms are counted by


@dataclass(frozen=True)
class Curve:
    """Losses (nats) and gradient norms of a run's steps. onset: the first sick step (1-based), None of a healthy run."""

    name: str
    losses: list[float]
    norms: list[float]
    onset: int | None = None
    reference: GuardReference = field(default_factory=lambda: GuardReference(math.log(text.VOCABULARY), 1.0))


@dataclass(frozen=True)
class Sizes:
    """The model, and the runs."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    sequences: int = 8
    length: int = 64
    max_bytes: int = 2_000_000
    rate: float = 0.004
    healthy_steps: int = 1500
    seeds: int = 3
    sick_steps: int = 600
    onset: int = 401


SHORT = Sizes(healthy_steps=300, seeds=1, sick_steps=300, onset=201)


@dataclass(frozen=True)
class Fault:
    """What goes wrong from the first sick step on. steps: for so many, None: to the end; noise: share of the targets that are
    random bytes; grows: the noise begins at nothing and is whole after 200 steps; rate: factor of the learning rate."""

    what: str
    steps: int | None = None
    noise: float = 0.0
    grows: bool = False
    rate: float = 1.0
    from_start: bool = False


FAULTS = {
    "one bad batch": Fault("the targets of one batch are random", steps=1, noise=1.0),
    "poisoned shard": Fault("the targets of 12 batches are random", steps=12, noise=1.0),
    "rate x 30": Fault("the learning rate is 30 times too high for 12 steps", steps=12, rate=30.0),
    "labels wrong": Fault("8% of all targets are random from there on", noise=0.08),
    "text decays": Fault("the share of random targets grows to 15% in 200 steps", noise=0.15, grows=True),
    "rate x 1000": Fault("the learning rate is 1,000 times too high from the first step", rate=1000.0, from_start=True),
}


def run(short: bool = False, folder: Path | None = None) -> dict[str, Any]:
    """Train, and replay. Returns `settings`, `healthy` and `sick`: by run, its steps and by rule the steps of its alarms; `own`:
    the same of the runs in `folder`. Raises InputError where it holds no recorded losses."""
    sizes, started = SHORT if short else Sizes(), perf_counter()
    own = [] if folder is None else recorded(folder)
    devices.keep_freed_memory()
    healthy, sick = [], []
    total = sizes.seeds * sizes.healthy_steps + len(FAULTS) * sizes.sick_steps
    with progress("study detection", total, "steps") as advance:
        for seed in range(sizes.seeds):
            healthy.append(_trained(f"seed {seed}", sizes, seed, sizes.healthy_steps, None, advance))
        for name, fault in FAULTS.items():
            sick.append(_trained(name, sizes, 0, sizes.sick_steps, fault, advance))
    groups = {"healthy": healthy, "sick": sick, "own": own}
    shown = {kind: {curve.name: _alarms(curve) for curve in curves} for kind, curves in groups.items()}
    return {"settings": asdict(sizes), **shown, "seconds": perf_counter() - started}


def recorded(folder: Path) -> list[Curve]:
    """The curves of all runs below a folder, by their metrics.jsonl. Raises InputError where there is none."""
    curves = []
    for path in sorted(folder.rglob("metrics.jsonl")):
        try:
            lines = read_json_lines(path)
        except OSError as error:
            warn(f"{path}: left out, it cannot be read ({error.strerror})")
            continue
        rows = [row for row in lines if row.get("kind") == "train" and row.get("loss") is not None]
        norms = [math.nan if row.get("grad_norm") is None else row["grad_norm"] for row in rows]
        if rows:  # its first losses are near a uniform guess
            reference = GuardReference(rows[0]["loss"], 1.0)
            curves.append(Curve(str(path.parent), [row["loss"] for row in rows], norms, None, reference))
    if not curves:
        raise InputError(f"study detection: {folder}: no metrics.jsonl with losses below it; give a folder of runs")
    return curves


def guard(curve: Curve) -> Iterable[tuple[int, str]]:
    """Alarms of the guard: step and kind."""
    history = History()
    for step, (loss, norm) in enumerate(zip(curve.losses, curve.norms, strict=True), start=1):
        if not (math.isfinite(loss) and math.isfinite(norm)):
            yield step, "nonfinite"
            continue
        history, alarm = observe(history, step, loss, norm, curve.reference)
        if alarm is not None:
            yield step, alarm.kind.name


def six_sigma(curve: Curve) -> Iterable[tuple[int, str]]:
    """OLMo-core's rule."""
    for step in range(MIN_WINDOW, len(curve.losses)):
        for kind, values in (("loss", curve.losses), ("norm", curve.norms)):
            window = values[max(step - WINDOW, 0) : step]
            if not values[step] <= fmean(window) + 6 * pstdev(window):
                yield step + 1, kind
                break


def largest(curve: Curve) -> Iterable[tuple[int, str]]:
    """Megatron-LM's rule."""
    for step in range(LARGEST_OF, len(curve.losses)):
        if not curve.losses[step] <= 10 * max(curve.losses[step - LARGEST_OF : step]):
            yield step + 1, "loss"


def ratio(curve: Curve) -> Iterable[tuple[int, str]]:
    """Half as much again as the mean."""
    for step in range(MIN_WINDOW, len(curve.losses)):
        if not curve.losses[step] <= 1.5 * fmean(curve.losses[max(step - WINDOW, 0) : step]):
            yield step + 1, "loss"


RULES: dict[str, Callable[[Curve], Iterable[tuple[int, str]]]] = {
    "guard": guard, "mean + 6 sigma": six_sigma, "10 x largest": largest, "1.5 x mean": ratio,
}  # fmt: skip


def _alarms(curve: Curve) -> dict[str, Any]:
    found = {rule: [list(alarm) for alarm in judge(curve)] for rule, judge in RULES.items()}
    return {"steps": len(curve.losses), "onset": curve.onset, "alarms": found, "losses": curve.losses}


def _trained(
    name: str, sizes: Sizes, seed: int, steps: int, fault: Fault | None, advance: Callable[..., None]
) -> Curve:
    """Train a model with a fault; losses and norms as they were computed."""
    recipe = text.study_recipe("study detection", {
        "tokens.sequence_length": sizes.length, "model.layers": sizes.layers, "model.width": sizes.width,
        "model.heads": sizes.heads, "train.device": "cpu", "train.compile": "off", "train.steps": steps,
        "train.global_batch_tokens": sizes.sequences * sizes.length, "train.micro_batch": sizes.sequences,
        "train.optimizer.learning_rate": sizes.rate,
    })  # fmt: skip
    model = build_model(model_config(recipe, text.VOCABULARY), seed)
    trainer = Trainer(recipe, model, devices.choose(recipe.train), text.END_OF_TEXT, 1)
    onset = None if fault is None else 1 if fault.from_start else sizes.onset
    losses, norms = [], []
    for number in range(steps):
        batch, factor = text.batch(seed * 1_000_000 + number, sizes.sequences, sizes.length, sizes.max_bytes), 1.0
        since = number + 1 - (onset or 0)
        if fault is not None and since >= 0 and (fault.steps is None or since < fault.steps):
            factor = fault.rate
            batch = _with_noise(batch, fault.noise * (min(since / 200, 1.0) if fault.grows else 1.0), number)
        results = trainer.forward_backward(batch)
        losses.append(results.loss)
        norms.append(results.grad_norm)
        if math.isfinite(results.loss) and math.isfinite(results.grad_norm):
            trainer.update(number, results.grad_norm, factor)
        advance(1, note=f"{name}, loss {results.loss:.3f}")
    return Curve(name, losses, norms, onset)


def _with_noise(batch: Batch, share: float, seed: int) -> Batch:
    if not share:
        return batch
    draw, tokens = np.random.default_rng(seed), np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)
    noisy = draw.random(tokens.shape) < share
    tokens[noisy] = draw.integers(0, text.VOCABULARY, int(noisy.sum()))
    return Batch.next_token(batch.first, tokens, batch.source)


def table(results: dict[str, Any]) -> str:
    """By rule: false alarms in 10,000 healthy steps, and after how many steps each fault was noticed."""
    width = max(map(len, RULES)) + 3
    head = f"  {'':<16}" + "".join(f"{rule:>{width}}" for rule in RULES)
    healthy = results["healthy"].values()
    steps = sum(curve["steps"] for curve in healthy)
    cells = []
    for rule in RULES:
        count = sum(len(curve["alarms"][rule]) for curve in healthy)
        cells.append(f"{ENOUGH * count / steps:>{width}.1f}")
    lines = [
        f"False alarms in {ENOUGH:,} steps, of {steps:,} healthy ones",
        "",
        head,
        f"  {'healthy':<16}" + "".join(cells),
    ]
    lines += ["", "Steps from the first sick one to the first alarm", "", head]
    for name, curve in results["sick"].items():
        lines.append(f"  {name:<16}" + "".join(f"{_noticed(curve, rule):>{width}}" for rule in RULES))
    lines += ["", *(f"  {name}: {fault.what}" for name, fault in FAULTS.items())]
    if results["own"]:
        lines += ["", "Alarms in the runs given", "", head]
        for name, curve in results["own"].items():
            counts = "".join(f"{len(curve['alarms'][rule]):>{width}}" for rule in RULES)
            lines.append(f"  {Path(name).name:<16}{counts}   of {curve['steps']:,} steps")
    return "\n".join(lines)


def shows(results: dict[str, Any]) -> list[str]:
    """What the replayed losses show."""
    sick, steps = results["sick"], sum(curve["steps"] for curve in results["healthy"].values())
    false = {rule: sum(len(curve["alarms"][rule]) for curve in results["healthy"].values()) for rule in RULES}
    seen = {rule: [name for name, curve in sick.items() if _noticed(curve, rule) != "never"] for rule in RULES}
    missed = [name for name in sick if name not in seen["guard"]]
    return [
        f"In {steps:,} healthy steps: {', '.join(f'{rule} {count}' for rule, count in false.items())} false alarms.",
        f"Of {len(sick)} faults: {', '.join(f'{rule} notices {len(names)}' for rule, names in seen.items())}.",
        f"The guard misses {', '.join(missed)}." if missed else "The guard misses none of them.",
    ]


def plot(results: dict[str, Any]) -> str:
    """Losses of the runs with faults, as SVG."""
    top = 3 * math.log(text.VOCABULARY)  # infinite losses, and those that would flatten the rest, are left out
    kept = {
        name: [(n + 1, loss) for n, loss in enumerate(curve["losses"]) if loss < top]
        for name, curve in results["sick"].items()
    }
    curves = {name: ([n for n, _ in points], [loss for _, loss in points]) for name, points in kept.items()}
    return line_chart("Loss of the runs with a fault", curves, "step", "nats a byte")


def _noticed(curve: dict[str, Any], rule: str) -> str:
    """The steps that it took, and the kind of the guard's alarm."""
    later = [(step, kind) for step, kind in curve["alarms"][rule] if step >= curve["onset"]]
    if not later:
        return "never"
    step, kind = later[0]
    took = step - curve["onset"] + 1
    return f"{kind} {took}" if rule == "guard" else str(took)
