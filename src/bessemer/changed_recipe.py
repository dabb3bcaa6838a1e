"""Whether a run goes on under a recipe: it is compared with the one that the run was planned by, or trained with.

Earlier results are set aside in previous-N/ before a training takes their place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bessemer.checkpoint.format import load_manifest
from bessemer.checkpoint.protocol import drop_newer
from bessemer.errors import BessemerError, InputError
from bessemer.guard.incidents import RECIPE_CHANGED, record
from bessemer.recipe import Recipe, Train, differences, is_as_dumped, load, parse, without_folders
from bessemer.run import LATEST, RunFolder, checkpoint_name, link, published, read_steps, staging
from bessemer.terminal import say

# Keys that change neither the data nor the weights: a run may go on under other values of them.
HARMLESS = (
    "run.name", "run.dir", "report.", "evaluate.", "export.", "checkpoint.", "guard.", "parallel.", "cluster.",
    "train.log_every", "train.validate_every", "train.recompute", "train.memory_budget", "train.watch_every",
    "corpus.engine", "corpus.address", "corpus.slurm.", "corpus.workers", "corpus.storage", "tokens.workers",
)  # fmt: skip
SHAPES = tuple(f"model.{key}:" for key in ("family", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"))
# Keys that say how long a run is: what changes with them is decided here, and not refused as another recipe.
HORIZON = ("train.steps", "train.tokens", "train.minutes", "train.max_epochs")

# Keys of training that are derived where a recipe leaves them out, and stay as derived when a run goes on.
GIVEN: dict[str, Callable[[Train], Any]] = {
    "train.optimizer.learning_rate": lambda train: train.optimizer.learning_rate,
    "train.optimizer.betas": lambda train: train.optimizer.betas,
    "train.schedule.warmup_steps": lambda train: train.schedule.warmup_steps,
    "train.global_batch_tokens": lambda train: train.global_batch_tokens,
}

# What follows from the last step of a training and is made again when it goes on.
RESULTS = (
    "mixture.json", "evaluation*.json", "export", "report.html", "profile", "planned_against_measured.json",
)  # fmt: skip
# What a training that goes on keeps writing to.
TRAINED = (
    "recipe.toml", "given.json", "derived.json", "plan.json", "*.jsonl", "tensorboard", "environment.json", *RESULTS,
)  # fmt: skip


def stored_recipe(run: RunFolder) -> Recipe | None:
    """The recipe that a run was last planned by; None before the first plan. Where its file is gone or was edited, that of the
    newest checkpoint: a change by hand is refused, or accepted, as any other change."""
    try:
        stored = load(run.recipe) if run.recipe.exists() else None
        if stored is not None and is_as_dumped(run.recipe.read_text(encoding="utf-8")):
            return stored
        for step in reversed(published(run.checkpoints)):
            manifest = run.checkpoints / checkpoint_name(step)
            with suppress(BessemerError):  # a damaged one is reported when it is read
                if (text := load_manifest(manifest).facts.get("recipe_toml")) is not None:
                    trained = parse(text, f"recipe of {manifest}")
                    # It may have been moved.
                    return (
                        trained
                        if stored is None
                        else trained.changed(run=stored.run.model_dump(include={"name", "dir"}))
                    )
        return stored
    except InputError as error:
        raise InputError(f"{error}; put the run's recipe back, or start over with --restart") from None


def accepted_changes(run: RunFolder) -> list[dict[str, Any]]:
    """The incidents of changes of the recipe under which the run went on."""
    rows = read_steps(run.incidents)
    return [row for row in rows if row.get("what") == RECIPE_CHANGED.name and row.get("is_accepted")]


def require_unedited(run: RunFolder) -> None:
    """Raise InputError where the recipe in a run folder is not the one that the run was trained with: what is said of its steps
    would be of others."""
    stored = stored_recipe(run)
    lines = [] if stored is None else differences(stored, load(run.recipe))
    if changed := [line for line in lines if not line.startswith((*HARMLESS, *HORIZON))]:
        raise InputError(
            f"{run.recipe}: was changed since the run was trained ({_some(changed)}); put it back as it was"
        )


def set_aside_other_attempt(stored: Recipe, resolved: Recipe, run: RunFolder) -> None:
    """Set aside what a training of another recipe left that ended without a checkpoint: its incidents and figures are of another
    run."""
    lines = [line for line in differences(stored, resolved) if not line.startswith((*HARMLESS, *HORIZON))]
    trained = read_steps(run.metrics)
    if lines and trained and (place := set_aside(run)) is not None:
        say(
            f"  the {trained[-1].get('step', 0):,} steps trained before, of another recipe, ended without a checkpoint: they are "
            f"in {place}"
        )
        action = f"began anew: the steps before ended without a checkpoint, and are in {place.name}"
        record(run.incidents, RECIPE_CHANGED, step=0, cause="; ".join(lines), action=action)


def given_keys(recipe: Recipe) -> list[str]:
    """Of the keys of training that are derived where they are left out, those that a recipe, not yet resolved, gives."""
    return [key for key, value in GIVEN.items() if value(recipe.train) is not None]


def _some(lines: list[str]) -> str:
    return f"{'; '.join(lines[:4])}{'; ...' if len(lines) > 4 else ''}"


def changes(stored: Recipe, requested: Recipe, has_micro_batch: bool) -> list[str]:
    """A line for each key in which two recipes differ, but for those that change nothing that is trained; has_micro_batch: as for
    `refuse_other_recipe`."""
    may_change = HARMLESS if has_micro_batch else (*HARMLESS, "train.micro_batch")
    # What the files of the data hold was compared when corpus and tokens were looked at.
    lines = differences(without_folders(stored), without_folders(requested))
    return [line for line in lines if not line.startswith(may_change)]


def refuse_other_recipe(
    stored: Recipe, requested: Recipe, run: RunFolder, has_micro_batch: bool, accept: bool
) -> Callable[[bool], None]:
    """Raise InputError where a run that has begun cannot go on under a recipe: it changes data or weights, unless accepted, or is
    shorter. Returns a function that records the changes, given whether the learning rate is warmed up again.

    has_micro_batch: whether the recipe sets train.micro_batch; else it follows from the layout.
    """
    lines = changes(stored, requested, has_micro_batch)
    changed = [line for line in lines if not line.startswith(HORIZON)]
    if shapes := [line for line in changed if line.startswith(SHAPES)]:
        raise InputError(
            f"{run.path}: holds weights of other shapes ({'; '.join(shapes)}), which training on cannot change. Give the new run "
            "a name of its own with --set run.name=NAME, or start over with --restart"
        )
    if changed and not accept:
        raise InputError(
            f"{run.path}: holds a run of another recipe ({_some(changed)}). "
            "Give the new run a name of its own with --set run.name=NAME, go on under the changed recipe with "
            "--accept-changes, or start over with --restart"
        )
    newest = published(run.checkpoints)[-1]
    if changed and requested.train.steps == newest:
        raise InputError(
            f"{run.path}: all {newest:,} steps are done, so none would be trained under the changed recipe "
            f"({'; '.join(changed[:4])}). Give more steps with it (train.steps, tokens or minutes), or give the new run a name "
            "of its own with --set run.name=NAME"
        )
    refuse_fewer_steps(stored.train, requested.train, run, newest, accept)

    def note(rewarms: bool) -> None:
        if lines:
            action = "went on, by --accept-changes" if changed else "went on under the new number of steps"
            if rewarms:
                action += ", with a re-warm-up: the weights are not those of a run that was planned so from the start"
            record(
                run.incidents, RECIPE_CHANGED, step=newest, cause="; ".join(lines), action=action,
                is_accepted=bool(changed),
            )  # fmt: skip

    return note


def refuse_fewer_steps(stored: Train, requested: Train, run: RunFolder, newest: int, accept: bool) -> None:
    """Raise InputError for fewer steps than are done or, unless accepted, than are planned. stored, requested: resolved."""
    planned, steps = stored.steps or 0, requested.steps or 0
    if steps >= planned or (steps >= newest and accept):
        return
    what = f"train.steps: {run.path} is planned for {stored.steps:,} steps and {newest:,} of them are done"
    wants = f"{requested.steps:,}"
    if stored.minutes is not None and requested.minutes not in (None, stored.minutes):
        what = f"train.minutes: {run.path} is a run of {stored.minutes:g} minutes ({newest:,} of {stored.steps:,} steps are done)"
        wants = f"{requested.minutes:g}"
    raise InputError(
        f"{what}, but the recipe asks for {wants}. Give more steps (train.steps, tokens or minutes) to train longer"
        + ("" if steps < newest else ", or add --accept-changes to end sooner")
        + ", give the new run a name of its own with --set run.name=NAME, or start over with --restart"
    )


def set_aside(run: RunFolder) -> Path | None:
    """Move what training made into previous-N/, so that the run starts over and nothing is lost. What was derived of the text
    stays with the corpus and the tokens that were made by it, and is copied."""
    there = [path for name in (*TRAINED, "checkpoints") for path in run.path.glob(name)]
    if not there or there == [run.derived]:
        return None
    place = _place(run)
    place.mkdir()
    _share_data(run, place)
    for path in there:
        if path == run.derived:
            shutil.copy2(path, place)
        else:
            os.rename(path, place / path.name)
    return place


def copy_aside(run: RunFolder, newest: int) -> Path:
    """Copy the result of a training that will go on, with its checkpoint of step `newest`, into previous-N/.

    The copy appears as a whole or not at all. Files are hard links, but for logs, which are written to in place. Raises
    BessemerError where it cannot be written; nothing has changed then.
    """
    place = _place(run)
    try:
        with staging(place) as staged:
            for name in (*TRAINED, f"checkpoints/{checkpoint_name(newest)}"):
                for source in run.path.glob(name):
                    link(source, staged / source.relative_to(run.path))
            (staged / "checkpoints" / LATEST).write_text(checkpoint_name(newest))
            _share_data(run, staged)
    except OSError as error:
        raise BessemerError(
            f"{place}: setting the earlier result aside failed ({error.strerror or error}); the run is as it was. Free some "
            "space, or lift the limit on it, and give the command again"
        ) from None
    return place


def drop_results(run: RunFolder, step: int) -> None:
    """Remove the checkpoints after `step` and what was made from the last one; `copy_aside` has kept it."""
    drop_newer(run.checkpoints, step)
    for path in [path for name in RESULTS for path in run.path.glob(name)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _share_data(run: RunFolder, place: Path) -> None:
    """Link the data of a run into a folder of results that are set aside, which commands then take as a run."""
    for path in (run.tokens, run.source):
        if path.exists():
            (place / path.name).symlink_to(Path("..") / path.name)


def _place(run: RunFolder) -> Path:
    """The next previous-N."""
    numbers = [path.name.removeprefix("previous-") for path in run.path.glob("previous-*")]
    return run.path / f"previous-{max((int(number) for number in numbers if number.isdigit()), default=0) + 1}"
