import random
from importlib import import_module

import pytest

pytest.importorskip("stdnum", reason="the corpus extra is not installed")

from bessemer.corpus import checksums
from bessemer.corpus.checksums import IBAN_LENGTHS, NATIONAL, cards, ibans, luhn, mod97, national
from bessemer.errors import InputError


def test_luhn_and_mod_97_agree_with_stdnum() -> None:
    from stdnum import luhn as their_luhn
    from stdnum.iso7064 import mod_97_10

    generator = random.Random(0)
    for _ in range(3000):
        digits = "".join(generator.choices("0123456789", k=generator.randrange(8, 24)))
        assert luhn(digits) == their_luhn.is_valid(digits)
        assert mod97("DE" + digits) == mod_97_10.is_valid(
            digits + "1314" if len(digits) < 3 else digits[2:] + "1314" + digits[:2]
        )


def test_every_country_that_stdnum_knows_has_its_length() -> None:
    iban = import_module("stdnum.iban")
    for country, length in IBAN_LENGTHS.items():
        info = iban._ibandb.info(f"{country}00")[0][1]
        if "bban" not in info:
            continue  # a country that joined after this release of python-stdnum
        import re

        theirs = 4 + sum(int(number) for number in re.findall(r"(\d+)!", info["bban"]))
        assert length == theirs, country


def test_ibans_with_right_and_wrong_digits() -> None:
    iban = import_module("stdnum.iban")
    generator = random.Random(2)
    for country, length in IBAN_LENGTHS.items():
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


@pytest.mark.parametrize("country", sorted(NATIONAL))
def test_a_word_of_another_language_is_no_number(country: str) -> None:
    assert not list(national("A text of words and 2024 numbers, 12.5% of it.", country))


def test_weak_proofs_need_their_word() -> None:
    assert not list(national("111222333", "nl"))
    assert list(national("Zijn BSN is 111222333.", "nl")) == [(12, 21)]
    assert not list(national("BSN" + " " * 60 + "111222333", "nl"))


def test_without_stdnum(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    checksums._proof.cache_clear()
    monkeypatch.setattr(checksums, "import_module", missing)
    with pytest.raises(InputError, match=r"python-stdnum is not installed; pip install"):
        list(national("536-90-4399", "us"))
