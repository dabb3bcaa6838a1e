"""Steps that all processes take together: a failure of one is the failure of all, with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from bessemer.errors import BessemerError
from bessemer.parallel.team import Team

Given = TypeVar("Given")
Got = TypeVar("Got")


def exchange(team: Team, give: Callable[[], Given], decide: Callable[[list[Given]], list[Got]]) -> Got:
    """Every process gives something, the first makes of it what each gets; both must pickle.

    give: called on every process; decide: called on the first with what all gave, by rank, returns what each gets, by
    rank. When either raises anywhere, every process raises one error that names the rank: BessemerError where a person
    can do something (BessemerError, OSError), else RuntimeError. A process alone sees its own error as it is.
    """
    if team.is_alone:
        return decide([give()])[0]
    value, fault, cause = _attempt(give)
    told = _at_first(team, (value, fault))
    answers: list[Any] | None = None
    if told is not None:
        failed = next((rank for rank, (_, found) in enumerate(told) if found is not None), None)
        if failed is None:
            decided, fault, cause = _attempt(lambda: decide([given for given, _ in told]))
            failed = 0 if fault is not None else None
        else:
            fault = told[failed][1]
        answers = [(None, (failed, *fault)) if fault else (decided[rank], None) for rank in range(team.world)]
    answer, verdict = _from_first(team, answers)
    if verdict is not None:
        rank, sentence, expected = verdict
        try:
            raise (BessemerError if expected else RuntimeError)(f"rank {rank}: {sentence}") from cause
        finally:
            del cause  # with this frame it would be a circle that keeps the group alive to the end of the process
    got: Got = answer
    return got


def together(team: Team, act: Callable[[], Given]) -> Given:
    """Do something on every process and return one's own result; when it fails on one, it fails on all."""
    done: list[Given] = []
    exchange(team, lambda: done.append(act()), lambda ready: ready)
    return done[0]


def _attempt(act: Callable[[], Any]) -> tuple[Any, tuple[str, bool] | None, Exception | None]:
    """What came of it, or a sentence for the others and whether it was to be expected."""
    try:
        return act(), None, None
    except (BessemerError, OSError) as error:
        return None, (str(error), True), error
    except Exception as error:
        return None, (f"{type(error).__name__}: {error}", False), error


def _at_first(team: Team, value: Any) -> list[Any] | None:
    found: list[Any] | None = [None] * team.world if team.is_first else None
    dist.gather_object(value, found, dst=0, group=team.control)
    return found


def _from_first(team: Team, values: list[Any] | None) -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, values, src=0, group=team.control)
    return found[0]
