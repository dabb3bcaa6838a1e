"""Tokens built by tasks of the corpus's engine: the same files, byte for byte, for any split of the text into tasks."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bessemer.common.errors import BessemerError
from bessemer.recipe import Recipe, dump, load
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json
from bessemer.run_tasks.task import Task
from bessemer.tokens import build, tasks
from bessemer.tokens.encode import Encoder
from bessemer.tokens.shards.shard import ShardWriter
from bessemer.tokens.tasks import cut_shards
from tests.changed_stage import record_again
from tests.corpus.object_store import Store
from tests.storage_folder import BOTH, on_disk, places, published, put_corpus_into, storage_of


def contents(folder: Path) -> dict[str, Any]:
    """Return the files of a tokens folder, with the manifest parsed."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
    manifest = read_json(folder / "manifest.json")
    return found | {"manifest": manifest, "tokenizer": (folder / "tokenizer.json").read_bytes()}


@pytest.fixture
def corpus(prepared: Path, tmp_path: Path) -> Path:
    """The prepared corpus in two part files with row groups of a few documents, a third of them labelled."""
    folder = tmp_path / "runs" / "small" / "corpus"
    shutil.copytree(prepared / "runs" / "small" / "corpus", folder)
    table = pq.read_table(folder / "documents")
    labels = [["", "x", "y"][number % 3] for number in range(table.num_rows)]
    table = table.set_column(table.column_names.index("label"), "label", [labels])
    shutil.rmtree(folder / "documents")
    (folder / "documents").mkdir()
    half = table.num_rows // 2
    pq.write_table(table.slice(0, half), folder / "documents" / "part-00000.parquet", row_group_size=7)
    pq.write_table(table.slice(half), folder / "documents" / "part-00001.parquet", row_group_size=5)
    record_again(folder)
    return tmp_path / "runs"


def recipe_of(prepared: Path, corpus: Path, name: str, *more: str) -> tuple[Recipe, RunDirectory]:
    recipe = load(prepared / "small.toml", [f'run.dir="{corpus}"', f'run.name="{name}"', *more])
    run = RunDirectory(recipe.run.folder)
    if name != "small":
        shutil.copytree(corpus / "small" / "corpus", run.corpus)
    return recipe, run


@pytest.mark.parametrize(
    "keys",
    [
        ["tokens.shard_tokens=3000"],
        ['tokens.held_out_from="passages"', "tokens.shard_tokens=5000"],
        ["tokenizer.sample_bytes=9000"],
    ],
)
@pytest.mark.parametrize("task_bytes", [1, 1 << 26])
def test_files_do_not_depend_on_the_tasks(
    keys: list[str], task_bytes: int, prepared: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (recipe_of(prepared, corpus, name, *keys) for name in ("one", "two"))
    build.build(*one)
    monkeypatch.setattr(tasks, "TASK_BYTES", task_bytes)
    build.build(*two)
    assert contents(two[1].tokens) == contents(one[1].tokens)
    assert any(name.endswith(".lbl") for name in contents(one[1].tokens))
    assert not (two[1].path / "tokens.work").exists()


def test_a_killed_build_encodes_no_text_twice(prepared: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (recipe_of(prepared, corpus, name) for name in ("one", "two"))
    build.build(*one)
    monkeypatch.setattr(tasks, "TASK_BYTES", 1)
    encoded: list[str] = []
    call = Encoder.__call__

    def counted(self: Encoder, batch: list[Any], counts: Any) -> Any:
        if len(encoded) > 20 and not is_again:
            raise BessemerError("killed")
        encoded.extend(item.identity for item in batch)
        return call(self, batch, counts)

    monkeypatch.setattr(Encoder, "__call__", counted)
    is_again = False
    with pytest.raises(BessemerError, match="killed"):
        build.build(*two)
    assert 20 < len(encoded) < 60
    is_again = True
    build.build(*two)
    assert len(encoded) == len(set(encoded)), "a document was encoded twice"
    assert contents(two[1].tokens) == contents(one[1].tokens)


def in_storage(of: Recipe, run: RunDirectory, kind: str, tmp_path: Path) -> Recipe:
    """Return the recipe of a run whose corpus is moved to a storage."""
    put_corpus_into(run, storage_of(kind, tmp_path))
    return of.changed(corpus={"storage": storage_of(kind, tmp_path)})


def built(run: RunDirectory, bucket: Store) -> dict[str, Any]:
    """Return the files of tokens, including published ones."""
    return contents(run.tokens) | published(run.tokens, bucket)


def hide_from_tasks(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hide the files of the run directory from tasks, as on another machine; return the names of tasks as they finish."""
    done: list[str] = []
    do = Task.run

    def elsewhere(self: Task) -> dict[str, Any]:
        hidden = run.path.rename(run.path.with_name("hidden"))
        try:
            return do(self)
        finally:
            hidden.rename(run.path)
            done.append(str(self))

    monkeypatch.setattr(Task, "run", elsewhere)
    return done


@BOTH
def test_tasks_keep_their_work_in_a_storage(
    kind: str, prepared: Path, corpus: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["tokens.shard_tokens=3000", "tokenizer.sample_bytes=9000"]
    one, two = (recipe_of(prepared, corpus, name, *keys) for name in ("one", "two"))
    build.build(*one)
    of = in_storage(*two, kind, tmp_path)
    monkeypatch.setattr(tasks, "TASK_BYTES", 6000)
    done = hide_from_tasks(two[1], monkeypatch)
    build.build(of, two[1])
    assert built(two[1], bucket) == contents(one[1].tokens)
    assert any(name.startswith("text of part-00001") for name in done) and any("shard 0 of" in name for name in done)
    assert not [name for name in places(storage_of(kind, tmp_path), bucket) if ".work" in name]
    left = {path.name for path in two[1].path.iterdir()} - {"other.json"}
    assert left == {"corpus", "tokens", "storage.json"}


@pytest.mark.long
@BOTH
def test_a_build_killed_at_many_moments_resumes_in_a_storage(
    kind: str, prepared: Path, corpus: Path, tmp_path: Path, bucket: Store
) -> None:
    one, two = (recipe_of(prepared, corpus, name, "tokens.shard_tokens=3000") for name in ("one", "two"))
    build.build(*one)
    file, run = tmp_path / "two.toml", two[1]
    file.write_text(dump(in_storage(*two, kind, tmp_path)))
    draw, kills, program = random.Random(1), 0, (sys.executable, "-m", "tests.tokens.build_tokens")
    while True:
        moment = [str(draw.randint(2, 90)), draw.choice(["before", "after"])]
        process = subprocess.run([*program, str(file), str(run.path), *moment], capture_output=True)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr
        kills += 1
        assert not run.tokens.exists() or built(run, bucket) == contents(one[1].tokens)
    assert kills >= 3
    assert built(run, bucket) == contents(one[1].tokens)
    assert not [name for name in places(storage_of(kind, tmp_path), bucket) if ".work" in name]


def test_work_on_other_tokens_in_a_storage_is_removed(
    prepared: Path, corpus: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, run = recipe_of(prepared, corpus, "two")
    of = in_storage(of, run, "s3", tmp_path)
    monkeypatch.setattr(tasks, "TASK_BYTES", 60_000)
    with monkeypatch.context() as patched:
        patched.setattr(build, "require_usable", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        for seed in (1, 2):
            with pytest.raises(OSError, match="full"):
                build.build(of.changed(tokens={"seed": seed}), run)
        assert len(list(on_disk("s3://b/storage", bucket).glob("two/*/tokens.work/*/begun"))) == 1
    build.build(of.changed(corpus={"storage": None}), run)
    assert [name.rpartition("/")[2][:7] for name in places("s3://b/storage", bucket)] == ["corpus-"]


@pytest.mark.parametrize("shard_tokens", [1, 7, 30, 1000])
def test_shards_are_split_as_by_one_writer(shard_tokens: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(shard_tokens)
    writer, encoded = ShardWriter(tmp_path, "s-train", np.dtype("<u2"), shard_tokens), list[tuple[int, Any]]()
    expected: dict[int, list[tuple[int, int]]] = {}
    for number in range(12):
        lengths = draw.integers(1, 12, draw.integers(0, 9))
        for row, length in enumerate(lengths):
            writer.add("0" * 32, np.zeros(length, np.uint16), 0)
            expected.setdefault(writer.shards, []).append((number, row))
        encoded.append((number, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)))
    writer.close()
    cuts = cut_shards(encoded, shard_tokens)
    rows = [[(number, row) for number, first, end in spans for row in range(first, end)] for _, spans in cuts]
    assert rows == list(expected.values())
    assert len(cuts) == writer.shards and sum(num_tokens for num_tokens, _ in cuts) == writer.counts["tokens"]
