"""Width transfer: small models of several widths, each with several learning rates, with `base_width` and without.

Without it every matrix has the same learning rate at every width, and the best one falls as the model grows wider. With
it (the maximal update parametrisation, Yang et al. 2022) the hidden matrices and the head have base_width / width of it,
and the best one is to stay where it was found. At the base width the two are the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf, isfinite, log2
from time import perf_counter
from typing import Any

from bessemer.studies import text
from bessemer.studies.base import build, fit, line_chart, scored
from bessemer.terminal import progress, text_table
from bessemer.train import device as devices

expected = (
    "With one rate for all widths the best one falls as the model grows wider; with base_width it stays where it was found "
    "(Yang et al. 2022)."
)
RULES = ("standard", "base_width")


@dataclass(frozen=True)
class Grid:
    """The grid, and how long each model is trained. Every width has the same depth, and heads of the same width."""

    widths: tuple[int, ...] = (64, 128, 256)
    rates: tuple[float, ...] = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16)
    layers: int = 2
    head_dim: int = 32
    steps: int = 60
    sequences: int = 8
    length: int = 128
    max_bytes: int = 2_000_000
    held_out: int = 64


def run(settings: Grid | None = None) -> dict[str, Any]:
    """Train the grid.

    Returns `settings`; `loss`, held-out nats a byte by rule, width and rate, None where the run diverged; `best`, the
    rate of the lowest loss by rule and width, and `optimum`, the same between the rates of the grid; `moved`, the
    factor between the optimum at the first width and at the last; `at_base_rate`, the loss of the last width at the
    rate that is best at the first one.
    """
    sizes, started = settings or Grid(), perf_counter()
    devices.keep_freed_memory()
    loss: dict[str, dict[int, dict[float, float]]] = {rule: {} for rule in RULES}
    base = sizes.widths[0]
    runs = [(rule, width, rate) for width in sizes.widths for rule in RULES for rate in sizes.rates]
    with progress("study mup", sum(width**2 for _, width, _ in runs), "work") as advance:
        for rule, width, rate in runs:
            by_rate = loss[rule].setdefault(width, {})
            if rule == "base_width" and width == base:
                by_rate[rate] = loss["standard"][width][rate]  # the same run
            else:
                by_rate[rate] = _trained(sizes, width, rate, base if rule == "base_width" else None)
            advance(width**2, note=f"width {width}, learning rate {rate:.4f}")
    best = {rule: {width: min(of, key=of.__getitem__) for width, of in loss[rule].items()} for rule in RULES}
    optimum = {rule: {width: _lowest(of) for width, of in loss[rule].items()} for rule in RULES}
    shown = {
        rule: {width: {rate: value if isfinite(value) else None for rate, value in of.items()} for width, of in by.items()}
        for rule, by in loss.items()
    }  # fmt: skip
    widest = sizes.widths[-1]
    return {
        "settings": asdict(sizes), "loss": shown, "best": best, "optimum": optimum,
        "moved": {rule: 2 ** abs(log2(optimum[rule][widest] / optimum[rule][base])) for rule in RULES},
        "at_base_rate": {rule: shown[rule][widest][best[rule][base]] for rule in RULES},
        "seconds": perf_counter() - started,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Losses by width (rows) and learning rate (columns) for both rules; the best of a row is starred."""
    sizes = results["settings"]
    lines = [
        f"Held-out loss in nats a byte after {sizes['steps']} steps of {sizes['sequences'] * sizes['length']:,} bytes; "
        f"{sizes['layers']} layers, heads of {sizes['head_dim']}; * the best of its row"
    ]
    base_width = f"train.optimizer.base_width = {sizes['widths'][0]}"
    titles = {"standard": "One learning rate for every width", "base_width": base_width}
    for rule, title in titles.items():
        rows = []
        for width, of in results["loss"][rule].items():
            best = results["best"][rule][width]
            rows.append([str(width), *(_cell(value) + ("*" if rate == best else " ") for rate, value in of.items())])
        lines += ["", title, *text_table(["width", *(f"{rate:.5f} " for rate in sizes["rates"])], rows, "r")]
    base, widest = sizes["widths"][0], sizes["widths"][-1]
    lines.append("")
    for rule, title in titles.items():
        optimum = results["optimum"][rule]
        lines.append(
            f"{title}: from width {base} to {widest} the best rate goes from {optimum[base]:.4f} to {optimum[widest]:.4f}, a "
            f"factor of {results['moved'][rule]:.2g}; at the rate that is best at {base}, width {widest} has "
            f"{_cell(results['at_base_rate'][rule])}"
        )
    return "\n".join(lines)


def shows(results: dict[str, Any]) -> list[str]:
    (base, *_, widest), moved, at_base = results["settings"]["widths"], results["moved"], results["at_base_rate"]
    holds = abs(log2(moved["base_width"])) < abs(log2(moved["standard"]))
    factors = [f"{rule} by a factor of {moved[rule]:.2g}" for rule in RULES]
    return [
        f"From width {base} to {widest} the best rate moves: {', '.join(factors)}.",
        f"At the rate that is best at {base}, width {widest} has {_cell(at_base['standard'])} nats without base_width and "
        f"{_cell(at_base['base_width'])} with it.",
        "As expected, the rate transfers better with it." if holds else "The rate does not transfer better with it here.",
    ]  # fmt: skip


def plot(results: dict[str, Any]) -> str:
    """Loss over the learning rate by width and rule, as SVG."""
    curves = {
        f"{rule} {width}": ([rate for rate in of if of[rate] is not None], [loss for loss in of.values() if loss is not None])
        for rule, by_width in results["loss"].items() for width, of in by_width.items()
    }  # fmt: skip
    return line_chart("Held-out loss", curves, "learning rate", "nats a byte", is_log=True, marks=5)


def _cell(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.3f}"


def _lowest(by_rate: dict[float, float]) -> float:
    """The rate at the bottom of the parabola, over the logarithm of the rate, through the lowest point and its neighbours.

    The lowest point itself where it is the first or the last, or a neighbour diverged.
    """
    rates, losses = list(by_rate), list(by_rate.values())
    place = losses.index(min(losses))
    if place in (0, len(rates) - 1) or not all(map(isfinite, losses[place - 1 : place + 2])):
        return rates[place]
    before, lowest, after = losses[place - 1 : place + 2]
    bend = before - 2 * lowest + after
    aside = 0.5 * (before - after) / bend if bend > 0 else 0.0
    return float(rates[place] * (rates[place + 1] / rates[place]) ** aside)


def _trained(sizes: Grid, width: int, rate: float, base_width: int | None) -> float:
    """Held-out loss of one model after its steps; infinite when it diverged."""
    recipe = text.study_recipe("study mup", {
        "tokens.sequence_length": sizes.length, "model.layers": sizes.layers, "model.width": width,
        "model.heads": width // sizes.head_dim, "model.head_dim": sizes.head_dim, "model.mlp_width": 3 * width,
        "train.steps": sizes.steps, "train.global_batch_tokens": sizes.sequences * sizes.length,
        "train.micro_batch": sizes.sequences, "train.compile": "off", "train.optimizer.learning_rate": rate,
        "train.schedule.kind": "linear", "train.schedule.warmup_steps": sizes.steps // 10, "train.schedule.final_share": 0.0,
        **({} if base_width is None else {"train.optimizer.base_width": base_width}),
    })  # fmt: skip
    trainer = build(recipe)
    row = fit(trainer, lambda step: text.batch(step, sizes.sequences, sizes.length, sizes.max_bytes))
    if row["steps"] < sizes.steps:
        return inf
    return scored(trainer, text.held_out(sizes.held_out, sizes.length, sizes.max_bytes)).loss
