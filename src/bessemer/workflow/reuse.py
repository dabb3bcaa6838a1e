"""Reuse of corpus and tokens: within a run if their inputs are unchanged, and between runs.

Files that were copied, moved or touched count as unchanged if their content is. A stage that checkpoints were trained on is
never rebuilt. Stages with equal inputs are built once for all runs under one `run.dir`. Runs one folder up, as in runs/ for
runs/compare/, are reused too. Stages are shared by hard links, so removing one run does not affect the others. Published
stages are never modified in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape

from bessemer.common.console import counted, say, warn
from bessemer.common.errors import BessemerError, DamagedFile, InputError
from bessemer.recipe import Recipe
from bessemer.run import lock
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.run.files import STAGE_FILE, link_or_copy, stage_facts, verify_stage
from bessemer.run.stage import stage_is_current, staging
from bessemer.storage.filesystem import parse_path
from bessemer.storage.path import is_published, published_folder
from bessemer.workflow import derive


def corpus_inputs(recipe: Recipe, run: RunDirectory) -> tuple[str, bool]:
    """Return the digest of the corpus inputs, and whether the existing corpus was built from them.

    Raises InputError if the inputs changed and checkpoints were trained on the existing corpus.
    """
    from bessemer.corpus.inputs import changed_files, content_digest, inputs_digest

    try:
        inputs = inputs_digest(recipe)
    except InputError as error:
        built = stage_facts(run.corpus).get("inputs")
        if built is None or not run.was_saved or not _is_whole(run.corpus, built):
            raise
        warn(f"{error}; the corpus is used as it was built")
        return built, True
    if (current := _is_current(run, run.corpus, inputs, lambda: content_digest(recipe))) is not None:
        return inputs, current
    files = changed_files(recipe, run) or {}
    text = "; ".join(_files(word, names) for word, names in files.items() if names)
    is_whole = _is_whole(run.corpus, stage_facts(run.corpus).get("inputs", ""))
    if text and is_whole and not files["changed"] and not files["added"]:  # the corpus still holds their text
        warn(f"{text} since the corpus was built; the corpus is used as it was built")
        return inputs, True
    why = "the sources or their rules have changed since the corpus was built"
    raise _refusal(run, run.corpus, f"{why} ({text})" if text else why)


def say_where(stage: Path, storage: str | None) -> None:
    """Print where the large files of a stage are if they are not in `storage`, the folder that the recipe names for them.

    None stands for the stage's own folder. The files are not moved.
    """
    folder = published_folder(stage)
    is_there = folder == stage if storage is None else f"{folder}/".startswith(f"{parse_path(storage)}/")
    if not is_there:
        say(escape(f"  corpus.storage: the {stage.name} stays in {folder}, where it was made"))


def _files(word: str, names: list[str]) -> str:
    listed = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"{counted(len(names), 'file')} {word} ({listed})"


def tokens_inputs(recipe: Recipe, run: RunDirectory) -> tuple[str, bool]:
    """Return the digest of the token inputs, and whether the existing tokens were written from them.

    Raises InputError if the inputs changed and checkpoints were trained on the existing tokens.
    """
    from bessemer.tokens import build

    inputs = build.inputs_digest(recipe, run)
    current = _is_current(run, run.tokens, inputs, lambda: build.inputs_digest(recipe, run, by_content=True))
    if current is None:
        raise _refusal(run, run.tokens, "the corpus or the tokenizer has changed since the tokens were written")
    return inputs, current


def require_unchanged(recipe: Recipe, run: RunDirectory) -> None:
    """Raise InputError if corpus or tokens would be rebuilt although checkpoints were trained on them."""
    if not run.was_saved:
        return
    recipe = derive.filled(recipe, run)
    is_current = not recipe.corpus.sources or not run.corpus.exists() or corpus_inputs(recipe, run)[1]
    if is_current and run.corpus.exists():
        tokens_inputs(recipe, run)


def trained_on(run: RunDirectory) -> str | None:
    """Return the digest of the tokens that the newest checkpoint was trained on; None without a checkpoint."""
    done = checkpoint_steps(run.checkpoints)
    if not done:
        return None
    from bessemer.checkpoint.format import load_manifest  # imports torch, which building a corpus does not need

    return load_manifest(run.checkpoints / checkpoint_name(done[-1])).facts.get("data")


def _is_current(run: RunDirectory, folder: Path, inputs: str, content: Callable[[], str]) -> bool | None:
    """Return True if a stage was built from the current inputs, False if it may be built, and None if it must not be rebuilt.

    It must not be rebuilt if its inputs changed and checkpoints were trained on it. `inputs` is the digest of the input
    files' paths and times. `content` computes the slower digest of their content, which decides if the first one differs.
    """
    built = stage_facts(folder)
    if built.get("inputs") == inputs or not folder.exists() or not run.was_saved:
        return _is_whole(folder, inputs)
    if not built or built.get("content") != content():
        return None
    say(f"  {folder.name}: its input files were moved or touched, but their content is the same: it is not built again")
    return _is_whole(folder, built["inputs"])


def _is_whole(folder: Path, inputs: str) -> bool:
    """Return True if a stage was made from these inputs and all its files exist, including those in remote storage."""
    return stage_is_current(folder, inputs) and is_published(folder)


def is_undamaged(verify: Callable[[], None], action: str) -> bool:
    """Return True if `verify` raises no BessemerError; otherwise print its error as a warning and return False.

    `action` ends the warning. It says what happens next, such as "writing the tokens again".
    """
    try:
        verify()
    except BessemerError as error:
        warn(f"{str(error).partition(';')[0]}: {action}")
        return False
    return True


def _refusal(run: RunDirectory, folder: Path, why: str) -> InputError:
    if not stage_facts(folder):
        why = f"{folder / STAGE_FILE} is missing or damaged, so it is unknown what the {folder.name} were made from"
    return InputError(
        f"{run.path}: {why}, and its checkpoints were trained on the old one; choose another name with --set run.name=NAME, "
        "continue this run with `bessemer train` and the run's own corpus, tokenizer and tokens keys, or start over with "
        "--restart, which removes the training"
    )


@contextmanager
def built_once(folder: Path, inputs: str) -> Iterator[Path | None]:
    """Context manager that lets runs with equal inputs build a stage only once.

    It looks for a finished, undamaged stage with the digest `inputs` in the runs next to this run and one folder up, after
    waiting for one that is building. Such a stage is linked or copied to `folder`, and its run directory is yielded. None
    is yielded if there is none, so that the `with` block builds it.
    """
    file = folder.parent.parent / f".building-{folder.name}-{inputs[:16]}"

    def wait(holder: str) -> None:
        say(escape(f"  waiting for another run ({holder}) that builds the same {folder.name}"))

    with lock.hold(file, on_wait=wait):
        try:
            yield None if stage_is_current(folder, inputs) else _taken(folder, inputs)
        finally:
            file.unlink(missing_ok=True)  # harmless: a process that starts meanwhile builds the same stage


def _taken(folder: Path, inputs: str) -> Path | None:
    root, others = folder.parent.parent, f"*/{folder.name}/{STAGE_FILE}"
    for record in [*sorted(root.glob(others)), *sorted(root.parent.glob(others))]:
        theirs = record.parent
        if theirs == folder or not stage_is_current(theirs, inputs):
            continue
        try:
            with staging(folder) as staged:
                link_or_copy(theirs.resolve(), staged)
                verify_stage(staged, "")
                if not (stage_is_current(staged, inputs) and is_published(staged)):
                    raise FileNotFoundError(theirs)
        except (FileNotFoundError, shutil.Error):  # it was removed or replaced while it was being linked
            pass
        except DamagedFile:
            warn(f"{theirs}: damaged, so it is not shared; `bessemer run {theirs.parent}` builds it again")
        else:
            return theirs.parent
    return None
