"""The runs of a ladder: what they all start from, how fast this machine trains, the design they follow, and their training.

They are ordinary runs in FOLDER/runs/NAME that read the same tokens, trained one after another. A run that is done is not
trained again; one that was stopped resumes from its checkpoint, as any run does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common import interrupt
from bessemer.common.console import amount, say
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import digest
from bessemer.ladder import summary
from bessemer.ladder.design import Planned, Rung, Size, batch_tokens, size_of, smaller
from bessemer.model import recipe_defaults
from bessemer.recipe import Parallel, Recipe, ResolvedRecipe, dump, parse
from bessemer.report import page
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json, read_steps, write_json
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.measure import step_seconds
from bessemer.train.task import config_of

Json = dict[str, Any]
Resolve = Callable[[], ResolvedRecipe]  # builds the tokens of the planned run and returns its resolved recipe
Train = Callable[[Recipe, RunDirectory], object]  # trains a recipe in its run directory, which has its tokens

DESIGN_FILE = "design.json"
PROBE_SECONDS = 1.0  # of steps of each size that is timed
LONGEST_STEP = 2.0  # seconds; larger models than one that takes so long are not timed
PROBE_FACTOR = 6.0  # between the sizes that are timed
RUN_SECONDS = {False: 3.0, True: 45.0}  # of a run beside its steps: on a CPU; on CUDA, where it is compiled
# Sections of the planned recipe that no rung depends on.
UNRELATED = ("run", "corpus", "parallel", "checkpoint", "report", "export", "cluster", "evaluate")


@dataclass(frozen=True)
class Ground:
    """What all small runs share.

    Attributes:
        folder: The folder of the small runs.
        run: The planned run.
        store: Its tokens.
        planned: The planned run's model and budget.
        sizes: Smaller models, by N.
        inputs: Digest of what the tokens were made from.
        train: Trains a recipe in its run directory.
    """

    folder: Path
    run: RunDirectory
    store: TokenStore
    planned: Planned
    sizes: list[Size]
    inputs: str
    train: Train

    def protocol(self, *more: Any) -> str:
        """Names what runs must share to be compared: tokens, training, and `more`."""
        recipe = self.planned.recipe
        plain = recipe.model_dump(mode="json", by_alias=True)
        related = {key: value for key, value in plain.items() if key not in UNRELATED}
        return digest(self.inputs, related, recipe.evaluate.max_tokens, *more)


@dataclass(frozen=True)
class Score:
    """Held-out loss of a run that is done, in nats a token: of all text, and by source. seconds: of its steps."""

    loss: float
    by_source: dict[str, float]
    seconds: float


# --- What they start from ---------------------------------------------------------------------------------------------


def ground(recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, folder: Path) -> Ground:
    """Resolve the planned run of a recipe and list the smaller models.

    Raises InputError for a recipe whose loss has no law to fit: a classifier, or one that starts from other weights.
    """
    if recipe.train.objective == "classify":
        raise InputError("ladder: a classifier's loss follows no law of size and tokens; give a recipe that pretrains")
    if recipe.is_continued:
        key = "model.from" if recipe.model.from_ is not None else "train.start"
        raise InputError(f"ladder: {key} gives the weights, and small models of that kind have none; leave it out")
    resolved = resolve()
    store = TokenStore.open(run.tokens)
    steps, batch = resolved.train.steps, resolved.train.global_batch_tokens
    planned = Planned(resolved, size_of(resolved, store.vocabulary), steps * batch)
    inputs = read_json(run.tokens / "stage.json")["inputs"]
    return Ground(folder, run, store, planned, smaller(resolved, store.vocabulary), inputs, train)


def timing(planned: Planned, sizes: list[Size], vocabulary: int) -> list[tuple[int, float]]:
    """FLOP/s that training reaches here at some sizes, by N, measured for a second each."""
    device = devices.choose(planned.recipe.train)
    if not device.is_cuda:
        devices.keep_freed_memory()
    batch = batch_tokens(planned.recipe, planned.flops * 0.03, planned.flops)
    changed = {"global_batch_tokens": batch, "micro_batch": None, "batch_ramp": None}
    found: list[tuple[int, float]] = []
    for size in sizes:
        if found and size.parameters < found[-1][0] * PROBE_FACTOR and size is not sizes[-1]:
            continue
        recipe = planned.recipe.changed(model=size.model, train=changed)
        probe = recipe_defaults.resolve(recipe, vocabulary, 100, recipe_defaults.MICRO_BATCH_TOKENS_ON[device.is_cuda])
        seconds = step_seconds(probe, config_of(probe, vocabulary, 0), device, PROBE_SECONDS)
        found.append((size.parameters, batch * size.flops / seconds))
        if seconds > LONGEST_STEP:
            break
    return found


def seconds_by(planned: Planned, rates: list[tuple[int, float]]) -> Callable[[Rung], float]:
    """What a rung is expected to take, from the rates that `timing` found; between its sizes by the logarithm of N."""
    at, logs = np.log([size for size, _ in rates]), np.log([rate for _, rate in rates])
    start = RUN_SECONDS[devices.choose(planned.recipe.train).is_cuda]
    return lambda rung: start + rung.flops / exp(float(np.interp(log(rung.size.parameters), at, logs)))


# --- The design that the folder keeps ---------------------------------------------------------------------------------


def kept_design(folder: Path, key: str, protocol: str) -> Json | None:
    """What design.json holds, if it was kept under this key: `rungs`, `earlier` (those of designs before), and what else was
    worked out with them.

    Raises BessemerError when its runs were made from other tokens or trained otherwise.
    """
    path = folder / DESIGN_FILE
    if not path.exists():
        return None
    found: Json = read_json(path)
    if found["protocol"] != protocol:
        raise BessemerError(
            f"{folder}: its runs were made from other tokens, for another planned run, or of another kind, and cannot be "
            "compared with new ones; give this ladder a folder of its own with --folder DIR, or start over with "
            "--restart (what is there is set aside)"
        )
    return found if found["key"] == key else None


def keep_design(folder: Path, key: str, protocol: str, rungs: list[Json], **more: Any) -> Json:
    """Write design.json. key: the options; protocol: what all runs of the folder share; more: what else it is to hold."""
    path, names = folder / DESIGN_FILE, {rung["name"] for rung in rungs}
    before = read_json(path) if path.exists() else {"earlier": [], "rungs": []}
    earlier = [rung for rung in [*before["earlier"], *before["rungs"]] if rung["name"] not in names]
    made = {"key": key, "protocol": protocol, "rungs": rungs, "earlier": earlier, "more": more}
    write_json(path, made)
    return made


@contextmanager
def open_ladder(
    recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, folder: Path, restart: bool
) -> Iterator[Ground]:
    """Yield the ground of the runs in `folder` while no other process writes the run or the folder.

    With `restart`, an earlier ladder in the folder is moved aside.
    """
    with ExitStack() as locks:
        locks.enter_context(run.lock())
        if restart:
            set_aside(folder)
        locks.enter_context(RunDirectory(folder).lock())
        yield ground(recipe, run, resolve, train, folder)


def set_aside(folder: Path) -> None:
    """Move a ladder's folder to previous-N beside it."""
    if (folder / DESIGN_FILE).exists():
        number = 1 + len(list(folder.parent.glob(f"{folder.name}-previous-*")))
        place = folder.with_name(f"{folder.name}-previous-{number}")
        shutil.move(folder, place)
        say(f"what was there before is in {place}")


# --- Training ---------------------------------------------------------------------------------------------------------


def recipe_of(planned: ResolvedRecipe, rung: Rung, folder: Path) -> Recipe:
    """The recipe of one run. planned: resolved; all that is not the run's own size, length, batch, rate and seed is as there,
    but that it runs in one process, without a batch ramp, and is saved and scored only as often as it needs."""
    train, steps = planned.train, rung.steps
    # The faster precision of a CPU is timed, and would differ between rungs and machines.
    is_timed = train.precision == "auto" and not devices.choose(train).is_cuda
    warmup = min(max(round(train.schedule.warmup_steps / train.steps * steps), 1), steps)
    made = planned.changed(
        run={"name": rung.name, "dir": str(folder / "runs"), "seed": planned.run.seed + rung.seed},
        model=rung.size.model,
        train={
            "steps": steps, "tokens": None, "minutes": None, "global_batch_tokens": rung.batch, "micro_batch": None,
            "batch_ramp": None, "schedule": {"warmup_steps": warmup}, "validate_every": steps,
            "optimizer": {"learning_rate": rung.learning_rate}, "precision": "fp32" if is_timed else train.precision,
        },
        parallel=Parallel(),
        checkpoint={"every": max(steps // 4, 1), "keep": 1, "mirror": None},
        export={"hf": False},
    )  # fmt: skip
    return parse(dump(made), f"rung {rung.name}")


def score(run: RunDirectory, steps: int) -> Score | None:
    """What a run's last validation found; None while it is not done."""
    if steps not in checkpoint_steps(run.checkpoints):
        return None
    rows = read_steps(run.metrics)
    validations = [row for row in rows if row.get("kind") == "validation" and row["step"] == steps]
    if not validations:
        return None
    trained = [row for row in rows if row.get("kind") == "train"]
    seconds = sum(row["step_seconds"] for row in trained) * steps / max(len(trained), 1)
    return Score(validations[-1]["loss"], validations[-1]["loss_by_source"], seconds)


def train_all(made: list[tuple[Rung, Recipe]], ground: Ground) -> dict[str, Score]:
    """Train the runs that are not done yet, in order, on the same tokens. Returns each run's score by its name.

    Raises Stopped after a stop signal, with everything saved, and BessemerError for a run without a finite loss.
    """
    found: dict[str, Score] = {}
    for number, (rung, recipe) in enumerate(made, 1):
        interrupt.check()
        name, run, steps = rung.name, RunDirectory(recipe.run.folder), rung.steps
        done = score(run, steps)
        if done is None:
            what = f"{recipe.model.layers} layers, width {recipe.model.width}, {amount(rung.tokens)} tokens"
            say(f"[bold]{number} of {len(made)}[/] {name}: {what}")
            done = _trained(ground, recipe, run, steps)
        if not isfinite(done.loss):
            raise BessemerError(
                f"{run.path}: its held-out loss is {done.loss}; lower train.optimizer.learning_rate, and start the ladder "
                "over with --restart"
            )
        found[name] = done
        say(f"[dim]{number} of {len(made)}[/] {name}: {done.loss:.4f} nats a token")
    return found


def _trained(ground: Ground, recipe: Recipe, run: RunDirectory, steps: int) -> Score:
    with run.lock():
        _link(run.tokens, ground.run.tokens)
        ground.train(recipe, run)
    done = score(run, steps)
    if done is None:
        raise BessemerError(f"{run.path}: trained, but {run.metrics.name} has no validation of step {steps}")
    return done


def _link(place: Path, tokens: Path) -> None:
    """Let a run read tokens that lie elsewhere; relative, so that the folder above both can be moved."""
    target = Path(os.path.relpath(tokens.resolve(), place.parent.resolve()))
    if place.is_symlink() and Path(os.readlink(place)) != target:
        place.unlink()
    if not place.is_symlink():
        place.symlink_to(target, target_is_directory=True)


def plain(value: Any) -> Any:
    """Numbers of numpy as Python's own, throughout."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, str) else value


def publish(found: Json, path: Path, run: RunDirectory) -> Json:
    """Write the result of a ladder, with its answers, and the report of the run if that shows it. Returns all of it."""
    found = {**found, "folder": str(path.parent), **summary.shown(found)}
    write_json(path, found)
    is_shown = path.parent.parent.resolve() == run.path.resolve()  # else --folder names another place
    return {**found, "page": str(page.write(run)) if is_shown else None}
