"""Experiments that teach and prove, run by `bessemer study NAME`.

A study is a module of this folder, or a `Variation` (base.py) in one. It has `expected`, a sentence with its source;
`run() -> dict`, plain values that `--json` prints; and of these values `table(results) -> str`, `shows(results) -> list[str]`,
what they show in three sentences, and `plot(results) -> str`, an SVG. A long one takes `short` and `folder`: a small part of it,
and where what is done is kept, or what is looked at. Sentences in `missed` say what it was to prove and did not.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from bessemer.errors import InputError


@dataclass(frozen=True)
class Study:
    """module: its file in this folder, and behind a colon its name there; what: the question it answers; long: it takes `short`
    and `folder`."""

    module: str
    what: str
    long: bool = False


STUDIES = {
    "batch-size": Study("variations:batch_size", "What does a batch of 32, 256 or 2048 sequences make of the same text?"),
    "rate-scaling": Study("variations:rate_scaling",
                          "How should the learning rate follow the batch: linearly, by its root, not at all?"),
    "warmup": Study("variations:warmup", "What is warmup good for, at a usual learning rate and at a high one?"),
    "clipping": Study("variations:clipping", "At which learning rate does training break, with clipping and without?"),
    "accumulation": Study("variations:accumulation",
                          "Is one pass over 128 sequences the same as eight over 16, and what does each cost?"),
    "recompute": Study("variations:recompute", "What does recompute save, what does it cost, and does it change a bit?"),
    "resume": Study("variations:resume",
                    "Is a resumed training the one that was never stopped, and what if a part of its state is lost?"),
    "packing": Study("data:packing", "What do packed sequences gain over padded ones?"),
    "duplicates": Study("data:duplicates", "What does a model memorise of text that is repeated?"),
    "quality": Study("data:quality", "Is less text better than more text that is partly bad?"),
    "mixture": Study("data:mixture", "How do shares of two sources trade one's loss for the other's?"),
    "zero": Study("processes:zero", "What does each ZeRO stage save on a rank, and what does it cost?"),
    "efficiency": Study("processes:efficiency", "How much faster are two processes than one, and what does Amdahl's law say?"),
    "loss-surface": Study("variations:loss_surface", "What does the loss look like around trained weights?"),
    "bidirectional-vs-causal": Study("bidirectional_vs_causal",
                                     "What can a transformer do that sees both sides, and what one that sees the left?"),
    "frozen-vs-full": Study("frozen_vs_full",
                            "Is a classifier better on a frozen encoder, on one trained along, or from scratch?"),
    "quality-classifier": Study("quality_classifier",
                                "How does a classifier of five features learn to tell good text from bad?"),
    "pipeline": Study("pipeline", "What does the bubble of a pipeline cost, and what do other schedules pay to shrink it?"),
    "layouts": Study("layouts", "However a model is split over processes, does it train alike?", long=True),
    "detection": Study("detection", "Which rule detects a bad run, how soon, and with how many false alarms?", long=True),
    "precision": Study("precision", "Where does fp16 fail and bf16 not, in numbers?"),
    "mup": Study("mup", "Does a learning rate found at a small width hold at a larger one, with base_width and without?"),
}  # fmt: skip


def load(name: str) -> Any:
    """What a study's functions are in. Raises InputError for a name that is none."""
    if name not in STUDIES:
        raise InputError(f"{name}: no study of that name; there are: {', '.join(STUDIES)}")
    module, _, inside = STUDIES[name].module.partition(":")
    found = import_module(f"bessemer.studies.{module}")
    return getattr(found, inside) if inside else found


def run(name: str, short: bool = False, folder: Path | None = None) -> tuple[dict[str, Any], str]:
    """Do a study. Returns its values, with what it shows, and its table; raises InputError for a name that is none, or options
    it lacks."""
    subject, study = load(name), STUDIES[name]
    if (short or folder is not None) and not study.long:
        raise InputError(f"study {name}: it has neither --short nor --folder; leave them out")
    results: dict[str, Any] = subject.run(short, folder) if study.long else subject.run()
    explained = {"question": study.what, "expected": subject.expected, "shows": subject.shows(results)}
    return {**results, **explained}, str(subject.table(results))
