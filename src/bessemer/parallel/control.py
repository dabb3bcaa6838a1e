"""Decisions of rank 0 for all processes, over the mesh's control group. A failure on one process raises on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bessemer.errors import BessemerError, InputError
from bessemer.parallel.mesh import ProcessMesh

Gathered = TypeVar("Gathered")
Result = TypeVar("Result")


def on_rank_zero(mesh: ProcessMesh, act: Callable[[], Result]) -> Result:
    """Call `act` on rank 0, and return its result, which must pickle, on every process; collective. Raises as
    `gather_scatter`."""
    return gather_scatter(mesh, lambda: None, lambda by_rank: [act()] * len(by_rank))


def gather_scatter(
    mesh: ProcessMesh, local: Callable[[], Gathered], decide: Callable[[list[Gathered]], list[Result]]
) -> Result:
    """Gather a value of every process on rank 0, and scatter what rank 0 makes of them; both must pickle. Collective.

    local: called on every process; decide: called on rank 0 with the values by rank, returns each rank's result. When either
    raises anywhere, every process raises one error that names the rank: InputError for one, BessemerError where a user can act
    on it (BessemerError, OSError), else RuntimeError. A single process raises its own error.
    """
    if mesh.is_single:
        return decide([local()])[0]
    value, fault, cause = _attempt(local)
    is_main, world = mesh.rank == 0, mesh.world
    gathered: list[Any] | None = [None] * world if is_main else None
    dist.gather_object((value, fault), gathered, dst=0, group=mesh.control)
    answers: list[Any] | None = None
    if gathered is not None:
        failed = next((rank for rank, (_, its_fault) in enumerate(gathered) if its_fault is not None), None)
        if failed is None:
            values = [its_value for its_value, _ in gathered]
            # Too few results raise here and not below, where the others would wait in vain.
            decided, fault, cause = _attempt(lambda: [one for one, _ in zip(decide(values), values, strict=True)])
            failed = 0 if fault is not None else None
        else:
            fault = gathered[failed][1]
        answers = [(None, (failed, *fault)) if fault else (decided[rank], None) for rank in range(world)]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, answers, src=0, group=mesh.control)
    answer, failure = scattered[0]
    if failure is not None:
        rank, message, kind = failure
        try:
            raise kind(f"rank {rank}: {message}") from cause
        finally:
            del cause  # with this frame it would be a reference cycle that keeps the group alive
    result: Result = answer
    return result


def _attempt(act: Callable[[], Any]) -> tuple[Any, tuple[str, type[Exception]] | None, Exception | None]:
    """(result, None, None), or on failure (None, (message, what the others raise), exception)."""
    try:
        return act(), None, None
    except Exception as error:
        if not isinstance(error, BessemerError | OSError):
            return None, (f"{type(error).__name__}: {error}", RuntimeError), error
        return None, (str(error), InputError if isinstance(error, InputError) else BessemerError), error
