"""A time bound for any machine, with inputs so long that a quadratic pass would take hours."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time


@contextmanager
def no_quadratic_pass(seconds: float = 60) -> Iterator[None]:
    """Fail if the block takes more CPU time than a linear pass needs on any slow or busy machine."""
    started = process_time()
    yield
    assert process_time() - started < seconds
