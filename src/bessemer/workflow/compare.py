"""Comparison of two recipes by trainings with paired seeds (`bessemer compare`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bessemer.common.console import say
from bessemer.common.errors import InputError
from bessemer.ladder import paired, runs
from bessemer.recipe import Recipe, load
from bessemer.report import comparison
from bessemer.run.directory import RunDirectory
from bessemer.tokens.shards import TokenStore
from bessemer.workflow import derive, preflight, stages
from bessemer.workflow.session import Session


def compare(recipes: Sequence[Recipe], references: Sequence[str], num_seeds: int) -> paired.Json:
    """Train two recipes with the seeds 1 to `num_seeds` and compare their held-out bits per byte over all finished pairs.

    Each training has a run directory in the folder `compare` of the first recipe's `run.dir`, named after the recipe and
    the seed. Trainings that are already finished are not repeated. The folder also holds the results and comparisons.jsonl,
    a list of all comparisons.

    Args:
        recipes: The baseline A and the recipe B.
        references: File or name that each recipe was loaded from.
        num_seeds: Number of pairs of trainings.

    Returns:
        The content of the result file (scores of both, their differences, p-value and the better recipe), and the path of the
        HTML page as `page`.

    Raises:
        InputError: The recipes are equal or cannot be compared.
        Stopped: A signal stopped the comparison; the same call resumes it.
    """
    folder = Path(recipes[0].run.dir).expanduser() / "compare"
    names = [paired.identity(recipe) for recipe in recipes]
    if num_seeds < 1:
        raise InputError(f"--seeds {num_seeds}: not a number of pairs; give 3 or more")
    if len({*map(paired.digest_of, names)}) == 1:
        raise InputError(f"{references[1]}: equal to {references[0]} in every key that can change a score; change one")
    trials = [paired.trial(recipe, folder, name, 1) for recipe, name in zip(recipes, names, strict=True)]
    firsts = [Session(one, RunDirectory(one.run.folder)) for one in trials]
    for first, reference in zip(firsts, references, strict=True):
        preflight.check(first.recipe, first.run, reference)
    with RunDirectory(folder).lock():
        for first in firsts:
            with first.run.lock():
                stages.build_data(first)
        parts = [(derive.filled(first.recipe, first.run), TokenStore.open(first.run.tokens)) for first in firsts]
        same_order = paired.require_comparable(parts)
        num_pairs = max(num_seeds, paired.finished_pairs(folder, names))
        pairs = [[_train(first, seed) for first in firsts] for seed in range(1, num_pairs + 1)]
        sides = [paired.read_side(*side) for side in zip(references, zip(*pairs, strict=True), strict=True)]
        result = paired.judge(folder, *sides, same_order=same_order)
        page = folder / f"{'-vs-'.join(names)}.html"
        comparison.write(page, [run for pair in pairs for run in pair], result["answers"])
    return {**result, "page": page}


def _train(first: Session, seed: int) -> RunDirectory:
    """Train a recipe with a seed, unless that run is already evaluated, and return its run.

    `first` is the session of seed 1. Other seeds use its tokens and the values that were derived for it.
    """
    session, (name, _, _) = first, first.run.path.name.rpartition("-")
    if seed > 1:
        recipe = paired.trial(load(first.run.recipe), first.run.path.parent, name, seed)
        session = Session(recipe, RunDirectory(recipe.run.folder))
    if not session.run.evaluation.exists():
        say(f"[bold]{name}[/], seed {seed}")
        runs.train_on(first.run.tokens, session.run, lambda: stages.run_all(session, has_tokens=True))
    return session.run
