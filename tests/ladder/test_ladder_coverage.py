"""The published coverage of the ladder's intervals is that of the rule in the source, on the losses that were measured."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (ROOT / "benchmarks" / "results" / "ladder_coverage.json").read_text(encoding="utf-8")
    )
    return found


def test_the_page_says_what_the_result_holds(result: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8")
    for name, row in result["summary"].items():
        told = (
            f"| {name} | {row['predictions']} | {row['median_beyond']:.1f} | {row['inside']} ({row['coverage']:.0%}) | "
            f"{row['median_width']:.1%} | {row['median_error']:.1%} | {row['mean_error']:+.1%} |"
        )
        assert told in page, told


@pytest.mark.long
def test_the_rule_gives_the_published_intervals(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the texts, scored anew from the measured losses; another rule or prior would show here."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from ladder_coverage import scored

    assert "ladder_coverage" in sys.modules
    for before in result["kinds"][::4]:
        now = scored(before["kind"], before)
        for old, new in zip(before["predictions"], now["predictions"], strict=True):
            assert (new["run"], new["from_rungs"]) == (old["run"], old["from_rungs"])
            assert [new["low"], new["predicted"], new["high"]] == pytest.approx(
                [old["low"], old["predicted"], old["high"]], rel=1e-3
            )


def test_the_summary_is_of_the_published_intervals(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from ladder_coverage import summary

    assert summary(result["kinds"]) == result["summary"]
