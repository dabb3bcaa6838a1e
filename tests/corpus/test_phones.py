import pytest

from bessemer.corpus.personal import CALLING_CODES, phones


def found(text: str) -> list[str]:
    return sorted({text[start:end] for start, end in phones(text)})


def test_calling_codes() -> None:
    """No code begins with another (a call would end too early), and the zones are those of ITU-T E.164."""
    assert not [(a, b) for a in CALLING_CODES for b in CALLING_CODES if a != b and str(b).startswith(str(a))]
    assert {"1", "7", "49", "353", "998"} <= CALLING_CODES
    assert not {"0", "9", "21", "80", "210", "999"} & CALLING_CODES


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("+49 30 901820 10 a.m.", "+49 30 901820 10"),  # what follows can belong to it
        ("+1 212-736-5000 2024", "+1 212-736-5000"),  # North America has 11 digits and no more
        ("+49 30 901820 1234567 1234567", "+49 30 901820"),
        ("+44 (0)20 7946 0958", "+44 (0)20 7946 0958"),
        ("+49 30 901820.", "+49 30 901820"),
    ],
)
def test_where_an_international_number_ends(text: str, number: str) -> None:
    assert found(text) == [number]


@pytest.mark.parametrize(
    "text", ["+999 12 345678", "+0 12 345678", "+1 012-736-5000", "+1 212-136-5000", "+41 111111", "x+49 30 901820"]
)
def test_no_such_number(text: str) -> None:
    assert found(text) == []


def test_numbers_for_fiction_stay() -> None:
    assert found("212-555-0100 and (212) 555-0199 and +1 212 555 0142, phone 555-0123") == []
    assert found("212-555-0200") == ["212-555-0200"]
