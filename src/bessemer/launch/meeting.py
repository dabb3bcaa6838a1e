"""What the processes of a run settle before they form a group: through the store at MASTER_ADDR:MASTER_PORT alone.

A group of a backend (NCCL, gloo) can hang or abort when its processes do not fit together. So they first lay side by side
what they were given, the first of them judges, and all leave with the same sentence when it does not fit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bessemer.errors import BessemerError, InputError
from bessemer.launch import outcome

PATIENCE = timedelta(minutes=30)  # for the slowest process to come, and for the first one to prepare the run
PARTING = timedelta(seconds=3)  # of the first process, which holds the store, for the others to read the last word
PORT_IN_USE = "EADDRINUSE"


class Settled(Exception):
    """An error that all processes of the run know of."""

    def __init__(self, error: BessemerError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Meeting:
    """This process among those that were started for a run."""

    store: dist.Store
    rank: int
    world: int

    def settle(
        self, name: str, bring: Callable[[], dict[str, Any]], judge: Callable[[list[dict[str, Any]]], Any]
    ) -> Any:
        """Every process brings plain values; the first judges all of them, by rank, and its finding is everybody's.

        Raises Settled on every process: with the error of the first process that could not bring its own, else with that of
        the judge.
        """
        own = _caught(bring)
        if self.rank:
            self.store.set(f"{name}/{self.rank}", json.dumps(own))
            return self._hear(name)
        theirs = [f"{name}/{rank}" for rank in range(1, self.world)]
        if theirs:
            self.store.wait(theirs, PATIENCE)
        brought = [own, *(json.loads(value) for value in (self.store.multi_get(theirs) if theirs else []))]

        def judged() -> Any:
            for one in brought:
                if "status" in one:
                    raise outcome.as_error(one)
            return judge([one["value"] for one in brought])

        return self.publish(name, judged)

    def publish(self, name: str, work: Callable[[], Any]) -> Any:
        """What the first process's `work` returns (a plain value), on every process; Settled when it fails."""
        if self.rank:
            return self._hear(name)
        word = _caught(work)
        self._spread(name, word)
        if "status" in word:
            self._part()
            raise Settled(outcome.as_error(word))
        return word["value"]

    def _spread(self, name: str, word: dict[str, Any]) -> None:
        self.store.set(f"{name}/verdict", json.dumps(word))

    def _hear(self, name: str) -> Any:
        self.store.wait([f"{name}/verdict"], PATIENCE)
        word = json.loads(self.store.get(f"{name}/verdict"))
        if "status" in word:
            self.store.set(f"parted/{self.rank}", "")
            raise Settled(outcome.as_error(word))
        return word["value"]

    def _part(self) -> None:
        """The store ends with this process: let the others read it first."""
        others = [f"parted/{rank}" for rank in range(1, self.world)]
        try:
            if others:
                self.store.wait(others, PARTING)
        except dist.DistError:
            return


def _caught(work: Callable[[], Any]) -> dict[str, Any]:
    """A value, or the expected failure instead of it, as can be told to others."""
    try:
        return {"value": work()}
    except BessemerError as error:
        return {"status": outcome.status_of(error), "message": str(error)}
    except OSError as error:
        return {"status": "failed", "message": f"{error.filename or 'a file'}: {error.strerror or error}"}


def meet() -> Meeting:
    """The meeting that a launcher's environment describes: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Raises InputError when the environment is not whole or the port is another program's, BessemerError when the first
    process cannot be reached.
    """
    try:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    except (KeyError, ValueError) as error:
        raise InputError(
            f"parallel: the launcher's environment lacks {error}; it takes RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
            "MASTER_PORT, as torchrun sets them"
        ) from None
    try:
        store, rank, world = next(dist.rendezvous("env://", rank, world, timeout=PATIENCE))
    except (dist.DistError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        if PORT_IN_USE in str(error):
            raise InputError(
                f"parallel: {where} is in use by another program; set another MASTER_PORT (torchrun: --master-port)"
            ) from None
        raise BessemerError(f"parallel: rank {rank} cannot join the others at {where}: {lines[0]}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(dist.PrefixStore(f"bessemer/{attempt}", store), rank, world)
