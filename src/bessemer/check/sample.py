"""Tokens for trials: the run's own if they exist, else those of a sample of its text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.common.console import silent
from bessemer.common.errors import InputError
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.run.directory import RunDirectory
from bessemer.run.stage import stage_is_current
from bessemer.tokens.build import inputs_digest

Build = Callable[[Recipe, RunDirectory], object]
# Bytes of sampled text: in total, and per token of a vocabulary that is trained on it.
SAMPLE_BYTES, BYTES_PER_ID = 1_500_000, 60
HELD_OUT = 0.05  # least held-out share of a sample


def sample_tokens(
    requested: Recipe, resolved: ResolvedRecipe, run: RunDirectory, build: Build, folder: Path
) -> RunDirectory:
    """Return a run directory with tokens for the trials: `run` if it has them, else a new one in `folder` of sampled text.

    `build` prepares the corpus and the tokens of a recipe in a run directory.
    """
    if _has_tokens(resolved, run):
        return run
    if not requested.corpus.sources:
        raise InputError(f"{run.path}: it has no tokens of this recipe; write them with `bessemer tokens`")
    size = max(SAMPLE_BYTES, BYTES_PER_ID * (resolved.tokenizer.vocabulary or 0)) // len(requested.corpus.sources)
    sources = tuple(
        one.model_copy(update={"max_bytes": min(one.max_bytes or size, size)}) for one in requested.corpus.sources
    )
    corpus: dict[str, Any] = {"sources": sources, "storage": None}
    small = resolved.changed(
        run={"name": "sample", "dir": str(folder)}, corpus=corpus, tokens={
            "held_out": max(resolved.tokens.held_out, HELD_OUT),
        })  # fmt: skip
    sample = RunDirectory(folder / "sample")
    sample.path.mkdir()
    with silent():
        build(small, sample)
    return sample


def _has_tokens(resolved: ResolvedRecipe, run: RunDirectory) -> bool:
    if not (run.tokens / "manifest.json").exists():
        return False
    if resolved.corpus.sources and not run.corpus.exists():  # the corpus may be deleted once there are tokens
        return True
    return stage_is_current(run.tokens, inputs_digest(resolved, run))
