"""Experiments that teach and prove: one file each, run by `bessemer study NAME`.

A study's module has `run() -> dict`, plain values that `--json` prints, and `table(found) -> str`, the same for a person.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bessemer.errors import InputError


@dataclass(frozen=True)
class Study:
    """module: its file in this folder; what: the question it answers, in a sentence."""

    module: str
    what: str


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
    "precision": Study("precision", "Where does fp16 fail and bf16 not, in numbers?"),
    "mup": Study(
        "mup", "Does a learning rate found at a small width hold at a larger one, with base_width and without?"
    ),
}


def run(name: str) -> tuple[dict[str, Any], str]:
    """Do a study. Returns its values and its table; raises InputError for a name that is none."""
    if name not in STUDIES:
        raise InputError(f"{name}: no study of that name; there are: {', '.join(STUDIES)}")
    module = import_module(f"bessemer.studies.{STUDIES[name].module}")
    found: dict[str, Any] = module.run()
    return found, str(module.table(found))
