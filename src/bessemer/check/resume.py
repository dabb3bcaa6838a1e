"""`bessemer check --resume`: trials of a recipe that are stopped in every way, against one that is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from bessemer.check import learning, sample, trial
from bessemer.check.command import Subject, scratch
from bessemer.check.rows import CheckRow, collected, judged
from bessemer.check.trial import STEPS
from bessemer.recipe import Parallel, Recipe
from bessemer.run import RunFolder
from bessemer.terminal import counted, progress
from bessemer.tokens.shards import TokenStore
from bessemer.train.task import task_of

EPOCHS = 1.7  # of a trial over the first documents
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}  # of a loss by the same weights on another number of processes
LOOSE = 1e-2  # in narrower precisions
PAIR = Parallel(replicate=2)


def checked_resume(asked: Recipe, run: RunFolder, reference: str) -> list[CheckRow]:
    """Rows for every way to stop that fits this machine. Raises InputError for a recipe that cannot be trained as it is."""
    rows: list[CheckRow] = []
    with scratch(run) as place, progress("check --resume", None, "rows") as advance:
        advance(0, note="sample of the text")
        subject = Subject(asked, run, reference, place)
        for row in collected(learning.RESUME, "trial", lambda: _ways(subject)):
            rows.append(row)
            advance(1, note=row.name)
    return rows


def _ways(subject: Subject) -> Iterator[CheckRow]:
    """One straight trial over a few epochs of few documents in each layout, and its stopped ones."""
    own, alone = subject.trial, _in_layout(subject.trial, Parallel())
    if own.train.batch_ramp is not None:  # which grows by whole micro-batches: the same on one process and on two
        alone = _in_layout(_in_layout(own, PAIR), Parallel())
    tokens = alone.batches.tokens_before(STEPS)
    store = sample.beginning_of(subject.store, own, subject.place / "beginning", int(tokens / EPOCHS))
    features = _features(subject)
    yield CheckRow(learning.RESUME, "what is trained", "ok", f"{subject.described()}; {', '.join(features)}")
    sequences = sum(task_of(own.train, False, subject.config, store.end_of_text).loader(own, store).mixture.sequences)
    edge = min(alone.batches.steps_for(sequences), STEPS - 2)
    stops = {
        "stopped in an epoch": (edge // 2,),
        "stopped at an epoch's edge": (edge,),
        "stopped repeatedly": tuple(sorted({1, edge - 1, edge + 1} & set(range(1, STEPS)))),
    }
    if own.train.batch_ramp is not None:
        stops["stopped while the batch grows"] = (STEPS // 4,)
    layouts = {"one process": alone}
    if own.parallel.world > 1:
        layouts[f"{own.parallel.world} processes"] = own
    elif subject.resolved.parallel.world > 1:
        said = f"{subject.resolved.parallel.world} processes do not fit on this machine"
        yield CheckRow(learning.RESUME, "in its own layout", "not here", said)
    straights: dict[str, trial.TrialResult] = {}
    for layout, recipe in layouts.items():
        straights[layout] = subject.trained(f"straight-{recipe.parallel.world}", recipe, tokens=store.folder)
        for way, at in stops.items():
            name = f"{layout}, {way}"
            examine = partial(_stopped, subject, recipe, straights[layout], name, at, store, edge)
            yield from collected(learning.RESUME, name, examine)
    yield from _another_world(subject, alone, straights["one process"], store, edge // 2)


def _stopped(
    subject: Subject, recipe: Recipe, straight: trial.TrialResult, name: str, at: tuple[int, ...], store: TokenStore, edge: int
) -> Iterator[CheckRow]:  # fmt: skip
    """A trial that is stopped after the steps `at`."""
    folder = name.replace(", ", "-").replace(" ", "-").replace("'", "")
    stopped = subject.trained(folder, recipe, stops=at, tokens=store.folder)
    how = f"SIGTERM in step {', '.join(map(str, at))}; an epoch is {counted(edge, 'step')}"
    yield learning.same(name, straight, stopped, how)


def _another_world(
    subject: Subject, alone: Recipe, straight: trial.TrialResult, store: TokenStore, stop: int
) -> Iterator[CheckRow]:
    """Begun on one process and continued on two: the samples and their order stay, and the first loss is that of the same
    weights."""
    name = "one process, then two"
    sequences = alone.batches.full
    if sequences % 2 or alone.batches.sequences(0) % 2:
        said = f"two processes do not divide {counted(sequences, 'sequence')}"
        yield CheckRow(learning.RESUME, name, "not here", said)
        return
    if not trial.fits_here(PAIR, subject.device.is_cuda):
        yield CheckRow(learning.RESUME, name, "not here", "this machine has one device")
        return
    other = subject.trained("resized", alone, stops=(stop,), tokens=store.folder, then=_in_layout(alone, PAIR))
    tolerance = TOLERANCES.get(subject.device.precision.name, LOOSE)
    differences = {step: abs(straight.losses[step] - other.losses.get(step, math.inf)) for step in straight.losses}
    at_once, later = max(differences[step] for step in range(1, stop + 2)), max(differences.values())
    if straight.order != other.order:
        said = learning.first_difference(straight, other, tolerance=math.inf) or ""
        yield CheckRow(learning.RESUME, name, "FAIL", said)
        return
    said = f"{len(differences)} steps read the same samples in the same order; the first loss on two differs by"
    said += f" {at_once:.1e} (limit {tolerance:g}), any later one by {later:.1e} at most"
    yield judged(learning.RESUME, name, at_once <= tolerance, said)


def _in_layout(recipe: Recipe, layout: Parallel) -> Recipe:
    """A trial in another layout, with micro-batches that fit."""
    each = recipe.batches.full // layout.data
    first = recipe.batches.sequences(0) // layout.data
    micro = recipe.train.micro_batch or 1
    fits = max(size for size in range(1, micro + 1) if each % size == 0 and first % size == 0)
    train = recipe.train.model_copy(update={"micro_batch": fits})
    return recipe.model_copy(update={"parallel": layout, "train": train})


def _features(subject: Subject) -> list[str]:
    """What of the recipe a resume must carry on."""
    train, tokens = subject.trial.train, subject.trial.tokens
    named = {
        f"packing {tokens.packing}": tokens.packing != "concatenate",
        "compiled": subject.device.compile,
        "growing batch": train.batch_ramp is not None,
        "dropout": train.dropout.is_on,
        "moving average": bool(train.ema),
        f"moments in {train.optimizer.state}": train.optimizer.state != "fp32",
        f"schedule of {len(tokens.schedule)} mixtures": bool(tokens.schedule),
    }
    return [subject.device.precision.name, train.optimizer.kind, *(name for name, is_on in named.items() if is_on)]
