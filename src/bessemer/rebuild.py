"""Whether corpus and tokens are built again: never under checkpoints that were trained on what is there.

Files that were copied, moved or touched hold what they held. Then what was built of them stays, and a run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bessemer import derived
from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run import STAGE_FILE, RunFolder, checkpoint_name, published, stage_facts, stage_is_current
from bessemer.store_path import StorePath, is_published, published_folder
from bessemer.terminal import counted, say, warn


def corpus_inputs(recipe: Recipe, run: RunFolder) -> tuple[str, bool]:
    """The digest of what the corpus is made from, and whether the one there was made from it. InputError for another one, where
    checkpoints were trained on it."""
    from bessemer.corpus import pipeline

    try:
        inputs = pipeline.inputs_digest(recipe, run)
    except InputError as error:
        built = stage_facts(run.corpus).get("inputs")
        if built is None or not _is_trained(run) or not _is_whole(run.corpus, built):
            raise
        warn(f"{error}; going on with the corpus as it was built")
        return built, True
    if (current := _is_current(run, run.corpus, inputs, lambda: pipeline.content_digest(recipe))) is not None:
        return inputs, current
    files = pipeline.changed_files(recipe, run) or {}
    said = "; ".join(_files(word, names) for word, names in files.items() if names)
    is_whole = _is_whole(run.corpus, stage_facts(run.corpus).get("inputs", ""))
    if said and is_whole and not files["changed"] and not files["added"]:  # what they held is in the corpus
        warn(f"{said} since the corpus was built; going on with the corpus as it was built")
        return inputs, True
    why = "the sources or their rules have changed since the corpus was built"
    raise _refusal(run, run.corpus, f"{why} ({said})" if said else why)


def say_where(stage: Path, url: str | None) -> None:
    """Say where the large files of a stage are, when the recipe names another place: they are not moved. stage: its folder in the
    run; url: `corpus.publish`, `tokens.publish`."""
    folder = published_folder(stage)
    wanted = stage if url is None else StorePath(url) / stage.parent.absolute().name
    if wanted not in (folder, folder.parent):
        both = " and ".join(dict.fromkeys((str(stage), str(folder))))
        say(f"  {stage.name}.publish: what was made before stays in {folder}; to make it anew remove {both}")


def _files(word: str, names: list[str]) -> str:
    listed = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"{counted(len(names), 'file')} {word} ({listed})"


def tokens_inputs(recipe: Recipe, run: RunFolder) -> tuple[str, bool]:
    """As `corpus_inputs`, of the tokens."""
    from bessemer.tokens import build

    inputs = build.inputs_digest(recipe, run)
    current = _is_current(run, run.tokens, inputs, lambda: build.inputs_digest(recipe, run, by_content=True))
    if current is None:
        raise _refusal(run, run.tokens, "the corpus or the tokenizer has changed since the tokens were written")
    return inputs, current


def require_unchanged(recipe: Recipe, run: RunFolder) -> None:
    """Raise InputError where corpus or tokens would be built anew under checkpoints that were trained on those that are there."""
    if not _is_trained(run):
        return
    recipe = derived.filled(recipe, run)
    is_current = not recipe.corpus.sources or not run.corpus.exists() or corpus_inputs(recipe, run)[1]
    if is_current and run.corpus.exists():
        tokens_inputs(recipe, run)


def trained_on(run: RunFolder) -> str | None:
    """The digest of the tokens that the newest checkpoint was trained on; None where there is none."""
    done = published(run.checkpoints)
    if not done:
        return None
    from bessemer.checkpoint.format import load_manifest  # loads torch, which a corpus does not need

    return load_manifest(run.checkpoints / checkpoint_name(done[-1])).facts.get("data")


def _is_current(run: RunFolder, folder: Path, inputs: str, content: Callable[[], str]) -> bool | None:
    """Whether a stage is current; where it is not, it may be made again: of what it was made of, or under no checkpoint. None:
    checkpoints were trained on what is there, and it is of something else."""
    built = stage_facts(folder)
    if built.get("inputs") == inputs or not folder.exists() or not _is_trained(run):
        return _is_whole(folder, inputs)
    if not built or built.get("content") != content():
        return None
    say(f"  {folder.name}: its files lie elsewhere or have another time, and hold the same: it stays as it was built")
    return _is_whole(folder, built["inputs"])


def _is_whole(folder: Path, inputs: str) -> bool:
    """Whether a stage was made from these inputs and all of it is there, in the run folder and in a store."""
    return stage_is_current(folder, inputs) and is_published(folder)


def _refusal(run: RunFolder, folder: Path, why: str) -> InputError:
    if not stage_facts(folder):
        why = f"{folder / STAGE_FILE} is missing or damaged, so it is unknown what the {folder.name} were made from"
    return InputError(
        f"{run.path}: {why}, but its checkpoints were trained on the old one. Give the new run a name of its own with "
        "--set run.name=NAME, go on with what was built by `bessemer train` and the stages after it, or start this one over "
        "with --restart (what was trained is set aside, not removed)"
    )


def _is_trained(run: RunFolder) -> bool:
    return run.was_saved
