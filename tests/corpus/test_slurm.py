"""Slurm job arrays with simulated commands that run the jobs: the same corpus, and failures."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import slurm_commands
from corpus_samples import prose, recipe
from slurm_tasks import Square, square

from bessemer.common import interrupt
from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import pipeline
from bessemer.recipe import Corpus, Recipe, dump
from bessemer.recipe.corpus import SlurmArray
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from bessemer.run_tasks import slurm
from bessemer.tokens import build
from tests.corpus.object_store import Store
from tests.storage_folder import BOTH, contents, published, storage_of


def settings(workers: int = 2, **options: Any) -> Corpus:
    return Corpus(engine="slurm", workers=workers, slurm=SlurmArray(**options))


def calls(cluster: Path, command: str) -> int:
    return sum(line.startswith(command) for line in (cluster / "calls").read_text().splitlines())


def squares(tasks: list[Square], workers: int = 2) -> list[int]:
    return [done["square"] for done in worker.run_tasks("squaring", "tasks", tasks, 1, settings(workers))]


@pytest.mark.usefixtures("cold")  # jobs are new interpreters in one of the tests
def test_all_tasks_are_done_once(cluster: Path, tmp_path: Path) -> None:
    work = tmp_path / "it's a %work folder"
    work.mkdir()
    tasks = [square(work, number) for number in range(12)]
    assert squares(tasks) == [number**2 for number in range(12)]
    assert sorted(map(int, (work / "made").read_text().split())) == list(range(12))
    deadline = time.monotonic() + 60
    while "RUNNING" in slurm_commands.states(cluster / "1") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert slurm_commands.states(cluster / "1") == ["COMPLETED"] * 8, "an array that did all is not cancelled"
    assert squares(tasks) == [number**2 for number in range(12)]
    assert calls(cluster, "sbatch") == 1, "what has a receipt is not submitted"
    assert not list((work / "slurm").iterdir())


def test_options_reach_the_script(tmp_path: Path) -> None:
    array = settings(
        sbatch=("--partition=cpu", "--constraint=a|b"), time="1-00:00:00", memory="8Gi", setup=("module load python",),
    )  # fmt: skip
    script = slurm.batch_script("drawing the tokenizer's sample", tmp_path / "q", 70, 7, array).splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in script if "=" in line and line[0] == "#")
    assert options == {
        "job-name": "bessemer-drawing-the-tokenizer-s-sample", "array": "0-69%7", "ntasks": "1", "cpus-per-task": "1", "mem": "8G",
        "time": "1-00:00:00", "partition": "cpu", "constraint": "a|b",
        "output": f'"{tmp_path}/q/logs/%a.out"',
    }  # fmt: skip
    assert "module load python" in script
    for name in ("a\nb", 'a"b', "a\\b"):
        with pytest.raises(InputError, match="sbatch"):
            slurm.batch_script("x", tmp_path / name, 1, 1, array)


def test_tasks_of_lost_jobs_are_resubmitted_unless_one_task_kills_every_job(cluster: Path, tmp_path: Path) -> None:
    tasks = [square(tmp_path / "a", number, "dies once" if number == 3 else "") for number in range(8)]
    tasks[0].work.mkdir()
    assert squares(tasks) == [number**2 for number in range(8)]
    assert (tmp_path / "a" / "made").read_text().split().count("3") == 2
    assert calls(cluster, "sbatch") == 2
    with pytest.raises(BessemerError, match=r"square 0.*NODE_FAIL.*corpus\.slurm\.memory"):
        squares([square(tmp_path, 0, "dies"), square(tmp_path, 1)])
    assert calls(cluster, "sbatch") == 5
    assert square(tmp_path, 1).receipt() is not None


def test_a_failure_is_raised_unchanged_and_ends_the_array(cluster: Path, tmp_path: Path) -> None:
    tasks = [square(tmp_path, 0, "fails"), square(tmp_path, 1, "waits")]
    with pytest.raises(InputError, match="^square 0: what, where$"):
        squares(tasks)
    assert "CANCELLED" in slurm_commands.states(cluster / "1")


def test_a_cancelled_array_is_not_resubmitted(cluster: Path, tmp_path: Path) -> None:
    def cancel() -> None:
        while not (tmp_path / "made").exists():
            time.sleep(0.02)
        slurm_commands.scancel(cluster / "1")

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(BessemerError, match="corpus: array 1"):
        squares([square(tmp_path, 0, "waits")])
    thread.join()
    assert calls(cluster, "sbatch") == 1


def test_jobs_that_cannot_start_are_shown_at_once(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SEEN_SECONDS", 3600.0)
    for line in ("module load python || exit 3", "module load python | cat"):
        array = Corpus(engine="slurm", workers=1, slurm=SlurmArray(setup=(line, "true")))
        why = r"square 0.*1 job FAILED.*module: command not found.*corpus\.slurm\.setup"
        began = time.monotonic()
        with pytest.raises(BessemerError, match=why):
            list(worker.run_tasks("squaring", "tasks", [square(tmp_path, 0)], 1, array))
        assert time.monotonic() - began < 600, "no task began, so there are no results to wait for"
    (cluster / "refuses").touch()
    with pytest.raises(BessemerError, match="corpus.slurm: .*Invalid partition name"):
        squares([square(tmp_path, 0)])


def test_a_stop_ends_the_array_and_so_does_the_next_build(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next build ends the array of a killed driver, whatever its engine."""
    whole = slurm._cancel

    def killed(folder: Path) -> None:
        if folder.parent.parent != tmp_path / "b":
            whole(folder)

    def check() -> None:
        if any((tmp_path / name / "made").exists() for name in "ab" if not (tmp_path / name / "over").exists()):
            raise KeyboardInterrupt

    monkeypatch.setattr(interrupt, "check", check)
    monkeypatch.setattr(slurm, "_cancel", killed)
    for name in "ab":
        (tmp_path / name).mkdir()
        with pytest.raises(KeyboardInterrupt):
            squares([square(tmp_path / name, 0, "waits")])
        (tmp_path / name / "over").touch()
    assert slurm_commands.states(cluster / "1") == ["CANCELLED"]
    assert slurm_commands.states(cluster / "2") == ["RUNNING"], "its driver was killed"
    monkeypatch.setattr(slurm, "_cancel", whole)
    assert [done["square"] for done in worker.run_tasks("s", "tasks", [square(tmp_path / "b", 0)], 1, Corpus())] == [0]
    assert slurm_commands.states(cluster / "2") == ["CANCELLED"]
    assert not list((tmp_path / "b" / "slurm").iterdir())


def test_a_job_without_its_queue_exits_cleanly(tmp_path: Path) -> None:
    slurm.main(tmp_path / "gone", "0")


def test_without_slurm_commands_the_build_is_an_error(
    tmp_path: Path, data: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "a.txt").write_text(prose(0))
    monkeypatch.setenv("PATH", str(tmp_path))
    of = on_slurm(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    with pytest.raises(InputError, match="corpus.engine"):
        pipeline.build(of, run)


def on_slurm(of: Recipe) -> Recipe:
    return of.changed(corpus={"engine": "slurm", "workers": 2})


def filled(data: Path) -> Recipe:
    for number in range(60):
        (data / f"{number}.txt").write_text(prose(number) + f"\n{prose(0)}" * (number % 7 == 1))
        if number % 5 == 0:
            (data / f"copy-{number}.txt").write_text(prose(number).title() + "\nmore of it" * (number % 2))
    return recipe({"name": "s", "format": "text", "paths": [str(data)]}, dedup="lines = true\nline_words = 5")


@pytest.mark.long
@BOTH
def test_jobs_work_in_a_storage(
    kind: str, data: Path, cluster: Path, finely: None, tmp_path: Path, bucket: Store
) -> None:
    """Share only the queue on disk; all other files are in a store."""
    of = filled(data).changed(tokens={"sequence_length": 32, "held_out": 0.1}, tokenizer={"vocabulary": 400})
    here, there = RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    stored = on_slurm(of).changed(corpus={"storage": storage_of(kind, tmp_path)})
    for recipe_of, run in ((of, here), (stored, there)):
        pipeline.build(recipe_of, run)
        build.build(recipe_of, run)
    assert not (there.corpus / "documents").exists()
    mine, theirs = contents(here.tokens), contents(there.tokens) | published(there.tokens, bucket)
    shards = [name for name in mine if name.endswith((".bin", ".idx"))]
    assert shards and {name: mine[name] for name in shards} == {name: theirs[name] for name in shards}
    scripts = [path.read_text() for path in cluster.rglob("script")]
    assert any("export AWS_ENDPOINT_URL=" in script for script in scripts)
    assert all((f"{there.path}/slurm/" in script) is (kind == "s3") for script in scripts)
    assert not (there.path / "slurm").exists()


@pytest.mark.long
def test_killed_drivers_and_jobs_do_not_change_the_corpus(
    data: Path, cluster: Path, finely: None, tmp_path: Path
) -> None:
    """Kill the driver or a running job about twice a second, five times each."""
    of, here, there = filled(data), RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    (tmp_path / "recipe.toml").write_text(dump(on_slurm(of)))
    program = [sys.executable, "-m", "tests.corpus.build_corpus", str(tmp_path / "recipe.toml"), str(there.path)]
    draw, killed = random.Random(0), {"driver": 0, "job": 0}
    for _ in range(60):
        driver = subprocess.Popen([*program, "slurm"], stdout=subprocess.DEVNULL, start_new_session=True)
        while not there.corpus.exists() and driver.poll() is None:
            time.sleep(draw.uniform(0.2, 1.0))
            running = [path for path in cluster.glob("*/*.state") if path.read_text() == "RUNNING"]
            what = "job" if running and killed["job"] <= killed["driver"] else "driver"
            if killed[what] < 5:
                number = int(draw.choice(running).with_suffix(".pid").read_text()) if what == "job" else driver.pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    killed[what] += 1
        if driver.wait() == 0:
            break
        assert driver.returncode == -signal.SIGKILL
    assert min(killed.values()) >= 3, killed
    assert contents(there.corpus) == contents(here.corpus)
