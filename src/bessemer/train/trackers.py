"""Experiment trackers that a run reports to, besides TensorBoard: W&B, trackio, MLflow, and JSON lines for log collectors.

A tracker that fails never stops the training: it is reported once, and left.
"""

from __future__ import annotations

import importlib
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json_again, write_json
from bessemer.terminal import FOR_JSON, QUIET, warn

STEP = "step"  # of the training, as a metric that others are plotted over: W&B's own step never goes back, as a rollback does


class Tracker(Protocol):
    """Takes the lines of metrics.jsonl. A resumed run continues in the same place."""

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        """Take in a line: its numbers by tag (kind/name), and the line itself."""

    def close(self) -> None:
        """The training has ended."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise InputError for a tracker that is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            package = {"mlflow": "mlflow or mlflow-skinny"}.get(name, name)
            raise InputError(
                f"report.trackers: {name} cannot be imported ({error}); install {package}, or leave it out"
            ) from None


def open_trackers(recipe: Recipe, run: RunFolder) -> list[Tracker]:
    """The trackers of a recipe; one that does not start is reported and left out."""
    openers: dict[str, Callable[[Recipe, RunFolder, dict[str, str]], Tracker]] = {
        "wandb": _Wandb, "trackio": _Trackio, "mlflow": _Mlflow,
    }  # fmt: skip
    found: list[Tracker] = []
    if recipe.report.stdout and os.environ.get(QUIET) == FOR_JSON:
        warn("report.stdout: left out, since --json prints one value alone; its lines are in metrics.jsonl")
    elif recipe.report.stdout:
        found.append(_JsonLines())
    place = run.path / "trackers.json"
    known: dict[str, str] = read_json_again(place) or {}
    for name in recipe.report.trackers:
        try:
            found.append(_Guarded(name, openers[name](recipe, run, known)))
        except Exception as error:  # of its own code, the network or its service
            warn(f"report.trackers: {name} did not start ({_first_line(error)}); the training goes on without it")
    if recipe.report.trackers:
        write_json(place, known)
    return found


class _Guarded:
    """A tracker that is left when it fails."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._has_failed = False

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        self._do(lambda: self._tracker.log(kind, step, scalars, row))

    def close(self) -> None:
        self._do(self._tracker.close)

    def _do(self, call: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:
            self._has_failed = True
            warn(f"report.trackers: {self._name} failed ({_first_line(error)}); the training goes on without it")


class _JsonLines:
    """Lines on standard output, each with the run's line of metrics.jsonl."""

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        from bessemer.logfile import json_line

        sys.stdout.write(json_line(row).decode())
        sys.stdout.flush()

    def close(self) -> None:
        pass


class _Wandb:
    """Weights & Biases. Where it reports to is its own environment's (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY)."""

    def __init__(self, recipe: Recipe, run: RunFolder, known: dict[str, str]) -> None:
        import wandb

        identity = known.setdefault("wandb", uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "bessemer"), name=recipe.run.name, id=identity, resume="allow",
            dir=str(run.path), config=recipe.model_dump(mode="json", by_alias=True),
        )  # fmt: skip
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        self._run.log({STEP: step, **scalars})

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """trackio, whose files lie where TRACKIO_DIR says."""

    def __init__(self, recipe: Recipe, run: RunFolder, known: dict[str, str]) -> None:
        import trackio

        self._trackio = trackio
        config = recipe.model_dump(mode="json", by_alias=True)
        project = os.environ.get("TRACKIO_PROJECT", "bessemer")
        trackio.init(project=project, name=recipe.run.name, config=config, resume="allow")

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        self._trackio.finish()


class _Mlflow:
    """MLflow: to MLFLOW_TRACKING_URI, else into mlflow.db of the run folder."""

    def __init__(self, recipe: Recipe, run: RunFolder, known: dict[str, str]) -> None:
        import mlflow

        self._mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{run.path.resolve() / 'mlflow.db'}")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "bessemer"))
        self._run = mlflow.start_run(run_id=known.get("mlflow"), run_name=recipe.run.name)
        if "mlflow" not in known:
            known["mlflow"] = self._run.info.run_id
            mlflow.set_tag("bessemer.run_folder", str(Path(run.path).resolve()))
            mlflow.log_dict(recipe.model_dump(mode="json", by_alias=True), "recipe.json")

    def log(self, kind: str, step: int, scalars: dict[str, float], row: dict[str, Any]) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
