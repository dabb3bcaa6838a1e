"""Experiments that teach and prove: one file each, run by `bessemer study NAME`.

A study's module has `run() -> dict`, plain values that `--json` prints, and `table(results) -> str`, the same for a person. A
long one takes `short` and `folder`: a small part of it, and where what is done is kept, or what is looked at. Sentences in
`missed` say what it was to prove and did not.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bessemer.errors import InputError


@dataclass(frozen=True)
class Study:
    """module: its file in this folder; what: the question it answers, in a sentence; long: it takes `short` and `folder`."""

    module: str
    what: str
    long: bool = False


STUDIES = {
    "bidirectional-vs-causal": Study(
        "bidirectional_vs_causal", "What can a transformer do that sees both sides, and what one that sees the left?"
    ),
    "frozen-vs-full": Study(
        "frozen_vs_full", "Is a classifier better on a frozen encoder, on one trained along, or from scratch?"
    ),
    "quality-classifier": Study(
        "quality_classifier", "How does a classifier of five features learn to tell good text from bad?"
    ),
    "pipeline": Study(
        "pipeline", "What does the bubble of a pipeline cost, and what do other schedules pay to shrink it?"
    ),
    "layouts": Study("layouts", "However a model is split over processes, does it train alike?", long=True),
    "detection": Study(
        "detection", "Which rule detects a bad run, how soon, and with how many false alarms?", long=True
    ),
    "precision": Study("precision", "Where does fp16 fail and bf16 not, in numbers?"),
    "mup": Study(
        "mup", "Does a learning rate found at a small width hold at a larger one, with base_width and without?"
    ),
}


def run(name: str, short: bool = False, folder: Path | None = None) -> tuple[dict[str, Any], str]:
    """Do a study. Returns its values and its table; raises InputError for a name that is none, or options it lacks."""
    if name not in STUDIES:
        raise InputError(f"{name}: no study of that name; there are: {', '.join(STUDIES)}")
    study = STUDIES[name]
    if (short or folder is not None) and not study.long:
        raise InputError(f"study {name}: it has neither --short nor --folder; leave them out")
    module = import_module(f"bessemer.studies.{study.module}")
    results: dict[str, Any] = module.run(short, folder) if study.long else module.run()
    return results, str(module.table(results))
