"""A bound on work that holds on any machine: inputs are so long that a quadratic pass over them would take hours."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time


@contextmanager
def no_quadratic_pass(seconds: float = 60) -> Iterator[None]:
    """Fail when the block takes more CPU time than any slow or busy machine needs for a linear pass."""
    started = process_time()
    yield
    assert process_time() - started < seconds
