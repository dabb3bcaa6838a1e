"""Files of a run in `corpus.storage`, in the test store or in a folder."""

import json
import shutil
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, stage_facts, write_json
from bessemer.run_tasks.stage_storage import begin_publishing, end_publishing
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, published_folder
from tests.corpus.object_store import Store

BOTH = pytest.mark.parametrize("kind", ["s3", "disk"])


def storage_of(kind: str, tmp_path: Path) -> str:
    return "s3://b/storage" if kind == "s3" else str(tmp_path / "storage")


def on_disk(place: AnyPath | str, bucket: Store) -> Path:
    """Return the folder on disk for a path in the storage."""
    url = str(place)
    return bucket.folder / url.removeprefix("s3://") if url.startswith("s3://") else Path(url)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder by relative path, without receipts."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "stage.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def published(stage: Path, bucket: Store) -> dict[str, bytes]:
    """Return the large files of a stage, which are in its storage."""
    place = published_folder(stage)
    assert place != stage and sorted(stage_facts(stage)["stored"]) == sorted(contents(on_disk(place, bucket)))
    return contents(on_disk(place, bucket))


def places(storage: str, bucket: Store) -> list[str]:
    """Return the entries below the run folders of a storage as RUN/ID/NAME; entries of work have their file."""
    folder = on_disk(storage, bucket)
    files = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return sorted({"/".join(parts[:3]) for parts in files})


def put_corpus_into(run: RunDirectory, storage: str) -> None:
    """Move the documents of a run to its storage, as if they had been published there."""
    facts, large = read_json(run.corpus / "stage.json"), ("documents", "rejected")
    place = begin_publishing(run.corpus, facts["inputs"], storage)
    assert place is not None
    files = [path for name in large for path in (run.corpus / name).iterdir()]
    for name in large if isinstance(place, Path) else ():
        (place / name).mkdir()
    copy_files([(path, place / path.relative_to(run.corpus)) for path in files])
    sizes = {str(path.relative_to(run.corpus)): path.stat().st_size for path in files}
    for name in large:
        shutil.rmtree(run.corpus / name)
    for key in ("outputs", "sha256"):
        facts[key] = {name: value for name, value in facts[key].items() if name not in sizes}
    write_json(run.corpus / "stage.json", {**facts, **end_publishing(place, facts["inputs"], sizes)})
    assert json.loads((run.corpus / "stage.json").read_text())["stored"] == sizes


def what_is_said(command: list[str], keys: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return all output of a command with these keys set; its exit code must be `code`."""
    capsys.readouterr()
    assert run_command([*command, *(part for key in keys for part in ("--set", key))]) == code
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())
