"""A run whose corpus is published in an object store: the tokens of one on a disk, and every reader of its documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer import store_path
from bessemer.cli import run_command
from bessemer.corpus import publish, worker
from bessemer.corpus.files import earlier_files
from bessemer.corpus.quality.sample import example_files
from bessemer.errors import InputError
from bessemer.run import RunFolder, read_json
from bessemer.store_path import StorePath
from bessemer.tokens import build, documents, ledger, tasks
from tests.corpus.object_store import Store


def what_is_said(command: list[str], keys: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """All that a command with these keys set writes; it has to end with `code`."""
    capsys.readouterr()
    assert run_command([*command, *(part for key in keys for part in ("--set", key))]) == code
    said = capsys.readouterr()
    return " ".join((said.out + said.err).split())


def tokens_of(run: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = {path.name: path.read_bytes() for path in run.tokens.iterdir() if path.suffix != ".json"}
    manifest = read_json(run.tokens / "manifest.json")
    del manifest["seconds"]
    return found | {"manifest": manifest}


def left(bucket: Store) -> list[str]:
    """The folders with a receipt, and all files below the work."""
    files = [str(path.relative_to(bucket.folder / "b")) for path in (bucket.folder / "b").rglob("*") if path.is_file()]
    return sorted(name for name in files if name.endswith("/stage.json") or name.startswith("work"))


@pytest.fixture
def command(prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command on the small recipe, with its corpus in the store; returns what it said."""

    def do(name: str, *more: str, code: int = 0) -> str:
        keys = [f'run.dir="{tmp_path / "runs"}"', 'corpus.publish="s3://b/corpora"', *more]
        return what_is_said([name, str(prepared / "small.toml")], keys, code, capsys)

    return do


def test_its_tokens_are_those_of_a_disk(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = RunFolder(prepared / "runs" / "small"), RunFolder(tmp_path / "runs" / "small")
    command("corpus")
    assert not any(path.suffix in (".parquet", ".idx") for path in run.path.rglob("*"))
    command("tokens")
    assert tokens_of(run) == tokens_of(whole)
    assert "unchanged" in command("corpus") and "unchanged" in command("tokens")

    identity = next(documents.documents(whole.corpus / "documents")).identity
    found = ledger.known(run.corpus, [identity, "0" * 32], text=True)
    assert found == ledger.known(whole.corpus, [identity], text=True) and found[identity]["text"]
    rows = sum(pq.read_metadata(store_path.opened(path)).num_rows for path in earlier_files(run.path))
    assert rows == documents.count(whole.corpus / "documents") > 0
    with pytest.raises(
        InputError, match=r"corpus.quality: .*its documents are in s3://b/corpora/small/.*examples are read"
    ):
        example_files(str(run.path))

    shutil.rmtree(run.tokens)
    monkeypatch.setattr(build, "is_distributed", lambda recipe, text_bytes: True)
    monkeypatch.setattr(tasks, "TASK_BYTES", 30_000)
    command("tokens", 'corpus.work="s3://b/work"')
    assert tokens_of(run) == tokens_of(whole)
    copied = [
        line for line in bucket.requests() if line.startswith("PUT") and "/work/" in line and "/documents/" in line
    ]
    assert not copied, "documents that are in a store were copied to it"
    assert len(left(bucket)) == 1


def test_files_of_others_are_no_part_of_it(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = RunFolder(prepared / "runs" / "small"), RunFolder(tmp_path / "runs" / "small")
    command("corpus")
    (place,) = (bucket.folder / "b" / name for name in left(bucket))
    before = read_json(run.corpus / "stage.json")
    shutil.rmtree(run.corpus)
    place.unlink()
    documents_there = place.parent / "documents"
    row = {name: ["ab" * 16] for name in pq.read_schema(next(documents_there.glob("*.parquet"))).names}
    pq.write_table(pa.table(row), documents_there / "part-00003.parquet")
    (documents_there / "part-00007.parquet").write_bytes(b"junk")
    (documents_there / "notes.txt").write_text("mine")
    said = command("corpus")
    assert "3 files there that this run did not write (documents/notes.txt, documents/part-00003.parquet" in said
    assert read_json(run.corpus / "stage.json") == before
    assert (documents_there / "part-00003.parquet").exists() and (documents_there / "notes.txt").read_text() == "mine"
    command("tokens")
    assert tokens_of(run) == tokens_of(whole)
    assert ledger.known(run.corpus, ["ab" * 16]) == {}
    assert {path.name for path in earlier_files(run.path)} == {path.name for path in earlier_files(whole.path)}


def test_files_of_others_in_the_work_folder_are_not_read(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = RunFolder(prepared / "runs" / "small"), RunFolder(tmp_path / "runs" / "small")

    def put_beside(folder: Path) -> dict[str, int]:
        (folder / "documents" / "part-00009.parquet").write_bytes(b"junk")
        return store_path.stage_outputs(folder)

    monkeypatch.setattr(publish, "stage_outputs", put_beside)
    command("corpus", 'corpus.work="s3://b/work"')
    monkeypatch.setattr(build, "is_distributed", lambda recipe, text_bytes: True)
    shutil.copytree(whole.corpus, tmp_path / "runs" / "other" / "corpus")
    other, open_stored = RunFolder(tmp_path / "runs" / "other"), tasks.open_stored

    def opened(*given: Any) -> StorePath:
        folder = open_stored(*given)
        (folder / "documents" / "part-00000.parquet").write_bytes(b"junk")
        (folder / "documents" / "part-00009.parquet").write_bytes(b"junk")
        return folder

    monkeypatch.setattr(tasks, "open_stored", opened)
    for name in ("small", "other"):
        command("tokens", 'corpus.work="s3://b/work"', f'run.name="{name}"')
    assert tokens_of(run) == tokens_of(other) == tokens_of(whole)


def test_a_store_that_does_not_answer_and_one_that_has_lost_it(command: Any, tmp_path: Path, bucket: Store) -> None:
    run = RunFolder(tmp_path / "runs" / "small")
    command("corpus")
    (place,) = left(bucket)
    bucket.refuse()
    said = command("corpus")
    assert "ACCESS_DENIED" in said and "going on as if s3://b/corpora/small/" in said and "unchanged" in said
    assert ledger.known(run.corpus, ["0" * 32]) == {}
    assert "s3://b/corpora/small/" in command("tokens", code=1)
    bucket.answer()
    (bucket.folder / "b" / place).unlink()
    assert "unchanged" not in command("corpus")
    assert left(bucket) == [place]
    said = command("corpus", 'corpus.publish="s3://b/elsewhere"')
    before = store_path.published_folder(run.corpus)
    assert (
        f"corpus.publish: s3://b/elsewhere was neither tried nor used, as what was made before stays in {before};"
        in said
    )
    assert f"to make it anew remove {run.corpus} and {before}" in said


def test_runs_share_it_and_it_goes_when_none_has_it(command: Any, tmp_path: Path, bucket: Store) -> None:
    second = RunFolder(tmp_path / "runs" / "second")
    command("corpus")
    (place,) = left(bucket)
    assert "shared with" in command("corpus", 'run.name="second"')
    assert left(bucket) == [place] and "small" in json.loads((second.corpus / "stage.json").read_text())["store"]
    folder = f"s3://b/{place.removesuffix('/stage.json')}"
    said = command("corpus", "corpus.rules.min_characters=21")  # the first has another one now
    assert f"{folder} stays while another run has its corpus there (second)" in said
    assert len(left(bucket)) == 2 and "unchanged" in command("corpus", 'run.name="second"')
    shutil.rmtree(second.path)
    command("corpus", "corpus.rules.min_characters=21")
    assert len(left(bucket)) == 1 and place not in left(bucket)


def test_a_run_of_the_same_name_leaves_it(command: Any, tmp_path: Path, bucket: Store) -> None:
    command("corpus")
    (place,) = left(bucket)
    folder = f"s3://b/{place.removesuffix('/stage.json')}"
    for number in (20, 21):
        elsewhere = f'run.dir="{tmp_path / "elsewhere"}"', f"corpus.rules.min_characters={number}"
        assert f"{folder}: published by another run folder, or" in command("corpus", *elsewhere)
        assert len(left(bucket)) == 2 and place in left(bucket), "its own is replaced"


@pytest.mark.long
def test_documents_that_an_earlier_corpus_in_a_store_has_are_duplicates(
    command: Any, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "runs" / "small"
    command("corpus")
    said = command("corpus", 'run.name="second"', f'corpus.dedup.against=["{first}"]', code=2)
    assert "none of its documents is left" in said and "duplicate" in said
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)  # by processes
    assert "none of its documents" in command(
        "corpus", 'run.name="third"', "corpus.workers=2", f'corpus.dedup.against=["{first}"]', code=2
    )
