import pytest

from bessemer.corpus.statistics import Funnel
from bessemer.errors import BessemerError


def funnel() -> Funnel:
    made = Funnel("s", "text", files=5, documents_in=5, bytes_in=500, documents_kept=1, bytes_kept=90)
    for number in range(4):
        made.reject("too_short" if number else "empty", 10, f"p{number}", "beginning", "7 characters")
    made.lengths.update([6])
    return made


def test_counts_that_add_up_pass() -> None:
    funnel().check()


def test_a_lost_document_fails_the_stage() -> None:
    made = funnel()
    made.documents_in += 1
    with pytest.raises(BessemerError, match="source s do not add up: 6 documents"):
        made.check()


def test_buckets_add_up_to_the_source() -> None:
    first, second = funnel(), funnel()
    second.languages.update(["en", "en", "de", ""])
    second.reject("not_text", 7, "p9", "", "")
    first.add(second)
    value = first.to_json()
    assert value["documents_in"] == 10
    assert value["length_histogram"] == [{"from_characters": 64, "documents": 2}]
    assert {reason: entry["documents"] for reason, entry in value["rejected"].items()} == {
        "empty": 2,
        "too_short": 6,
        "not_text": 1,
    }
    assert list(value["languages"].items()) == [("en", 2), ("de", 1)]
