"""The checklist in its order: what follows from the recipe, small trainings, masks, the machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bessemer import changed_recipe, forecast, preflight, rebuild
from bessemer.check import learning, masks, planned, sample, trial
from bessemer.check.begun import begun_rows
from bessemer.check.machine import machine_rows
from bessemer.check.planned import existing
from bessemer.check.rows import CheckRow, collected, is_go
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Parallel, Recipe
from bessemer.run import RunFolder, published
from bessemer.terminal import progress, silent
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.recompute import blocks_recomputed
from bessemer.train.start import starting_model
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

MEASURE_SECONDS = 2.0  # of training steps, for the plan


class Subject:
    """A recipe under examination: asked for, resolved and planned, with tokens and a trial of it. place: a scratch folder on the
    run's disk."""

    def __init__(self, asked: Recipe, run: RunFolder, reference: str, place: Path) -> None:
        self.asked, self.run, self.place = asked, run, place
        preflight.check(asked, run, reference, exports=asked.export.hf)
        rebuild.require_unchanged(asked, run)
        with silent():
            elsewhere = asked.changed(run={"dir": str(place)})  # where a checkpoint is written to time it
            self.plan, self.resolved = forecast.plan_only(elsewhere, run, MEASURE_SECONDS)
        if published(run.checkpoints) and (stored := changed_recipe.stored_recipe(run)) is not None:
            has_micro_batch = asked.train.micro_batch is not None
            changed_recipe.refuse_other_recipe(stored, self.resolved, run, has_micro_batch, accept=False)
        self.built = sample.sampled(asked, self.resolved, run, place)
        self.store = TokenStore.open(self.built.tokens)
        self.store.is_verified = True  # a row says whether it is; the others are tried all the same
        self.device = devices.choose(self.resolved.train)
        fits = trial.fits_here(self.resolved.parallel, self.device.is_cuda)
        layout = self.resolved.parallel if fits else Parallel()
        one = self.resolved.model_copy(update={"parallel": layout})
        config = config_of(one, self.store.vocabulary, len(self.store.labels))
        free = 0.5 * devices.available_bytes(self.device) / (1 if self.device.is_cuda else layout.world)
        self.trial, self.smaller = trial.scaled(one, config, devices.peak_rate(self.device), free)
        if not fits:
            self.smaller.append(f"one process instead of {self.resolved.parallel.world}")
        self.config = config_of(self.trial, self.store.vocabulary, len(self.store.labels))
        self.whole = config
        self.scale = config.parameters / self.config.parameters

    def trained(self, name: str, recipe: Recipe, *, stops: tuple[int, ...] = (), tokens: Path | None = None,
                then: Recipe | None = None) -> trial.TrialResult:  # fmt: skip
        """A trial in a new folder; then: the recipe after the first stop."""
        run = trial.lay_out(self.place, name, recipe, tokens or self.built.tokens, self.plan)
        return trial.train(run, recipe, stops, then)

    def described(self) -> str:
        """How a trial differs from the run."""
        return f"{trial.STEPS} steps" + (
            f", with {', '.join(self.smaller)}" if self.smaller else " of the run's own model"
        )


@contextmanager
def scratch(run: RunFolder) -> Iterator[Path]:
    """A hidden folder on the disk of the run, beside it, which is removed."""
    there = existing(run.path if not run.path.exists() else run.path.parent)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".bessemer-check-", dir=there)
    except OSError as error:
        why = f"cannot be written ({error.strerror}); choose another folder with --set run.dir=PATH"
        raise InputError(f"{there}: {why}") from None
    with folder as place:
        yield Path(place)


def checked(asked: Recipe, run: RunFolder, reference: str) -> list[CheckRow]:
    """Every row of the checklist of a recipe. Raises InputError for a recipe that cannot be trained as it is."""
    rows: list[CheckRow] = []
    with scratch(run) as place, progress("check", 6, "parts") as advance:
        advance(0, note="plan, sample of the text")
        subject = Subject(asked, run, reference, place)
        parts = {
            "plan": lambda: _planned(subject),
            "small training": lambda: _trained(subject),
            "masks": lambda: _examined(subject),
            "machine": lambda: machine_rows(subject.resolved, place),
        }
        advance(1)
        for name, part in parts.items():
            advance(0, note=name)
            if name == "small training" and not is_go(rows):
                rows += learning.not_tried("not tried: another row fails already")
            else:
                rows += collected(name, name, part)
            advance(1)
    return rows


def _planned(subject: Subject) -> Iterator[CheckRow]:
    resolved, plan = subject.resolved, subject.plan
    yield from planned.budget_rows(subject.asked, resolved, plan)
    yield planned.layout_row(resolved)
    yield planned.memory_fit(resolved, plan)
    yield from planned.data_rows(resolved, subject.run, subject.built, plan)
    stored = planned.checkpoint_bytes(resolved, subject.whole)
    yield planned.disk_row(resolved, subject.run, stored, subject.built)
    yield planned.rollback_row(resolved)
    yield from begun_rows(subject.run)


def _trained(subject: Subject) -> Iterator[CheckRow]:
    recipe, store = subject.trial, subject.store
    try:
        straight = subject.trained("straight", recipe)
    except BessemerError as error:
        yield CheckRow(learning.LEARNING, "a small training ends well", "FAIL", f"{subject.described()}: {error}")
        yield from learning.not_tried("it is seen in a small training, which failed (see the row that says why)")
        return
    row = learning.learns(recipe, straight, len(store.labels) or store.vocabulary)
    yield CheckRow(row.topic, row.name, row.status, f"{row.evidence} ({subject.described()})")
    yield learning.logged(straight)
    yield learning.memory_row(straight)
    resolved, steps = subject.resolved, subject.resolved.train.steps or 0
    saves = math.ceil(steps / (resolved.checkpoint.every or steps))
    yield from learning.saved(recipe, straight, subject.scale, saves, float(subject.plan["seconds"]))
    stop = trial.STEPS * 3 // 8

    def resumed() -> Iterator[CheckRow]:
        other = subject.trained("resumed", recipe, stops=(stop,))
        yield learning.same(learning.CONTINUES, straight, other, f"SIGTERM in step {stop}")

    yield from collected(learning.RESUME, learning.CONTINUES, resumed)


def _examined(subject: Subject) -> Iterator[CheckRow]:
    """Masks and overfitting, in this process on one device, with the trial's starting weights."""
    recipe, store = subject.trial.model_copy(update={"parallel": Parallel()}), subject.store
    devices.make_deterministic()
    with silent():
        model = starting_model(recipe.model.from_, subject.config, recipe.run.seed, store)
    recomputed = blocks_recomputed(recipe.train, recipe.parallel, subject.config, subject.device)
    trainer = Trainer(recipe, model, subject.device, store.end_of_text, len(store.sources), recomputed=recomputed)
    reader = trainer.task.loader(recipe, store)
    yield from masks.mask_rows(recipe, trainer, reader, store)
    yield learning.overfits(trainer, reader.batch(0, 1))
