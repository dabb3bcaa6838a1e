import random
import re
import string
import sys
import time
from importlib import import_module
from ipaddress import ip_address

import pytest

pytest.importorskip("stdnum", reason="the corpus extra is not installed")

from bessemer.common.errors import InputError
from bessemer.corpus.filters import personal
from bessemer.corpus.filters.personal import addresses, emails, ibans, numbers, phones, replace
from bessemer.recipe import PersonalData, parse
from tests.corpus.personal_lines import LINES, PHONE

NUMBERS = (
    "us.ssn", "es.dni", "es.nie", "de.idnr", "fr.nir", "it.codicefiscale", "gb.nhs", "br.cpf", "pl.pesel",
    "se.personnummer", "ch.ssn", "stdnum.in_.aadhaar",
)  # fmt: skip
ALL = PersonalData(kinds=("email", "ip", "card", "iban", *NUMBERS))
LABELLED = [(kind, line) for kind, block in LINES.items() for line in block.strip().split("\n")]


@pytest.mark.parametrize(("kind", "line"), LABELLED)
def test_manually_labelled_lines(kind: str, line: str) -> None:
    placeholder = getattr(ALL.placeholders, kind)
    expected, number = re.subn("⟦.*?⟧", placeholder, line)
    text, counts = replace(line.replace("⟦", "").replace("⟧", ""), ALL)
    assert text == expected
    assert counts == ({kind: number} if number else {})


def test_only_the_requested_kinds_are_replaced() -> None:
    text = "jane@company.com, 536-90-4399, 82.50.72.202"
    assert replace(text, PersonalData()) == (text, {})
    found = replace(text, PersonalData(kinds=("us.ssn",)))
    assert found == ("jane@company.com, <NATIONAL_ID>, 82.50.72.202", {"national": 1})


def test_placeholders_of_the_recipe() -> None:
    recipe = parse(
        '[run]\nname = "t"\n[model]\ndepth = 2\n[corpus.personal]\nkinds = ["email"]\nplaceholders = {email = "[mail]"}\n',
        "test",
    )
    assert replace("to jane@company.com!", recipe.corpus.personal) == ("to [mail]!", {"email": 1})


def test_few_digits_are_not_a_number() -> None:
    assert list(numbers("111222333 and 1112.22.333 and 44051401359", ("nl.bsn", "pl.pesel"))) == [(14, 25), (30, 41)]
    assert not list(numbers("version 300.1.2.3", ("nl.bsn",)))  # the validator adds leading zeros


@pytest.mark.parametrize("line", PHONE.strip().split("\n"))
def test_phone_numbers(line: str) -> None:
    pytest.importorskip("phonenumbers", reason="the extra phones is not installed")
    expected, number = re.subn("⟦.*?⟧", "<PHONE>", line)
    found = replace(line.replace("⟦", "").replace("⟧", ""), PersonalData(kinds=("phone",)))
    assert found == (expected, {"phone": number} if number else {})


def test_national_forms_of_phone_numbers_need_a_region() -> None:
    pytest.importorskip("phonenumbers", reason="the extra phones is not installed")
    assert replace("212-736-5000", PersonalData(kinds=("phone",), phone_region="US")) == ("<PHONE>", {"phone": 1})
    with pytest.raises(InputError, match=r"corpus\.personal\.phone_region"):
        list(phones("212-736-5000", "XX"))


def test_counts_and_positions_in_one_text() -> None:
    block = "\n".join(line for _, line in LABELLED)
    expected = {kind: sum(line.count("⟦") for other, line in LABELLED if other == kind) for kind in LINES}
    text, counts = replace(block.replace("⟦", "").replace("⟧", ""), ALL)
    assert counts == expected
    assert text.split("\n")[0] == "Write to <EMAIL> for details."
    assert replace(text, ALL) == (text, {})  # a second pass finds nothing


def test_overlapping_matches_are_replaced_once_by_the_stronger_one() -> None:
    # The first digits of this IBAN could be those of a card.
    assert replace("DE89370400440532013000", ALL)[1] == {"iban": 1}
    assert replace("tel 4111 1111 1111 1111", ALL) == ("tel <CARD>", {"card": 1})
    assert replace("12345678Z@company.com", ALL)[1] == {"email": 1}


def test_public_addresses_are_those_the_standard_library_calls_global() -> None:
    generator = random.Random(0)
    for _ in range(5000):
        parts = [generator.randrange(1, 256), *(generator.randrange(256) for _ in range(3))]
        shown = ".".join(map(str, parts))
        address = ip_address(shown)
        public = address.is_global and not address.is_multicast
        if parts[:3] in ([192, 0, 0], [192, 88, 99]) or max(parts) < 32:
            continue  # assignments and 6to4 relays, on which Python versions differ; and text that looks like a version
        assert bool(list(addresses(f"at {shown} now"))) == public, shown


def test_random_text_never_fails_and_other_text_is_kept() -> None:
    generator = random.Random(1)
    letters = string.digits * 3 + "+()-./ :@\n" * 2 + "abcDEF@" + "é日\ud800"
    for _ in range(1000):
        text = "".join(generator.choices(letters, k=generator.randrange(120)))
        result, counts = replace(text, ALL)
        assert sum(counts.values()) == len(re.findall("<[A-Z_]+>", result))
        rest = re.split("<[A-Z_]+>", result)
        position = 0
        for part in rest:  # the remaining text is in its order
            position = text.index(part, position) + len(part)


def test_long_local_parts_and_names() -> None:
    assert replace("a" * 64 + "@company.com", ALL)[1] == {"email": 1}
    assert replace("a" * 65 + "@company.com", ALL)[1] == {}
    assert list(emails("x@" + "a" * 64 + ".com")) == []


HOSTILE = {
    "digits": "1", "at signs": "@", "addresses": "a@", "dots": "1.", "plus": "+1", "groups": "123 ", "zeros": "0 ", "colons": "2000:",
    "brackets": "(", "brackets and digits": "(212", "capitals": "DE89 ", "labels": "a.", "at labels": "@a.", "dashes": "1-",
    "cues": "tel 1", "mixed": "+49 (0", "hex": "2001:db8:", "letters": "A", "domain": "a@b-", "nothing": "x",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_extreme_text_takes_linear_time(name: str) -> None:
    """A text eight times as long takes about eight times the work; a quadratic pass would take 64 times."""

    def seconds(size: int) -> float:
        text = (HOSTILE[name] * size)[:size]
        best = float("inf")
        for _ in range(3):
            started = time.process_time()
            replace(text, ALL)
            best = min(best, time.process_time() - started)
        return best

    assert seconds(160_000) < 16 * max(seconds(20_000), 0.002) + 0.05


def test_ibans_with_right_and_wrong_digits() -> None:
    iban = import_module("stdnum.iban")
    generator = random.Random(2)
    lengths = {"BE": 16, "DE": 22, "FR": 27, "GB": 22, "MT": 31, "NO": 15, "PL": 28, "RU": 33, "XK": 20}
    for country, length in lengths.items():
        body = "".join(generator.choices("0123456789", k=length - 4))
        digits = iban.calc_check_digits(f"{country}00{body}")
        number = f"{country}{digits}{body}"
        grouped = " ".join(number[at : at + 4] for at in range(0, length, 4))
        for shown in (number, grouped):
            assert list(ibans(f"to {shown}, please")) == [(3, 3 + len(shown))], shown
            wrong = shown[:-1] + str((int(shown[-1]) + 1) % 10)
            assert not list(ibans(f"to {wrong}, please"))
        assert not list(ibans(f"to {number}7"))


@pytest.mark.parametrize(("module", "kind"), [("phonenumbers", "phone"), ("stdnum.us.ssn", "us.ssn")])
def test_a_missing_package_is_named(module: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PersonalData(kinds=(kind,))
    personal._package.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"corpus\.personal: the package [a-z-]* is not installed; pip install"):
        replace("+49 30 901820, 536-90-4399", settings)
