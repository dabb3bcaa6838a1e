"""Small trainings of a run's own recipe, each in new processes and a separate folder.

`python -m bessemer.check.trial RUN [STOP]` is one process of a training that torchrun starts. It receives SIGTERM in
step STOP, as from a scheduler.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.common import interrupt
from bessemer.common.console import counted, silent
from bessemer.common.environment import num_cores
from bessemer.common.errors import BessemerError, Stopped
from bessemer.distributed.step_flops import hardware_flops
from bessemer.launch import local_start
from bessemer.launch.worker import Worker
from bessemer.model.config import ModelConfig
from bessemer.recipe import BatchRamp, Parallel, ResolvedRecipe, dump, load
from bessemer.recipe.model import HIDDEN_WIDTHS
from bessemer.recipe.schema import Report
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_steps, write_atomic, write_json
from bessemer.train.run_spec import RunSpec

STEPS = 24  # steps of a trial
STEP_SECONDS = 0.4  # target time of a trial's step; the batch and then the model are reduced to reach it
ASSUMED_SHARE = 0.25  # assumed share of the peak FLOP/s in a step
LOSS_SEQUENCES = 16  # sequences of a validation
HANG_SECONDS = 900.0  # time limit of a trial's step


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Attributes:
        run: Its run directory.
        losses: Training loss by step.
        weights: Hash of the weights at the end.
        rows: Rows of metrics.jsonl.
    """

    run: RunDirectory
    losses: dict[int, float]
    weights: str
    rows: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]


def scaled(recipe: ResolvedRecipe, config: ModelConfig, peak: float, free: float) -> tuple[ResolvedRecipe, list[str]]:
    """Return a resolved recipe for STEPS steps on this machine, and descriptions of what is smaller than in the run.

    Batch, depth and then width are reduced until a step is expected to take STEP_SECONDS. `peak` is FLOP/s and `free`
    is bytes of memory.
    """
    notes, train = [], recipe.train
    layout, length = recipe.parallel, recipe.tokens.sequence_length
    sequences, micro = train.global_batch_tokens // length, train.micro_batch

    def seconds(one: ModelConfig, rows: int) -> float:
        small = train.model_copy(update={"global_batch_tokens": rows * length})
        return hardware_flops(small, one, one.layers) / (ASSUMED_SHARE * peak)

    unit, least = layout.data * layout.min_micro_batches, layout.pipeline * layout.stages_per_rank
    if seconds(config, sequences) > STEP_SECONDS and sequences > unit:
        rows, micro = unit * max(int(STEP_SECONDS / seconds(config, unit)), 1), 1
        notes.append(f"a batch of {rows} of {counted(sequences, 'sequence')}")
        sequences = rows
    small = config
    while (seconds(small, sequences) > STEP_SECONDS or 24 * small.parameters > free) and small.layers > least:
        small = replace(small, layers=max(small.layers // 2, least))
    sizes = ("heads", "kv_heads", "width", *(key for key in HIDDEN_WIDTHS if getattr(recipe.model, key)))
    while seconds(small, sequences) > 8 * STEP_SECONDS or 24 * small.parameters > free:
        if any(getattr(small, key) % 2 for key in sizes) or small.heads // 2 < layout.tensor:
            break
        small = replace(small, **{key: getattr(small, key) // 2 for key in sizes})
    model: dict[str, Any] = {}
    if small is not config:
        model = resized(recipe, **{key: getattr(small, key) for key in ("layers", *sizes)})
        notes.append(f"{small.layers} of {counted(config.layers, 'layer')}, width {small.width} of {config.width}")
    ramp = train.batch_ramp
    changes: dict[str, Any] = {
        "steps": STEPS, "minutes": None, "tokens": None, "max_epochs": None, "log_every": 1, "deterministic": "on",
        "global_batch_tokens": sequences * length, "micro_batch": micro,
        "schedule": {"warmup_steps": STEPS // 8}, "validate_every": STEPS // 2,
        **({"start": None, "start_step": None} if small is not config else {}),
        "batch_ramp": None if ramp is None else BatchRamp(
            start_tokens=min(unit * micro * length, sequences * length), steps=STEPS // 2),
    }  # fmt: skip
    small_recipe = recipe.changed(
        model=model, train=changes, guard={"hang_seconds": HANG_SECONDS}, parallel={"restarts": 0, "elastic": False},
        checkpoint={"every": STEPS, "keep": 3, "mirror": None}, evaluate={"max_tokens": LOSS_SEQUENCES * length},
        report=Report(tensorboard=False),
    )  # fmt: skip
    return small_recipe, notes


def resized(recipe: ResolvedRecipe, *, layers: int, **sizes: int) -> dict[str, Any]:
    """Return the [model] keys to change for a model with these layers and other sizes (by key) and with initial weights."""
    model: dict[str, Any] = {"depth": None, "from_": None, "layers": layers, **sizes}
    for key in ("global_layers", "unrotated_layers"):
        if numbers := getattr(recipe.model, key):
            model[key] = tuple(number for number in numbers if number < layers)
    return model


def lay_out(parent: Path, name: str, spec: RunSpec, tokens: Path) -> RunDirectory:
    """Create a run directory that is ready to train on the tokens of another run."""
    run = RunDirectory(parent / name)
    run.path.mkdir()
    run.tokens.symlink_to(tokens.resolve(), target_is_directory=True)
    write_atomic(run.recipe, dump(spec.recipe.changed(run={"name": name, "dir": str(parent)})))
    write_json(run.plan, spec.to_dict())
    return run


def train(run: RunDirectory, recipe: ResolvedRecipe, stopped_in: int | None = None) -> TrialResult:
    """Train a prepared run in new processes to its end.

    If `stopped_in` is given, other processes first train it until a signal stops them in that step. Raises
    BessemerError if a process fails.
    """
    if stopped_in is not None:
        run_processes(run, recipe, stopped_in)
    weights = run_processes(run, recipe)["weights"]
    rows = read_steps(run.metrics)
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return TrialResult(run, losses, weights, rows)


def run_processes(run: RunDirectory, recipe: ResolvedRecipe, stop: int | None = None) -> dict[str, Any]:
    """Train a run in new processes and return its `TrainSummary` as a dict, or {} if a signal stops it in step `stop`."""
    program = ["-m", "bessemer.check.trial", str(run.path), *([] if stop is None else [str(stop)])]
    try:
        with silent():
            return local_start.train(recipe, run, program)
    except BessemerError as error:
        interrupt.check()  # the user's own interrupt has priority
        if stop is None or not isinstance(error, Stopped):
            raise BessemerError(f"check: the small training failed: {error}") from None
    return {}


def fits_here(layout: Parallel, is_cuda: bool) -> bool:
    """Return True if this machine can run the processes of a layout: one GPU each, or half a core."""
    import torch

    return layout.world <= (torch.cuda.device_count() if is_cuda else max(2 * num_cores(), 2))


def main() -> None:
    run, stop = RunDirectory(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    Worker(lambda: (load(run.recipe), run), observe=partial(_stopped, stop)).work()


def _stopped(stop: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches, and signal this process in step `stop`, as a scheduler does."""
    for step, batch in enumerate(batches, 1):
        if step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


if __name__ == "__main__":
    main()
