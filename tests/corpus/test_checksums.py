import random
import sys
from importlib import import_module

import pytest

pytest.importorskip("stdnum", reason="the corpus extra is not installed")

from bessemer.corpus import personal
from bessemer.corpus.personal import cards, iban_length, ibans, numbers
from bessemer.errors import InputError


def test_ibans_with_right_and_wrong_digits() -> None:
    iban = import_module("stdnum.iban")
    generator = random.Random(2)
    for country in ("BE", "DE", "FR", "GB", "MT", "NO", "PL", "RU", "XK"):
        length = iban_length(country)
        body = "".join(generator.choices("0123456789", k=length - 4))
        digits = iban.calc_check_digits(f"{country}00{body}")
        number = f"{country}{digits}{body}"
        grouped = " ".join(number[at : at + 4] for at in range(0, length, 4))
        for shown in (number, grouped):
            assert list(ibans(f"to {shown}, please")) == [(3, 3 + len(shown))], shown
            wrong = shown[:-1] + str((int(shown[-1]) + 1) % 10)
            assert not list(ibans(f"to {wrong}, please"))
        assert not list(ibans(f"to {number}7"))


def test_random_long_numbers_are_rarely_cards() -> None:
    generator = random.Random(3)
    hits = sum(bool(list(cards("".join(generator.choices("0123456789", k=16))))) for _ in range(20_000))
    # Visa, Mastercard (5 and 2), Discover, JCB, UnionPay have 21.9% of the prefixes of 16 digits, one in ten of which passes.
    assert 0.015 < hits / 20_000 < 0.028


def test_without_stdnum(monkeypatch: pytest.MonkeyPatch) -> None:
    personal._package.cache_clear()
    monkeypatch.setitem(sys.modules, "stdnum.us.ssn", None)
    with pytest.raises(InputError, match=r"python-stdnum is not installed; pip install"):
        list(numbers("536-90-4399", ("us.ssn",)))
