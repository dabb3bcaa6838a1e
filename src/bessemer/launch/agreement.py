"""What all processes of a run must have in common, found out before they form a group; one sentence where they do not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from bessemer import __version__
from bessemer.errors import InputError
from bessemer.launch import outcome
from bessemer.launch.elastic import fitted
from bessemer.launch.meeting import Meeting
from bessemer.parallel.team import require_world
from bessemer.recipe import Parallel, Recipe, digest, load
from bessemer.run import RunFolder, read_json

SHARED_SECONDS = 4.0  # until a file of one process must be seen by the others
POLL_SECONDS = 0.1


def on_the_recipe(meeting: Meeting, opened: Callable[[], tuple[Recipe, RunFolder]]) -> RunFolder:
    """The run folder, when every process could read the same recipe and their number fits it.

    Raises Settled, with the error of the first process that has one.
    """
    found: list[RunFolder] = []

    def bring() -> dict[str, Any]:
        recipe, run = opened()
        if not recipe.parallel.elastic:
            require_world(recipe.parallel, meeting.world)
        found.append(run)
        return {"program": __version__, "recipe": digest(recipe), "folder": str(run.path)}

    def judge(brought: list[dict[str, Any]]) -> None:
        _require_same(brought, "program", "versions of bessemer")
        _require_same(brought, "folder", "run folders")
        _require_same(brought, "recipe", "recipes")

    meeting.settle("recipe", bring, judge)
    return found[0]


def on_the_folder(meeting: Meeting, run: RunFolder) -> Parallel:
    """The layout of a prepared run for the processes that are there, when all see the same folder and tokens."""
    place = outcome.folder(run)

    def mark() -> str:
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"seen-{time.time_ns()}-{os.getpid()}"
        path.touch()
        return path.name

    name = meeting.publish("mark", mark)

    def bring() -> dict[str, Any]:
        manifest = run.tokens / "manifest.json"
        tokens = digest(read_json(manifest)["files"]) if manifest.exists() else "none"
        return {"sees": _sees(run, name), "tokens": tokens}

    def judge(brought: list[dict[str, Any]]) -> dict[str, Any]:
        (place / name).unlink(missing_ok=True)
        blind = [rank for rank, one in enumerate(brought) if not one["sees"]]
        if blind:
            raise InputError(
                f"{run.path}: rank {_ranks(blind)} does not see what rank 0 writes there: the run folder has to lie on a disk "
                "that all processes share; set run.dir to one"
            )
        _require_same(brought, "tokens", f"tokens in {run.tokens}")
        return _layout(load(run.recipe), meeting.world).model_dump()

    return Parallel(**meeting.settle("folder", bring, judge))


def _sees(run: RunFolder, name: str) -> bool:
    """Whether a file of the first process is here, soon. Nothing looked for it before, so no absence is remembered."""
    deadline = time.monotonic() + SHARED_SECONDS
    while not (there := (outcome.folder(run) / name).exists()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return there


def _layout(recipe: Recipe, processes: int) -> Parallel:
    if not recipe.parallel.elastic:
        return recipe.parallel
    found = fitted(recipe, processes)
    if found is None:
        least = recipe.parallel.tensor * recipe.parallel.pipeline * recipe.parallel.context
        raise InputError(
            f"parallel.elastic: {processes} processes are left, and no layout of them keeps the global batch with tensor x "
            f"pipeline x context = {least} and train.micro_batch = {recipe.train.micro_batch}; at least {least} are needed"
        )
    return found


def _require_same(brought: list[dict[str, Any]], key: str, what: str) -> None:
    others = [rank for rank, one in enumerate(brought) if one.get(key) != brought[0].get(key)]
    if others:
        raise InputError(f"parallel: the processes have different {what}: rank {_ranks(others)} differs from rank 0")


def _ranks(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
