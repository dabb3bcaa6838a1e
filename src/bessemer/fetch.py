"""A run that is in a store is brought to this machine: where a recipe names it (`run.store`), and by `bessemer fetch`."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

from bessemer.corpus import owners
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Recipe, load
from bessemer.recipe.section import store_or_folder
from bessemer.run import STORE_LOCK, RunFolder, published, sync_folder
from bessemer.run_store import SETTLE_TRIES, RunStore, locked, run_files
from bessemer.storage import is_remote, patient, require_bucket, requiring_answer
from bessemer.store_folder import StoreFolder
from bessemer.terminal import counted, say, size


def fetch_missing(recipe: Recipe, run: RunFolder, num_checkpoints: int, goes_on: bool) -> None:
    """Where this machine has nothing of a run that is in a store, fetch it, with its newest checkpoints. goes_on: the run is to
    go on, which another machine that writes it forbids. Raises InputError, BessemerError."""
    store = RunStore.of(recipe, run)
    if store is None:
        return
    if run.has_begun and goes_on:
        _set_aside_older(store, run)
    if run.has_begun:
        return
    if goes_on:
        store.require_free()
    with requiring_answer("run.store"), patient():
        if (copy := store.copy()) is None:
            return
        step = _bring(recipe.run.store or "", recipe.run.name, run, copy, num_checkpoints, goes_on)
        if goes_on:
            owners.take_over(run.path)
    older = sorted(run.path.parent.glob(f"{run.path.name}.older-*"))  # perhaps by another process of this training
    why = f"has gone on elsewhere (what was here is in {older[-1]})" if older else "is not on this machine"
    say(f"  {run.path} {why}: {_brought(copy, step)} fetched from {store.place}")


def _set_aside_older(store: RunStore, run: RunFolder) -> None:
    """Set a run folder aside where another machine has gone on from it, by way of the store. Raises BessemerError where one is
    doing so."""
    with requiring_answer("run.store"), patient():
        copy = store.copy()
    if not store.is_older_than(copy):
        return
    store.require_free()
    with locked(lock := run.path.with_name(f".{run.path.name}.older")):
        if store.is_older_than(copy):  # else another process of this training has done it
            places = (run.path.with_name(f"{run.path.name}.older-{number}") for number in count(1))
            place = next(place for place in places if not place.exists())
            with run.writing():
                os.rename(run.path, place)
        lock.unlink(missing_ok=True)


def fetch_checkpoints(recipe: Recipe, run: RunFolder, num_checkpoints: int) -> None:
    """Fetch those of a run's `num_checkpoints` newest checkpoints that are not here, where the run is in a store."""
    url, name = recipe.checkpoint.mirror, recipe.run.name
    if recipe.run.store is None or url is None or len(published(run.checkpoints)) >= num_checkpoints:
        return
    with requiring_answer("checkpoint.mirror"), patient():
        step = _checkpoints(url, name, run, num_checkpoints)
    if step is not None:
        say(f"  the checkpoint of step {step:,} was fetched from {url.rstrip('/')}/{name}")


def fetch_run(url: str, folder: Path | None, has_all: bool) -> dict[str, Any]:
    """Bring a run to a folder, by default runs/NAME. has_all: with all checkpoints, not the newest alone. Raises InputError where
    there is no run, and where the folder has another one or another state of it."""
    base, _, name = url.rstrip("/").rpartition("/")
    try:
        store_or_folder(base)
    except ValueError:
        raise InputError(
            f"fetch: {url}: give s3://BUCKET/PATH/RUN, gs://BUCKET/PATH/RUN or an absolute folder"
        ) from None
    run = RunFolder(Path("runs") / name if folder is None else folder)
    store = RunStore(base, name, run)
    with requiring_answer("fetch"), patient():
        copy = store.copy()
        if copy is None and is_remote(base):
            require_bucket(base, "no run can be there")
        if copy is None:
            raise InputError(
                f"{store.place}: no run there, as it has no run.json; give run.store and the name of a run"
            )
        if run.has_begun:
            if not store.knows(copy):
                raise InputError(
                    f"{run.path}: has another run, or another state of this one, than {store.place}; name a folder that "
                    "does not exist"
                )
            mirror = _mirror_url(run, base)
            step = _checkpoints(mirror, name, run, None if has_all else 1)
            said = (
                "is that run, as it is in the store; " + ("nothing" if step is None else f"step {step:,}") + " fetched"
            )
        else:
            if run.path.exists() and not run.path.is_dir():
                raise InputError(f"{run.path}: a file; name a folder that does not exist")
            step = _bring(base, name, run, copy, None if has_all else 1)
            said = f"{_brought(copy, step)} fetched from {store.place}"
    say(f"[green]✓[/] {run.path}: {said}")
    return {
        "run": run.path,
        "from": store.place,
        "files": len(copy["files"]),
        "checkpoints": published(run.checkpoints),
    }


def _brought(copy: dict[str, Any], step: int | None) -> str:
    files = copy["files"].values()
    saved = "" if step is None else f" and the checkpoint of step {step:,}"
    return f"{counted(len(files), 'file')} ({size(sum(row[0] for row in files))}){saved}"


def _bring(
    base: str, name: str, run: RunFolder, copy: dict[str, Any], num_checkpoints: int | None, goes_on: bool = False
) -> int | None:
    """Fetch a copy of a run; its folder appears as a whole. goes_on: its incidents name it. Returns the step of the newest
    checkpoint."""
    part = RunFolder(run.path.with_name(f".{run.path.name}.fetch"))
    part.path.mkdir(parents=True, exist_ok=True)
    with locked(part.path / STORE_LOCK):
        if run.has_begun:  # another process has fetched it meanwhile
            shutil.rmtree(part.path, ignore_errors=True)
            return next(reversed(published(run.checkpoints)), None)
        store = RunStore(base, name, part)
        _fetch_settled(store, part, copy)
        step = None
        if num_checkpoints != 0:
            step = _checkpoints(_mirror_url(part, base), name, part, num_checkpoints)
        if step is not None and goes_on:
            from bessemer.guard.incidents import RESTORED, record

            cause, action = f"{run.path} was not on this machine", f"fetched it and step {step} from {store.place}"
            record(part.incidents, RESTORED, step=step, cause=cause, action=action)
        shutil.rmtree(run.path, ignore_errors=True)  # what a command that was refused left
        os.rename(part.path, run.path)
        sync_folder(run.path.absolute().parent)
    return step


def _fetch_settled(store: RunStore, part: RunFolder, copy: dict[str, Any]) -> None:
    """Fetch a copy, or the one that took its place meanwhile: of a run that trains files are replaced."""
    is_final = False
    for tries in count(1):
        for file, path in run_files(part.path).items():
            if file not in copy["files"]:  # by a fetch of another copy
                path.unlink()
        try:
            store.fetch(copy, is_final)
            return
        except BessemerError:
            newer = store.copy()
            if is_final or newer is None or tries == SETTLE_TRIES:
                raise
            is_final, copy = newer["sha256"] == copy["sha256"], newer


def _mirror_url(run: RunFolder, base: str) -> str:
    """Where the checkpoints of a run that was fetched are."""
    return (load(run.recipe).checkpoint.mirror if run.recipe.exists() else None) or base


def _checkpoints(mirror_url: str, name: str, run: RunFolder, num_checkpoints: int | None) -> int | None:
    """Fetch those of the `num_checkpoints` newest checkpoints, None: all, that are not here. Returns the step of the newest that
    was fetched. None newer than one that is here is fetched: the folder's logs would not reach it."""
    there = StoreFolder(f"{mirror_url.rstrip('/')}/{name}")
    if not any(entry.startswith("step-") for entry in there.entries()):
        return None
    from bessemer.checkpoint.mirror import Mirror  # loads torch, which a machine that builds a corpus need not have

    mirror, here = Mirror(mirror_url, name, run), published(run.checkpoints)
    newest = here[-1] if here else mirror.restore_newest()
    if newest is None:
        return None
    wanted = [step for step in mirror.steps() if step <= newest][-num_checkpoints if num_checkpoints else 0 :]
    missing = [step for step in wanted if step not in published(run.checkpoints)]
    for step in missing:
        mirror.fetch(step)
    return None if here and not missing else max([*missing, *([] if here else [newest])])
