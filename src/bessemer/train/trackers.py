"""Experiment trackers that a run reports to in addition to TensorBoard: W&B and MLflow.

A tracker that fails never stops the training: its failure is reported once, and it is not used again.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bessemer.common.console import warn
from bessemer.common.errors import InputError, first_line
from bessemer.recipe import Recipe
from bessemer.recipe.secrets import shareable
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_or_none, write_json

# The training step, as the metric that others are plotted over: W&B's own step cannot go back, as a rollback does.
STEP = "step"


@dataclass
class Tracker:
    """A tracker that receives the lines of metrics.jsonl. A resumed run continues in the same tracker run.

    Attributes:
        name: The name of its package.
        write: Receives a step and its numbers by tag (kind/name).
        end: Called when the training has ended.
        has_failed: True after its first failure.
    """

    name: str
    write: Callable[[int, dict[str, float]], object]
    end: Callable[[], object] = lambda: None
    has_failed: bool = False

    def log(self, step: int, scalars: dict[str, float]) -> None:
        self._do(lambda: self.write(step, scalars))

    def close(self) -> None:
        self._do(self.end)

    def _do(self, call: Callable[[], object]) -> None:
        if self.has_failed:
            return
        try:
            call()
        except Exception as error:
            self.has_failed = True
            warn(f"report: {self.name} failed ({first_line(error)}); the training continues without it")


def require_trackers(names: Sequence[str]) -> None:
    """Raise InputError for a tracker that is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InputError(f"report.trackers: {name} cannot be imported ({error}); install it") from None


def open_trackers(recipe: Recipe, run: RunDirectory) -> list[Tracker]:
    """Return the trackers of a recipe. A tracker that does not start is reported and omitted."""
    openers = {"wandb": _wandb, "mlflow": _mlflow}
    trackers: list[Tracker] = []
    path = run.path / "trackers.json"
    known: dict[str, str] = read_json_or_none(path) or {}
    for name in recipe.report.trackers:
        try:
            trackers.append(openers[name](recipe, run, known))
        except Exception as error:  # any error of the tracker's code, the network or the service
            warn(f"report.trackers: {name} did not start ({first_line(error)}); the training continues without it")
    if recipe.report.trackers:
        write_json(path, known)
    return trackers


def _wandb(recipe: Recipe, run: RunDirectory, known: dict[str, str]) -> Tracker:
    """Start or resume a Weights & Biases run, configured by WANDB_MODE, WANDB_PROJECT and WANDB_ENTITY.

    `known` has the id of the run to resume by tracker name; a new id is added to it.
    """
    import wandb

    identity = known.setdefault("wandb", uuid.uuid4().hex[:8])
    logged = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "bessemer"), name=recipe.run.name, id=identity, resume="allow",
        dir=str(run.path), config=shareable(recipe),
    )  # fmt: skip
    logged.define_metric(STEP)
    logged.define_metric("*", step_metric=STEP)
    return Tracker("wandb", lambda step, scalars: logged.log({STEP: step, **scalars}), logged.finish)


def _mlflow(recipe: Recipe, run: RunDirectory, known: dict[str, str]) -> Tracker:
    """Start or resume an MLflow run at MLFLOW_TRACKING_URI, else in mlflow.db of the run directory.

    `known` has the id of the run to resume by tracker name; a new id is added to it.
    """
    import mlflow

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.path.resolve() / 'mlflow.db'}")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "bessemer"))
    started = mlflow.start_run(run_id=known.get("mlflow"), run_name=recipe.run.name)
    if "mlflow" not in known:
        known["mlflow"] = started.info.run_id
        mlflow.set_tag("bessemer.run_folder", str(Path(run.path).resolve()))
        mlflow.log_dict(shareable(recipe), "recipe.json")
    return Tracker("mlflow", lambda step, scalars: mlflow.log_metrics(scalars, step=step), mlflow.end_run)
