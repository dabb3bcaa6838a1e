"""What one node of several is to start, from the options that torchrun has under the same names."""

from __future__ import annotations

import re

from bessemer.errors import InputError
from bessemer.launch.agent import Order
from bessemer.recipe import Recipe


def order(
    arguments: tuple[str, ...], recipe: Recipe | None, nodes: str, processes: int | None, endpoint: str | None,
    identity: str,
) -> Order:  # fmt: skip
    """The agent's order. recipe: None when it cannot be read, which the processes then say."""
    fewest, most = _range(nodes)
    if endpoint is None and most > 1:
        raise InputError("train: --nnodes needs --rdzv-endpoint HOST:PORT, a free port of the first node")
    if endpoint is not None and not re.fullmatch(r"\S+:\d{1,5}", endpoint):
        raise InputError(f"--rdzv-endpoint: {endpoint}: write it as HOST:PORT, for example node001:29500")
    world = 1 if recipe is None else recipe.parallel.world
    if processes is None:
        processes = max(world // most, 1)
    if processes < 1:
        raise InputError(f"--nproc-per-node: {processes} is not a number of processes; give 1 or more")
    restarts = 0 if recipe is None else recipe.parallel.restarts
    return Order(arguments, processes, restarts, (fewest, most), endpoint or "localhost:0", identity)


def _range(nodes: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", nodes)
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise InputError(f"--nnodes: {nodes}: write it as N or MIN:MAX, for example 2:4")
    return int(found[1]), int(found[2] or found[1])
