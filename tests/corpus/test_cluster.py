"""A recipe on a Ray cluster of several local nodes: the same corpus and shards, hash for hash."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from build_corpus import cut_finely
from corpus_samples import prose, recipe

from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import partition, pipeline
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import run as worker
from bessemer.run_tasks.ray import run_on_ray
from bessemer.run_tasks.task import ATTEMPTS
from tests.corpus.object_store import store
from tests.storage_folder import contents, places, published

ray: Any = pytest.importorskip("ray", reason="ray is not installed (pip install 'bessemer[ray]')")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of a head and two more nodes with one core each, and credentials of a store."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            patched.setenv(name, "true")
        yield from _cluster(Cluster)


def _cluster(Cluster: Any) -> Iterator[str]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1)
        made.add_node(num_cpus=1)
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def of(data: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    cut_finely(monkeypatch)
    for number in range(200):
        (data / f"{number}.txt").write_text(prose(number) + f"\n{prose(0)}" * (number % 7 == 1))
        if number % 5 == 0:
            (data / f"copy-{number}.txt").write_text(prose(number).title() + "\nmore of it" * (number % 2))
    return recipe({"name": "s", "format": "text", "paths": [str(data)]}, dedup="lines = true\nline_words = 5")


def on_ray(of: Recipe, address: str | None, workers: int | None = None) -> Recipe:
    return of.changed(corpus={"engine": "ray", "address": address, "workers": workers})


@pytest.mark.long
def test_a_ray_cluster_works_in_a_storage(
    of: Recipe, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bessemer.tokens import build

    of = of.changed(tokens={"sequence_length": 32, "held_out": 0.1}, tokenizer={"vocabulary": 400})
    here, there = RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    build.build(of, here)
    if ray.is_initialized():
        ray.shutdown()  # the next connection passes on where the store is
    with store(tmp_path / "store") as served:
        (served.folder / "b").mkdir()
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.endpoint)
        stored = on_ray(of, address).changed(corpus={"storage": "s3://b/storage"})
        pipeline.build(stored, there)
        monkeypatch.setattr(worker, "SMALL_BYTES", 0)
        build.build(stored, there)
        assert all(any(step in line for line in served.requests()) for step in ("partitions", "/encoded/", "/shards/"))
        mine, theirs = contents(here.corpus), contents(there.corpus) | published(there.corpus, served)
        assert theirs == mine
        mine, theirs = contents(here.tokens), contents(there.tokens) | published(there.tokens, served)
        assert not [name for name in places("s3://b/storage", served) if ".work" in name]
        ray.shutdown()
    shards = [name for name in mine if name.endswith((".bin", ".idx"))]
    assert shards and {name: mine[name] for name in shards} == {name: theirs[name] for name in shards}


@pytest.mark.long
def test_killed_workers_neither_double_nor_lose_documents(of: Recipe, address: str, tmp_path: Path) -> None:
    here, there = RunDirectory(tmp_path / "here"), RunDirectory(tmp_path / "there")
    pipeline.build(of, here)
    killed: list[int] = []
    ended = threading.Event()

    def reap() -> None:
        draw = random.Random(0)
        while not ended.is_set() and len(killed) < ATTEMPTS - 1:  # otherwise one unlucky task would be given up
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    name = (entry / "cmdline").read_bytes()
                    if name.startswith(b"ray::answer"):
                        os.kill(int(entry.name), signal.SIGKILL)
                        killed.append(int(entry.name))
                        time.sleep(draw.random() / 2)
                        break
            time.sleep(0.002)

    thread = threading.Thread(target=reap)
    thread.start()
    try:
        pipeline.build(on_ray(of, address), there)
    finally:
        ended.set()
        thread.join()
    assert killed, "no worker was caught at work"
    assert contents(there.corpus) == contents(here.corpus)


@pytest.mark.long
def test_a_failure_on_a_worker_is_raised_unchanged(of: Recipe, address: str, run: RunDirectory) -> None:
    list(run_on_ray([], on_ray(of, address).corpus))
    task = partition.Partition(run.path, "partition 5", 0, 0, "s", ())
    with pytest.raises(InputError, match="context.json"):
        list(run_on_ray([task], on_ray(of, address).corpus))


def test_ray_without_ray_says_what_to_install(of: Recipe, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"corpus.engine: .*bessemer\[ray\]"):
        pipeline.build(on_ray(of, None), run)


def test_a_missing_cluster_is_named(of: Recipe, run: RunDirectory) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(BessemerError, match="corpus.address: .*127.0.0.1:1"):
        pipeline.build(on_ray(of, "127.0.0.1:1"), run)
