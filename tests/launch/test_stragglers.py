"""A process that is slower than those with the same work is found by the time it computes, and named."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainings import another, command, injected, metrics, wait_for_step

from bessemer.report import data, page
from bessemer.run import RunFolder, read_json_lines
from bessemer.train.stragglers import RankTime, excess
from tests.choose import long_but

NEW_SETS = ("guard.stragglers_every=12", "train.steps=78", "checkpoint.every=1000", "train.log_every=10")


def times(*seconds: float, work: int = 0) -> list[RankTime]:
    return [RankTime(rank, "node", one, 0.0, work) for rank, one in enumerate(seconds)]


def test_a_rank_is_compared_with_those_of_the_same_work() -> None:
    assert excess(times(1.0, 1.0, 1.3, 1.0))[2] == pytest.approx(0.3)
    assert excess(times(1.0, 1.4)) == pytest.approx({0: 0.0, 1: 0.4}), "of two, the other is the measure"
    stages = [*times(1.0, 1.1), RankTime(2, "node", 5.0, 0.0, 1), RankTime(3, "node", 5.5, 0.0, 1)]
    assert excess(stages) == pytest.approx({0: 0.0, 1: 0.1, 2: 0.0, 3: 0.1})
    assert excess([RankTime(0, "a", 1.0, 0.0, 0), RankTime(1, "b", 9.0, 0.0, 1)]) == {}, "no peers, no verdict"


@contextlib.contextmanager
def heartbeats(pid: int) -> Iterator[None]:
    """Stop a process for three quarters of the time."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.06)
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


SLOW = """
import os, sys, threading, time
def patch():
    while not hasattr(sys.modules.get("bessemer.model.transformer"), "Transformer"):
        time.sleep(0.001)
    from bessemer.model.transformer import Transformer
    honest = Transformer.forward
    def forward(self, *arguments, **options):
        time.sleep(0.04)
        return honest(self, *arguments, **options)
    Transformer.forward = forward
if os.environ.get("LOCAL_RANK") == "1":
    threading.Thread(target=patch, daemon=True).start()
"""


def trained(made: Path, name: str, *sets: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    sets_ = [part for key in (*NEW_SETS, *sets) for part in ("--set", key)]
    return subprocess.Popen(command("train", *another(made, name), *sets_), stderr=subprocess.PIPE, text=True,
                            env=os.environ | (environment or {}))  # fmt: skip


def require_named(made: Path, name: str, said: str) -> None:
    run = made.parent / "runs" / name
    windows = metrics(made, name, "ranks")
    assert [row["step"] for row in windows] == [12, 24, 36, 48, 60, 72]
    assert sum(row["slowest"] == 1 for row in windows[2:]) >= 2, "other programs may slow the other one, for a while"
    seconds = [sum(row["compute_seconds"][rank] for row in windows[2:]) for rank in ("0", "1")]
    assert seconds[1] > 1.2 * seconds[0]
    incidents = [
        row for row in read_json_lines(run / "incidents.jsonl") if row["what"] == "straggler" and row["rank"] == 1
    ]
    assert len(incidents) == 1, "once"
    assert incidents[0]["cause"].startswith(f"rank 1 on {incidents[0]['host']} is ")
    assert "% slower than the other rank with the same work: computing takes" in incidents[0]["cause"]
    assert "all others wait for it" in said
    assert said.count("rank 1 on") == 2, "when it is found, and at the end"
    shown = page.render(data.read(RunFolder(run)))
    assert "Rank 1 on" in shown
    assert "Computing, a step" in shown


@pytest.mark.long
def test_a_rank_that_is_stopped_now_and_then_is_named(made: Path) -> None:
    with trained(made, "halted", "parallel.replicate=2") as training:
        run = made.parent / "runs" / "halted"
        wait_for_step(run, 10)
        with heartbeats(int((run / ".training" / "rank-1.pid").read_text())):
            _, said = training.communicate(timeout=300)
    assert training.returncode == 0, said
    require_named(made, "halted", said)


@pytest.mark.parametrize("layout", long_but(("shard", "tensor", "context"), "shard"))
def test_a_rank_whose_model_is_slow_is_named_in_every_layout(made: Path, layout: str, tmp_path: Path) -> None:
    fault = injected(tmp_path, SLOW)
    sets: tuple[str, ...] = (f"parallel.{layout}=2", "train.micro_batch=4")
    if layout == "tensor":  # which divides heads
        sets = (*sets, "model.depth=2")
    if layout == "context":  # whose parts of the sequences are no equal work: a second pair
        sets = (f"parallel.{layout}=2", "parallel.replicate=2", "train.micro_batch=2")
    with trained(made, f"slow-{layout}", *sets, environment=fault) as training:
        _, said = training.communicate(timeout=400)
    assert training.returncode == 0, said
    require_named(made, f"slow-{layout}", said)
