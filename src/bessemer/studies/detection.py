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
from bessemer.run import read_json_lines
from bessemer.studies import text
from bessemer.studies.base import BASE, LENGTH, MAX_BYTES, build, loss_chart
from bessemer.terminal import progress, text_table, warn
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices

expected = (
    "A rule that compares with the last steps notices a jump at once and gets used to what comes slowly; only one that "
    "remembers the level reached notices decay."
)
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
    """The runs."""

    healthy_steps: int = 1500
    seeds: int = 3
    sick_steps: int = 600
    onset: int = 401


SEQUENCES = 8
MODEL = {**BASE, "train.precision": "auto", "train.global_batch_tokens": SEQUENCES * LENGTH, "train.micro_batch": SEQUENCES,
         "train.optimizer.learning_rate": 0.004}  # fmt: skip
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
    return {"settings": {**asdict(sizes), "model": MODEL}, **shown, "seconds": perf_counter() - started}


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


@dataclass(frozen=True)
class WindowRule:
    """An alarm where a value is above the limit of the last `window` values, once there are `least`. has_norms: of gradient norms
    as well."""

    limit: Callable[[list[float]], float]
    window: int = 128
    least: int = 64
    has_norms: bool = False

    def __call__(self, curve: Curve) -> Iterable[tuple[int, str]]:
        of = {"loss": curve.losses, **({"norm": curve.norms} if self.has_norms else {})}
        for step in range(self.least, len(curve.losses)):
            begin = max(step - self.window, 0)
            above = (kind for kind, values in of.items() if not values[step] <= self.limit(values[begin:step]))
            if (kind := next(above, None)) is not None:
                yield step + 1, kind


RULES: dict[str, Callable[[Curve], Iterable[tuple[int, str]]]] = {
    "guard": guard,
    "mean + 6 sigma": WindowRule(lambda window: fmean(window) + 6 * pstdev(window), has_norms=True),
    "10 x largest": WindowRule(lambda window: 10 * max(window), window=100, least=100),
    "1.5 x mean": WindowRule(lambda window: 1.5 * fmean(window)),
}


def _alarms(curve: Curve) -> dict[str, Any]:
    found = {rule: [list(alarm) for alarm in judge(curve)] for rule, judge in RULES.items()}
    return {"steps": len(curve.losses), "onset": curve.onset, "alarms": found, "losses": curve.losses}


def _trained(
    name: str, sizes: Sizes, seed: int, steps: int, fault: Fault | None, advance: Callable[..., None]
) -> Curve:
    """Train a model with a fault; losses and norms as they were computed."""
    trainer = build(text.study_recipe("study detection", {**MODEL, "run.seed": seed, "train.steps": steps}))
    onset = None if fault is None else 1 if fault.from_start else sizes.onset
    losses, norms = [], []
    for number in range(steps):
        batch, factor = text.batch(seed * 1_000_000 + number, SEQUENCES, LENGTH, MAX_BYTES), 1.0
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
    steps, false = _false_alarms(results)
    lines = [f"False alarms in {ENOUGH:,} steps, of {steps:,} healthy ones", ""]
    lines += text_table(("", *RULES), [("healthy", *(f"{ENOUGH * count / steps:.1f}" for count in false.values()))])
    lines += ["", "Steps from the first sick one to the first alarm", ""]
    sick = [(name, *(_noticed(curve, rule) for rule in RULES)) for name, curve in results["sick"].items()]
    lines += text_table(("", *RULES), sick)
    lines += ["", *(f"  {name}: {fault.what}" for name, fault in FAULTS.items())]
    if results["own"]:
        own = [
            (Path(name).name, *(str(len(curve["alarms"][rule])) for rule in RULES), f"{curve['steps']:,}")
            for name, curve in results["own"].items()
        ]
        lines += ["", "Alarms in the runs given", "", *text_table(("", *RULES, "steps"), own)]
    return "\n".join(lines)


def _false_alarms(results: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Healthy steps, and the alarms in them by rule."""
    healthy = results["healthy"].values()
    counts = {rule: sum(len(curve["alarms"][rule]) for curve in healthy) for rule in RULES}
    return sum(curve["steps"] for curve in healthy), counts


def shows(results: dict[str, Any]) -> list[str]:
    sick, (steps, false) = results["sick"], _false_alarms(results)
    seen = {rule: [name for name, curve in sick.items() if _noticed(curve, rule) != "never"] for rule in RULES}
    missed = [name for name in sick if name not in seen["guard"]]
    return [
        f"In {steps:,} healthy steps: {', '.join(f'{rule} {count}' for rule, count in false.items())} false alarms.",
        f"Of {len(sick)} faults: {', '.join(f'{rule} notices {len(names)}' for rule, names in seen.items())}.",
        f"The guard misses {', '.join(missed)}." if missed else "The guard misses none of them.",
    ]


def plot(results: dict[str, Any]) -> str:
    losses = {name: curve["losses"] for name, curve in results["sick"].items()}
    return loss_chart(
        "Loss of the runs with a fault", losses, top=3 * math.log(text.VOCABULARY)
    )  # higher ones flatten the rest


def _noticed(curve: dict[str, Any], rule: str) -> str:
    """The steps that it took, and the kind of the guard's alarm."""
    later = [(step, kind) for step, kind in curve["alarms"][rule] if step >= curve["onset"]]
    if not later:
        return "never"
    step, kind = later[0]
    took = step - curve["onset"] + 1
    return f"{kind} {took}" if rule == "guard" else str(took)
