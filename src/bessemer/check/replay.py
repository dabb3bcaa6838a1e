"""Replay of a step of a run on one process, from a checkpoint before it, to find what was wrong with it.

| kind | evidence |
|---|---|
| transient | the step does not repeat |
| numerics | it repeats, and in higher precision it is healthy |
| data | it repeats, and is an outlier among the neighbouring batches with the same weights |
| state | it repeats, and those batches are as bad |

A step is bad if the guard recorded an incident, or if its loss and gradient norm deviate too much from those of the steps
before it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from bessemer.checkpoint import SavedCheckpoint
from bessemer.checkpoint.protocol import iterate_verified
from bessemer.common.console import warn
from bessemer.common.errors import InputError
from bessemer.distributed.mesh import SINGLE_PROCESS
from bessemer.guard.detection import History, spike_limits
from bessemer.guard.heartbeat import Heartbeat
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState
from bessemer.recipe import Parallel, ResolvedRecipe
from bessemer.recipe.schema import Report
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_steps
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.recompute import blocks_recomputed
from bessemer.train.run_spec import RunSpec, start_of
from bessemer.train.setup import Training, set_up
from bessemer.train.state import TrainState
from bessemer.train.step import enqueue, judge_step, scale_of
from bessemer.train.task import config_of

NEIGHBOURS = 16  # number of batches around the step to compare it with
SAME_RESULT = 0.01  # relative difference within which two precisions agree, so that the precision is not at fault
MEANINGS = {
    "transient": "the step is not reproducible: a fault of memory, a device or a link, not of the training",
    "numerics": "the step is normal in higher precision: the precision of the run is too low for it",
    "data": "the batch is an outlier among its neighbours with the same weights",
    "state": "neighbouring batches are as bad with the same weights: earlier steps damaged the weights",
    "none": "nothing is wrong with this step",
}


class Figures(NamedTuple):
    """The loss (nats per target) and gradient norm of a step; infinite if they are not finite."""

    loss: float
    grad_norm: float


def replay(recipe: ResolvedRecipe, run: RunDirectory, step: int) -> dict[str, Any]:
    """Replay step `step` (1-based) of a run without changing its folder; a rolled-back step is replayed as it was then.

    Returns a dict with the `step`, the `kind` of the cause (a key of MEANINGS) and its `meaning`, the loss and gradient norm of
    the step by test (`figures`: as recorded, repeated, in higher precision) and of each of its samples alone, worst first
    (`sequences`), the step of the checkpoint (`replayed_from`), the first step that differs from what the run recorded
    (`first_difference`), the recorded `incident`, and the ranges of samples that rollbacks had skipped by then (`omitted`).
    Raises InputError for a step that the run has not completed, and BessemerError if tokens or journal are damaged.
    """
    TokenStore.open(run.tokens).verify()
    journal, (incident, num_rollbacks) = Journal.read_run(run), _incident(run, step)
    journal = journal if num_rollbacks is None else journal.after(num_rollbacks)
    recorded = _recorded(run, journal.num_rollbacks)
    if incident is not None and incident["step"] == step:
        recorded.setdefault(step, _figures(incident))
    if incident is None and not 1 <= step <= (last := max([*recorded, *checkpoint_steps(run.checkpoints)], default=0)):
        raise InputError(f"--step {step}: the run has not completed this step; use one of 1 to {last}")
    checkpoint = _checkpoint_before(run, step, journal)
    with tempfile.TemporaryDirectory(prefix="bessemer-") as folder:
        training = _training(recipe, run, checkpoint, journal, Path(folder) / "replay")
        device = training.trainer.device
        # Another layout sums in another order, and kernels that are not deterministic sum in any order.
        is_exact = recipe.parallel.world == 1 and devices.choose(recipe.train).deterministic
        tolerance = 0.0 if is_exact else math.sqrt(torch.finfo(device.dtype).eps)
        state, first_difference = _train_to(training, step - 1, recorded, tolerance)

        def figures(batch: Batch) -> Figures:
            gradients = training.trainer.forward_backward(batch, scale_of(training, state))
            return _figures(vars(training.trainer.read([gradients])[0]))

        batch, end = _batch(training, step), max(step, min(NEIGHBOURS + 2, training.steps + 1))
        again, repeated = figures(batch), figures(batch)
        neighbours = [figures(_batch(training, n)) for n in range(max(end - NEIGHBOURS, 1), end) if n != step]
        sequences = {row.first: figures(row) for row in map(batch.row, range(len(batch.inputs)))}
        weights = {name: value.detach().cpu().clone() for name, value in training.trainer.model.state_dict().items()}
        recipe = recipe.changed(train={"precision": "fp64" if device.precision.name in ("fp32", "fp64") else "fp32"})
        training = _training(recipe, run, None, journal, Path(folder) / "higher")
        training.trainer.model.load_state_dict(weights)
        precise = figures(_batch(training, step))
    finite = [one for one in neighbours if math.inf not in one and one.grad_norm]
    around = History(tuple(one.loss for one in finite), tuple(math.log(one.grad_norm) for one in finite))
    before, expected = state.guard.history, recorded.get(step, again)
    is_bad = _is_outlier(again, before)
    if again != repeated or (not is_bad and not _are_equal(again, expected, tolerance)):
        kind = "transient"
    elif incident is None and not is_bad:
        kind = "none"
    elif not _is_outlier(precise, before) and not _are_equal(precise, again, SAME_RESULT):
        kind = "numerics"
    else:
        kind = "data" if _is_outlier(again, around) else "state"
    tests = {"recorded": expected, "again": again, "a second time": repeated, "in higher precision": precise}
    worst_first = sorted(sequences.items(), key=lambda item: -math.prod(item[1]))
    return {
        "step": step, "kind": kind, "meaning": MEANINGS[kind], "figures": {test: _row(one) for test, one in tests.items()},
        "replayed_from": checkpoint.step if checkpoint else 0, "first_difference": first_difference, "incident": incident,
        "sequences": {sample: _row(one) for sample, one in worst_first}, "omitted": journal.omitted,
    }  # fmt: skip


def _train_to(
    training: Training, step: int, recorded: dict[int, Figures], tolerance: float
) -> tuple[TrainState, int | None]:
    """Repeat the steps up to `step` with the batches and skips of the run.

    Returns the state and the first step whose figures differ from `recorded` by more than `tolerance` (relative), if any.
    """
    state, first_difference = training.start_state, None
    while (number := state.step + 1) <= step:
        enqueued = enqueue(training, state, number, _batch(training, number), scale_of(training, state))
        [stats] = training.trainer.read([enqueued.stats])
        figures = _figures(vars(stats))
        if first_difference is None and not _are_equal(figures, recorded.get(number, figures), tolerance):
            first_difference = number
        _, state = judge_step(training, state, enqueued.batch, stats)
    return state, first_difference


def _figures(row: Mapping[str, Any]) -> Figures:
    return Figures(*(math.inf if x is None or math.isnan(x) else x for x in (row.get("loss"), row.get("grad_norm"))))


def _row(figures: Figures) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in figures._asdict().items()}


def _are_equal(one: Figures, other: Figures, tolerance: float) -> bool:
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(one, other, strict=True))


def _is_outlier(one: Figures, others: History) -> bool:
    """Return True if a step is a spike by the guard's limits for the steps of `others`; False if these are too few for limits."""
    limits = spike_limits(others)
    return limits is not None and (math.inf in one or limits.exceeded_by(*one))


def _batch(training: Training, step: int) -> Batch:
    sizes = training.stream.sizes
    return training.loader.batch(sizes.first(step - 1), sizes.sequences(step - 1))


def _incident(run: RunDirectory, step: int) -> tuple[dict[str, Any] | None, int | None]:
    """Return the last incident whose onset and alarm enclose `step` and that names documents, and the rollbacks before it."""
    result: tuple[dict[str, Any] | None, int | None] = (None, None)
    before = 0
    for row in read_steps(run.incidents):
        if row.get("documents") and row.get("onset", row["step"]) <= step <= row["step"]:
            result = row, before
        before = max(before, int(row.get("rollback", 0)))
    return result


def _recorded(run: RunDirectory, num_rollbacks: int) -> dict[int, Figures]:
    """Return the figures by step as logged after `num_rollbacks` rollbacks, including those that later rollbacks undid."""
    # The lines that a rollback undid are in the fork of its number. The first fork after num_rollbacks is last, so it wins.
    undone = [row for row in reversed(read_steps(run.forks)) if row.get("fork", 0) > num_rollbacks]
    rows = [row for row in (*read_steps(run.metrics), *undone) if row.get("kind") == "train"]
    return {row["step"]: _figures(row) for row in rows if {"loss", "grad_norm"} <= row.keys()}


def _checkpoint_before(run: RunDirectory, step: int, journal: Journal) -> SavedCheckpoint | None:
    """Return the newest verified checkpoint before `step` that no rollback undid; None for the start of the run."""
    steps = [number for number in reversed(checkpoint_steps(run.checkpoints)) if 0 < number < step]
    for checkpoint in iterate_verified(run.checkpoints, steps, warn, "trying an earlier checkpoint"):
        num_rollbacks = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
        if num_rollbacks <= journal.num_rollbacks and journal.keeps(checkpoint.step, num_rollbacks):
            return checkpoint
    return None


def _training(
    recipe: ResolvedRecipe, run: RunDirectory, checkpoint: SavedCheckpoint | None, journal: Journal, folder: Path
) -> Training:
    """Set up a training in this process, at a checkpoint or at the start of the run, that writes to `folder`."""
    checkpoints = {"asynchronous": False, "mirror": None}
    recipe = recipe.changed(
        train={"deterministic": "on"}, parallel=Parallel(), report=Report(tensorboard=False), checkpoint=checkpoints
    )
    device, store = devices.choose(recipe.train), TokenStore.open(run.tokens)
    config = config_of(recipe, store.vocabulary, len(store.labels))
    devices.set_deterministic(device)
    recomputed, start = blocks_recomputed(recipe.train, Parallel(), config, device), start_of(recipe, run)
    spec = RunSpec(recipe, config, device.name, device.precision.name, store.digest, {}, recomputed, 1.0, start)
    folder.mkdir()
    heartbeat = Heartbeat(None, 0, folder / "stacks.txt", 0)
    return set_up(
        spec, RunDirectory(folder), store, device, SINGLE_PROCESS, heartbeat, journal, checkpoint, perf_counter()
    )
