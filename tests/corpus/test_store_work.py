"""The work of a corpus in an object store: the corpus of a disk, byte for byte, whatever is killed or refused on the way."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from build_corpus import small
from corpus_samples import prose, recipe

from bessemer import storage, store_path
from bessemer.corpus import look, owners, partition, pipeline, publish, units, walk, whole, worker
from bessemer.corpus.dedup import task
from bessemer.corpus.inputs import inputs_digest
from bessemer.corpus.work import BEGUN
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Recipe, Source, dump, parse
from bessemer.run import RunFolder
from bessemer.store_path import StorePath
from tests.corpus.object_store import Store

PROGRAM = str(Path(__file__).with_name("build_corpus.py"))


@pytest.fixture
def finely(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((units, "UNIT_BYTES"), (units, "RANGE_BYTES"), (worker, "SMALL_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(task, "MEBIBYTE", task.MEBIBYTE)
    monkeypatch.setattr(whole, "GROUP_BYTES", whole.GROUP_BYTES)
    for name in ("PARTITION_BYTES", "BUCKET_BYTES", "RANGES"):
        monkeypatch.setattr(partition, name, getattr(partition, name))
    monkeypatch.setattr(look, "HASHED_BYTES", 10 * look.OPEN_COST)
    monkeypatch.setattr(walk, "LISTED_HERE", 2)
    small(pool=False)


def sample(data: Path, dedup: str = "bands = 14\nrows = 8") -> Recipe:
    """Files, compressed lines of which some are damaged, and a source with a budget, with duplicates and rejects."""
    for number in range(40):
        (data / "files" / str(number % 5)).mkdir(parents=True, exist_ok=True)
        (data / "files" / str(number % 5) / f"{number}.txt").write_text(prose(number))
    for number in range(0, 40, 7):
        (data / "files" / f"copy-{number}.txt").write_text(prose(number).upper())
        (data / "files" / f"near-{number}.txt").write_text(prose(number + 1) + "\nand some more words")
        (data / "files" / f"short-{number}.txt").write_text("short")
    for name, first in (("lines", 500), ("part", 700)):
        lines = [json.dumps({"text": prose(first + number), "n": number}) for number in range(40)]
        lines[13] = "{damaged"
        (data / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return recipe(
        {"name": "files", "format": "text", "paths": [str(data / "files")]},
        {"name": "lines", "format": "jsonl", "paths": [str(data / "lines.jsonl.gz")]},
        {"name": "part", "format": "jsonl", "paths": [str(data / "part.jsonl.gz")], "max_bytes": 20_000},
        dedup=dedup,
    )


def in_store(of: Recipe, **more: object) -> Recipe:
    return of.changed(corpus={"work": "s3://b/work/", **more})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def left(bucket: Store) -> list[str]:
    return sorted(contents(bucket.folder))


def receipts(bucket: Store) -> dict[str, int]:
    """Time of every receipt in the store."""
    return {str(path): path.stat().st_mtime_ns for path in (bucket.folder / "b").rglob("stage.json")}


@pytest.mark.parametrize(
    "dedup",
    [
        "bands = 14\nrows = 8",
        pytest.param("lines = true", marks=pytest.mark.long),
    ],
)
def test_the_corpus_is_that_of_a_disk(
    data: Path, tmp_path: Path, bucket: Store, finely: None, dedup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, here, there = sample(data, dedup), RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    pipeline.build(of, here)
    steps: set[str] = set()
    put = store_path.put_folder
    monkeypatch.setattr(
        "bessemer.corpus.work.store_path.put_folder",
        lambda made, folder, last: steps.update(str(folder).split("/")[6:]) or put(made, folder, last),  # type: ignore[func-returns-value]
    )
    pipeline.build(in_store(of), there)
    assert contents(there.corpus) == contents(here.corpus)
    assert {"plan", "contents", "files", "partitions", "merged", "duplicates", "published"} <= steps
    if "lines" in dedup:
        assert {"lines", "LineKeys", "RepeatedLines"} <= steps
    assert left(bucket) == ["b/others/object"]
    assert [path.name for path in there.path.iterdir()] == ["corpus"]
    assert inputs_digest(of) == inputs_digest(in_store(of)), "where the work lies changes no document"


@pytest.mark.long
def test_quality_scores_are_those_of_a_disk(data: Path, tmp_path: Path, bucket: Store, finely: None) -> None:
    of = sample(data)
    for name, words in (("high", "the sea was calm and the ship sailed on"), ("low", "buy cheap pills now click here")):
        lines = [json.dumps({"text": prose(2000 + number) + f"\n{words} " * 9}) for number in range(60)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    labelled = (Source(name=name, format="jsonl", paths=(str(data / f"{name}.jsonl"),)) for name in ("high", "low"))
    quality = {"high": ("high",), "low": ("low",), "use": "pareto"}
    of = of.changed(corpus={"sources": (*of.corpus.sources, *labelled), "quality": quality})
    here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    pipeline.build(of, here)
    pipeline.build(in_store(of), there)
    mine, theirs = contents(here.corpus), contents(there.corpus)
    assert mine.keys() == theirs.keys()
    assert {name for name in mine if mine[name] != theirs[name]} <= {"quality.json", "stage.json"}  # it has seconds


@pytest.mark.long
def test_refused_again_and_again_it_goes_on(data: Path, tmp_path: Path, bucket: Store, finely: None) -> None:
    of, whole, run = sample(data), RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    pipeline.build(of, whole)
    draw, said = random.Random(3), list[str]()
    while True:
        before = receipts(bucket)
        bucket.refuse_writes_after(draw.randint(1000, 2500))
        try:
            pipeline.build(in_store(of), run)
            break
        except BessemerError as error:
            said.append(str(error))
        after = receipts(bucket)
        if not any("duplicates/result" in path for path in after):
            assert {path: after[path] for path in before} == before, "nothing finished is done again"
        assert not run.corpus.exists()
    assert len(said) >= 10
    assert all("s3://b/work/run" in one and "ACCESS_DENIED" in one for one in said)
    assert not any("a-secret-of-someone" in one for one in said)
    assert contents(run.corpus) == contents(whole.corpus)
    bucket.refuse_writes_after(None)


@pytest.mark.long
def test_killed_at_many_moments(data: Path, tmp_path: Path, bucket: Store, finely: None) -> None:
    of, whole, run = sample(data), RunFolder(tmp_path / "whole"), tmp_path / "killed"
    pipeline.build(of, whole)
    file = tmp_path / "recipe.toml"
    file.write_text(dump(in_store(of)))
    draw, kills = random.Random(1), 0
    while True:
        moment = [str(draw.randint(2, 40)), draw.choice(["before", "after"])]
        process = subprocess.Popen([sys.executable, PROGRAM, str(file), str(run), *moment], stdout=subprocess.PIPE)
        process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        assert not (run / "corpus").exists() or contents(run / "corpus") == contents(whole.corpus)
    assert kills >= 3
    assert contents(run / "corpus") == contents(whole.corpus)
    assert left(bucket) == ["b/others/object"]


@pytest.mark.long
def test_killed_while_it_is_published(data: Path, tmp_path: Path, bucket: Store, finely: None) -> None:
    of, whole, run = sample(data), RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    stored = of.changed(corpus={"publish": "s3://b/corpora"})
    pipeline.build(of, whole)
    large = {name: data for name, data in contents(whole.corpus).items() if name.count("/")}
    file = tmp_path / "recipe.toml"
    file.write_text(dump(stored))
    with pytest.MonkeyPatch.context() as patched:  # the work is done: what is left is to publish
        patched.setattr("bessemer.corpus.pipeline.assemble", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            pipeline.build(stored, run)
    stored_at = str(owners.published_place(run.corpus, inputs_digest(of), "s3://b/corpora"))
    place, kills = bucket.folder / stored_at.removeprefix("s3://"), 0
    for moment in range(5, 1000, 4):
        command = [sys.executable, PROGRAM, str(file), str(run.path), str(moment), "after", "copies"]
        process = subprocess.run(command, stdout=subprocess.PIPE, timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += bool(contents(place)) and not run.corpus.exists()
        assert run.corpus.exists() <= (place / "stage.json").exists()
    assert kills >= 2, "no kill came while it was published"
    found = contents(place)
    del found["stage.json"]
    assert found == large and str(store_path.published_folder(run.corpus)).endswith(place.name)
    assert len(left(bucket)) == len(found) + 2 and sorted(path.name for path in run.path.iterdir()) == [
        "corpus",
        "run-id.json",
    ]


@pytest.mark.long
def test_workers_need_no_disk_in_common(
    data: Path, tmp_path: Path, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, here, there = sample(data), RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    pipeline.build(of, here)
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    pipeline.build(in_store(of, workers=2), there)
    assert contents(there.corpus) == contents(here.corpus)


@pytest.mark.long
def test_what_other_inputs_left_goes_and_a_half_removed_folder_is_not_trusted(
    data: Path, run: RunFolder, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = in_store(sample(data))
    with monkeypatch.context() as patched:
        patched.setattr("bessemer.corpus.pipeline.assemble", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        for text in ("one", "two"):
            (data / "files" / "new.txt").write_text(prose(1000) + text)
            with pytest.raises(OSError, match="full"):
                pipeline.build(of, run)
        (folder,) = {path.parent for path in (bucket.folder / "b" / "work" / "run").glob(f"*/{BEGUN}")}
        assert folder.name == inputs_digest(of)[:16] and (folder / "published").exists()
        assert {path.split("/")[3] for path in left(bucket)[1:]} == {folder.name}
    (folder / BEGUN).unlink()  # as a removal that was killed leaves it
    for path in folder.glob("partitions/*/rows.parquet"):
        path.unlink()
    pipeline.build(of, run)
    assert left(bucket) == ["b/others/object"]
    pipeline.build(of.changed(corpus={"work": None}), RunFolder(run.path.with_name("whole")))
    assert contents(run.corpus) == contents(run.path.with_name("whole") / "corpus")


def test_a_store_that_cannot_be_used_is_named(
    data: Path, run: RunFolder, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = in_store(sample(data))
    bucket.refuse()
    with pytest.raises(InputError, match=r"corpus.work: .*s3://b/work/run/.*ACCESS_DENIED.*AWS_ENDPOINT_URL") as caught:
        pipeline.build(of, run)
    assert "a-secret-of-someone" not in str(caught.value)


def test_a_store_that_fails_for_a_while_is_waited_for(
    data: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails at the start, and before the corpus is published; until the warning has come."""
    monkeypatch.setattr(storage, "OUTAGE_GAP_SECONDS", 0.0)
    of, here, there = sample(data), RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    pipeline.build(of, here)
    said, assemble = list[str](), publish.assemble

    def assembled(*given: Any) -> Any:
        bucket.fail()
        return assemble(*given)

    monkeypatch.setattr(pipeline, "assemble", assembled)
    monkeypatch.setattr(storage, "warn", lambda line: said.append(line) or bucket.answer())  # type: ignore[func-returns-value]
    bucket.fail()
    pipeline.build(in_store(of, publish="s3://b/corpora"), there)
    assert len(said) == 2 and all(line.startswith("s3://b does not answer (") for line in said), said
    found = contents(bucket.folder / str(store_path.published_folder(there.corpus)).removeprefix("s3://"))
    del found["stage.json"]
    assert found == {name: raw for name, raw in contents(here.corpus).items() if "/" in name}


def test_a_store_that_is_away_for_longer_ends_the_build(
    data: Path, run: RunFolder, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.5)
    bucket.fail()
    with pytest.raises(InputError, match=r"corpus.publish: s3://b/corpora/run: .* failed for 0 s: .*once it answers"):
        pipeline.build(sample(data).changed(corpus={"publish": "s3://b/corpora"}), run)


@pytest.mark.parametrize(
    ("url", "advice"), [("s3://none/x", "no such bucket: create it"), ("s3://b/x", "check the cred")]
)
def test_a_store_that_refuses_is_not_waited_for(
    data: Path, run: RunFolder, bucket: Store, url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "warn", lambda line: pytest.fail(line))
    if url.startswith("s3://b"):
        bucket.refuse()
    for key in ("work", "publish"):
        with pytest.raises(InputError, match=rf"corpus.{key}: {url}/run.* failed: .*{advice}") as caught:
            pipeline.build(sample(data).changed(corpus={key: url}), run)
        assert "once it answers" not in str(caught.value)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("s3://key:secret@b/x", "leave credentials out of the URL"),
        ("s3://b/x?signature=1", "leave credentials out of the URL"),
        ("/scratch/work", "give s3://BUCKET/PATH or gs://BUCKET/PATH; on disks all lies in the run folder"),
        ("s3://", "give s3://BUCKET/PATH"),
        ("hf://datasets/a/b", "give s3://BUCKET/PATH"),
    ],
)
def test_places_that_are_no_stores_are_refused(work: str, message: str) -> None:
    text = f'[run]\nname = "t"\n[model]\ndepth = 2\n[corpus]\nwork = "{work}"\n'
    with pytest.raises(InputError, match=message.replace("?", r"\?")) as caught:
        parse(text, "test")
    assert message.startswith("give") or "secret" not in str(caught.value).replace("a secret", "")


PUBLISHED = "b/corpora/there"


@pytest.mark.parametrize("work", [None, pytest.param("s3://b/work", marks=pytest.mark.long)])
def test_a_corpus_published_in_a_store_is_that_of_a_disk(
    data: Path, tmp_path: Path, bucket: Store, finely: None, work: str | None
) -> None:
    of, here, there = sample(data), RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    pipeline.build(of, here)
    stored = of.changed(corpus={"work": work, "publish": "s3://b/corpora/"})
    pipeline.build(stored, there)
    place = str(store_path.published_folder(there.corpus)).removeprefix("s3://")
    assert place.startswith(f"{PUBLISHED}/corpus-{inputs_digest(of)[:16]}-")
    whole, mine, theirs = contents(here.corpus), contents(there.corpus), contents(bucket.folder / place)
    del theirs["stage.json"]
    large = {name: data for name, data in whole.items() if name.startswith(("documents/", "rejected/"))}
    assert theirs == large and any(name.endswith("part-00001.parquet") for name in large)
    assert mine.keys() == whole.keys() - large.keys() and all(
        mine[name] == whole[name] for name in mine.keys() - {"stage.json"}
    )
    assert json.loads(mine["stage.json"])["stored"] == {name: len(data) for name, data in large.items()}
    assert (
        sorted(path.name for path in there.path.iterdir()) == ["corpus", "run-id.json"]
        and len(left(bucket)) == len(theirs) + 2
    )
    if work is not None:
        parts = [line for line in bucket.requests() if line.startswith("GET") and "/documents/part-" in line]
        assert not parts, "the driver fetched documents"


def test_what_was_published_before_goes_when_the_next_one_is_there(
    data: Path, tmp_path: Path, bucket: Store, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "files").mkdir()
    of = recipe({"name": "files", "format": "text", "paths": [str(data / "files")]})
    of, run = of.changed(corpus={"publish": "s3://b/corpora"}), RunFolder(tmp_path / "there")
    places = []
    for text in ("one", "two", "three"):
        (data / "files" / "new.txt").write_text(prose(1000) + text)
        if text == "three":
            bucket.refuse_writes_after(3)  # one to see that it can be written
            with pytest.raises(BessemerError, match="s3://b/corpora/there/corpus-.*ACCESS_DENIED"):
                pipeline.build(of, run)
            assert str(store_path.published_folder(run.corpus)) == places[-1], "the old one stays"
            assert (StorePath(places[-1]) / "stage.json").exists()
            bucket.refuse_writes_after(None)
        pipeline.build(of, run)
        places.append(str(store_path.published_folder(run.corpus)))
        assert {"/".join(name.split("/")[:4]) for name in left(bucket)} == {places[-1][5:], "b/others/object"}
    assert len(set(places)) == 3


def test_a_store_that_cannot_be_published_to_is_refused_at_the_start(data: Path, run: RunFolder, bucket: Store) -> None:
    bucket.refuse_writes_after(0)
    with pytest.raises(InputError, match=r"corpus.publish: .*s3://b/corpora/run.*ACCESS_DENIED.*AWS_ENDPOINT_URL"):
        pipeline.build(sample(data).changed(corpus={"publish": "s3://b/corpora"}), run)
    assert not run.path.exists()


def test_a_path_of_a_store(bucket: Store, tmp_path: Path) -> None:
    folder = StorePath("s3://b/run/x")
    assert str(folder / "y") == "s3://b/run/x/y" and pickle.loads(pickle.dumps(folder)) == folder
    assert not folder.exists() and list(folder.iterdir()) == []
    data = os.urandom(store_path.PIECE_BYTES * 3)
    (folder / "deep" / "file").write_bytes(data)
    assert folder.is_dir() and (folder / "deep" / "file").is_file()
    assert (folder / "deep" / "file").read_bytes() == data
    with (folder / "deep" / "file").open("rb") as file:
        assert file.seek(-5, 2) == len(data) - 5 and file.read() == data[-5:]
    store_path.get_folder(folder, tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"deep/file": data}
    for use in (os.stat, open, shutil.rmtree, os.fspath):
        with pytest.raises(BessemerError, match="s3://b/run/x: an object of a store is no local file"):
            use(folder)  # type: ignore[operator]
    with pytest.raises(FileNotFoundError, match="s3://b/run/x/none"):
        (folder / "none").read_bytes()
    store_path.remove_tree(folder)
    store_path.remove_tree(folder)
    assert left(bucket) == ["b/others/object"]


def test_a_file_of_which_a_part_arrived_is_reported(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    files, _ = storage.open_filesystem("s3://b/x")

    class Short:
        def __getattr__(self, name: str) -> object:
            return getattr(files, name)

        def get_file_info(self, path: str) -> object:
            files.open_output_stream(path).close()  # empty
            return files.get_file_info(path)

    monkeypatch.setattr(storage, "open_filesystem", lambda place: (Short(), place.removeprefix("s3://")))
    with pytest.raises(BessemerError, match="s3://b/x: 0 bytes arrived of 5"):
        storage.put_file(tmp_path / "file", "s3://b/x")


def test_a_run_that_was_fetched_keeps_what_it_published(tmp_path: Path) -> None:
    first, second = (tmp_path / name / "x" / "corpus" for name in ("one", "two"))
    place = owners.published_place(first, "0" * 64, "s3://b/corpora")
    shutil.copytree(first.parent, second.parent)
    assert owners.is_own(first, place) and not owners.is_own(second, place), "a copy may be anybody's"
    owners.take_over(second.parent)
    assert owners.is_own(second, place) and owners.published_place(second, "0" * 64, "s3://b/corpora") == place
