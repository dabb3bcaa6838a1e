import json

import pytest

pytest.importorskip("pyarrow", reason="the corpus extra is not installed")

from bessemer.studies import STUDIES, frozen_vs_full
from tests.studies.test_library import TINY


def test_a_tiny_run_has_its_table() -> None:
    found = frozen_vs_full.run(TINY)
    assert len(frozen_vs_full.shows(found)) == 3 and frozen_vs_full.plot(found).startswith("<svg")
    json.dumps(found)
    assert found["frozen"]["trained_parameters"] == 6 * 32  # the head
    assert found["full"]["trained_parameters"] == found["scratch"]["trained_parameters"]
    assert found["full"]["trained_parameters"] > 512 * 32
    for way in frozen_vs_full.WAYS:
        assert 0 <= found[way]["accuracy"] <= 1
    text = frozen_vs_full.table(found)
    assert all(name in text for name in frozen_vs_full.WAYS.values())
    assert len({len(line) for line in text.splitlines()[3:7]}) == 1


def test_the_study_is_listed() -> None:
    assert STUDIES["frozen-vs-full"].module == "frozen_vs_full"
