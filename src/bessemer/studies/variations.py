"""Studies of training: what keys of the recipe do (batch, learning rate, clipping, warmup, accumulation, recompute), a training
that is stopped halfway and resumed by way of a real checkpoint, and the loss surface of the textbook, which is losses around
trained weights along two random directions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bessemer.checkpoint import save
from bessemer.parallel.dtensors import tensors_digest
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Recipe
from bessemer.report.static import heat_map
from bessemer.studies import text
from bessemer.studies.base import LENGTH, MAX_BYTES, Row, Rows, Variation, build, fit, measured, python_text, scored
from bessemer.terminal import size
from bessemer.train import optimizer as optimizers
from bessemer.train.trainer import Trainer

BATCH, MICRO, RATE = "train.global_batch_tokens", "train.micro_batch", "train.optimizer.learning_rate"
CLIP, WARMUP, SCALING = "train.optimizer.clip_norm", "train.schedule.warmup_steps", "train.optimizer.batch_scaling"
NEVER = 1e9  # a norm to clip to that no gradient has


def _lowest(names: Iterable[str], rows: Rows) -> str:
    """The variant of these with the best score."""
    return min(names, key=lambda name: float(rows[name]["bits_per_byte"]))


def _batch_size(rows: Rows) -> list[str]:
    small, large = rows["32"], rows["2048"]
    first, few = sorted(rows.values(), key=lambda row: -row["steps"])[0], large["steps"]
    after = sum(first["losses"][max(few - 2, 0) : few]) / len(first["losses"][max(few - 2, 0) : few])
    per_update = "less" if large["losses"][-1] < after else "more"
    fastest, slowest = (pick(row["tokens_per_second"] for row in rows.values()) for pick in (max, min))
    best = _lowest(rows, rows)
    return [
        f"On the same text a batch of {best} ends lowest: {rows[best]['bits_per_byte']:.3f} bits a byte. A batch of 32 makes "
        f"{small['steps']:,} updates of it ({small['bits_per_byte']:.3f}), one of 2048 makes {few} "
        f"({large['bits_per_byte']:.3f}).",
        f"After {few} updates each, the batch of 2048 has {per_update} loss than that of 32, {large['losses'][-1]:.2f} and "
        f"{after:.2f} nats, for 64 times the text: updates are not worth 64 times as much.",
        f"The fastest batch reads {fastest / slowest:.2f} times as many tokens a second as the slowest, so that here a large one "
        f"{'buys little time' if fastest < 1.5 * slowest else 'buys time'}; on many devices it is what they divide among them.",
    ]


batch_size = Variation(
    expected="Up to a critical batch size, twice the batch needs about half the updates; beyond it the text is spent for little "
    "(McCandlish et al. 2018, section 2).",
    variants={str(n): {BATCH: n * 32, MICRO: min(n, 256)} for n in (32, 256, 2048)},
    conclude=_batch_size, base={"tokens.sequence_length": 32}, tokens=1_310_720,
    measures=("steps", "loss", "bits_per_byte", "tokens_per_second"),
)  # fmt: skip


def _rate_scaling(rows: Rows) -> list[str]:
    few, *scaled = rows
    best = _lowest(scaled, rows)
    bits = {name: rows[name]["bits_per_byte"] for name in rows}
    return [
        f"With 8 times the batch, {best.removeprefix('128, ')} does best: {bits[best]:.3f} bits a byte; the rate left as it "
        f"was gives {bits['128, same rate']:.3f}, the root {bits['128, sqrt']:.3f}, linear {bits['128, linear']:.3f}.",
        "The root was the better rule for AdamW, as expected." if bits["128, sqrt"] < bits["128, linear"]
        else "Linear scaling was the better rule here, against what is expected of AdamW.",
        f"No rule makes up for an eighth of the updates: the batch of 16 ends at {bits[few]:.3f} on the same text."
        if bits[few] < bits[best] else f"Scaled, the large batch loses nothing: that of 16 ends at {bits[few]:.3f}.",
    ]  # fmt: skip


_LARGE = {BATCH: 128 * LENGTH, MICRO: 32, "train.optimizer.reference_batch_tokens": 16 * LENGTH}
rate_scaling = Variation(
    expected="The root of the batch for Adam-like updates (Malladi et al. 2022), in proportion to it for SGD (Goyal et al. 2017, "
    "section 2.1).",
    variants={
        "16": {}, "128, same rate": _LARGE, "128, sqrt": {**_LARGE, SCALING: "sqrt"},
        "128, linear": {**_LARGE, SCALING: "linear"},
    },
    conclude=_rate_scaling, tokens=800_000, measures=("steps", "loss", "bits_per_byte", "diverged_at"),
)  # fmt: skip


def _clipping(rows: Rows) -> list[str]:
    rates = sorted({float(name.split(",")[0]) for name in rows})
    gains = {rate: rows[f"{rate:g}, free"]["loss"] - rows[f"{rate:g}, clipped"]["loss"] for rate in rates}
    counts = np.bincount(text.training_and_held_out(MAX_BYTES)[0])
    shares = counts[counts > 0] / counts.sum()
    nothing = float(-(shares * np.log(shares)).sum())
    broken, first = dict[str, list[float]](), dict[str, str]()
    for kind in ("clipped", "free"):
        broken[kind] = [rate for rate in rates if not rows[f"{rate:g}, {kind}"]["loss"] < nothing]
        first[kind] = f"breaks at {broken[kind][0]:g}" if broken[kind] else f"bears all rates to {rates[-1]:g}"
    later = broken["clipped"][:1] != broken["free"][:1]
    return [
        f"At the usual rate, {rates[0]:g}, clipping changes the loss by {gains[rates[0]]:+.3f} nats; at the others by "
        f"{', '.join(f'{gains[rate]:+.3f} ({rate:g})' for rate in rates[1:])} (positive: it helps).",
        f"Clipped, the model {first['clipped']}; without, it {first['free']}. Broken: it ends above {nothing:.2f} nats, what the "
        "frequencies of single bytes are worth.",
        "So clipping moves the rate at which it breaks." if later
        else "So clipping does not move the rate at which it breaks: AdamW divides a gradient by its own size, clipped or not.",
    ]  # fmt: skip


clipping = Variation(
    expected="Clipping caps what one bad batch can do, and lets rates be a little higher (Pascanu et al. 2013, section 3.2); "
    "with Adam, which is invariant to the scale of gradients, less than with SGD.",
    variants={
        f"{rate:g}, {name}": {RATE: rate, CLIP: norm}
        for rate in (0.008, 0.064, 0.512, 4.0) for name, norm in (("clipped", 1.0), ("free", NEVER))
    },
    conclude=_clipping, base={WARMUP: 0}, tokens=300_000, plot_of="loss", measures=("loss", "max_norm", "diverged_at"),
)  # fmt: skip


def _warmup(rows: Rows) -> list[str]:
    bits = {name: row["bits_per_byte"] for name, row in rows.items()}
    low, high = (bits[f"{rate}, none"] - bits[f"{rate}, warmup"] for rate in ("0.008", "0.06"))
    without, with_it = rows["0.06, none"], rows["0.06, warmup"]
    return [
        f"At the usual rate warmup is worth {low:+.3f} bits a byte, at a rate 7.5 times as high {high:+.3f} (positive: it "
        f"helps).",
        "As expected it helps more where the rate is high: it lets the run bear a higher one."
        if high > max(low, 0) else "It was not needed more at the high rate, against what is expected.",
        f"The largest gradient norm at the high rate is {without['max_norm']:.3g} without warmup and "
        f"{with_it['max_norm']:.3g} with it.",
    ]  # fmt: skip


warmup = Variation(
    expected="Warmup lets a run bear a higher rate; at a low one it changes little (Kalra and Barkeshli 2024).",
    variants={
        f"{rate:g}, "
        f"{name}": {RATE: rate, WARMUP: steps} for rate in (0.008, 0.06) for name, steps in (("none", 0), ("warmup", 60))
    },
    conclude=_warmup, tokens=600_000, measures=("loss", "bits_per_byte", "max_norm"),
)  # fmt: skip


def _accumulation(rows: Rows) -> list[str]:
    whole, parts = rows["1 x 128"], rows["8 x 16"]
    apart = max(abs(a - b) for a, b in zip(whole["losses"], parts["losses"], strict=True))
    return [
        f"Losses differ by at most {apart:.1e} nats: the sum is divided by the targets of the whole batch, so only the order of "
        "sums differs" + ("." if apart < 1e-3 else ", and here that grew; look for a mistake."),
        f"8 x 16 makes {parts['passes'] // whole['passes']} times the passes and takes {size(parts['memory_bytes'])} at its "
        f"peak, where 1 x 128 takes {size(whole['memory_bytes'])}.",
        f"It takes {parts['cpu_seconds'] / whole['cpu_seconds']:.2f} times the CPU time: what a device loses to smaller "
        "matmuls, or gains where their results stay in its cache.",
    ]


accumulation = Variation(
    expected="The same gradient but for rounding, an eighth of the activations, and more time where a micro-batch is too "
    "small to fill the device.",
    variants={"1 x 128": {MICRO: 128}, "8 x 16": {MICRO: 16}},
    conclude=_accumulation, base={BATCH: 128 * LENGTH}, plot_of="memory_bytes", train=measured,
    measures=("loss", "passes", "memory_bytes", "cpu_seconds", "weights"),
)  # fmt: skip


def _recompute(rows: Rows) -> list[str]:
    none, full = rows["none"], rows["full"]
    same = len({row["weights"] for row in rows.values()}) == 1
    return [
        f"The weights at the end are {'the same to the last bit' if same else 'NOT the same'} in all variants.",
        f"Full recompute takes {size(full['memory_bytes'])} at the peak in place of {size(none['memory_bytes'])}; selective, "
        f"which keeps the results of matmuls and attention, {size(rows['selective']['memory_bytes'])}.",
        f"The second forward pass makes the step take {full['cpu_seconds'] / none['cpu_seconds']:.2f} times as long, where "
        "4/3 is expected of compute alone.",
    ]


recompute = Variation(
    expected="The same bits; activations of one block at a time for a second forward pass, a third more compute (Chen et al. "
    "2016; selective: Korthikanti et al. 2022, section 5).",
    variants={kind: {"train.recompute": kind} for kind in ("none", "selective", "full")},
    conclude=_recompute, base={BATCH: 32 * 128, "tokens.sequence_length": 128, "model.layers": 6}, tokens=100_000, train=measured,
    plot_of="memory_bytes", measures=("loss", "memory_bytes", "cpu_seconds", "weights"),
)  # fmt: skip


def _stopped(recipe: Recipe, stops: bool = True, optimizer: bool = True, position: bool = True) -> Row:
    """Train, stop halfway, and go on from the checkpoint in a new trainer. optimizer, position: whether it gets back the
    optimizer's state, and the place in the data."""
    read, trainer, half = python_text(recipe), build(recipe), (recipe.train.steps or 0) // 2
    row = fit(trainer, read, 0, half)
    if stops:
        with tempfile.TemporaryDirectory() as folder:
            tensors = {"model": {name: p.detach() for name, p in trainer.model.named_parameters()},
                       "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer)}  # fmt: skip
            saved = save(Path(folder), half, tensors, {}, 1)
            trainer = build(recipe.changed(run=recipe.run.model_copy(update={"seed": recipe.run.seed + 1})))
            saved.fill("model", trainer.model.named_parameters())
            if optimizer:
                optimizers.load_state(trainer.model, trainer.optimizer, saved)
    rest = fit(trainer, read if position else (lambda step: read(step - half)), half)
    losses = row["losses"] + rest["losses"]
    return {**rest, "losses": losses, "steps": len(losses), "bits_per_byte": scored(trainer).bits_per_byte,
            "weights": tensors_digest(trainer.model.named_parameters(), SINGLE_PROCESS)[:8]}  # fmt: skip


def _resume(rows: Rows) -> list[str]:
    never, back = rows["never stopped"], rows["resumed"]
    bare, again = rows["no optimizer state"], rows["data from its start"]
    half = len(never["losses"]) // 2
    same = never["weights"] == back["weights"] and never["losses"] == back["losses"]
    jump = max(a - b for a, b in zip(bare["losses"][half:], never["losses"][half:], strict=True))
    gap = bare["bits_per_byte"] - never["bits_per_byte"]
    return [
        f"Resumed from its checkpoint the run has "
        f"{'the same losses and weights to the last bit' if same else 'OTHER losses or weights'} "
        "as one that was never stopped.",
        f"Without the optimizer's state the loss is up to {jump:.3f} nats above the other's, and the run ends {abs(gap):.3f} "
        f"bits a byte {'worse' if gap > 0 else 'better'}.",
        f"Where the data begins anew, the second half trains on the text of the first: it ends at {again['loss']:.3f} nats "
        f"on that and at {again['bits_per_byte']:.3f} bits a byte on held-out text, the others at {never['loss']:.3f} and "
        f"{never['bits_per_byte']:.3f}.",
    ]


resume = Variation(
    expected="The same bits, where weights, optimizer state, schedule, random states and the place in the data are restored; "
    "Adam without its moments takes first steps of full size in all directions (Kingma and Ba 2015, algorithm 1).",
    variants={
        "never stopped": {"stops": False}, "resumed": {}, "no optimizer state": {"optimizer": False},
        "data from its start": {"position": False},
    },
    conclude=_resume, train=_stopped, measures=("loss", "bits_per_byte", "weights"),
)  # fmt: skip


SURFACE_SEQUENCES = 16  # held-out ones, for each point


@torch.no_grad()
def grid(trainer: Trainer, edge: int) -> list[list[float]]:
    """Held-out losses (nats) on an `edge` x `edge` grid from -1 to 1 along two random directions, each filter of which has
    the norm of the weights' own (Li et al. 2018, section 4); vectors, such as gains of norms, stay. edge: odd."""
    draw, weights = torch.Generator().manual_seed(0), [p for p in trainer.model.parameters() if p.ndim > 1]
    start = [p.clone() for p in weights]
    noise = [[torch.randn(p.shape, generator=draw) for p in weights] for _ in range(2)]
    directions = [
        [n * p.norm(dim=-1, keepdim=True) / n.norm(dim=-1, keepdim=True) for n, p in zip(of, start, strict=True)]
        for of in noise
    ]
    part = text.held_out(SURFACE_SEQUENCES, trainer.model.config.sequence_length, MAX_BYTES)
    steps = np.linspace(-1, 1, edge).tolist()
    rows = list[list[float]]()
    for a in steps:
        rows.append([])
        for b in steps:
            for p, origin, first, second in zip(weights, start, *directions, strict=True):
                p.copy_(origin + a * first + b * second)
            rows[-1].append(scored(trainer, part).loss)
    for p, origin in zip(weights, start, strict=True):
        p.copy_(origin)
    return rows


def _surface(recipe: Recipe, steps: int | None = None, edge: int = 21) -> Row:
    trainer = build(recipe)
    row = fit(trainer, python_text(recipe), 0, steps)
    around = grid(trainer, edge)
    middle = edge // 2
    center, rim = around[middle][middle], [around[0][middle], around[-1][middle], around[middle][0], around[middle][-1]]
    return {**row, "grid": around, "center": center, "rim": sum(rim) / len(rim), "lowest": min(map(min, around)),
            "near": float((np.array(around) < center + 0.5).mean())}  # fmt: skip


class LossSurface(Variation):
    """A variation whose figure is the grid around its last variant."""

    def plot(self, results: dict[str, Any]) -> str:
        name, row = list(results["rows"].items())[-1]
        title = f"Held-out loss around the weights, {name}; dark: low"
        return heat_map(title, row["grid"], "first direction, -1 to 1", "second direction")


def _loss_surface(rows: Rows) -> list[str]:
    first, last = rows["at initialisation"], rows["trained"]
    is_lowest = last["lowest"] >= last["center"]
    lowest = "the lowest point" if is_lowest else f"above the lowest point ({last['lowest']:.2f})"
    return [
        f"The trained weights ({last['center']:.2f} nats) are {lowest} of their grid; at a distance of 1 the loss is "
        f"{last['rim']:.2f}.",
        f"Around the initial weights it goes from {first['center']:.2f} to {first['rim']:.2f} over the same distance: "
        f"training has made the "
        f"surface {'steeper' if last['rim'] - last['center'] > first['rim'] - first['center'] else 'no steeper'}.",
        f"{last['near']:.0%} of the trained grid lies within half a nat of the middle, {first['near']:.0%} of the initial one.",
    ]


loss_surface = LossSurface(
    expected="A basin with the trained weights at its bottom, round and without other minima nearby for networks that train "
    "well (Li et al. 2018).",
    variants={"at initialisation": {"steps": 0}, "trained": {}},
    conclude=_loss_surface, tokens=600_000, train=_surface, measures=("center", "rim", "lowest", "near"),
)  # fmt: skip
