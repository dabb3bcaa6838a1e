import pytest

from bessemer.corpus import engine
from bessemer.errors import BessemerError


def test_failures_of_the_engine_become_one_line() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    with pytest.raises(BessemerError, match=r"^corpus: the work failed: ValueError: first$"):
        engine.run(fail)
