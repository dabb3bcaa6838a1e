"""A run with its corpus in `corpus.storage`: its tokens equal those of a corpus in the run directory, and all readers find its
documents.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bessemer.corpus.readers.files import earlier_files
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.run_tasks import run as worker
from bessemer.storage import path as store_path
from bessemer.storage.path import is_published, published_folder
from bessemer.tokens import documents, tasks, trace
from tests.corpus.object_store import Store
from tests.storage_folder import BOTH, on_disk, places, published, storage_of, what_is_said


def tokens_of(run: RunDirectory, bucket: Store) -> dict[str, Any]:
    found: dict[str, Any] = {path.name: path.read_bytes() for path in run.tokens.iterdir() if path.suffix != ".json"}
    if published_folder(run.tokens) != run.tokens:
        assert not any(tasks.is_published(name) for name in found)
        found |= published(run.tokens, bucket)
    manifest = read_json(run.tokens / "manifest.json")
    return found | {"manifest": manifest}


@pytest.fixture
def command(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command on the small recipe with its corpus in a storage, and return its output."""

    def do(name: str, url: str, *more: str, code: int = 0) -> str:
        keys = [f'run.dir="{tmp_path / "runs"}"', f'corpus.storage="{url}"', *more]
        return what_is_said([name, str(prepared / "small.toml")], keys, code, capsys)

    return do


@BOTH
def test_tokens_of_a_stored_corpus_equal_those_of_a_run_directory(
    kind: str, command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = storage_of(kind, tmp_path)
    whole, run = RunDirectory(prepared / "runs" / "small"), RunDirectory(tmp_path / "runs" / "small")
    command("corpus", url)
    assert not any(path.suffix in (".parquet", ".idx") for path in run.path.rglob("*"))
    (on_disk(published_folder(run.corpus), bucket) / "documents" / "part-00009.parquet").write_bytes(b"of others")
    command("tokens", url)
    assert tokens_of(run, bucket) == tokens_of(whole, bucket)
    assert "unchanged" in command("corpus", url) and "unchanged" in command("tokens", url)

    identity = next(documents.read_documents(documents.part_files(whole.corpus / "documents"))).identity
    found = trace.describe_documents(run.corpus, [identity, "0" * 32], text=True)
    assert found == trace.describe_documents(whole.corpus, [identity], text=True) and found[identity]["text"]
    rows = sum(pq.read_metadata(store_path.arrow_source(path)).num_rows for path in earlier_files(run.path))
    assert rows == pq.read_table(whole.corpus / "documents").num_rows > 0

    shutil.rmtree(run.tokens)
    monkeypatch.setattr(tasks, "TASK_BYTES", 30_000)
    command("tokens", url)
    assert tokens_of(run, bucket) == tokens_of(whole, bucket)
    assert [name.rpartition("/")[2].partition("-")[0] for name in places(url, bucket)] == ["corpus", "tokens"]


@BOTH
def test_a_lost_corpus_and_an_unreachable_storage_are_errors(
    kind: str, command: Any, tmp_path: Path, bucket: Store
) -> None:
    url, run = storage_of(kind, tmp_path), RunDirectory(tmp_path / "runs" / "small")
    command("corpus", url)
    place = published_folder(run.corpus)
    if kind == "s3":
        bucket.refuse()
        said = command("corpus", url)
        assert "ACCESS_DENIED" in said and str(place) in said and "unchanged" in said
        assert trace.describe_documents(run.corpus, ["0" * 32]) == {}
        assert str(place) in command("tokens", url, code=1)
        bucket.answer()
    lost = "stage.json" if kind == "s3" else "documents/part-00000.parquet"
    (on_disk(place, bucket) / lost).unlink()
    assert not is_published(run.corpus) and "unchanged" not in command("corpus", url)
    assert is_published(run.corpus) and published_folder(run.corpus) == place
    assert f"stays in {place}" in command("corpus", f"{url}-elsewhere")


def test_a_shared_corpus_is_removed_with_its_last_run(command: Any, tmp_path: Path, bucket: Store) -> None:
    url, second = storage_of("disk", tmp_path), RunDirectory(tmp_path / "runs" / "second")
    command("corpus", url)
    (place,) = places(url, bucket)
    assert "shared with" in command("corpus", url, 'run.name="second"')
    assert places(url, bucket) == [place] and str(published_folder(second.corpus)).endswith(place)
    command("corpus", url, "corpus.rules.min_characters=21")  # the first run has another corpus now
    assert len(places(url, bucket)) == 2 and "unchanged" in command("corpus", url, 'run.name="second"')
    shutil.rmtree(second.path)
    command("corpus", url, "corpus.rules.min_characters=21")
    assert len(places(url, bucket)) == 1 and place not in places(url, bucket)


def test_run_directories_with_the_same_name_do_not_remove_each_others_corpus(
    command: Any, tmp_path: Path, bucket: Store
) -> None:
    url = storage_of("disk", tmp_path)
    command("corpus", url)
    (place,) = places(url, bucket)
    for number in (20, 21):
        command("corpus", url, f'run.dir="{tmp_path / "other"}"', f"corpus.rules.min_characters={number}")
        assert len(places(url, bucket)) == 2 and place in places(url, bucket), "its own is replaced"
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")
    command("corpus", url, f'run.dir="{tmp_path / "copy"}"', "corpus.rules.min_characters=22")
    assert len(places(url, bucket)) == 3 and is_published(tmp_path / "runs" / "small" / "corpus")


@pytest.mark.long
def test_documents_of_an_earlier_stored_corpus_are_duplicates(
    command: Any, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "runs" / "small"
    command("corpus", "s3://b/storage")
    said = command("corpus", "s3://b/storage", 'run.name="second"', f'corpus.dedup.against=["{first}"]', code=2)
    assert "corpus.sources." in said and "duplicate" in said
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)  # with processes
    assert "corpus.sources." in command(
        "corpus", "s3://b/storage", 'run.name="third"', "corpus.workers=2", f'corpus.dedup.against=["{first}"]', code=2
    )
