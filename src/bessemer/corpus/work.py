"""The work folder of a corpus build, and tasks whose results survive a kill there.

    run/corpus.work/DIGEST/     DIGEST: of the build's inputs; folders of other digests are removed
      context.json              the recipe's [corpus] and the number of buckets per source
      contents/SOURCE/000000/   hashes of some files
      files/SOURCE-FORMAT/000000/  pieces of some files, and what was unpacked of them (look.py)
      plan/                     the units of each partition, and spool/: what was unpacked of sources with max_bytes
      partitions/000000/        rows.parquet: the cleaned rows of a partition
      merged/SOURCE/000000/     a range of buckets from all partitions, a file for each bucket; where there are many (merge.py)
      classifier/ scores/000000/ decisions/000000/ quality/  of the quality classifier (whole.py)
      duplicates/STEP/000000/   tasks of the search for duplicates (dedup/search.py); lines/ for repeated lines
      published/SOURCE/000000/  an identity bucket of one source: documents, rejects, counts

A folder with a receipt (stage.json) was renamed into place as a whole: it is either complete or absent.

corpus.work/places.json has the addresses of what the run has in stores and is not sure to keep: work, and corpora that are being
published or were replaced; of these it stays as long as another run under the same run.dir shares one (`shared`).

With `corpus.work` DIGEST lies in an object store, URL/RUN/DIGEST, and corpus.work/ has its address. A task writes its result on
its own machine and copies it there, the receipt last; what a kill leaves without a receipt is written over. The object `begun` is
written first and removed first, so that a folder of which a part was removed is not taken for whole.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.markup import escape

from bessemer import store_path
from bessemer.corpus import owners
from bessemer.errors import BessemerError
from bessemer.run import (
    STAGE_FILE,
    RunFolder,
    mark_stage,
    read_json,
    read_json_again,
    stage_facts,
    stage_is_current,
    staging,
    sync_folder,
    write_json,
)
from bessemer.storage import answering, asked, require_writable, requiring_answer
from bessemer.store_path import STORED_AT, StorePath
from bessemer.terminal import counted, say, warn

TEMPORARY = ".tmp"
BEGUN = "begun"  # of a work folder in a store
PLACES = "places.json"
FOREIGN = "published by another run folder, or by this one before it was made anew or moved: left, as a run may need it"
LISTING = ".listing-"  # begins the name of a folder of the run in which tasks list files (look.py)


@dataclass(frozen=True)
class CorpusTask(ABC):
    """Work whose result is a folder with a receipt: idempotent, in any order, process and machine. `str` names it."""

    work: Path

    stage: ClassVar[str] = "corpus"  # of the run, which errors name
    is_durable: ClassVar[bool] = True  # the result is synced to disk; else a power loss may cost it

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where the result lies."""

    @property
    @abstractmethod
    def inputs(self) -> str:
        """What the result depends on besides the inputs of the build."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Amount of work, for the progress bar."""

    @property
    def progress(self) -> Path | None:
        """The file that says which document is read (time_limit.py), of a task in which one may take so long that only the
        end of the process stops it."""
        return None

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result into a temporary folder; returns the facts for the receipt."""

    def run(self) -> dict[str, Any]:
        """Do the task unless it is done; its receipt."""
        return build_once(self.folder, self.inputs, self.make, self.is_durable)

    def receipt(self) -> dict[str, Any] | None:
        """The receipt of the finished task; None when it has to be done."""
        return receipt(self.folder, self.inputs)

    def load(self, name: str) -> Any:
        """What the finished task pickled into a file."""
        return pickle.loads((self.folder / name).read_bytes())


def open_work(run: RunFolder, inputs: str, url: str | None = None) -> Path:
    """The work folder for these inputs, without the folders of other inputs and what a killed build left half-written.

    url: `corpus.work`. Raises InputError for a store that cannot be written.
    """
    above = _work_folder(run.corpus)
    folder = above / inputs[:16]
    stored = None if url is None else open_stored(run.corpus, inputs, url)
    if stored is None:
        _remove_stored(run.corpus, inputs)
        folder.mkdir(parents=True, exist_ok=True)
    for other in (*above.iterdir(), *run.path.glob(f"{LISTING}*")):
        if other.name != PLACES and (stored is not None or other != folder):
            shutil.rmtree(other, ignore_errors=True)
    if stored is not None:
        return stored
    steps = (
        step
        for name in ("contents", "files", "merged", "duplicates", "lines", "published")
        for step in (folder / name).glob("*")
    )
    for place in (folder, *(folder / name for name in ("partitions", "scores", "digits", "decisions")), *steps):
        for path in place.glob(f".*{TEMPORARY}"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def open_stored(stage: Path, inputs: str, url: str) -> StorePath:
    """The work folder of a stage in a store for these inputs, without those of other inputs. stage: its folder in the run; url:
    `corpus.work`. Raises InputError for a store that cannot be written."""
    stored = StorePath(f"{url.rstrip('/')}/{stage.parent.absolute().name}") / inputs[:16]
    _remove_stored(stage, inputs)
    _note(stage, str(stored))
    _begin_stored(stored)
    return stored


def _note(stage: Path, *places: str) -> None:
    """Add folders in stores to those that a run knows as its own; before their first object."""
    record = _work_folder(stage) / PLACES
    record.parent.mkdir(parents=True, exist_ok=True)
    known = read_json_again(record) or {}
    write_json(record, {**known, "places": sorted({*known.get("places", ()), *places})})


@contextmanager
def publishing(run: RunFolder, inputs: str, url: str | None) -> Iterator[tuple[Path, Path]]:
    """A temporary folder that becomes the corpus of the run when the block ends well, and where its documents, rejects and
    indexes are to be written: there, or with a `url` (`corpus.publish`) in a store.

    A folder in a store is named by the inputs. Until the corpus of the run names it, it is known as one that may be removed;
    the one that it replaces is from then on.
    """
    place = begin_publishing(run.corpus, inputs, url)
    with staging(run.corpus) as staged:
        yield staged, place or staged


def begin_publishing(stage: Path, inputs: str, url: str | None) -> StorePath | None:
    """The folder in a store for the large files of a stage; None without a URL. It and the one that is replaced are known as the
    run's own, of which `close_work` removes what the stage does not name then."""
    note_replaced(stage)
    if url is None:
        return None
    place, before = owners.published_place(stage, inputs, url), stage_facts(stage).get(STORED_AT)
    there = {one for one in place.parent.iterdir() if one.name.startswith(f"{stage.name}-")}
    there |= {StorePath(before)} if before else set()
    if others := sorted(one for one in there if not owners.is_own(stage, one)):
        more = f" and {len(others) - 1} more there" if len(others) > 1 else ""
        say(f"  {escape(str(others[0]))}{more}: {FOREIGN}")
    _note(stage, str(place))
    (place / STAGE_FILE).unlink(missing_ok=True)
    return place


def note_replaced(stage: Path) -> None:
    """Note where in a store a run published the stage that another will replace, for `close_work` to remove."""
    before = stage_facts(stage).get(STORED_AT)
    if before and owners.is_own(stage, StorePath(before)):
        _note(stage, before)


def end_publishing(place: StorePath, inputs: str, written: dict[str, int]) -> dict[str, Any]:
    """Mark the folder in a store as complete; returns what the stage's own receipt says of it.

    written: the sizes of its files. Others that lie there are no part of the stage, and warned of. Raises BessemerError for a
    file that is not there as a whole.
    """
    there, stored = store_path.sizes(place), dict(sorted(written.items()))
    for name in (name for name, size in stored.items() if there.get(name) != size):
        raise BessemerError(
            f"{place / name}: missing, or not of the {stored[name]} bytes that were written; write it again"
        )
    if others := sorted(there.keys() - stored.keys() - {STAGE_FILE}):
        names = ", ".join([*others[:3], *(["..."] if len(others) > 3 else [])])
        warn(
            f"{place}: {counted(len(others), 'file')} there that this run did not write ({names}): left alone and not read; the "
            "folder is removed as a whole when it is replaced, so move what you need"
        )
    (place / STAGE_FILE).write_bytes(json.dumps({"inputs": inputs, "outputs": stored}).encode())
    return {STORED_AT: str(place), "stored": stored}


def _begin_stored(folder: StorePath) -> None:
    """Mark a work folder in a store as begun; what is left of one that was being removed goes first. Raises InputError."""
    with requiring_answer("corpus.work"):
        if not (folder / BEGUN).exists():
            store_path.remove_tree(folder)
            (folder / BEGUN).write_bytes(b"1")


def require_publishable(stage: Path, url: str) -> None:
    """Raise InputError where the large files of a stage could not be written at the end. url: `corpus.publish`,
    `tokens.publish`."""
    place = f"{url.rstrip('/')}/{stage.parent.absolute().name}"
    with requiring_answer(f"{stage.name}.publish"), answering(place):
        asked(place, lambda: require_writable(place))


def _remove_stored(stage: Path, inputs: str | None = None) -> list[str]:
    """Remove the folders in stores that a run knows as its own, but the one that its stage names, those of these inputs and those
    that other runs share. Returns what is left to remove later. Raises BessemerError for a store that fails."""
    record = _work_folder(stage) / PLACES
    known = (read_json_again(record) or {}) if record.exists() else {}
    kept = [place for place in known.get("places", ()) if inputs and inputs[:16] in place.rpartition("/")[2]]
    shared: list[str] = []
    for place in known.get("places", ()):
        if place in (*kept, stage_facts(stage).get(STORED_AT)):
            continue
        if users := owners.other_users(stage, place):
            shared.append(place)
            if place not in known.get("shared", ()):
                say(
                    f"  {escape(place)} stays while another run has its {stage.name} there ({escape(', '.join(users))})"
                )
        elif owners.is_publication(place) and not owners.is_own(stage, StorePath(place)):
            say(f"  {escape(place)}: {FOREIGN}")
        else:
            (StorePath(place) / BEGUN).unlink(missing_ok=True)
            store_path.remove_tree(StorePath(place))
    if record.exists():
        write_json(record, {"places": [*kept, *shared], "shared": shared})
    return [*kept, *shared]


def close_work(stage: Path) -> None:
    """Remove the work folder of a stage, which has been published. stage: its folder in the run."""
    try:
        left = _remove_stored(stage)
    except BessemerError as error:
        warn(f"what the work on the {stage.name} left in the store could not be removed: {error}")
        return
    for path in _work_folder(stage).glob("*") if left else ():
        if path.name != PLACES:
            shutil.rmtree(path, ignore_errors=True)
    if not left:
        shutil.rmtree(_work_folder(stage), ignore_errors=True)


def _work_folder(stage: Path) -> Path:
    return stage.with_name(f"{stage.name}.work")


def receipt(folder: Path, inputs: str) -> dict[str, Any] | None:
    """The receipt of a folder that is complete and made from these inputs; else None."""
    if isinstance(folder, StorePath):  # it was written after all other files, whose sizes were compared then
        try:
            recorded: dict[str, Any] = json.loads((folder / STAGE_FILE).read_bytes())
        except FileNotFoundError:
            return None
        return recorded if recorded["inputs"] == inputs else None
    return read_json(folder / STAGE_FILE) if stage_is_current(folder, inputs) else None


def build_once(
    folder: Path, inputs: str, make: Callable[[Path], dict[str, Any]], is_durable: bool = True
) -> dict[str, Any]:
    """The receipt of `folder`, which `make` fills first unless it is finished: a temporary folder that is then renamed.

    The receipt holds what `make` returns, and all file sizes. When two processes write the same folder, the first to
    rename wins.
    """
    if (recorded := receipt(folder, inputs)) is not None:
        return recorded
    if isinstance(folder, StorePath):
        return _build_in_store(folder, inputs, make)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    temporary.mkdir()
    try:
        facts = make(temporary)
        for path in temporary.rglob("*"):
            if is_durable and path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        mark_stage(temporary, inputs, is_durable, **facts)
        if folder.exists() and not stage_is_current(folder, inputs):
            shutil.rmtree(folder)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not stage_is_current(folder, inputs):
                raise
        if is_durable:
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    recorded = receipt(folder, inputs)
    assert recorded is not None
    return recorded


def _build_in_store(folder: StorePath, inputs: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bessemer-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        mark_stage(made, inputs, is_durable=False, **make(made))
        (folder / STAGE_FILE).unlink(missing_ok=True)  # of other inputs
        store_path.put_folder(made, folder, last=STAGE_FILE)
        recorded: dict[str, Any] = read_json(made / STAGE_FILE)
        return recorded
