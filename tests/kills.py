"""Processes that kill themselves at a chosen operation, as a failing machine would."""

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def kill_at(target: int, when: str, operations: Iterable[tuple[Any, str]]) -> Iterator[int]:
    """Kill this process "before" or "after" the call with number `target` of any of these attributes of modules and classes.

    Returns the iterator that numbers the calls, also those of threads.
    """
    calls = itertools.count(1)

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any, **named: Any) -> Any:
            number = next(calls)
            if (number, when) == (target, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*given, **named)
            if number == target:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return done

    for owner, name in operations:
        setattr(owner, name, counted(getattr(owner, name)))
    return calls
