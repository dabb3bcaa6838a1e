"""An encoder pretrained by masking, then a classifier on it: the encoder frozen, trained along, or never pretrained.

The task: which of six packages of Python's standard library 64 tokens of source come from. Accuracy is on files that
neither the pretraining nor the classifier saw.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from bessemer.report.static import bar_chart
from bessemer.studies.library import (
    PACKAGES,
    ClassifierStudy,
    Snippets,
    classifier,
    pretrained,
    tokens_of,
    train_classifier,
)
from bessemer.terminal import amount, size, text_table
from bessemer.train import device as devices
from bessemer.train.trainer import Trainer
from bessemer.train.validation import validate

expected = (
    "Trained along, an encoder is a little better than frozen, which is the cheapest (Devlin et al. 2019, section 5.3); from "
    "scratch is worse where labels are few."
)
FAMILY = "modernbert"
WAYS = {"frozen": "encoder frozen", "full": "encoder trained along", "scratch": "from scratch"}


def run(settings: ClassifierStudy | None = None) -> dict[str, Any]:
    """Pretrain, then train the three classifiers for the same number of steps on the same snippets.

    Returns `settings`, `pretraining` (tokens, seconds, accuracy on hidden tokens) and by way: accuracy, trainable
    parameters, seconds, and bytes of memory at the peak above what was held before.
    """
    sizes = settings or ClassifierStudy()
    with tempfile.TemporaryDirectory() as folder:
        store = tokens_of(sizes, Path(folder))
        started = perf_counter()
        encoder = pretrained(sizes, store, "masked", FAMILY)
        seconds = perf_counter() - started
        hidden = validate(encoder, encoder.task.held_out(sizes.recipe("masked", FAMILY), store, 100_000))
        train = Snippets.of(store, "train", sizes.snippet, sizes.train_snippets, sizes.seed)
        test = Snippets.of(store, "heldout", sizes.snippet, sizes.test_snippets, sizes.seed)
        tokens = sizes.steps * sizes.sequences * sizes.length
        pretraining = {"tokens": tokens, "seconds": seconds, "hidden_accuracy": hidden.accuracy}
        results = {"settings": asdict(sizes), "pretraining": pretraining, "chance": 1 / len(PACKAGES)}
        for way, what in WAYS.items():
            body = encoder if way != "scratch" else None
            step = classifier(sizes, store, body, FAMILY, causal=False, frozen=way == "frozen")
            results[way] = _trained(step, train, test, sizes, what)
    return results


def table(result: dict[str, Any]) -> str:
    settings, before = result["settings"], result["pretraining"]
    lines = [
        f"Which of {len(PACKAGES)} packages do {settings['snippet']} tokens of Python come from? Held-out files; chance: "
        f"{result['chance']:.1%}.",
        f"The encoder was pretrained on {amount(before['tokens'])} tokens in {before['seconds']:.0f} s and guesses "
        f"{before['hidden_accuracy']:.1%} of hidden tokens. Each classifier: {settings['class_steps']} steps of "
        f"{settings['class_batch']} snippets.",
        "",
    ]
    rows = [
        (name, f"{row['accuracy']:.1%}", amount(row["trained_parameters"]), f"{row['seconds']:.1f}",
         size(row["memory_bytes"]))
        for name, row in ((name, result[way]) for way, name in WAYS.items())
    ]  # fmt: skip
    lines += text_table(("", "accuracy", "trained", "seconds", "memory"), rows)
    lines += ["", "trained: parameters with a gradient; memory: the peak above what was held before the training."]
    return "\n".join(lines)


def shows(results: dict[str, Any]) -> list[str]:
    order = sorted(WAYS, key=lambda way: -float(results[way]["accuracy"]))
    frozen, full = results["frozen"], results["full"]
    accuracies = [f"{WAYS[way]} {results[way]['accuracy']:.1%}" for way in order]
    gain = full["accuracy"] - results["scratch"]["accuracy"]
    return [
        f"From the best: {', '.join(accuracies)}; chance is {results['chance']:.1%}.",
        f"Frozen, {frozen['trained_parameters']:,} parameters are trained in {frozen['seconds']:.0f} s; with the encoder "
        f"{full['trained_parameters']:,} in {full['seconds']:.0f} s.",
        f"Pretraining is worth {100 * gain:+.1f} points to the classifier that is trained whole.",
    ]


def plot(results: dict[str, Any]) -> str:
    bars = [(WAYS[way], results[way]["accuracy"], f"{results[way]['accuracy']:.1%}") for way in WAYS]
    return bar_chart("Accuracy on held-out files", bars)


def _trained(trainer: Trainer, train: Snippets, test: Snippets, sizes: ClassifierStudy, what: str) -> dict[str, Any]:
    devices.release_unused(trainer.device)
    devices.reset_peak_resident()
    held, started = devices.resident_bytes(), perf_counter()
    loss = train_classifier(sizes, trainer, train, what)
    seconds, peak = perf_counter() - started, devices.peak_resident_bytes()
    scored = validate(trainer, [test.held_out()])
    parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    return {"accuracy": scored.accuracy, "loss": scored.loss, "train_loss": loss, "trained_parameters": parameters,
            "seconds": seconds, "memory_bytes": max(peak - held, 0)}  # fmt: skip
