"""`corpus.storage`: the same corpus as in a run directory, byte for byte, after kills and rejected requests."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import prose, recipe

from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import partition, pipeline, publish
from bessemer.corpus.inputs import inputs_digest
from bessemer.recipe import Recipe, Source, dump, parse
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks.stage_storage import BEGUN
from bessemer.run_tasks.task import Task
from bessemer.storage import path as store_path
from tests.corpus.object_store import Store
from tests.storage_folder import BOTH, contents, on_disk, places, published, storage_of

PROGRAM = "-m", "tests.corpus.build_corpus"
LARGE = ("documents/", "rejected/")


def sample(data: Path, count: int = 40) -> Recipe:
    """Write files, compressed lines with some damage, and a source with a budget, with duplicates and rejects."""
    for number in range(count):
        (data / "files" / str(number % 5)).mkdir(parents=True, exist_ok=True)
        (data / "files" / str(number % 5) / f"{number}.txt").write_text(prose(number))
    for number in range(0, count, 7):
        (data / "files" / f"copy-{number}.txt").write_text(prose(number).upper())
        (data / "files" / f"near-{number}.txt").write_text(prose(number + 1) + "\nand some more words")
        (data / "files" / f"short-{number}.txt").write_text("short")
    for name, first in (("lines", 500), ("part", 700)):
        lines = [json.dumps({"text": prose(first + number), "n": number}) for number in range(count)]
        lines[13] = "{damaged"
        (data / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return recipe(
        {"name": "files", "format": "text", "paths": [str(data / "files")]},
        {"name": "lines", "format": "jsonl", "paths": [str(data / "lines.jsonl.gz")]},
        {"name": "part", "format": "jsonl", "paths": [str(data / "part.jsonl.gz")], "max_bytes": 20_000},
        dedup="bands = 14\nrows = 8",
    )


def built(run: RunDirectory, bucket: Store) -> dict[str, bytes]:
    """Return all files of a corpus in a storage."""
    here, there = contents(run.corpus), published(run.corpus, bucket)
    assert all(name.startswith(LARGE) for name in there) and not any(name.startswith(LARGE) for name in here)
    return here | there


@BOTH
def test_the_corpus_equals_that_of_a_run_directory(
    kind: str, data: Path, tmp_path: Path, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = storage_of(kind, tmp_path)
    of, here, there = sample(data), RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    steps, run_task = set[str](), Task.run

    def run(self: Any) -> Any:
        assert str(self.work).startswith(url), "a task works in the run directory"
        steps.add(type(self).__name__)
        return run_task(self)

    monkeypatch.setattr(Task, "run", run)
    pipeline.build(of.changed(corpus={"storage": url}), there)
    assert built(there, bucket) == contents(here.corpus)
    assert {"Partition", "PublishBucket", "EqualTexts"} <= steps, steps
    assert [name.rpartition("/")[2] for name in places(url, bucket)] == [f"corpus-{inputs_digest(of)[:16]}"]
    assert sorted(path.name for path in there.path.iterdir()) == ["corpus", "storage.json"]
    assert inputs_digest(of) == inputs_digest(of.changed(corpus={"storage": url})), "the place changes no document"
    parts = [
        line
        for line in (bucket.requests() if kind == "s3" else ())
        if line.startswith("GET") and "/documents/part-" in line
    ]
    assert not parts, "the driver fetched documents"


@pytest.mark.long
def test_quality_scores_equal_those_of_a_local_build(data: Path, tmp_path: Path, bucket: Store, finely: None) -> None:
    of = sample(data)
    for name, words in (("high", "the sea was calm and the ship sailed on"), ("low", "buy cheap pills now click here")):
        lines = [json.dumps({"text": prose(2000 + number) + f"\n{words} " * 9}) for number in range(60)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    labelled = (Source(name=name, format="jsonl", paths=(str(data / f"{name}.jsonl"),)) for name in ("high", "low"))
    quality = {"high": ("high",), "low": ("low",), "use": "filter", "keep_share": 0.8}
    of = of.changed(corpus={"sources": (*of.corpus.sources, *labelled), "quality": quality})
    here, there = RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    pipeline.build(of.changed(corpus={"storage": "s3://b/storage"}), there)
    mine, theirs = contents(here.corpus), built(there, bucket)
    assert mine.keys() == theirs.keys()
    assert {name for name in mine if mine[name] != theirs[name]} <= {"quality.json"}  # contains seconds


@pytest.mark.long
@BOTH
def test_a_build_killed_at_many_moments_resumes_to_the_same_corpus(
    kind: str, data: Path, tmp_path: Path, bucket: Store, finely: None
) -> None:
    url = storage_of(kind, tmp_path)
    of, whole, run = sample(data), RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "killed")
    pipeline.build(of, whole)
    file = tmp_path / "recipe.toml"
    file.write_text(dump(of.changed(corpus={"storage": url})))
    draw, kills = random.Random(1), 0
    while True:
        moment = [str(draw.randint(2, 60)), draw.choice(["before", "after"]), "copies"]  # 46 publishes it
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, str(file), str(run.path), *moment], stdout=subprocess.PIPE
        )
        process.communicate(timeout=300)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert not run.corpus.exists() or built(run, bucket) == contents(whole.corpus)
    assert kills >= 3
    assert built(run, bucket) == contents(whole.corpus)
    assert len(places(url, bucket)) == 1


@contextmanager
def disk_that_is_full_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make builds fail once all documents of a corpus are done."""
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "assemble", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        yield


@BOTH
def test_work_of_other_inputs_is_removed_and_a_partly_removed_folder_is_not_trusted(
    kind: str, data: Path, tmp_path: Path, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, run = storage_of(kind, tmp_path), RunDirectory(tmp_path / "run")
    of = sample(data, 16).changed(corpus={"storage": url})
    with disk_that_is_full_at_the_end(monkeypatch):
        for text in ("one", "two"):
            (data / "files" / "new.txt").write_text(prose(1000) + text)
            with pytest.raises(OSError, match="full"):
                pipeline.build(of, run)
        (folder,) = {path.parent for path in on_disk(url, bucket).glob(f"run/*/corpus.work/*/{BEGUN}")}
        assert folder.name == inputs_digest(of)[:16] and (folder / "published").exists()
        assert {path.relative_to(folder.parent).parts[0] for path in folder.parent.rglob("stage.json")} == {folder.name}
    (folder / BEGUN).unlink()  # as a killed removal leaves it
    for path in folder.glob("partitions/*/rows.parquet"):
        path.unlink()
    pipeline.build(of, run)
    assert len(places(url, bucket)) == 1
    pipeline.build(of.changed(corpus={"storage": None}), whole := RunDirectory(tmp_path / "whole"))
    assert built(run, bucket) == contents(whole.corpus)


def test_a_failing_store_ends_the_build_and_the_same_command_resumes(
    data: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails at the start, and before the corpus is published; work on the documents is done once."""
    of, here, there = sample(data), RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    stored, made, assemble = of.changed(corpus={"storage": "s3://b/storage"}), list[str](), publish.assemble

    def build(expected: str | None = None) -> None:
        if expected is None:
            pipeline.build(stored, there)
            return
        with pytest.raises(BessemerError, match=expected) as caught:
            pipeline.build(stored, there)
        assert caught.value.exit_code == 1
        bucket.answer()

    def assembled(*given: Any) -> Any:
        bucket.fail()
        return assemble(*given)

    bucket.fail()
    build("s3://b/storage/there/.*AWS_ENDPOINT_URL")
    assert not there.path.exists()
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "assemble", assembled)
        build("s3://b/storage/there/.*AWS_ENDPOINT_URL")
    make = partition.Partition.make
    monkeypatch.setattr(partition.Partition, "make", lambda *given: made.append("again") or make(*given))  # type: ignore[func-returns-value]
    build()
    assert built(there, bucket) == contents(here.corpus) and not made


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://none/x", "AWS_ENDPOINT_URL"),
        ("s3://b/x", "check the cred"),
        ("/proc/x", "/proc cannot be written"),
    ],
)
def test_a_storage_without_write_access_is_an_error(
    data: Path, run: RunDirectory, bucket: Store, url: str, advice: str
) -> None:
    if url.startswith("s3://b"):
        bucket.refuse()
    with pytest.raises(InputError, match=rf"corpus.storage: {url}/run.*{advice}") as caught:
        pipeline.build(sample(data).changed(corpus={"storage": url}), run)
    assert "once it answers" not in str(caught.value) and "a-secret-of-someone" not in str(caught.value)
    assert not run.path.exists()


@pytest.mark.parametrize(
    "place",
    ["s3://key:secret@b/x", "s3://b/x?signature=1", "scratch/work", "s3://", "s3:///path", "hf://datasets/a/b", "https://h", "/runs"],
)  # fmt: skip
@pytest.mark.parametrize("key", ["corpus.storage", "checkpoint.mirror"])
def test_invalid_storage_and_mirror_urls_are_errors(place: str, key: str) -> None:
    table, _, name = key.partition(".")
    with pytest.raises(InputError) as caught:
        parse(f'[run]\nname = "t"\ndir = "/runs"\n[model]\ndepth = 2\n[{table}]\n{name} = "{place}"\n', "test")
    assert str(caught.value).startswith("test:") and "secret" not in str(caught.value)


@BOTH
def test_an_earlier_corpus_is_removed_once_the_next_is_published(
    kind: str, data: Path, tmp_path: Path, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "files").mkdir()
    url, run = storage_of(kind, tmp_path), RunDirectory(tmp_path / "there")
    of = recipe({"name": "files", "format": "text", "paths": [str(data / "files")]}).changed(corpus={"storage": url})
    theirs = on_disk(url, bucket) / "there" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("of somebody else")
    found = []
    for text in ("one", "two", "three"):
        (data / "files" / "new.txt").write_text(prose(1000) + text)
        if text == "three":
            with disk_that_is_full_at_the_end(monkeypatch), pytest.raises(OSError, match="full"):
                pipeline.build(of, run)
            assert store_path.is_published(run.corpus), "the old one stays"
        pipeline.build(of, run)
        assert store_path.is_published(run.corpus)
        found.append(store_path.published_folder(run.corpus))
        assert places(url, bucket) == sorted(["there/notes.txt", str(found[-1]).removeprefix(f"{url}/")])
    assert len(set(found)) == 3
