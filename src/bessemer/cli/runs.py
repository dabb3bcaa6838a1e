"""Opening of the recipe, run directory or model that a command's arguments name."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.errors import InputError
from bessemer.run.directory import RunDirectory, Weights, checkpoint_steps
from bessemer.run.files import read_json

if TYPE_CHECKING:
    from bessemer.model.transformer import Transformer
    from bessemer.recipe import ResolvedRecipe
    from bessemer.storage.filesystem import AnyPath
    from bessemer.tokens.shards import TokenStore
    from bessemer.tokens.tokenizer import Tokenizer
    from bessemer.workflow.session import Session


def open_recipe(args: argparse.Namespace, fill_derived: bool = True, *, may_be_unnamed: bool = False) -> Session:
    """Load the recipe that `args.recipe` names, and its run.

    Args:
        args: Arguments of the command.
        fill_derived: True to fill in the values that were derived earlier for this run. Commands that build a run derive them
            themselves.
        may_be_unnamed: True to accept a recipe without [run], for a command that neither reads nor writes a run.
    """
    from bessemer.recipe.load import is_text, load
    from bessemer.tokens.tokenizer.choice import resolve_tokenizer
    from bessemer.workflow import derive
    from bessemer.workflow.session import Session

    if Path(args.recipe).is_dir() and not is_text(Path(args.recipe)):
        if names_another_run(args):  # start a new run from its recipe
            args.recipe = str(RunDirectory(Path(args.recipe)).recipe)
            return open_recipe(args, fill_derived, may_be_unnamed=may_be_unnamed)
        args.run = args.recipe
        return open_run(args)
    recipe = resolve_tokenizer(
        load(args.recipe, args.overrides, may_be_unnamed=may_be_unnamed, trust_code=trusts_code(args))
    )
    folder = RunDirectory(recipe.run.folder)
    if fill_derived and (folder.basis.exists() or folder.was_saved):
        recipe = derive.filled(recipe, folder)
    if recipe.parallel.auto:
        from bessemer.workflow.choose_layout import with_chosen_layout

        recipe = with_chosen_layout(recipe, folder)
    return Session(recipe, folder)


def trusts_code(args: argparse.Namespace) -> bool | None:
    """Return True if --trust-code is given and False if not; None for a command that loads no code of the recipe."""
    return getattr(args, "trust_code", None)


def names_another_run(args: argparse.Namespace) -> bool:
    """Return True if an override (`--set`) sets `run.name` or `run.dir`."""
    return any(override.startswith(("run.name=", "run.dir=")) for override in args.overrides)


def open_run(args: argparse.Namespace) -> Session:
    """Open the existing run that `args.run` names by its folder or its recipe."""
    from bessemer.recipe import load, shipped
    from bessemer.workflow.session import Session

    folder = Path(args.run)
    if not folder.is_dir():
        if not folder.exists() and folder.suffix != ".toml" and args.run not in shipped():
            raise InputError(f"{folder}: no such run directory or recipe{_nearby_runs(folder)}")
        args.recipe = args.run
        session = open_recipe(args)
        if not session.run.path.is_dir():
            args.recipe = args.run
            raise InputError(f"{session.run.path}: no such run; make it with `bessemer run {recipe_as_given(args)}`")
        return session
    run = RunDirectory(folder)
    if not run.recipe.exists():
        raise InputError(f"{folder}: it has no recipe.toml; give the recipe instead{_nearby_runs(folder / 'x')}")
    if names_another_run(args):
        raise InputError(
            f"{folder}: a run directory keeps its name; leave run.name and run.dir out, or name the other run's folder"
        )
    return Session(load(folder, args.overrides, trust_code=trusts_code(args)), run)


def folder_of(name: str, overrides: list[str], command: str) -> RunDirectory:
    """Return the run directory for `name`, which is its folder or a recipe, even if the run has not been trained.

    `command` is the name of the command, for error messages. Raises InputError if it is not a run directory.
    """
    path = Path(name)
    if not path.is_dir():
        return open_run(argparse.Namespace(run=name, overrides=overrides, command=command)).run
    run = RunDirectory(path)
    if overrides:
        raise InputError(f"--set: {name} is a run directory, whose files are shown as they are; leave --set out")
    if not any(part.exists() for part in (run.recipe, run.metrics, run.corpus, run.tokens, run.log, run.lock_file)):
        raise InputError(
            f"{name}: not a run directory; `bessemer run` makes one of a folder of text{_nearby_runs(path / 'x')}"
        )
    return run


def _nearby_runs(folder: Path) -> str:
    """Return the end of an error about a missing run: the runs in the same folder, or in runs/."""
    for parent in dict.fromkeys((folder.parent, Path("runs"))):
        runs = sorted(str(path.parent) for path in parent.glob("*/recipe.toml"))
        if runs:
            return f"; there are {', '.join(runs[:6])}{', ...' if len(runs) > 6 else ''}"
    return ""


def open_trained(args: argparse.Namespace) -> tuple[Session, ResolvedRecipe]:
    """Open the trained run that `args.run` names, and return it with its resolved recipe.

    Overrides (`--set`) change the recipe that is returned.
    """
    from bessemer.recipe import load_resolved
    from bessemer.workflow.resume_policy import require_unedited

    session = open_run(args)
    if not session.run.recipe.exists():
        raise InputError(f"{session.run.path}: it is not trained yet; train it with `bessemer train {args.run}`")
    require_unedited(session.run)
    return session, load_resolved(session.run.recipe, args.overrides)


def open_model(args: argparse.Namespace) -> tuple[TokenStore, Tokenizer, Transformer]:
    """Load the token shards, tokenizer and model of a trained run."""
    from bessemer.tokens.tokenizer import Tokenizer
    from bessemer.train.state import load_model

    session, resolved = open_trained(args)
    store, restored = load_model(resolved, session.run, weights(args, session))
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", resolved.tokenizer.end_of_text)
    return store, tokenizer, restored.trainer.model


def weights(args: argparse.Namespace, session: Session) -> Weights:
    """Return which weights to use: the newest, those of the step in --step, or the mean of the last --average checkpoints.

    Raises InputError if the arguments are invalid.
    """
    from bessemer.checkpoint.selection import find_step

    count, wanted = getattr(args, "average", 1), args.of_step
    if count < 1:
        raise InputError(f"--average {count}: not a number of checkpoints; give 1 or more")
    if wanted is None:
        return Weights(count)
    if count > 1:
        raise InputError("--step and --average exclude each other; leave one of them out")
    step = find_step(session.run, wanted, "--step")
    return Weights(step=None if step == checkpoint_steps(session.run.checkpoints)[-1] else step)


def recipe_as_given(args: argparse.Namespace) -> str:
    """Return the recipe and its overrides as on the command line."""
    return shlex.join([args.recipe, *(part for override in args.overrides for part in ("--set", override))])


def require_stage(args: argparse.Namespace, output: AnyPath, what: str, command: str) -> None:
    """Raise InputError unless the file or folder `output` exists, which an earlier stage writes.

    The error calls the missing output `what`, such as "tokens", and suggests `bessemer COMMAND` with `command`.
    """
    if not output.exists():
        recipe = recipe_as_given(args)
        raise InputError(
            f"{output.parent}: it has no {what}; make them with `bessemer {command} {recipe}`, or run every stage with "
            f"`bessemer run {recipe}`"
        )


def restart(args: argparse.Namespace, session: Session) -> None:
    """Remove the earlier training if --restart is given. Raises InputError if its mirror would restore it."""
    from bessemer.checkpoint.mirror import Mirror
    from bessemer.workflow.resume_policy import remove_training

    if not args.restart:
        return
    mirror = Mirror.from_recipe(session.recipe, session.run)
    if mirror is not None and (steps := mirror.steps()):
        raise InputError(
            f"--restart: {mirror.folder} has checkpoints of the earlier training, the newest of step {steps[-1]}; "
            "choose another name with --set run.name=NAME, or another folder with --set checkpoint.mirror=URL, or remove them"
        )
    remove_training(session.run)


def corpus_statistics(run: RunDirectory) -> dict[str, Any]:
    """Return the statistics of the corpus; empty for a run on tokens from elsewhere."""
    path = run.corpus / "statistics.json"
    return {"corpus": read_json(path, run.command("corpus"))} if path.exists() else {}


def summary(session: Session) -> dict[str, Any]:
    """Return what `--json` prints for a run, by name: path, stages, corpus statistics, scores, report and export."""
    run = session.run
    values: dict[str, Any] = {"run": run.path, "stages": session.results, **corpus_statistics(run)}
    if run.evaluation.exists():
        evaluation = read_json(run.evaluation)
        keys = ("step", "loss", "bits_per_byte", "accuracy", "ngram", "ppmd")
        values |= {key: evaluation[key] for key in keys if key in evaluation}
    return values | {name: path for name, path in (("report", run.report), ("export", run.export)) if path.exists()}
