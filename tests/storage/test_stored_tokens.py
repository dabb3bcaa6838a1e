"""A run with its tokens in `corpus.storage`, which trains bit for bit as with tokens in its run directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.common.errors import BessemerError
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, read_steps
from bessemer.storage.filesystem import StorePath, parse_path
from bessemer.storage.path import StoredNumbers, published_folder
from bessemer.tokens import tasks
from bessemer.tokens.loader import open_loader
from bessemer.tokens.shards import TokenStore
from tests.corpus.object_store import Store
from tests.storage_folder import BOTH, on_disk, places, published, put_corpus_into, storage_of, what_is_said

SHARDS = ["tokens.shard_tokens=3000"]


@pytest.fixture
def command(prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command on the small recipe with its corpus under another name, and return its output."""

    def do(name: str, run: str, *more: str, code: int = 0) -> str:
        folder = tmp_path / run / run  # each in its own folder: they share nothing
        if not folder.exists():
            shutil.copytree(prepared / "runs" / "small" / "corpus", folder / "corpus")
        keys = [f'run.dir="{tmp_path / run}"', f'run.name="{run}"', *SHARDS, *more]
        return what_is_said([name, str(prepared / "small.toml")], keys, code, capsys)

    return do


def same_tokens(one: RunDirectory, two: RunDirectory, bucket: Store) -> None:
    """Check that the token files of two runs are equal, in the run directory and in the storage."""
    theirs = published(two.tokens, bucket)
    assert theirs and not any(tasks.is_published(path.name) for path in two.tokens.iterdir())
    for path in one.tokens.iterdir():
        if path.suffix != ".json":
            assert path.read_bytes() == (theirs.get(path.name) or (two.tokens / path.name).read_bytes()), path.name
    files = [read_json(run.tokens / "manifest.json")["files"] for run in (one, two)]
    assert files[0] == files[1]


@BOTH
def test_stored_token_files_equal_those_of_a_run_directory(
    kind: str, command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = storage_of(kind, tmp_path)
    one, two, three = (RunDirectory(tmp_path / name / name) for name in ("one", "two", "three"))
    command("tokens", "one")
    command("tokens", "two", f'corpus.storage="{url}"')
    same_tokens(one, two, bucket)
    assert "unchanged" in command("tokens", "two", f'corpus.storage="{url}"')
    monkeypatch.setattr(tasks, "TASK_BYTES", 30_000)
    shutil.copytree(prepared / "runs" / "small" / "corpus", three.corpus)
    put_corpus_into(three, url)
    command("tokens", "three", f'corpus.storage="{url}"')
    same_tokens(one, three, bucket)
    requests = [line for line in (bucket.requests() if kind == "s3" else ()) if line.startswith("GET")]
    fetched = [line for line in requests if "/shards/" in line and "-train-" in line]
    assert not [line for line in fetched if ".bin" in line], "tokens passed through the driver"
    assert not [name for name in places(url, bucket) if ".work" in name]

    recipe = load(prepared / "small.toml", SHARDS)
    stores = [TokenStore.open(run.tokens) for run in (one, two)]
    loaders = [open_loader(recipe, store) for store in stores]
    for first in (0, 40, 93):
        here, there = (loader.batch(first, 9) for loader in loaders)
        assert np.array_equal(here.inputs, there.inputs) and np.array_equal(here.targets, there.targets)


@BOTH
def test_lost_shards_are_rewritten(kind: str, command: Any, tmp_path: Path, bucket: Store) -> None:
    url = storage_of(kind, tmp_path)
    run, key = RunDirectory(tmp_path / "two" / "two"), f'corpus.storage="{url}"'
    command("tokens", "two", key)
    there = published(run.tokens, bucket)
    shard = on_disk(published_folder(run.tokens), bucket) / "prose-train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2] if kind == "s3" else shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(BessemerError, match=r"prose-train-00001.bin: .*again"):
        TokenStore.open(run.tokens).split("prose", "train").shards[1].tokens[:]
    said = command("tokens", "two", key)
    assert "prose-train-00001.bin" in said and "unchanged" not in said
    assert published(run.tokens, bucket) == there
    command("tokens", "two", key, "tokens.seed=5")
    assert len(places(url, bucket)) == 1, "the old ones stayed"
    command("tokens", "two", "tokens.seed=6")  # in the run directory again
    assert not places(url, bucket) and published_folder(run.tokens) == run.tokens


def test_numbers_in_a_store_and_its_failures(bucket: Store) -> None:
    numbers, place = np.arange(1000, dtype="<u2"), parse_path("s3://b/x")
    assert isinstance(place, StorePath)
    place.write_bytes(numbers.tobytes())
    stored = StoredNumbers(place, "<u2", 1000)
    assert np.array_equal(stored[10:20], numbers[10:20]) and len(stored[990:2000]) == 10
    for use, advice in ((bucket.fail, "AWS_ENDPOINT_URL"), (bucket.refuse, "check the credentials")):
        use()
        with pytest.raises(BessemerError, match=rf"s3://b/x: the object store failed: AWS Error .*{advice}"):
            stored[0:500]  # with fewer bytes Arrow has no room for the store's answer and reports it as broken
        bucket.answer()
    assert np.array_equal(stored[:], numbers)


def test_packed_tokens_stay_in_the_run_directory(command: Any, tmp_path: Path, bucket: Store) -> None:
    run = RunDirectory(tmp_path / "two" / "two")
    command("tokens", "two", 'corpus.storage="s3://b/storage"', 'tokens.packing="best-fit"')
    assert published_folder(run.tokens) == run.tokens and not places("s3://b/storage", bucket)


def test_existing_files_are_not_moved(command: Any, tmp_path: Path, bucket: Store) -> None:
    command("tokens", "one")
    said = command("tokens", "one", 'corpus.storage="s3://b/storage"')
    assert "unchanged" in said and f"stays in {tmp_path / 'one' / 'one' / 'tokens'}" in said


@pytest.mark.long
@pytest.mark.parametrize("layout", [[], ["parallel.replicate=2"]])
@BOTH
def test_a_training_reads_ahead_and_is_equal_bit_for_bit(
    kind: str, layout: list[str], command: Any, tmp_path: Path, bucket: Store
) -> None:
    key = f'corpus.storage="{storage_of(kind, tmp_path)}"'
    one, two = (RunDirectory(tmp_path / name / name) for name in ("one", "two"))
    command("run", "one", *layout)
    command("tokens", "two", key)
    command("run", "two", key, *layout)
    losses = [[(row["step"], row["loss"]) for row in read_steps(run.metrics) if "loss" in row] for run in (one, two)]
    assert losses[0] == losses[1] and len(losses[0]) >= 24
    scores = [read_json(run.evaluation) for run in (one, two)]
    for score in scores:
        del score["seconds"], score["ngram"]["seconds"], score["ppmd"]["seconds"]
    assert scores[0] == scores[1]
    assert kind == "disk" or any("-train-" in line and "bytes=" in line for line in bucket.requests())
