"""What a ladder starts from: the tokens, the planned run, how fast this machine trains, and the folder it keeps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np

from bessemer import forecast, stages
from bessemer.errors import BessemerError, InputError
from bessemer.ladder.design import Budget, Planned, Rung
from bessemer.ladder.sizes import Size, batch_tokens, size_of, smaller
from bessemer.layout import dial
from bessemer.recipe import Recipe, digest, load
from bessemer.run import RunFolder, read_json, read_json_lines, write_json
from bessemer.stages import Session
from bessemer.terminal import say
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.measure import step_seconds
from bessemer.train.task import config_of

DESIGN_FILE = "design.json"
PROBE_SECONDS = 1.0  # of steps of each size that is timed
LONGEST_STEP = 2.0  # seconds; larger models than one that takes so long are not timed
PROBE_FACTOR = 6.0  # between the sizes that are timed
RUN_SECONDS = {False: 3.0, True: 45.0}  # of a run beside its steps: on a CPU; on CUDA, where it is compiled
# Keys of the planned recipe that no rung depends on.
APART = ("run", "corpus", "parallel", "checkpoint", "report", "export", "cluster", "evaluate")


@dataclass(frozen=True)
class Ground:
    """What all small runs stand on. sizes: smaller than the planned one, by N; inputs: names the tokens."""

    folder: Path
    run: RunFolder
    store: TokenStore
    planned: Planned
    sizes: list[Size]
    inputs: str


def ground(session: Session, folder: Path) -> Ground:
    """Make the corpus and the tokens if they are not there, and resolve the planned run.

    Raises InputError for a recipe whose loss has no law to fit: a classifier, or weights that are given.
    """
    recipe, run = session.recipe, session.run
    refuse(recipe)
    if recipe.corpus.sources or not recipe.tokens.sources:
        stages.corpus(session)
    stages.tokens(session)
    store = TokenStore.open(run.tokens)
    resolved = _resolved(session, store)
    steps, batch = resolved.train.steps, resolved.train.global_batch_tokens
    assert steps is not None and batch is not None
    planned = Planned(resolved, size_of(resolved, store.vocabulary), steps * batch)
    inputs = read_json(run.tokens / "stage.json")["inputs"]
    return Ground(folder, run, store, planned, smaller(resolved, store.vocabulary), inputs)


def refuse(recipe: Recipe) -> None:
    """Raises InputError for a recipe that no ladder can be made of."""
    if recipe.train.objective == "classify":
        raise InputError("ladder: a classifier's loss follows no law of size and tokens; give a recipe that pretrains")
    if recipe.model.from_ is not None or recipe.train.start is not None:
        key = "model.from" if recipe.model.from_ is not None else "train.start"
        raise InputError(f"ladder: {key} gives the weights, and small models of that kind have none; leave it out")


def _resolved(session: Session, store: TokenStore) -> Recipe:
    """The planned run with every value filled in; its minutes as steps, those of the run where it exists."""
    recipe, run = session.recipe, session.run
    stored = load(run.recipe) if run.recipe.exists() else None
    steps = None
    if recipe.train.minutes is not None and recipe.train.steps is None:
        if stored is not None and stored.train.minutes == recipe.train.minutes:
            steps = stored.train.steps
            most = recipe.evaluate.max_tokens or stored.evaluate.max_tokens
            recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"max_tokens": most})})
        else:
            return forecast.plan_only(recipe, run)[1]
    is_cuda = devices.choose(recipe.train).is_cuda
    micro = dial.MICRO_BATCH_TOKENS if is_cuda else dial.CPU_MICRO_BATCH_TOKENS
    return dial.resolve(recipe, store.vocabulary, steps, micro)


def measured(ground: Ground) -> dict[str, Any] | None:
    """The planned run's own loss, where it has been trained to its last step already: the same model, as long, as fast, and
    scored on the same text."""
    run, planned = ground.run, ground.planned.recipe
    if not run.recipe.exists() or _same(load(run.recipe)) != _same(planned):
        return None
    steps = planned.train.steps
    found = [row for row in read_json_lines(run.metrics) if row.get("kind") == "validation" and row["step"] == steps]
    return {"loss": found[-1]["loss"]} if found else None


def _same(recipe: Recipe) -> str:
    train = recipe.train
    return digest(
        recipe.model,
        train.steps,
        train.global_batch_tokens,
        train.optimizer,
        train.schedule,
        recipe.evaluate.max_tokens,
    )


def timing(ground: Ground) -> list[tuple[int, float]]:
    """FLOP/s that training reaches here at some sizes, by N, measured for a second each."""
    planned = ground.planned
    device = devices.choose(planned.recipe.train)
    if not device.is_cuda:
        devices.keep_freed_memory()
    micro = dial.MICRO_BATCH_TOKENS if device.is_cuda else dial.CPU_MICRO_BATCH_TOKENS
    flops = planned.flops * 0.03
    batch = batch_tokens(planned.recipe, flops, planned.flops)
    found: list[tuple[int, float]] = []
    for size in ground.sizes:
        if found and size.parameters < found[-1][0] * PROBE_FACTOR and size is not ground.sizes[-1]:
            continue
        train = planned.recipe.train.model_copy(
            update={"global_batch_tokens": batch, "micro_batch": None, "batch_ramp": None}
        )
        probe = dial.resolve(
            planned.recipe.model_copy(update={"model": size.model, "train": train}), ground.store.vocabulary, 100, micro
        )
        seconds = step_seconds(probe, config_of(probe, ground.store.vocabulary, 0), device, PROBE_SECONDS)
        found.append((size.parameters, batch * size.flops / seconds))
        if seconds > LONGEST_STEP:
            break
    return found


def seconds_by(ground: Ground, rates: list[tuple[int, float]]) -> Callable[[Rung], float]:
    """What a rung is said to take, from the rates that `timing` found; between its sizes by the logarithm of N."""
    at, logs = np.log([size for size, _ in rates]), np.log([rate for _, rate in rates])
    beside = RUN_SECONDS[devices.choose(ground.planned.recipe.train).is_cuda]
    return lambda rung: beside + rung.flops / exp(float(np.interp(log(rung.size.parameters), at, logs)))


@dataclass(frozen=True)
class Kept:
    """What design.json holds. key: what was asked for; protocol: what all runs of the folder share; rungs: those asked for;
    earlier: finished ones of designs before; more: what else was worked out with them."""

    key: str
    protocol: str
    rungs: list[dict[str, Any]]
    earlier: list[dict[str, Any]]
    more: dict[str, Any]


def protocol_of(ground: Ground, *asked: Any) -> str:
    """Names what runs must share to be held against each other: tokens, training, and what else is given."""
    plain = ground.planned.recipe.model_dump(mode="json", by_alias=True)
    scored = ground.planned.recipe.evaluate.max_tokens
    return digest(ground.inputs, {key: value for key, value in plain.items() if key not in APART}, scored, *asked)


def kept(folder: Path, key: str, protocol: str) -> Kept | None:
    """The design that the folder holds, if it is the one asked for; or, with another key, None.

    Raises BessemerError when its runs were made from other tokens or trained otherwise.
    """
    path = folder / DESIGN_FILE
    if not path.exists():
        return None
    found = Kept(**read_json(path))
    if found.protocol != protocol:
        raise BessemerError(
            f"{folder}: its runs were made from other tokens, for another planned run, or of another kind, and cannot be held "
            "against new ones; give this ladder a folder of its own with --folder DIR, or start over with --restart (what is "
            "there is set aside)"
        )
    return found if found.key == key else None


def keep(folder: Path, key: str, protocol: str, rungs: list[dict[str, Any]], **more: Any) -> Kept:
    """Write design.json; what was asked for before and is not asked for now stays as `earlier`."""
    path = folder / DESIGN_FILE
    before = Kept(**read_json(path)) if path.exists() else None
    names = {rung["name"] for rung in rungs}
    earlier = [rung for rung in [*before.earlier, *before.rungs] if rung["name"] not in names] if before else []
    made = Kept(key, protocol, rungs, earlier, more)
    write_json(path, made.__dict__)
    return made


def set_aside(folder: Path) -> Path | None:
    """Move a ladder's folder to previous-N beside it."""
    if not (folder / DESIGN_FILE).exists():
        return None
    number = 1 + len(list(folder.parent.glob(f"{folder.name}-previous-*")))
    place = folder.with_name(f"{folder.name}-previous-{number}")
    shutil.move(folder, place)
    say(f"what was there before is in {place}")
    return place


def budget_of(text: str | None) -> Budget:
    """The budget asked for; five minutes where none is."""
    from bessemer.ladder.design import parse_budget

    return Budget(seconds=300.0) if text is None else parse_budget(text)
