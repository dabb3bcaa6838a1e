"""The textbook exercise: a quality classifier of five features, learnt epoch by epoch from synthetic texts.

Texts are made of good lines (sentences) and bad ones (keyword lists, shouting, leftovers of markup). In a high text a
good line is likelier and in a low text a bad one, by chance: so some texts come out on the wrong side, and nobody could
tell them all apart. The features are those of the corpus's
own classifier (`bessemer.corpus.quality`); its L-BFGS gives the optimum that the epochs approach.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from bessemer.corpus.quality.classify import minimise
from bessemer.corpus.quality.features import STATISTICS, extract, standardised
from bessemer.corpus.quality.scores import roc_auc
from bessemer.studies.base import line_chart
from bessemer.terminal import text_table

Vector = npt.NDArray[np.float64]

FEATURES = ("mean_word_length", "letter_share", "stop_word_share", "unique_word_share", "closed_line_share")

expected = "Logistic regression has one optimum, so the epochs approach the loss that L-BFGS finds."
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SNIPPETS: tuple[str, ...] = tuple(TEXTS["snippets"])


@dataclass(frozen=True)
class ClassifierSizes:
    """Sizes of the exercise."""

    samples: int = 500
    held_out: int = 100
    epochs: int = 30
    batch: int = 20
    rate: float = 0.1
    lines: int = 12
    gap: float = 0.2
    """The chance of a good line is uniform: in high texts above 0.5 + gap / 2, in low ones below 0.5 - gap / 2."""
    seed: int = 0


def run(settings: ClassifierSizes | None = None) -> dict[str, Any]:
    """Make the texts, train, and score the snippets.

    Returns `settings`; `epochs`, after each the loss and the accuracy of training and held-out texts; `held_out`,
    accuracy and ROC AUC in the end; `optimum`, the training loss that no epoch can go below and the distance to its
    weights; `weights` by feature, for standardised values; `snippets` with their scores.
    """
    sizes, started = settings or ClassifierSizes(), perf_counter()
    draw = np.random.default_rng(sizes.seed)
    high = np.arange(sizes.samples) % 2 == 0
    aside = draw.uniform(sizes.gap / 2, 0.5, sizes.samples)
    goodness = np.where(high, 0.5 + aside, 0.5 - aside)
    raw = _features([_text(draw, share, sizes.lines) for share in goodness])
    held = np.arange(sizes.samples) >= sizes.samples - sizes.held_out
    centre, spread = raw[~held].mean(axis=0), raw[~held].std(axis=0)
    values = _with_bias(standardised(raw, centre, spread))
    train, test = (values[~held], high[~held]), (values[held], high[held])

    weights = np.zeros(values.shape[1])
    epochs = []
    for epoch in range(1, sizes.epochs + 1):
        order = draw.permutation(len(train[0]))
        for first in range(0, len(order), sizes.batch):
            rows = order[first : first + sizes.batch]
            weights -= sizes.rate * loss_and_gradient(weights, train[0][rows], train[1][rows])[1]
        epochs.append({
            "epoch": epoch, "loss": loss_and_gradient(weights, *train)[0], "accuracy": _accuracy(weights, *train),
            "held_out_loss": loss_and_gradient(weights, *test)[0], "held_out_accuracy": _accuracy(weights, *test),
        })  # fmt: skip
    best = minimise(lambda at: loss_and_gradient(at, *train), np.zeros(len(weights)), 200, 1e-9)
    snippets = _with_bias(standardised(_features(list(SNIPPETS)), centre, spread))
    return {
        "settings": asdict(sizes),
        "epochs": epochs,
        "held_out": {"texts": int(held.sum()), "accuracy": _accuracy(weights, *test),
                     "roc_auc": roc_auc(test[0] @ weights, test[1])},
        "optimum": {"loss": best.fun, "distance": float(np.linalg.norm(best.x - weights))},
        "weights": {name: float(weight) for name, weight in zip(FEATURES, weights[1:], strict=True)},
        "bias": float(weights[0]),
        "snippets": [
            {"text": text, "score": float(score)} for text, score in zip(SNIPPETS, expit(snippets @ weights), strict=True)
        ],
        "seconds": perf_counter() - started,
    }  # fmt: skip


def table(results: dict[str, Any]) -> str:
    """Loss and accuracy by epoch, the weights, and the snippets with their scores."""
    sizes, held = results["settings"], results["held_out"]
    lines = [
        f"{sizes['samples']} synthetic texts of {sizes['lines']} lines, {len(FEATURES)} features, logistic regression, "
        f"{sizes['epochs']} epochs in batches of {sizes['batch']}; {held['texts']} texts held out",
        "",
    ]
    last = len(results["epochs"])
    epochs = [
        (str(row["epoch"]), f"{row['loss']:.3f}", f"{row['accuracy']:.1%}", f"{row['held_out_loss']:.3f}",
         f"{row['held_out_accuracy']:.1%}")
        for row in results["epochs"] if row["epoch"] in (1, 2, 3, last) or row["epoch"] % 5 == 0
    ]  # fmt: skip
    lines += text_table(("epoch", "loss", "accuracy", "held-out loss", "accuracy"), epochs, "r")
    lines += [
        "",
        f"Held out: {held['accuracy']:.1%} right, ROC AUC {held['roc_auc']:.3f}. The lowest training loss there is, by "
        f"L-BFGS: {results['optimum']['loss']:.3f}",
        "",
        "feature             weight, for one standard deviation",
    ]
    lines += [f"{name:<18}  {weight:+.2f}" for name, weight in results["weights"].items()]
    lines += ["", "score  snippet"]
    lines += [f"{row['score']:.3f}  {row['text'][:90]}" for row in results["snippets"]]
    return "\n".join(lines)


def shows(results: dict[str, Any]) -> list[str]:
    epochs, held, weights = results["epochs"], results["held_out"], results["weights"]
    strongest = max(weights, key=lambda name: abs(weights[name]))
    return [
        f"From {epochs[0]['loss']:.3f} after the first epoch the loss falls to {epochs[-1]['loss']:.3f}; the optimum is "
        f"{results['optimum']['loss']:.3f}.",
        f"{held['accuracy']:.1%} of {held['texts']} held-out texts are classified rightly, ROC AUC {held['roc_auc']:.3f}.",
        f"The strongest feature is {strongest.replace('_', ' ')}, {weights[strongest]:+.2f} for a standard deviation.",
    ]


def plot(results: dict[str, Any]) -> str:
    rows, names = results["epochs"], {"training": "loss", "held out": "held_out_loss"}
    curves = {title: ([row["epoch"] for row in rows], [row[key] for row in rows]) for title, key in names.items()}
    return line_chart("Loss by epoch", curves, "epoch", "nats a text")


def loss_and_gradient(weights: Vector, values: Vector, high: npt.NDArray[np.bool_]) -> tuple[float, Vector]:
    """Mean logistic loss in nats over the rows of `values` (texts, 1 + features), and its gradient."""
    logits = values @ weights
    loss = float((np.logaddexp(0.0, logits) - high * logits).mean())
    return loss, values.T @ (expit(logits) - high) / len(high)


def _accuracy(weights: Vector, values: Vector, high: npt.NDArray[np.bool_]) -> float:
    return float(((values @ weights > 0) == high).mean())


def _features(texts: list[str]) -> Vector:
    """FEATURES of each text, as the corpus measures them."""
    names = list(STATISTICS)
    every = extract(texts, read_bytes=20_000, hash_bits=16).statistics
    return every[:, [names.index(name) for name in FEATURES]]


def _with_bias(values: Vector) -> Vector:
    return np.concatenate([np.ones((len(values), 1)), values], axis=1)


def _text(draw: np.random.Generator, goodness: float, lines: int) -> str:
    """Lines, each good with this chance."""
    return "\n".join(_good(draw) if draw.random() < goodness else _bad(draw) for _ in range(lines))


def _good(draw: np.random.Generator) -> str:
    words = [str(draw.choice(TEXTS[part])) for part in ("subjects", "verbs", "objects")]
    ending = f", {draw.choice(TEXTS['clauses'])}" if draw.random() < 0.5 else ""
    return " ".join(words) + ending + "."


def _bad(draw: np.random.Generator) -> str:
    words = [str(word) for word in draw.choice(TEXTS["keywords"], draw.integers(3, 12))]
    kind = draw.random()
    if kind < 0.3:
        return " ".join(words).upper() + "!!!"
    if kind < 0.6:
        return f" {draw.choice(TEXTS['markup'])} ".join(words)
    return " ".join(words)
