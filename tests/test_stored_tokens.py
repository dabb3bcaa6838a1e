"""A run whose tokens are published in an object store: it trains on them as on those of a disk, bit for bit."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer import rebuild, storage
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import load
from bessemer.run import RunFolder, read_json, read_steps
from bessemer.store_path import StoredNumbers, StorePath, published_folder
from bessemer.tokens import build, ledger, tasks
from bessemer.tokens.loader import loader_of
from bessemer.tokens.shards import TokenStore
from tests.corpus.object_store import Store
from tests.test_stored_corpus import what_is_said

SHARDS = ["tokens.shard_tokens=3000"]
PUBLISH = 'tokens.publish="s3://b/tokens"'


def objects(bucket: Store) -> list[str]:
    return sorted(
        str(path.relative_to(bucket.folder / "b")) for path in (bucket.folder / "b").rglob("*") if path.is_file()
    )


@pytest.fixture
def command(prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command on the small recipe with its corpus under another name; returns what it said."""

    def do(name: str, run: str, *more: str, code: int = 0) -> str:
        folder = tmp_path / run / run  # each in a folder of its own: they share nothing
        if not folder.exists():
            shutil.copytree(prepared / "runs" / "small" / "corpus", folder / "corpus")
        keys = [f'run.dir="{tmp_path / run}"', f'run.name="{run}"', *SHARDS, *more]
        return what_is_said([name, str(prepared / "small.toml")], keys, code, capsys)

    return do


def same_tokens(one: RunFolder, two: RunFolder, bucket: Store) -> None:
    """The files of two are those of one, in the run folder and in the store."""
    theirs = {path.name: path for path in (bucket.folder / "b" / "tokens" / two.path.name).glob("*/*.bin")}
    assert theirs and not any(tasks.is_published(path.name) for path in two.tokens.iterdir())
    for path in one.tokens.iterdir():
        if path.suffix != ".json":
            assert path.read_bytes() == theirs.get(path.name, two.tokens / path.name).read_bytes(), path.name
    files = [read_json(run.tokens / "manifest.json")["files"] for run in (one, two)]
    assert files[0] == files[1]


def test_the_files_are_those_of_a_disk(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = (RunFolder(tmp_path / name / name) for name in ("one", "two", "three"))
    command("tokens", "one")
    command("tokens", "two", PUBLISH)
    same_tokens(one, two, bucket)
    assert "unchanged" in command("tokens", "two", PUBLISH)
    monkeypatch.setattr(build, "is_distributed", lambda recipe, text_bytes: True)
    monkeypatch.setattr(tasks, "TASK_BYTES", 30_000)
    command("tokens", "three", PUBLISH, 'corpus.work="s3://b/work"')
    same_tokens(one, three, bucket)
    fetched = [
        line for line in bucket.requests() if line.startswith("GET") and "/shards/" in line and "-train-" in line
    ]
    assert not [line for line in fetched if ".bin" in line], "tokens passed through the driver"
    assert not [name for name in objects(bucket) if name.startswith("work")]

    recipe = load(prepared / "small.toml", SHARDS)
    stores = [TokenStore.open(run.tokens) for run in (one, two)]
    loaders = [loader_of(recipe, store) for store in stores]
    for first in (0, 40, 93):
        here, there = (loader.batch(first, 9) for loader in loaders)
        assert np.array_equal(here.inputs, there.inputs) and np.array_equal(here.targets, there.targets)
    assert [ledger.token(store, one.corpus, "prose-train-00001:17", True) for store in stores][1]["position"] >= 0


def test_shards_that_are_lost_are_written_again(command: Any, tmp_path: Path, bucket: Store) -> None:
    run = RunFolder(tmp_path / "two" / "two")
    command("tokens", "two", PUBLISH)
    there = objects(bucket)
    shard = next(bucket.folder / "b" / name for name in there if name.endswith("prose-train-00001.bin"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    with pytest.raises(BessemerError, match=r"prose-train-00001.bin: ends before byte .*write the tokens again"):
        TokenStore.open(run.tokens).split("prose", "train").shards[1].tokens[:]
    said = command("tokens", "two", PUBLISH)
    assert "prose-train-00001.bin" in said and "unchanged" not in said
    assert shard.read_bytes() == whole and objects(bucket) == there
    command("tokens", "two", PUBLISH, "tokens.seed=5")
    assert len({name.split("/")[2] for name in objects(bucket) if name.startswith("tokens")}) == 1, (
        "the old ones stayed"
    )
    command("tokens", "two", "tokens.seed=6")  # on a disk again
    assert not [name for name in objects(bucket) if name.startswith("tokens")]


def test_a_store_that_is_away_for_a_while_is_asked_again(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(1000, dtype="<u2")
    StorePath("s3://b/x").write_bytes(numbers.tobytes())
    stored = StoredNumbers(StorePath("s3://b/x"), "<u2", 1000)
    assert np.array_equal(stored[10:20], numbers[10:20]) and stored[-1] == 999 and len(stored[990:2000]) == 10
    said = list[str]()
    monkeypatch.setattr(storage, "warn", lambda line: said.append(line) or bucket.answer())  # type: ignore[func-returns-value]
    bucket.fail()
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(lambda start: stored[start : start + 100], range(0, 1000, 100)):
            assert len(part) == 100
    assert len(said) == 1 and said[0].startswith("s3://b does not answer ("), said
    assert said[0].endswith("); asking it again for up to 5 minutes") and "operation: )" not in said[0]
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.5)
    bucket.fail()
    monkeypatch.setattr(storage, "warn", said.append)
    with pytest.raises(
        BessemerError, match=r"s3://b/x: the object store failed for 0 s: .*AWS Error.*run the command again"
    ):
        stored[0:1]
    bucket.answer()
    bucket.refuse()
    with pytest.raises(BessemerError, match=r"s3://b/x: the object store failed: AWS Error ACCESS_DENIED.*credentials"):
        stored[0:500]  # with fewer bytes Arrow has no room for the store's answer, and takes it for a broken one


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (['tokens.packing="best-fit"'], "packed sequences .* are read from disks"),
        (['tokens.publish="/disk"'], "give s3://BUCKET/PATH"),
        (['tokens.publish="s3://key:secret@b/x"'], "leave credentials out"),
    ],
)
def test_what_is_not_read_from_a_store_is_refused(prepared: Path, keys: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(prepared / "small.toml", [PUBLISH, *keys])


def test_what_is_there_already_is_not_moved(command: Any, tmp_path: Path, bucket: Store) -> None:
    command("tokens", "one")
    said = command("tokens", "one", PUBLISH)
    assert (
        "unchanged" in said
        and "tokens.publish: s3://b/tokens was neither tried nor used, as what was made before stays in "
        f"{tmp_path / 'one' / 'one' / 'tokens'}; to make it anew remove {tmp_path / 'one' / 'one' / 'tokens'}"
        in said
    )


def test_runs_of_one_name_and_url_do_not_meet(
    prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the same tokens nor others take those of a run in another folder away, nor does a copy of its folder."""

    def tokens(folder: str, *more: str) -> tuple[str, TokenStore]:
        if not (run := tmp_path / folder / "same").exists():
            shutil.copytree(prepared / "runs" / "small" / "corpus", run / "corpus")
        keys = [f'run.dir="{tmp_path / folder}"', 'run.name="same"', *SHARDS, PUBLISH, *more]
        said = what_is_said(["tokens", str(prepared / "small.toml")], keys, 0, capsys)
        return said, TokenStore.open(run / "tokens")

    _, first = tokens("one")
    said, second = tokens("two")
    assert f"{published_folder(first.folder)}: published by another run" in said and published_folder(
        second.folder
    ) != published_folder(first.folder)
    for vocabulary in (420, 440):
        said, second = tokens("two", f"tokenizer.vocabulary={vocabulary}")
        assert f"{published_folder(first.folder)}: published by another run" in said
        first.verify()
    assert len({name.split("/")[2] for name in objects(bucket) if name.startswith("tokens")}) == 2, (
        "its own were replaced"
    )
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    _, third = tokens("copy", "tokenizer.vocabulary=420")
    second.verify()
    assert published_folder(third.folder) not in (published_folder(first.folder), published_folder(second.folder))


def test_tokens_that_another_run_shares_stay_as_long_as_it_does(
    prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def tokens(name: str, *more: str) -> str:
        if not (run := tmp_path / name).exists():
            shutil.copytree(prepared / "runs" / "small" / "corpus", run / "corpus")
        keys = [f'run.dir="{tmp_path}"', f'run.name="{name}"', *SHARDS, PUBLISH, *more]
        return what_is_said(["tokens", str(prepared / "small.toml")], keys, 0, capsys)

    tokens("aw")
    assert "shared with" in (said := tokens("tr"))
    shared = TokenStore.open(tmp_path / "tr" / "tokens")
    place = str(published_folder(shared.folder))
    assert place.startswith("s3://b/tokens/aw/")
    assert f"stays in {place}, which run aw published: leave it; a run in another folder" in said
    said = tokens("aw", "tokenizer.vocabulary=420")
    assert f"{place} stays while another run has its tokens there (tr)" in said
    shared.verify()
    assert "stays while" not in tokens("aw", "tokenizer.vocabulary=420"), "it is said once"
    shared.verify()
    assert "shared with" in tokens("aw")  # what it published meanwhile goes
    assert {"/".join(name.split("/")[:3]) for name in objects(bucket) if name.startswith("tokens")} == {
        place[len("s3://b/") :]
    }
    tokens("aw", "tokenizer.vocabulary=420")
    tokens("tr", "tokenizer.vocabulary=440")
    tokens("aw", "tokenizer.vocabulary=420")
    left = {"/".join(name.split("/")[:3]) for name in objects(bucket) if name.startswith("tokens")}
    assert left == {str(published_folder(tmp_path / name / "tokens"))[len("s3://b/") :] for name in ("aw", "tr")}


@pytest.mark.long
@pytest.mark.parametrize("layout", [[], ["parallel.replicate=2"]])
def test_a_training_reads_ahead_and_is_the_same_bit_for_bit(
    layout: list[str], command: Any, tmp_path: Path, bucket: Store
) -> None:
    one, two = (RunFolder(tmp_path / name / name) for name in ("one", "two"))
    command("run", "one", *layout)
    command("tokens", "two", PUBLISH)
    command("run", "two", PUBLISH, *layout)
    losses = [[(row["step"], row["loss"]) for row in read_steps(run.metrics) if "loss" in row] for run in (one, two)]
    assert losses[0] == losses[1] and len(losses[0]) >= 24
    scores = [read_json(run.evaluation) for run in (one, two)]
    for score in scores:
        del score["seconds"], score["ngram"]["seconds"]
    assert scores[0] == scores[1]
    assert any("-train-" in line and "bytes=" in line for line in bucket.requests())


def test_where_only_the_tokens_are_the_commands_that_go_on_are_named(prepared: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "small")
    shutil.copytree(prepared / "runs" / "small" / "tokens", run.tokens)
    recipe = load(prepared / "small.toml", ['corpus.sources.prose.paths=["/nowhere"]'])
    with pytest.raises(
        InputError, match=r"/nowhere: no such file.*the tokens in .*small/tokens: that is `bessemer train`"
    ):
        rebuild.corpus_inputs(recipe, run)
    shutil.rmtree(run.tokens)
    with pytest.raises(InputError, match="/nowhere: no such file") as caught:
        rebuild.corpus_inputs(recipe, run)
    assert "train" not in str(caught.value)
