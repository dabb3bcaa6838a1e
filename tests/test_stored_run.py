"""A run whose folder is kept in a store: a machine that has the recipe alone goes on with it, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bessemer import run_store
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import parse
from bessemer.run import RunFolder, read_json, read_steps
from bessemer.run_store import RunStore, run_files
from bessemer.train.loop import StopSignal
from tests.corpus.object_store import Store
from tests.newest import weights_hash
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
    with pytest.raises(InputError, match=r"gone on elsewhere \(written by .*Move this folder away"):
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
            one._there.write("owner.json", json.dumps(other).encode())
            until = time.monotonic() + 30
            while not warned and time.monotonic() < until:
                time.sleep(0.02)
            one.follow(warned.append)
            one.finish()

    with pytest.raises(BessemerError, match="is not up to date: .*process 7 of other"):
        is_taken_over()
    assert "process 7 of other" in warned[0] and "no longer copied from here" in warned[0]
    assert "this copy of the run is not up to date" in warned[1]
    assert json.loads(one._there.read("owner.json") or b"")["process"] == 7, "that of another stays"


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


def test_the_recipe_alone_goes_on(command: Any, prepared: Path, tmp_path: Path) -> None:
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
    assert "the run has gone on elsewhere" in command("train", "one", STORE, code=2)
    assert "restored" not in command("evaluate", "one", STORE)
    assert "unchanged" in command("tokens", "two", STORE)
    scored = command("evaluate", "three", STORE)
    assert "the checkpoint of step 24 fetched from s3://b/runs/small" in scored
    three = RunFolder(tmp_path / "three" / "small")
    assert read_json(three.evaluation)["step"] == 24 and len(list(three.checkpoints.glob("step-*"))) == 1
    command("report", "four", STORE)
    four = RunFolder(tmp_path / "four" / "small")
    assert four.report.exists() and four.evaluation.exists(), "what was added is there"
    assert not four.checkpoints.exists()
    assert losses(one) == losses(quiet)[: len(losses(one))] != losses(quiet)
