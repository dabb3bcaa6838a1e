"""Reads what lies in a run folder into plain values.

Every file is optional, because a run is reported at any stage; what is there but damaged becomes a note on
the page rather than an error, because a report is wanted most when something went wrong.
"""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bessemer.errors import BessemerError, InputError
from bessemer.run import RunFolder, read_json, read_json_lines

Column = NDArray[np.float64]

TRAIN = (
    "tokens",
    "loss",
    "accuracy",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "mfu",
    "data_wait",
    "step_seconds",
    "memory_bytes",
)
INSIDE = ("activation_rms", "activation_max", "attention_logit_max", "grad_norm", "update_ratio")
VALIDATION = ("tokens", "loss", "bits_per_byte", "accuracy", "seconds")


@dataclass(frozen=True)
class Curves:
    """Columns over the steps of one kind of metrics line; NaN where a line lacks the value."""

    step: Column
    columns: dict[str, Column] = field(default_factory=dict)
    by_source: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> Column | None:
        """A column, or None when no line has a finite value of it."""
        values = self.columns.get(name)
        return values if values is not None and bool(np.isfinite(values).any()) else None

    def last(self, name: str) -> float | None:
        """The last finite value of a column."""
        values = self.column(name)
        return None if values is None else float(values[np.isfinite(values)][-1])


@dataclass(frozen=True)
class RunData:
    """What one run folder holds. Empty values stand for files that are not there."""

    name: str
    recipe: dict[str, Any]
    recipe_text: str
    environment: dict[str, Any]
    statistics: dict[str, Any]
    manifest: dict[str, Any]
    plan: dict[str, Any]
    train: Curves
    validation: Curves
    mixture: dict[str, Any]
    incidents: list[dict[str, Any]]
    evaluation: dict[str, Any]
    export: dict[str, Any]
    stages: list[dict[str, Any]]
    notes: list[str]
    inside: dict[str, Curves] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> str:
        """What the run predicts: causal, masked or classify."""
        return text(table(self.recipe.get("train")).get("objective")) or "causal"

    @property
    def loss_unit(self) -> str:
        """What the loss is counted by."""
        return {"masked": "nats per hidden token", "classify": "nats per text"}.get(self.objective, "nats per token")

    @property
    def source_names(self) -> list[str]:
        """Names of the sources, first as in the recipe, then as in the data: the order of their colours."""
        names = [text(source.get("name")) for source in tables(table(self.recipe.get("corpus")).get("sources"))]
        names += [text(source.get("source")) for source in tables(self.statistics.get("sources"))]
        names += [*table(self.manifest.get("sources")), *table(self.mixture.get("sources"))]
        names += [*self.train.by_source, *self.validation.by_source]
        return list(dict.fromkeys(names))


def read(run: RunFolder) -> RunData:
    """Everything the report shows. Raises InputError when the folder holds nothing of a run."""
    if not run.path.is_dir():
        raise InputError(f"{run.path}: no such run folder; `bessemer run RECIPE` makes one")
    notes: list[str] = []

    def json_file(path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        try:
            return table(read_json(path))
        except BessemerError:
            notes.append(f"{path.relative_to(run.path)} is damaged and was left out.")
            return {}

    recipe_text = run.recipe.read_text(encoding="utf-8", errors="replace") if run.recipe.exists() else ""
    try:
        recipe = tomllib.loads(recipe_text)
    except tomllib.TOMLDecodeError:
        notes.append("recipe.toml is damaged; it is shown as it stands.")
        recipe = {}
    train, validation, inside, sent = _curves(run.metrics, notes)
    stages = json_file(run.path / "stages.json")
    data = RunData(
        name=text(table(recipe.get("run")).get("name")) or run.path.resolve().name,
        recipe=recipe,
        recipe_text=recipe_text,
        environment=json_file(run.environment),
        statistics=json_file(run.corpus / "statistics.json"),
        quality=json_file(run.corpus / "quality.json"),
        manifest=json_file(run.tokens / "manifest.json"),
        plan=json_file(run.plan),
        train=train,
        validation=validation,
        inside=inside,
        sent=sent,
        mixture=json_file(run.path / "mixture.json"),
        incidents=tables(read_json_lines(run.incidents)),
        evaluation=json_file(run.evaluation),
        export=json_file(run.export / "bessemer.json"),
        stages=tables(stages.get("stages")),
        notes=notes,
    )
    parts = (
        data.recipe_text,
        data.environment,
        data.statistics,
        data.manifest,
        data.plan,
        len(train),
        len(validation),
    )
    if not any((*parts, data.mixture, data.incidents, data.evaluation, data.export, data.stages, notes)):
        raise InputError(
            f"{run.path}: nothing of a run lies here, so there is nothing to report; `bessemer run RECIPE` starts one"
        )
    return data


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def table(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[dict[str, Any]]:
    """The JSON objects in a list; nothing for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """A string, or the empty one."""
    return value if isinstance(value, str) else ""


def _curves(path: Path, notes: list[str]) -> tuple[Curves, Curves, dict[str, Curves], dict[str, float]]:
    """Curves of training, of validation and of what was watched inside the model, those by block or group of weights
    in the place of sources; and the bytes that the processes sent each other in a step, by kind, at the median. Read line by
    line: as objects, a long run would not fit in memory."""
    train, validation, sent = _Columns(TRAIN), _Columns(VALIDATION), _Columns(())
    inside = {name: _Columns(()) for name in INSIDE}
    damaged = 0
    for row in _lines(path):
        if row is None or number(row.get("step")) is None:
            damaged += 1
        elif row.get("kind") == "train":
            train.add(row, table(row.get("loss_by_source")))
            if kinds := table(row.get("communicated_bytes")):
                sent.add(row, kinds)
        elif row.get("kind") == "validation":
            validation.add(row, table(row.get("bits_per_byte_by_source") or row.get("accuracy_by_source")))
        elif row.get("kind") == "inside":
            for name, columns in inside.items():
                columns.add(row, table(row.get(name)))
    if damaged:
        notes.append(f"{damaged} damaged line{'s' if damaged > 1 else ''} of metrics.jsonl left out.")
    in_a_step = {kind: float(np.nanmedian(values)) for kind, values in sent.finish().by_source.items()}
    return train.finish(), validation.finish(), {name: columns.finish() for name, columns in inside.items()}, in_a_step


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line as an object; None for one that is damaged."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield row if isinstance(row, dict) else None


class _Columns:
    """Collects rows into columns of doubles."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.step = array("d")
        self.columns = {name: array("d") for name in names}
        self.by_source: dict[str, array[float]] = {}

    def add(self, row: dict[str, Any], by_source: dict[str, Any]) -> None:
        for name in by_source:
            if name not in self.by_source:
                self.by_source[name] = array("d", [math.nan]) * len(self.step)
        for name, values in self.by_source.items():
            values.append(_or_nan(by_source.get(name)))
        for name, values in self.columns.items():
            values.append(_or_nan(row.get(name)))
        self.step.append(float(row["step"]))

    def finish(self) -> Curves:
        """Ordered by step. A step trained twice, as after a return to a checkpoint, counts as it was last."""
        step = np.array(self.step)
        newest_first = step[::-1]
        _, index = np.unique(newest_first, return_index=True)
        keep = len(step) - 1 - index
        return Curves(
            step[keep],
            {name: np.array(values)[keep] for name, values in self.columns.items()},
            {name: np.array(values)[keep] for name, values in self.by_source.items()},
        )


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None else found
