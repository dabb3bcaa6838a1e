"""Runs of a ladder: shared inputs, training rates of this machine, the saved design, and training.

They are ordinary runs in FOLDER/runs/NAME that read the same tokens and are trained one after another. A finished run
is not trained again, and a stopped one resumes from its checkpoint, as any run does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common import interrupt
from bessemer.common.console import amount, say
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import digest
from bessemer.ladder.design import Planned, Rung, Size, batch_tokens, size_of, smaller_sizes
from bessemer.model import recipe_defaults
from bessemer.recipe import Parallel, Recipe, ResolvedRecipe, dump, parse
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json, read_steps, stage_facts, write_json
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.measure import step_seconds
from bessemer.train.task import config_of

Json = dict[str, Any]
Resolve = Callable[[], ResolvedRecipe]  # builds the tokens of the planned run and returns its resolved recipe
Train = Callable[[Recipe, RunDirectory], object]  # trains a recipe in its run directory, which has its tokens

DESIGN_FILE = "design.json"
PROBE_SECONDS = 1.0  # seconds of steps for each size that is timed
LONGEST_STEP = 2.0  # seconds of a step beyond which no larger model is timed
PROBE_FACTOR = 6.0  # ratio between the sizes that are timed
RUN_SECONDS = {False: 3.0, True: 45.0}  # seconds of a run in addition to its steps, by CUDA, where it is compiled
# Sections of a recipe that do not change what a model learns from given tokens.
UNRELATED = ("run", "corpus", "parallel", "checkpoint", "report", "export", "cluster", "evaluate")


@dataclass(frozen=True)
class LadderInputs:
    """The shared inputs of all rungs.

    Attributes:
        folder: The folder of the ladder.
        run: The planned run.
        store: Its tokens.
        planned: The planned run's model and budget.
        sizes: Smaller models, ascending in N.
        tokens_digest: Digest of the inputs of the tokens.
        train: Trains a recipe in its run directory.
    """

    folder: Path
    run: RunDirectory
    store: TokenStore
    planned: Planned
    sizes: list[Size]
    tokens_digest: str
    train: Train

    def protocol(self, *more: Any) -> str:
        """Return a digest of what runs must share to be comparable: tokens, training settings, and the values `more`."""
        recipe = self.planned.recipe
        return digest(self.tokens_digest, settings(recipe), recipe.evaluate.max_tokens, *more)


@dataclass(frozen=True)
class Score:
    """The result of a finished run.

    Attributes:
        loss: Held-out loss of all text, in nats per token.
        by_source: Held-out loss by source.
        seconds: Seconds of its steps.
    """

    loss: float
    by_source: dict[str, float]
    seconds: float


def settings(recipe: Recipe) -> Json:
    """Return the sections of a recipe that change what a model learns from given tokens, as plain values."""
    return recipe.model_dump(mode="json", by_alias=True, exclude={*UNRELATED})


# --- Shared inputs ----------------------------------------------------------------------------------------------------


def resolve_inputs(recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, folder: Path) -> LadderInputs:
    """Resolve the planned run of a recipe and list the smaller models.

    Raises InputError for a recipe whose loss follows no scaling law: a classifier, or a run that starts from other
    weights.
    """
    if recipe.train.objective == "classify":
        raise InputError(
            "train.objective = classify: a classifier's loss follows no scaling law; give the ladder a recipe that pretrains"
        )
    if recipe.is_continued:
        key = "model.from" if recipe.model.from_ is not None else "train.start"
        raise InputError(f"{key}: a ladder trains smaller models from random weights; remove this key")
    resolved = resolve()
    store = TokenStore.open(run.tokens)
    steps, batch = resolved.train.steps, resolved.train.global_batch_tokens
    planned = Planned(resolved, size_of(resolved, store.vocabulary), steps * batch)
    sizes, tokens_digest = smaller_sizes(resolved, store.vocabulary), stage_facts(run.tokens)["inputs"]
    return LadderInputs(folder, run, store, planned, sizes, tokens_digest, train)


def measure_rates(planned: Planned, sizes: list[Size], vocabulary: int) -> list[tuple[int, float]]:
    """Measure the training rate of some sizes on this machine, as (N, FLOP/s)."""
    device = devices.choose(planned.recipe.train)
    if not device.is_cuda:
        devices.keep_freed_memory()
    batch = batch_tokens(planned.recipe, planned.flops * 0.03, planned.flops)
    changed = {"global_batch_tokens": batch, "micro_batch": None, "batch_ramp": None}
    rates: list[tuple[int, float]] = []
    for size in sizes:
        if rates and size.parameters < rates[-1][0] * PROBE_FACTOR and size is not sizes[-1]:
            continue
        recipe = planned.recipe.changed(model=size.model, train=changed)
        probe = recipe_defaults.resolve(recipe, vocabulary, 100, recipe_defaults.MICRO_BATCH_TOKENS_ON[device.is_cuda])
        seconds = step_seconds(probe, config_of(probe, vocabulary, 0), device, PROBE_SECONDS)
        rates.append((size.parameters, batch * size.flops / seconds))
        if seconds > LONGEST_STEP:
            break
    return rates


def predict_seconds(planned: Planned, rates: list[tuple[int, float]]) -> Callable[[Rung], float]:
    """Return a function that predicts the seconds of a rung from measured rates, interpolated in the logarithm of N."""
    at, logs = np.log([size for size, _ in rates]), np.log([rate for _, rate in rates])
    start = RUN_SECONDS[devices.choose(planned.recipe.train).is_cuda]
    return lambda rung: start + rung.flops / exp(float(np.interp(log(rung.size.parameters), at, logs)))


# --- Saved design -----------------------------------------------------------------------------------------------------


def saved_design(folder: Path, key: str, protocol: str, design: Callable[[], Json]) -> Json:
    """Return the content of design.json; if its key is not `key`, a new design is made and saved first.

    It has `rungs` (the dicts of `Rung.to_dict`), `earlier` (those of previous designs) and `more` (from `design`).

    Args:
        folder: Folder of the ladder.
        key: Digest of the options that determine the design.
        protocol: Digest of everything that all runs of the folder share.
        design: Makes a new design: `rungs`, and `more` values to save with them.

    Raises:
        BessemerError: The runs in the folder have other tokens or training settings.
    """
    path = folder / DESIGN_FILE
    saved: Json = read_json(path) if path.exists() else {"key": "", "protocol": protocol, "rungs": [], "earlier": []}
    if saved["protocol"] != protocol:
        raise BessemerError(
            f"{folder}: its runs have other tokens, training settings or another design, and do not compare with new ones; "
            "choose another folder with --folder DIR, or move these runs aside with --restart"
        )
    if saved["key"] == key:
        return saved
    new = design()
    names = {rung["name"] for rung in new["rungs"]}
    earlier = [rung for rung in [*saved["earlier"], *saved["rungs"]] if rung["name"] not in names]
    saved = {"key": key, "protocol": protocol, "earlier": earlier, **new}
    write_json(path, saved)
    return saved


def set_aside(folder: Path) -> None:
    """Rename a ladder's folder to NAME-previous-N."""
    if (folder / DESIGN_FILE).exists():
        number = 1 + len(list(folder.parent.glob(f"{folder.name}-previous-*")))
        backup = folder.with_name(f"{folder.name}-previous-{number}")
        shutil.move(folder, backup)
        say(f"the earlier ladder is now in {backup}")


# --- Training ---------------------------------------------------------------------------------------------------------


def recipe_of(planned: ResolvedRecipe, rung: Rung, folder: Path) -> Recipe:
    """Return the recipe of a rung, derived from the planned run's resolved recipe.

    Only size, length, batch, learning rate and seed differ. The run also has one process and no batch ramp, and saves
    and validates only as often as necessary.
    """
    train, steps = planned.train, rung.steps
    # On a CPU, `auto` selects the precision by timing, so it could differ between rungs and machines.
    is_timed = train.precision == "auto" and not devices.choose(train).is_cuda
    warmup = min(max(round(train.schedule.warmup_steps / train.steps * steps), 1), steps)
    changed = planned.changed(
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
    return parse(dump(changed), f"rung {rung.name}")


def score(run: RunDirectory, steps: int) -> Score | None:
    """Return the result of a run's last validation, or None if the run is not finished."""
    if steps not in checkpoint_steps(run.checkpoints):
        return None
    rows = read_steps(run.metrics)
    validations = [row for row in rows if row.get("kind") == "validation" and row["step"] == steps]
    if not validations:
        return None
    trained = [row for row in rows if row.get("kind") == "train"]
    seconds = sum(row["step_seconds"] for row in trained) * steps / max(len(trained), 1)
    return Score(validations[-1]["loss"], validations[-1]["loss_by_source"], seconds)


def train_all(rungs: list[tuple[Rung, Recipe]], inputs: LadderInputs) -> dict[str, Score]:
    """Train unfinished runs in order, on the same tokens, and return each run's score by name.

    Raises Stopped after a stop signal, with everything saved, and BessemerError for a run without a finite loss.
    """
    scores: dict[str, Score] = {}
    for number, (rung, recipe) in enumerate(rungs, 1):
        interrupt.check()
        name, run, steps = rung.name, RunDirectory(recipe.run.folder), rung.steps
        done = score(run, steps)
        if done is None:
            what = f"{recipe.model.layers} layers, width {recipe.model.width}, {amount(rung.tokens)} tokens"
            say(f"[bold]{number} of {len(rungs)}[/] {name}: {what}")
            done = _train(inputs, recipe, run, steps)
        if not isfinite(done.loss):
            raise BessemerError(
                f"{run.path}: its held-out loss is {done.loss}; lower train.optimizer.learning_rate, and run the ladder again "
                "with --restart"
            )
        scores[name] = done
        say(f"[dim]{number} of {len(rungs)}[/] {name}: {done.loss:.4f} nats a token")
    return scores


def _train(inputs: LadderInputs, recipe: Recipe, run: RunDirectory, steps: int) -> Score:
    train_on(inputs.run.tokens, run, lambda: inputs.train(recipe, run))
    done = score(run, steps)
    if done is None:
        raise BessemerError(
            f"{run.metrics}: it has no validation of the last step, {steps:,}; remove {run.path} and run the ladder again"
        )
    return done


def train_on(tokens: Path, run: RunDirectory, train: Callable[[], object]) -> None:
    """Call `train` with the run directory locked and linked to these tokens, unless they are its own."""
    with run.lock():
        if tokens != run.tokens:
            _link(run.tokens, tokens)
        train()


def _link(link: Path, tokens: Path) -> None:
    """Link a run to the tokens of another one, by a relative path, so that the folder above both can be moved."""
    target = Path(os.path.relpath(tokens.resolve(), link.parent.resolve()))
    link.unlink(missing_ok=True)  # the planned run may have moved
    link.symlink_to(target, target_is_directory=True)
