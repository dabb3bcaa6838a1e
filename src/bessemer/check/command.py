"""Implementation of `bessemer check`: a list of checks of the recipe, of short trainings on its data, and of attention masks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.check import coordinates, masks, recipe_rows, sample, trial, trial_rows
from bessemer.check.rows import CheckRow, collect_rows
from bessemer.common.console import progress, silent
from bessemer.common.errors import InputError
from bessemer.plan import local_plan
from bessemer.recipe import Parallel, Recipe, ResolvedRecipe
from bessemer.run.directory import RunDirectory
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train.recompute import base_bytes, blocks_recomputed, memory_of
from bessemer.train.run_spec import RunSpec, start_of
from bessemer.train.starting_weights import starting_model
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

Plan = Callable[[], tuple[dict[str, Any], ResolvedRecipe]]


class Subject:
    """A recipe to check, with its plan, its tokens and `trial`, a small copy of the recipe for short trainings.

    Trainings run in the scratch `folder`. `requested` is the recipe as written.
    """

    def __init__(
        self, requested: Recipe, run: RunDirectory, plan: dict[str, Any], resolved: ResolvedRecipe, build: sample.Build,
        folder: Path,
    ) -> None:  # fmt: skip
        self.requested, self.run, self.plan, self.resolved, self.folder = requested, run, plan, resolved, folder
        self.built = sample.sample_tokens(requested, resolved, run, build, folder)
        self.store = TokenStore.open(self.built.tokens)
        self.store.verify()
        self.device = devices.choose(self.resolved.train)
        fits = trial.fits_here(self.resolved.parallel, self.device.is_cuda)
        layout = self.resolved.parallel if fits else Parallel()
        one = self.resolved.model_copy(update={"parallel": layout})
        config = config_of(one, self.store.vocabulary, len(self.store.labels))
        free = 0.5 * devices.available_bytes(self.device) / (1 if self.device.is_cuda else layout.world)
        self.trial, self.smaller = trial.scaled(one, config, local_plan.peak_rate(self.device), free)
        if not fits:
            self.smaller.append(f"one process instead of {self.resolved.parallel.world}")
        self.config = config_of(self.trial, self.store.vocabulary, len(self.store.labels))

    def trained(self, name: str, recipe: ResolvedRecipe, stopped_in: int | None = None) -> trial.TrialResult:
        """Train a small recipe in the new folder `name` and return its result.

        If `stopped_in` is given, a signal first stops the training in that step, and it is resumed.
        """
        base = base_bytes(recipe.train, recipe.parallel, self.device)
        recomputed = blocks_recomputed(recipe.train, recipe.parallel, self.config, self.device, base)
        memory = memory_of(recipe.train, recipe.parallel, self.config, self.device, recomputed, base)
        if (step_bytes := self.plan["measured_step_bytes"]) is not None:
            memory = memory.as_measured(step_bytes)
        spec = RunSpec(
            recipe, self.config, self.device.name, self.device.precision.name, self.store.digest, memory.to_dict(), recomputed,
            self.plan["peak_flops"], start_of(recipe, self.run),
        )  # fmt: skip
        return trial.train(trial.lay_out(self.folder, name, spec, self.built.tokens), recipe, stopped_in)


@contextmanager
def scratch(run: RunDirectory) -> Iterator[Path]:
    """Yield a temporary hidden folder on the run's file system, next to the run directory."""
    parent = next(folder for folder in run.path.absolute().parents if folder.is_dir())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".bessemer-check-", dir=parent)
    except OSError as error:
        raise InputError(f"run.dir: {parent} cannot be written ({error.strerror}); choose another folder") from None
    with folder as path:
        yield Path(path)


def run_checklist(requested: Recipe, run: RunDirectory, plan: Plan, build: sample.Build) -> list[CheckRow]:
    """Return every row of the checklist of a recipe.

    Args:
        requested: The recipe as written.
        run: Its run directory, which is not changed.
        plan: Returns the plan of the run and its resolved recipe. Raises InputError for a recipe that cannot be
            trained.
        build: Builds the tokens of a recipe in a run directory.
    """
    rows: list[CheckRow] = []
    with scratch(run) as folder, progress("check", 4, "parts") as advance:
        subject = Subject(requested, run, *plan(), build, folder)
        parts = {"plan": _recipe_rows, "small training": _training_rows, "masks": _model_rows, "widths": _width_rows}
        for name, part in parts.items():
            advance(0, note=name)
            rows += collect_rows(name, name, partial(part, subject))
            advance(1)
    return rows


def _recipe_rows(subject: Subject) -> Iterator[CheckRow]:
    yield from recipe_rows.budget_rows(subject.requested, subject.resolved)
    yield recipe_rows.layout_row(subject.resolved)


def _training_rows(subject: Subject) -> Iterator[CheckRow]:
    recipe, store = subject.trial, subject.store
    straight = subject.trained("straight", recipe)
    row = trial_rows.learns(recipe, straight, len(store.labels) or store.vocabulary)
    smaller = f"with {', '.join(subject.smaller)}" if subject.smaller else "of the run's own model"
    yield replace(row, evidence=f"{row.evidence} ({trial.STEPS} steps {smaller})")
    yield trial_rows.logged(straight)
    yield trial_rows.memory_row(straight)
    yield trial_rows.saved(straight)
    stop = trial.STEPS * 3 // 8
    yield trial_rows.same(straight, subject.trained("resumed", recipe, stop), f"SIGTERM in step {stop}")


def _model_rows(subject: Subject) -> Iterator[CheckRow]:
    """Yield the rows about attention masks and about overfitting one sequence.

    They use the small trial model with the weights that its training starts from, in this process on one device.
    """
    recipe, store = subject.trial.model_copy(update={"parallel": Parallel()}), subject.store
    devices.set_deterministic(subject.device)
    with silent():
        model = starting_model(recipe.model.from_, subject.config, recipe.run.seed, store, checked=True)
    recomputed = blocks_recomputed(recipe.train, recipe.parallel, subject.config, subject.device)
    trainer = Trainer(recipe, model, subject.device, store.end_of_text, len(store.sources), recomputed=recomputed)
    reader = trainer.task.loader(recipe, store)
    yield from masks.mask_rows(recipe, trainer, reader, store)
    yield trial_rows.overfits(trainer, reader.batch(0, 1))


def _width_rows(subject: Subject) -> Iterator[CheckRow]:
    return coordinates.coordinate_rows(subject.trial, subject.store, subject.device)
