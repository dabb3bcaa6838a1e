"""What a study of a few dozen lines stands on: a small byte model, variants of its recipe, what is measured and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite
from time import perf_counter, process_time
from typing import Any

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model
from bessemer.parallel.dtensors import tensors_digest
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Recipe
from bessemer.report.parts import axis, figure, known, series_ink, short_time, trace
from bessemer.report.static import bar_chart, svg
from bessemer.studies import text
from bessemer.terminal import progress, size, text_table
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.trainer import Trainer
from bessemer.train.validation import Validation, validate

LENGTH = 64
MAX_BYTES = 2_000_000
BASE = {
    "tokens.sequence_length": LENGTH, "model.layers": 2, "model.width": 64, "model.heads": 2, "train.device": "cpu",
    "train.precision": "fp32", "train.compile": "off", "train.global_batch_tokens": 16 * LENGTH,
    "train.optimizer.learning_rate": 0.008,
}  # fmt: skip
HELD_OUT = 128  # sequences

# What is measured: its title, and how it is shown.
MEASURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("training loss", "{:.3f}".format),
    "bits_per_byte": ("held-out bits a byte", "{:.3f}".format),
    "steps": ("updates", "{:,}".format),
    "passes": ("forward passes", "{:,}".format),
    "tokens_per_second": ("tokens a CPU second", "{:,.0f}".format),
    "cpu_seconds": ("CPU time", short_time),
    "memory_bytes": ("peak memory", size),
    "max_norm": ("largest gradient norm", "{:.3g}".format),
    "diverged_at": ("diverged at", "{:,}".format),
    "weights": ("weights at the end", str),
    "real_share": ("positions with a target", "{:.1%}".format),
    "text_bytes": ("bytes of text read", "{:,}".format),
    "repeated_bits": ("bits a byte, repeated passages", "{:.2f}".format),
    "unseen_bits": ("unseen passages", "{:.2f}".format),
    "recalled": ("recalled verbatim", "{:.1%}".format),
    "python_bits": ("Python, bits a byte", "{:.3f}".format),
    "prose_bits": ("prose, bits a byte", "{:.3f}".format),
    "weight_bytes": ("weights at rest", size),
    "gradient_bytes": ("gradients", size),
    "moment_bytes": ("optimizer", size),
    "step_seconds": ("fastest step", short_time),
    "efficiency": ("efficiency T1 / (p Tp)", "{:.1%}".format),
    "center": ("loss in the middle", "{:.3f}".format),
    "rim": ("at a distance of 1", "{:.3f}".format),
    "lowest": ("lowest of the grid", "{:.3f}".format),
    "near": ("within 0.5 of the middle", "{:.1%}".format),
    "predicted": ("by Amdahl's law", "{:.1%}".format),
}

Row = dict[str, Any]
Rows = dict[str, Row]
Reader = Callable[[int], Batch]
Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def build(recipe: Recipe, config: ModelConfig | None = None, end_of_text: int = text.END_OF_TEXT) -> Trainer:
    """A new model with its optimizer, by default of bytes."""
    model = build_model(config or model_config(recipe, text.VOCABULARY), recipe.run.seed)
    return Trainer(recipe, model, devices.choose(recipe.train), end_of_text, 1)


def shape(recipe: Recipe) -> tuple[int, int]:
    """Sequences of a batch, and tokens of a sequence."""
    length, tokens = recipe.tokens.sequence_length, recipe.train.global_batch_tokens
    assert tokens is not None, "the recipe is resolved"
    return tokens // length, length


def python_text(recipe: Recipe) -> Reader:
    """The batches of a study that varies no data."""
    return lambda step: text.batch(step, *shape(recipe), MAX_BYTES)


def fit(
    trainer: Trainer, read: Reader, first: int = 0, last: int | None = None,
    advance: Callable[..., None] = lambda number, note: None,
) -> Row:  # fmt: skip
    """Train updates [first, last), by default all. Returns losses (nats a byte), their mean over the last tenth, the largest
    gradient norm, and the step at which it diverged: a loss that is not finite, which ends it, or half as much again as the
    first one."""
    settings, losses, norms = trainer.settings, list[float](), list[float]()
    assert settings.steps is not None, "the recipe is resolved"
    diverged = None
    for step in range(first, settings.steps if last is None else last):
        results = trainer.forward_backward(read(step))
        if not (isfinite(results.loss) and isfinite(results.grad_norm)):
            diverged = diverged or step + 1
            break
        losses.append(results.loss)
        norms.append(results.grad_norm)
        if results.loss > 1.5 * losses[0]:
            diverged = diverged or step + 1
        trainer.update(step, results.grad_norm)
        advance(1, note=f"loss {results.loss:.3f}")
    tail = losses[-max(len(losses) // 10, 1) :]
    return {"losses": losses, "loss": sum(tail) / len(tail) if tail else None, "max_norm": max(norms, default=None),
            "diverged_at": diverged, "steps": len(losses)}  # fmt: skip


def measured(recipe: Recipe, read: Reader | None = None, trainer: Trainer | None = None) -> Row:
    """Train a recipe to its end; what `fit` returns, with time, memory above what the process held, and the weights' digest."""
    trainer = trainer or build(recipe)
    devices.release_unused(trainer.device)
    devices.reset_peak_resident()
    held, started = devices.resident_bytes(), process_time()
    row = fit(trainer, read or python_text(recipe))
    seconds, (sequences, length) = process_time() - started, shape(recipe)
    return {
        **row,
        "passes": row["steps"] * -(-sequences // (recipe.train.micro_batch or sequences)),
        "cpu_seconds": seconds,
        "tokens_per_second": row["steps"] * sequences * length / max(seconds, 1e-9),
        "memory_bytes": max(devices.peak_resident_bytes() - held, 0),
        "weights": tensors_digest(trainer.model.named_parameters(), SINGLE_PROCESS)[:8],
    }


def scored(trainer: Trainer, *parts: HeldOut) -> Validation:
    """Scores on these parts, by default on held-out Python."""
    return validate(trainer, list(parts) or [text.held_out(HELD_OUT, trainer.model.config.sequence_length, MAX_BYTES)])


def trained(recipe: Recipe, read: Reader | None = None) -> Row:
    trainer = build(recipe)
    return {**measured(recipe, read, trainer), "bits_per_byte": scored(trainer).bits_per_byte}


@dataclass(frozen=True)
class Variation:
    """A study that trains one recipe in several variants.

    variants: by name, what is varied: keys of the recipe (with a dot), and arguments of `train`; conclude: sentences that follow
    from the rows; base: on top of BASE; tokens: that each variant is trained on; plot: "losses", or the measure to draw.
    """

    expected: str
    variants: dict[str, dict[str, Any]]
    conclude: Callable[[Rows], list[str]]
    measures: tuple[str, ...] = ("loss", "bits_per_byte")
    base: dict[str, Any] = field(default_factory=dict)
    tokens: int = 400_000
    train: Callable[..., Row] = trained
    plot_of: str = "losses"

    def recipe(self, variant: str) -> Recipe:
        """The resolved recipe of a variant: a given number of tokens, whatever its batch."""
        keys = {key: value for key, value in self.variants[variant].items() if "." in key}
        values = {**BASE, **self.base, **keys}
        batch = values["train.global_batch_tokens"]
        replicas = values.get("parallel.replicate", 1) * values.get("parallel.shard", 1)
        values.setdefault("train.steps", max(self.tokens // batch, 2))
        values.setdefault("train.micro_batch", batch // values["tokens.sequence_length"] // replicas)
        return text.study_recipe("study", values)

    def run(self) -> dict[str, Any]:
        """Train the variants. Returns `settings`, `rows` (measures by variant) and `seconds`."""
        devices.keep_freed_memory()
        started, rows = perf_counter(), Rows()
        with progress("study", len(self.variants), "variants") as advance:
            for name, values in self.variants.items():
                options = {key: value for key, value in values.items() if "." not in key}
                rows[name] = self.train(self.recipe(name), **options)
                advance(1, note=name)
        settings = {"base": {**BASE, **self.base}, "tokens": self.tokens, "variants": self.variants}
        return {"settings": settings, "rows": rows, "seconds": perf_counter() - started}

    def columns(self, results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
        titles = ["", *(MEASURES[name][0] for name in self.measures)]
        rows = results["rows"].items()
        return titles, [[name, *(known(row[key], MEASURES[key][1]) for key in self.measures)] for name, row in rows]

    def table(self, results: dict[str, Any]) -> str:
        return "\n".join(text_table(*self.columns(results)))

    def shows(self, results: dict[str, Any]) -> list[str]:
        return self.conclude(results["rows"])

    def plot(self, results: dict[str, Any]) -> str:
        rows = results["rows"]
        if self.plot_of != "losses":
            title, form = MEASURES[self.plot_of]
            values = {name: row[self.plot_of] for name, row in rows.items()}
            return bar_chart(title, [(name, value, known(value, form)) for name, value in values.items()])
        curves = {}
        for name, row in rows.items():
            tokens = self.recipe(name).train.global_batch_tokens or 1
            curves[name] = [tokens * (n + 1) for n in range(len(row["losses"]))], smoothed(row["losses"])
        return line_chart("Loss while it trains, smoothed", curves, "tokens", "loss, nats a byte")


def smoothed(losses: list[float]) -> list[float]:
    """Exponential moving mean over about a fiftieth of the steps; of few steps the losses as they are."""
    new = 1 / max(len(losses) // 50, 1)
    return list(accumulate(losses, lambda mean, loss: (1 - new) * mean + new * loss))


def loss_chart(title: str, losses: Mapping[str, Sequence[float | None]], top: float = inf) -> str:
    """Losses by step as SVG. losses: by name; those that are missing, or not below `top`, are left out."""
    kept = {name: [(n, y) for n, y in enumerate(of, 1) if y is not None and y < top] for name, of in losses.items()}
    curves = {name: ([n for n, _ in points], [y for _, y in points]) for name, points in kept.items()}
    return line_chart(title, curves, "step", "nats a byte")


def line_chart(title: str, curves: Curves, x: str, y: str, *, is_log: bool = False, marks: int = 0) -> str:
    """Curves as SVG. curves: x and y by name; is_log: of the x axis."""
    traces = [trace(name, *points, series_ink(n), marks=marks) for n, (name, points) in enumerate(curves.items())]
    return svg(figure("chart", title, traces, axis(x, **({"type": "log"} if is_log else {})), y), on_page=True)
