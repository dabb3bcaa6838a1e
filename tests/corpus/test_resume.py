"""A build killed anywhere resumes to the same corpus byte for byte, without repeating finished work."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_samples import prose, recipe

from bessemer.common.errors import BessemerError
from bessemer.corpus import pipeline
from bessemer.recipe import Recipe, dump
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import local
from bessemer.run_tasks import run as worker
from bessemer.run_tasks.task import Task
from tests.storage_folder import contents

PROGRAM = "-m", "tests.corpus.build_corpus"


def receipts(run: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of every receipt in the work folder."""
    found = {}
    for folder, below, names in os.walk(run / "corpus.work"):  # unlike a glob it ignores files that disappear meanwhile
        below[:] = [name for name in below if not name.endswith(".tmp")]
        if "stage.json" in names:
            path = os.path.join(folder, "stage.json")
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                found[path] = (status.st_ino, status.st_mtime_ns)
    return found


@pytest.fixture
def of(data: Path) -> Recipe:
    """Write two sources in twenty partitions and some buckets, with duplicates across partitions and rejects in each."""
    (data / "files").mkdir()
    for number in range(60):
        (data / "files" / f"{number}.txt").write_text(prose(number) + f"\n{prose(0)}" * (number % 7 == 1))
    for number in range(0, 60, 7):
        (data / "files" / f"copy-{number}.txt").write_text(prose(number).upper())
        (data / "files" / f"near-{number}.txt").write_text(prose(number + 1) + "\nand some more words")
        (data / "files" / f"short-{number}.txt").write_text("short")
    lines = [json.dumps({"text": prose(500 + number), "n": number}) for number in range(60)]
    lines[13] = "{damaged"
    (data / "a.jsonl").write_text("\n".join(lines))
    return recipe(
        {"name": "files", "format": "text", "paths": [str(data / "files")]},
        {"name": "lines", "format": "jsonl", "paths": [str(data / "a.jsonl")]},
        dedup="bands = 14\nrows = 8\nlines = true\nline_words = 5",
    )


def start(of: Recipe, tmp_path: Path, run: Path, *more: str) -> subprocess.Popen[str]:
    file = tmp_path / "recipe.toml"
    file.write_text(dump(of))
    return subprocess.Popen([sys.executable, *PROGRAM, str(file), str(run), *more], stdout=subprocess.PIPE, text=True)


def test_a_build_killed_at_many_moments_resumes_to_the_same_corpus(of: Recipe, tmp_path: Path, finely: None) -> None:
    whole = RunDirectory(tmp_path / "whole")
    pipeline.build(of, whole)
    assert not (whole.path / "corpus.work").exists()
    run = tmp_path / "killed"
    draw = random.Random(0)
    kills, killed_in = 0, set()
    while True:
        before = receipts(run)
        process = start(of, tmp_path, run, str(draw.randint(4, 70)), draw.choice(["before", "after"]))
        process.communicate(timeout=300)
        after = receipts(run)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
        killed_in.add(next(kind for kind in ("published", "steps", "partitions", "plan", "") if kind in str(after)))
        for step in ("duplicates", "lines"):
            if any(f"{step}/result" in path for path in after):  # files no longer needed are removed
                before = {
                    path: value for path, value in before.items() if f"{step}/" not in path or "/verdicts" in path
                }
        assert {path: after[path] for path in before} == before  # no finished work was repeated
        assert not (run / "corpus").exists() or contents(run / "corpus") == contents(whole.corpus)
    assert kills >= 5
    assert {"partitions", "published"} <= killed_in
    assert contents(run / "corpus") == contents(whole.corpus)
    assert [path.name for path in run.iterdir()] == ["corpus"]


@pytest.mark.long
@pytest.mark.usefixtures("cold")
def test_a_killed_build_ends_its_workers_and_another_build_resumes(of: Recipe, tmp_path: Path, finely: None) -> None:
    whole = RunDirectory(tmp_path / "whole")
    pipeline.build(of, whole)
    run = tmp_path / "killed"
    of = of.changed(corpus={"workers": 2})
    for kill in range(3):
        before = receipts(run)
        process = start(of, tmp_path, run, "pool")
        deadline = time.monotonic() + 60
        while len(receipts(run)) < len(before) + 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.poll() is None, "too quick to be killed"
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        workers = [int(pid) for thread in threads for pid in thread.read_text().split()]
        process.kill()
        process.wait()
        assert kill or len(workers) == 2
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        after = receipts(run)
        assert {path: after[path] for path in before} == before
    assert start(of, tmp_path, run, "pool").wait(timeout=300) == 0
    assert contents(run / "corpus") == contents(whole.corpus)


def kill_workers(monkeypatch: pytest.MonkeyPatch, is_now: Callable[[Task, int], bool]) -> list[int]:
    """Use worker processes and kill the one that receives a task for which `is_now` is true; return the killed ones."""
    monkeypatch.setattr(worker, "SMALL_BYTES", 0)
    run_in_process, killed = local.run_in_process, list[int]()

    def run_and_kill(process: subprocess.Popen[bytes], task: Task) -> None:
        if is_now(task, len(killed)):
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.read()  # returns once it is dead
        run_in_process(process, task)

    monkeypatch.setattr(local, "run_in_process", run_and_kill)
    return killed


@pytest.mark.fault(13)
def test_a_dead_worker_does_not_change_the_corpus(
    of: Recipe, tmp_path: Path, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "other")
    pipeline.build(of, whole)
    killed = kill_workers(monkeypatch, lambda task, killed: killed < 2 and "bucket" in str(task))
    pipeline.build(of.changed(corpus={"workers": 2}), other)
    assert len(killed) == 2
    assert contents(other.corpus) == contents(whole.corpus)


def test_a_task_that_kills_its_workers_is_named(
    of: Recipe, run: RunDirectory, finely: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_workers(monkeypatch, lambda task, killed: str(task) == "partition 5")
    with pytest.raises(BessemerError, match=r"corpus: partition 5: .*signal 9.*corpus\.workers"):
        pipeline.build(of.changed(corpus={"workers": 2}), run)
    assert not run.corpus.exists()
