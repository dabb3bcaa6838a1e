"""A run whose folder is kept in a store: a machine that has the recipe alone goes on with it, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bessemer import fetch, run_store, storage
from bessemer.checkpoint.mirror import Mirror
from bessemer.cli import run_command
from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.recipe import parse
from bessemer.run import RunFolder, read_json, read_steps
from bessemer.run_store import RunStore, run_files
from bessemer.store_folder import StoreFolder, TakenOver
from bessemer.train.loop import StopSignal
from tests.checkpoint.test_mirror import saved
from tests.conftest import recipe_text, write_text
from tests.corpus.object_store import Store
from tests.newest import weights_hash
from tests.ports import free_port
from tests.test_stored_corpus import what_is_said

STORE = 'run.store="s3://b/runs"'


@pytest.fixture(params=["s3", "disk"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "s3://b/runs" if request.param == "s3" else str(tmp_path / "disk")


def a_run(folder: Path, **files: str) -> RunFolder:
    for name, text in {"recipe.toml": "x", "corpus/stage.json": "{}", "metrics.jsonl": "1\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return RunFolder(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in run_files(folder).items()}


def test_one_key_stands_for_four() -> None:
    def places(*lines: str) -> list[str | None]:
        one = parse("\n".join(['[run]\nname = "x"\nstore = "s3://b/runs"', *lines]), "r.toml")
        return [one.corpus.work, one.corpus.publish, one.tokens.publish, one.checkpoint.mirror]

    url = "s3://b/runs"
    assert places() == [url] * 4
    assert places('[corpus]\nwork = "s3://c/w"\n[checkpoint]\nmirror = "/m"') == ["s3://c/w", url, url, "/m"]
    assert places('[tokens]\npacking = "best-fit"') == [url, url, None, url]
    on_disk = parse('[run]\nname = "x"\nstore = "/disk"', "r.toml")
    assert on_disk.checkpoint.mirror == "/disk" and on_disk.corpus.work is on_disk.tokens.publish is None
    for bad in ("s3://key:secret@b/x", "relative", "https://b"):
        with pytest.raises(InputError, match=r"(?s)^r\.toml:.*run\.store") as error:
            parse(f'[run]\nname = "x"\nstore = "{bad}"', "r.toml")
        assert "secret" not in str(error.value) and "mirror" not in str(error.value)
    with pytest.raises(InputError, match=r"run\.store = .*in the run's own folder"):
        parse('[run]\nname = "x"\ndir = "/runs"\nstore = "/runs"', "r.toml")


def test_it_is_copied_and_fetched(url: str, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "one" / "x")
    for name in (".lock", ".tokens.work/a", "corpus.work/a", "checkpoints/step-00000001/manifest.json"):
        a_run(run.path, **{name: "not copied"})
    puts, honest = list[str](), run_store.StoreFolder.put
    monkeypatch.setattr(
        run_store.StoreFolder,
        "put",
        lambda self, path, name, *more: puts.append(name) or honest(self, path, name, *more),
    )
    store = RunStore(url, "x", run)
    store.update()
    assert [name.rpartition(".")[0] for name in sorted(puts)] == [
        "files/corpus/stage.json", "files/metrics.jsonl", "files/recipe.toml"]  # fmt: skip
    puts.clear()
    store.update()
    assert not puts, "nothing has changed"
    with open(run.metrics, "a") as log:
        log.write("2\n")
    (run.path / "corpus" / "stage.json").unlink()
    store.update()
    assert [name.rpartition(".")[0] for name in puts] == ["files/metrics.jsonl"]
    there = store.copy()
    assert there is not None and sorted(there["files"]) == ["metrics.jsonl", "recipe.toml"]
    assert len(store._there.entries("files", is_recursive=True)) == 2, "what no copy names is removed"

    two = RunFolder(tmp_path / "two" / "x")
    two.path.mkdir(parents=True)
    again = RunStore(url, "x", two)
    again.fetch(there)
    assert contents(two.path) == contents(run.path)
    again.update()
    a_run(two.path, **{"evaluation.json": "{}"})
    again.update()
    with pytest.raises(BessemerError, match="another machine has gone on with this run"):
        store.update()
    with pytest.raises(InputError, match="another run of this name"):
        RunStore(url, "x", a_run(tmp_path / "three" / "x")).update()


def test_a_copy_that_is_cut_short_leaves_the_one_before(
    url: str, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "x")
    store = RunStore(url, "x", run)
    store.update()
    before, whole = contents(run.path), store.copy()
    assert whole is not None
    a_run(run.path, **{"recipe.toml": "y", "metrics.jsonl": "1\n2\n", "new": "z"})

    def killed(self: Any, name: str, data: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_store.StoreFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            store.update()
    fresh = RunFolder(tmp_path / "fresh" / "x")
    RunStore(url, "x", fresh).fetch(whole)
    assert contents(fresh.path) == before
    store.update()  # the kill did not make it a stranger
    there = store.copy()
    assert there is not None and set(there["files"]) == {"recipe.toml", "metrics.jsonl", "new", "corpus/stage.json"}
    with pytest.raises(BessemerError, match="missing or damaged, so this copy of the run is not whole"):
        RunStore(url, "x", RunFolder(tmp_path / "late" / "x")).fetch(whole)
    place = (bucket.folder / url.removeprefix("s3://") if url.startswith("s3") else Path(url)) / "x"
    (place / "run.json").write_text((place / "run.json").read_text().replace('"host"', '"hast"'))
    with pytest.raises(InputError, match=r"x/run\.json: damaged, so the copy"):
        store.copy()


def test_what_made_nothing_makes_no_copy(url: str, tmp_path: Path, bucket: Store) -> None:
    run = a_run(tmp_path / "one" / "x")
    store, two = RunStore(url, "x", run), RunFolder(tmp_path / "two" / "x")
    store.update()
    before = store.copy()
    assert before is not None
    two.path.mkdir(parents=True)
    other = RunStore(url, "x", two)
    other.fetch(before)
    a_run(two.path, **{"log.txt": "refused", "incidents.jsonl": "{}", "stages.json": "{}"})
    other.update()
    assert other.copy() == before and store.knows(other.copy()), "the first folder is not older now"
    a_run(run.path, **{"evaluation.json": "1", "metrics.jsonl": "1\n2\n"})
    store.update()
    a_run(run.path, **{"report.html": "made last", "metrics.jsonl": "1\n2\n"})
    store.update()
    assert "report.html" in (store.copy() or {})["files"], "of a command that made something all is copied"
    a_run(two.path, **{"log.txt": "again"})
    fetched = RunFolder(tmp_path / "three" / "x")
    fetched.path.mkdir(parents=True)
    fetch._fetch_settled(RunStore(url, "x", fetched), fetched, before)
    assert contents(fetched.path) == contents(run.path), "the copy of before was replaced meanwhile"
    other = RunStore(url, "x", two)
    shutil.rmtree(two.path)
    two.path.mkdir()
    other.fetch(store.copy() or {})

    def is_taken_over() -> None:
        with store.writing():
            a_run(two.path, **{"evaluation.json": "{}"})
            store._there.remove("owner.json")
            other.update()
            raise Stopped("stopped by SIGTERM; everything is saved")

    with pytest.raises(Stopped, match="^stopped by SIGTERM; another machine has taken this run over"):
        is_taken_over()


def test_files_that_are_replaced_meanwhile_are_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path / "x")
    store, honest, left = RunStore(str(tmp_path / "disk"), "x", run), run_store.StoreFolder.put, [3]

    def put(self: Any, path: Path, *more: Any) -> str:
        done = honest(self, path, *more)
        if path == run.recipe and left[0]:
            left[0] -= 1
            new = path.with_name(".new")
            new.write_text(f"version {left[0]}")
            os.replace(new, path)
        return done

    monkeypatch.setattr(run_store.StoreFolder, "put", put)
    store.update()
    fresh, there = RunFolder(tmp_path / "fresh" / "x"), store.copy()
    assert there is not None and left == [0]
    RunStore(str(tmp_path / "disk"), "x", fresh).fetch(there)
    assert fresh.recipe.read_text() == "version 0"
    left[0] = 1000
    (run.recipe).write_text("another")
    with pytest.raises(BessemerError, match="replaced faster"):
        store.update()


def test_two_machines(url: str, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(run_store, "LEASE_SECONDS", 5.0)
    run = a_run(tmp_path / "one" / "x")
    one, two = RunStore(url, "x", run), RunStore(url, "x", RunFolder(tmp_path / "two" / "x"))
    with one.writing():
        said = json.loads(one._there.read("owner.json") or b"")
        assert said["process"] == os.getpid() and said["host"]
        with pytest.raises(BessemerError, match=rf"process {os.getpid()} of .* is writing this run: two machines"):
            two.require_free()
    assert one._there.read("owner.json") is None
    two.require_free()
    owner = {"folder": "x", "host": said["host"], "boot": said["boot"], "process": 2**22 + 1, "time": time.time()}
    one._there.write("owner.json", json.dumps(owner).encode())
    two.require_free()  # it is dead
    monkeypatch.setattr(run_store, "LEASE_SECONDS", 0.3)
    one._there.write("owner.json", json.dumps({**owner, "host": "other", "time": time.time() + 3600}).encode())
    two.require_free()  # it gave no sign of life for so long
    one._there.write("owner.json", json.dumps({**owner, "host": "other"}).encode())
    two.require_free()
    monkeypatch.setattr(run_store, "LEASE_SECONDS", 5.0)
    one._there.remove("owner.json")
    warned = list[str]()
    monkeypatch.setattr(run_store, "warn", warned.append)

    def is_taken_over() -> None:
        with one.writing():
            other = {**owner, "host": "other", "process": 7, "time": time.time() + 60}
            until = time.monotonic() + 30
            while not warned and time.monotonic() < until:  # again and again: a sign of life may be on its way
                one._there.write("owner.json", json.dumps(other).encode())
                time.sleep(0.02)
            one.follow(warned.append)
            one.finish()

    with pytest.raises(BessemerError, match="another machine has taken this run over: what was made here since"):
        is_taken_over()
    assert "process 7 of other" in warned[0] and "no longer copied from here" in warned[0]
    assert "this copy of the run is not up to date" in warned[1] and one.is_taken_over
    num_warned = len(warned)
    one.follow(warned.append)
    assert one.finish() and len(warned) == num_warned, "said once"
    assert json.loads(one._there.read("owner.json") or b"")["process"] == 7, "that of another stays"


def test_a_machine_that_was_suspended_writes_nothing_more(
    url: str, tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_store, "LEASE_SECONDS", 0.2)
    here, there = a_run(tmp_path / "one" / "x"), RunFolder(tmp_path / "two" / "x")
    one, two = Mirror(url, "x", here), Mirror(url, "x", there)
    one.first, two.first = RunStore(url, "x", here), RunStore(url, "x", there)
    put = StoreFolder.put

    def takes_over() -> None:
        copy = two.first.copy() if two.first else None
        assert two.first is not None and copy is not None
        there.path.mkdir(parents=True)
        two.first.fetch(copy)
        assert two.restore_newest() == 20
        saved(there, 30)
        (there.path / "metrics.jsonl").write_text("1\n2\n")
        with two.first.writing():
            two.update()

    def suspended(self: StoreFolder, source: Path, name: str, max_bytes: int | None = None) -> str:
        result = put(self, source, name, max_bytes)
        if self is one._there and name.startswith("step-00000040/") and not there.path.exists():
            takes_over()
        return result

    monkeypatch.setattr(StoreFolder, "put", suspended)

    def is_taken_over(store: RunStore) -> None:
        with store.writing():
            saved(here, 10)
            saved(here, 20)
            one.update()
            (here.path / "metrics.jsonl").write_text("1\n3\n")
            saved(here, 40)
            with pytest.raises(TakenOver):
                one.update()

    with pytest.raises(BessemerError, match="another machine has taken this run over"):
        is_taken_over(one.first)
    assert two.steps() == [20, 30], "the manifest of step 40 is not there"

    def finishes_its_copy(step: str) -> None:
        for file in sorted((here.checkpoints / "step-00000040").iterdir()):
            put(one._there, file, f"{step}/{file.name}")

    # Had it been faster by a moment, its checkpoint would be there as a whole.
    finishes_its_copy("step-00000040")
    one._there.write("step-00000040/of-run.json", two._there.read("step-00000030/of-run.json") or b"")
    assert two.steps() == [20, 30, 40]
    saved(there, 50)
    two.update()
    assert two.steps() == [30, 50] and 40 not in two._listed()
    finishes_its_copy("step-00000060")  # of another training, as far as one can know: it stays
    with pytest.raises(BessemerError, match="step 60 from another training"):
        two.update()


def test_a_damaged_list_of_files_is_named(url: str, tmp_path: Path, bucket: Store) -> None:
    store = RunStore(url, "x", a_run(tmp_path / "x"))
    for text in ("[]", "[1]", "3", "null", "{}", '{"checksum": 1'):
        store._there.write("run.json", text.encode())
        with pytest.raises(InputError, match=r"run.json: damaged"):
            store.copy()


def test_a_damaged_page_keeps_no_run_there(
    url: str, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store = RunStore(url, "x", a_run(tmp_path / "one" / "x", **{"report.html": "a page"}))
    store.update()
    copy, fresh = store.copy(), RunFolder(tmp_path / "two" / "x")
    fresh.path.mkdir(parents=True)
    assert copy is not None
    (page,) = (name for name in store._there.entries("files") if name.startswith("report.html."))
    store._there.write(f"files/{page}", b"a pagf")
    fetch._fetch_settled(RunStore(url, "x", fresh), fresh, copy)
    assert f"files/{page}: missing or damaged; it is left out" in capsys.readouterr().err.replace("\n", " ")
    assert run_files(fresh.path).keys() == copy["files"].keys() - {"report.html"}
    RunStore(url, "x", fresh).require_same(copy)


@pytest.fixture
def command(prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command on the small recipe with its store, in a folder of runs; returns what it said."""

    def do(name: str, machine: str, *more: str, code: int = 0) -> str:
        return what_is_said(
            [name, str(prepared / "small.toml")],
            [f'run.dir="{tmp_path / machine}"', "report.tensorboard=false", *more], code, capsys)  # fmt: skip

    return do


@contextmanager
def stopped_after(steps: int) -> Iterator[None]:
    """As by SIGTERM."""
    left = [steps]

    def received(self: StopSignal) -> str | None:
        left[0] -= 1
        return "SIGTERM" if left[0] <= 0 else None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StopSignal, "received", received)
        yield


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_steps(run.metrics) if row["kind"] == "train"]


def test_the_recipe_alone_goes_on(command: Any, prepared: Path, tmp_path: Path, bucket: Store) -> None:
    for name in ("quiet", "one"):
        shutil.copytree(prepared / "runs" / "small", tmp_path / name / "small")
    command("train", "quiet")
    with stopped_after(11):
        assert "stopped by SIGTERM after step 1" in command("train", "one", STORE, code=75)
    said = command("train", "two", STORE)
    quiet, one, two = (RunFolder(tmp_path / name / "small") for name in ("quiet", "one", "two"))
    assert "two/small is not on this machine: " in said and "and the checkpoint of step 1" in said, said
    assert "going on from step 1" in said and "built" not in said
    assert weights_hash(two.path) == weights_hash(quiet.path) and losses(two) == losses(quiet)
    assert two.corpus.is_dir() and [row["what"] for row in read_steps(two.incidents)] == ["restored"]
    # The first machine comes back: its folder is older now.
    before = losses(one)
    assert before == losses(quiet)[: len(before)] != losses(quiet)
    assert "the run has gone on elsewhere" in command("evaluate", "one", STORE)
    assert losses(one) == before
    assert f"what was here is in {one.path}.older-1" in command("train", "one", STORE)
    assert losses(one) == losses(two) and losses(RunFolder(tmp_path / "one" / "small.older-1")) == before
    assert "unchanged" in command("tokens", "one", STORE)
    scored = command("evaluate", "three", STORE)
    assert "the checkpoint of step 24 fetched from s3://b/runs/small" in scored
    three = RunFolder(tmp_path / "three" / "small")
    assert read_json(three.evaluation)["step"] == 24 and len(list(three.checkpoints.glob("step-*"))) == 1
    command("report", "four", STORE)
    four = RunFolder(tmp_path / "four" / "small")
    assert four.report.exists() and four.evaluation.exists(), "what was added is there"
    assert not four.checkpoints.exists()
    # What the store has lost is there again at the end of the next command, or that is an error.
    (place,) = bucket.folder.glob("**/small/step-00000024")
    shutil.rmtree(place)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Mirror, "update", lambda self: (_ for _ in ()).throw(BessemerError("it is full")))
        said = command("train", "one", STORE, code=1)
    assert "does not have all checkpoints: it is full; then the same command copies them" in said and not place.exists()
    command("train", "one", STORE)
    assert place.exists()
    (place / "manifest.json").unlink()
    said = command("evaluate", "five", STORE)
    assert "five/small/evaluation.json has the scores of step 24, whose checkpoint is not here: step" in said


def test_what_cannot_go_on_is_refused(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(prepared / "runs" / "small", tmp_path / "one" / "small")
    for name in ("tokens", "train", "check"):
        said = command(name, "one", 'run.store="s3://none/runs"', code=2)
        assert "run.store: s3://none/runs/small: the object store failed" in said and "no such bucket" in said, said
    monkeypatch.setattr(storage, "PATIENCE_SECONDS", 0.5)
    for answer, says in (
        (bucket.refuse, "check the credentials"),
        (bucket.fail, "run the command again once it answers"),
    ):
        answer()
        said = command("tokens", "two", STORE, code=2)  # a machine with the recipe alone
        assert "run.store: s3://b/runs/small" in said and says in said and "a-secret" not in said
        assert not (tmp_path / "two").exists(), "a refusal leaves no trace"
        bucket.answer()
    command("tokens", "one", STORE)
    assert not list((bucket.folder / "b").rglob("owner.json"))
    shutil.copytree(prepared / "runs" / "small", tmp_path / "three" / "small")
    assert "another run of this name" in command("check", "three", STORE, code=2)
    # What is there, and damaged, is not taken for whole.
    kept = next(path for path in (bucket.folder / "b").rglob("*") if path.name.startswith("tokenizer.json."))
    kept.write_bytes(kept.read_bytes()[:-1] + b" ")
    assert f"{kept.name}: missing or damaged" in command("report", "four", STORE, code=2)
    assert not (tmp_path / "four" / "small").exists()
    kept.unlink()
    command("tokens", "one", STORE)  # which copies it again
    command("report", "four", STORE)
    # Another machine is writing the run: it gives another sign of life.
    place, owner = kept.parents[2] / "owner.json", {"folder": "x", "host": "other", "boot": "", "process": 7}

    def signed(_: float) -> None:
        place.write_text(json.dumps({**owner, "time": time.time()}))

    signed(0)
    monkeypatch.setattr(run_store, "sleep", signed)
    for machine in ("one", "five"):
        said = command("train", machine, STORE, code=1)
        assert "process 7 of other (last heard of " in said and "is writing this run: two machines" in said, said
    assert not (tmp_path / "five").exists() and json.loads(place.read_text())["process"] == 7
    place.unlink()
    # A store that goes away meanwhile costs no result.
    with monkeypatch.context() as patched:
        patched.setattr(RunStore, "update", lambda self: bucket.fail() or self._there.entries())  # type: ignore[func-returns-value]
        said = command("tokens", "one", STORE, "tokens.seed=5", code=1)
    assert (
        "run.store: s3://b/runs/small is not up to date: " in said and "the same command brings it up to date" in said
    )
    bucket.answer()
    assert "unchanged" in command("tokens", "one", STORE, "tokens.seed=5")

    def said_of(*arguments: str, code: int = 0) -> str:
        return what_is_said(list(arguments), [], code, capsys)

    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        for arguments in (
            ["report", "s3://b/runs/small"],
            ["chat", "s3://b/runs/small"],
            ["train", "s3://b/runs/small"],
        ):
            assert "bring it to this machine with `bessemer fetch s3://b/runs/small`" in said_of(*arguments, code=2)
        assert "no run there" in run_fetch("s3://b/runs/other", 2, capsys)
        said = run_fetch("s3://nowhere/runs/small", 2, capsys)
        assert "the store has no bucket 'nowhere'" in said and "no run there" not in said
        (tmp_path / "file").write_text("x")
        said = run_fetch("s3://b/runs/small", 2, capsys, str(tmp_path / "file"))
        assert said.count("fetch:") == 1 and "a file; name a folder that does not exist" in said
        assert "give s3://BUCKET/PATH/RUN" in run_fetch("s3://b", 2, capsys)


def test_tokens_that_are_read_from_disks_are_files_of_the_run(
    command: Any, prepared: Path, tmp_path: Path, bucket: Store
) -> None:
    shutil.copytree(prepared / "runs" / "small", tmp_path / "one" / "small")
    command("tokens", "one", STORE, 'tokens.packing="best-fit"')
    said = command("tokens", "two", STORE, 'tokens.packing="best-fit"')
    assert "tokens unchanged" in said and " is not on this machine" in said
    one, two = (RunFolder(tmp_path / name / "small") for name in ("one", "two"))
    assert contents(one.tokens) == contents(two.tokens)
    assert {".bin", ".pack"} <= {path.suffix for path in two.tokens.iterdir()}


def test_text_with_other_times_is_the_same_text(
    tmp_path: Path, bucket: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "small.toml").write_text(recipe_text(tmp_path))

    def do(name: str) -> str:
        return what_is_said([name, str(tmp_path / "small.toml")], [STORE], 0, capsys)

    do("corpus")
    do("tokens")
    shutil.rmtree(tmp_path / "runs")
    for path in (tmp_path / "text").rglob("*.*"):
        os.utime(path, (1e9, 1e9))
    assert "corpus unchanged" in do("corpus") and "tokens unchanged" in do("tokens")
    (tmp_path / "text" / "prose" / "000.txt").write_text(
        "Another text of some length, that was not there before.\n" * 9
    )
    assert "unchanged" not in do("corpus")


def test_what_is_refused_begins_no_copy(command: Any, prepared: Path, tmp_path: Path, bucket: Store) -> None:
    shutil.copytree(prepared / "runs" / "small", tmp_path / "one" / "small")
    command("train", "one", "train.steps=2")
    assert "Give more steps" in command("train", "one", STORE, "train.steps=1", code=2)
    assert not [path for path in (bucket.folder / "b" / "runs").rglob("*") if path.is_file()]
    assert command("check", "five", STORE)
    assert {path.name for path in (bucket.folder / "b" / "runs").iterdir()} == {"small"} and not (
        tmp_path / "five"
    ).exists()


def run_fetch(url: str, code: int, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert run_command(["fetch", url, *more]) == code
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.long
@pytest.mark.parametrize("layout", [[], ["parallel.replicate=2"]])
def test_a_whole_run_goes_from_machine_to_machine(
    layout: list[str],
    tmp_path: Path,
    bucket: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Built, trained, stopped, its machine lost; gone on with, killed, lost; finished; looked at where there are no sources."""
    write_text(tmp_path / "text")
    (tmp_path / "small.toml").write_text(recipe_text(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def keys(machine: str, *more: str) -> list[str]:
        sets = [f'run.dir="{tmp_path / machine}"', "train.steps=120", "checkpoint.every=20", *layout, *more]
        return [part for one in sets for part in ("--set", one)]

    def do(name: str, machine: str, *more: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run_command([name, str(tmp_path / "small.toml"), *keys(machine, *more)]) == code
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    def ended_by(number: signal.Signals, machine: str, step: int) -> None:
        line = [sys.executable, "-m", "bessemer", "run", str(tmp_path / "small.toml"), *keys(machine, STORE)]
        process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        checkpoint = bucket.folder / "b" / "runs" / "small" / f"step-{step:08d}" / "manifest.json"
        while not checkpoint.exists() and time.monotonic() < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        error = process.communicate(timeout=120)[1]
        assert process.returncode == (75 if number == signal.SIGTERM else -number), error

    quiet = RunFolder(tmp_path / "quiet" / "small")
    do("run", "quiet")
    ended_by(signal.SIGTERM, "one", 20)
    built = read_json(tmp_path / "one" / "small" / "corpus" / "stage.json")
    shutil.rmtree(tmp_path / "one")
    ended_by(signal.SIGKILL, "two", 60)
    assert read_json(tmp_path / "two" / "small" / "corpus" / "stage.json") == built
    shutil.rmtree(tmp_path / "two")
    said = do("run", "three", STORE)
    assert "the checkpoint of step " in said and "corpus unchanged, skipped" in said and "tokens unchanged" in said, (
        said
    )
    three = RunFolder(tmp_path / "three" / "small")
    assert weights_hash(three.path) == weights_hash(quiet.path) and losses(three) == losses(quiet)
    shutil.rmtree(tmp_path / "three")
    shutil.rmtree(tmp_path / "text")
    said = do("run", "four", STORE)
    assert "going on with the corpus as it was built" in said and said.count("unchanged") >= 4
    mine, url = str(tmp_path / "mine"), "s3://b/runs/small"
    assert "and the checkpoint of step 120 fetched from s3://b/runs/small" in run_fetch(url, 0, capsys, mine, "--all")
    assert len(list((tmp_path / "mine" / "checkpoints").glob("step-*"))) == 3
    assert "nothing fetched" in run_fetch(url, 0, capsys, mine, "--all")
    assert "has another run, or another state" in run_fetch(url, 2, capsys, str(quiet.path))
    for name in (["evaluate", mine], ["report", mine], ["export", mine, f"{mine}-hf"], ["generate", mine, "The "]):
        assert run_command([*name, *(["--max-tokens", "3"] if name[0] == "generate" else [])]) == 0
    there = {path.name for path in (bucket.folder / "b" / "runs").iterdir()}
    assert there == {"small"} and not (bucket.folder / "b" / "runs" / "small" / "owner.json").exists()
    assert (bucket.folder / "b" / "others" / "object").read_bytes() == b"not mine"


@pytest.mark.long
def test_processes_of_a_launcher_fetch_it_once(prepared: Path, tmp_path: Path, bucket: Store) -> None:
    """Two machines with the recipe alone, and a folder in common: one process fetches, both train, and the copy is up to date."""

    def train(machine: str, *more: str) -> list[str]:
        sets = [f'run.dir="{tmp_path / machine}"', STORE, "parallel.replicate=2", "checkpoint.every=6", *more]
        line = ["train", str(prepared / "small.toml"), *(part for one in sets for part in ("--set", one))]
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bessemer", *line], stderr=subprocess.PIPE, text=True,
                env={**os.environ, **places, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [process.communicate(timeout=150)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        return said

    shutil.copytree(prepared / "runs" / "small", tmp_path / "one" / "small")
    train("one")
    said = train("two", "train.steps=30", "train.schedule.kind=cosine")
    assert "small is not on this machine" in said[0] and "and the checkpoint of step 24 fetched" in " ".join(
        said[0].split()
    )
    two = RunFolder(tmp_path / "two" / "small")
    assert len(losses(two)) == 30 and [row["what"] for row in read_steps(two.incidents)].count("restored") == 1
    said = train("one", "train.steps=36", "train.schedule.kind=cosine")  # whose folder is older now
    assert "what was here is in" in "".join(said) and (tmp_path / "one" / "small.older-1").is_dir(), said
    assert len(losses(RunFolder(tmp_path / "one" / "small"))) == 36
    two = RunFolder(tmp_path / "one" / "small")
    there = RunStore("s3://b/runs", "small", two)
    copy = there.copy()
    assert there.knows(copy) and copy is not None and there._there.read("owner.json") is None
    assert copy["files"]["metrics.jsonl"][0] == two.metrics.stat().st_size
