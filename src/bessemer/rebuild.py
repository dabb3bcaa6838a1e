"""Whether corpus and tokens are built again: never under checkpoints that were trained on what is there.

Files that were copied, moved or touched hold what they held. Then what was built of them stays, and a run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bessemer.checkpoint.format import load_manifest
from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run import STAGE_FILE, RunFolder, published, stage_facts, stage_is_current
from bessemer.terminal import counted, say, warn


def corpus_inputs(recipe: Recipe, run: RunFolder) -> tuple[str, bool]:
    """The digest of what the corpus is made from, and whether the one there was made from it. InputError for another one, where
    checkpoints were trained on it."""
    from bessemer.corpus import pipeline

    try:
        inputs = pipeline.inputs_digest(recipe)
    except InputError as error:
        built = stage_facts(run.corpus).get("inputs")
        if built is None or not _is_trained(run) or not stage_is_current(run.corpus, built):
            raise
        warn(f"{error}; going on with the corpus as it was built")
        return built, True
    try:
        why = "the sources or their rules have changed since the corpus was built"
        return _judged(run, run.corpus, inputs, lambda: pipeline.content_digest(recipe), why)
    except InputError as error:
        if (files := pipeline.changed_files(recipe, run)) is None:
            raise
        said = "; ".join(_files(word, names) for word, names in files.items() if names)
        if not files["changed"] and not files["added"]:  # what they held is in the corpus
            warn(f"{said} since the corpus was built; going on with the corpus as it was built")
            built = stage_facts(run.corpus)["inputs"]
            return inputs, stage_is_current(run.corpus, built)
        raise InputError(f"{error} ({said})") from None


def _files(word: str, names: list[str]) -> str:
    listed = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"{counted(len(names), 'file')} {word} ({listed})"


def tokens_inputs(recipe: Recipe, run: RunFolder) -> tuple[str, bool]:
    """As `corpus_inputs`, of the tokens."""
    from bessemer.tokens import build

    inputs = build.inputs_digest(recipe, run)
    why = "the corpus or the tokenizer has changed since the tokens were written"
    return _judged(run, run.tokens, inputs, lambda: build.inputs_digest(recipe, run, by_content=True), why)


def trained_on(run: RunFolder) -> str | None:
    """The digest of the tokens that the newest checkpoint was trained on; None where there is none."""
    done = published(run.checkpoints)
    return load_manifest(run.checkpoints / f"step-{done[-1]:08d}").facts.get("data") if done else None


def _judged(run: RunFolder, folder: Path, inputs: str, content: Callable[[], str], why: str) -> tuple[str, bool]:
    """Checkpoints belong to the data they were trained on. What was made of the same, and is damaged, is made again."""
    built = stage_facts(folder)
    if built.get("inputs") == inputs or not folder.exists() or not _is_trained(run):
        return inputs, stage_is_current(folder, inputs)
    if built and built.get("content") == content():
        say(
            f"  {folder.name}: its files lie elsewhere or have another time, and hold the same: it stays as it was built"
        )
        return inputs, stage_is_current(folder, built["inputs"])
    if not built:
        why = f"{folder / STAGE_FILE} is missing or damaged, so it is unknown what the {folder.name} were made from"
    raise InputError(
        f"{run.path}: {why}, but its checkpoints were trained on the old one. Give the new run a name of its own with "
        "--set run.name=NAME, go on with what was built by `bessemer train` and the stages after it, or start this one over "
        "with --restart (what was trained is set aside, not removed)"
    )


def _is_trained(run: RunFolder) -> bool:
    return (run.checkpoints / "latest").exists()
