"""Plans with changes, as `--what-if gpus=1024,precision=fp8` asks for them. Every error names the what-if that it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bessemer.common.errors import InputError
from bessemer.plan.ask import PlanRequest, with_changes
from bessemer.plan.outcome import PlanResult


def changed(asked: PlanRequest, text: str) -> PlanRequest:
    """`name=value,name=value`: what is asked, with these changes. Raises InputError."""
    with _named(text):
        return with_changes(asked, _changes(text))


def plans(
    requests: Sequence[PlanRequest], texts: Sequence[str], plan: Callable[[PlanRequest], PlanResult]
) -> list[PlanResult]:
    """The plan of each request. texts: what each was made from by `changed`. Raises InputError where one is not possible."""
    found = []
    for request, text in zip(requests, texts, strict=True):
        with _named(text):
            found.append(plan(request))
    return found


def _changes(text: str) -> dict[str, str]:
    """Names to values."""
    changes: dict[str, str] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError("write it as name=value,name=value, for example gpus=1024,precision=fp8")
        if name.strip() in changes:
            raise InputError(f"{name.strip()} stands there twice; give it once")
        changes[name.strip()] = value.strip()
    if not changes:
        raise InputError("what? for example gpus=1024, or precision=fp8,tp=4")
    return changes


@contextmanager
def _named(text: str) -> Iterator[None]:
    """Says of an InputError which what-if it is of."""
    try:
        yield
    except InputError as error:
        what = str(error).removeprefix("plan: ").removeprefix(f"{text.strip()}: ")
        raise InputError(f"{f'--what-if {text.strip()}'.rstrip()}: {what}") from None
