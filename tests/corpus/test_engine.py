import pytest

from bessemer.common.errors import BessemerError
from bessemer.recipe import Work
from bessemer.run_tasks.local import run_in_thread
from bessemer.run_tasks.run import require_engine


def test_failures_of_the_engine_become_one_line() -> None:
    def fail() -> None:
        raise ValueError("first\nsecond")

    with pytest.raises(BessemerError, match=r"^corpus: the work failed: ValueError: first$"):
        run_in_thread(fail)


def test_settings_of_another_engine_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_engine(Work.model_validate({"address": "auto", "slurm": {"partition": "a"}}))
    said = capsys.readouterr().err
    assert "corpus.address" in said and "corpus.slurm" in said
