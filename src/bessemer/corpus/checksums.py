"""Numbers that carry their own proof: payment cards, bank accounts, national numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from bessemer.errors import InputError

CARDS = re.compile(
    r"[1-6](?<![\w.,+/=#-].)(?:"
    r"[0-9]{3}(?P<sep>[ -])[0-9]{4}(?P=sep)[0-9]{4}(?P=sep)[0-9]{1,4}(?:(?P=sep)[0-9]{3})?"  # 4 4 4 4, 4 4 4 1, 4 4 4 4 3
    r"|[0-9]{3}[ -][0-9]{6}[ -][0-9]{4,5}"  # American Express and Diners Club: 4 6 5, 4 6 4
    r"|[0-9]{11,18}"
    r")(?![\w+/=]|[.,-][0-9])"
)
"""Shapes in which card numbers are printed; the first digit names the industry (ISO/IEC 7812-1: 1 to 6 are in use)."""

ISSUERS: tuple[tuple[int, int, frozenset[int]], ...] = (
    (4_000, 4_999, frozenset({13, 16, 19})),  # Visa
    (5_100, 5_599, frozenset({16})),  # Mastercard
    (2_221, 2_720, frozenset({16})),  # Mastercard
    (3_400, 3_499, frozenset({15})),  # American Express
    (3_700, 3_799, frozenset({15})),  # American Express
    (6_011, 6_011, frozenset({16, 19})),  # Discover
    (6_440, 6_599, frozenset({16, 19})),  # Discover
    (3_528, 3_589, frozenset({16})),  # JCB
    (3_000, 3_059, frozenset({14})),  # Diners Club
    (3_600, 3_699, frozenset({14})),  # Diners Club
    (3_800, 3_899, frozenset({14})),  # Diners Club
    (6_200, 6_299, frozenset({16, 17, 18, 19})),  # UnionPay
)
"""First four digits, from and to, and the lengths that the networks' own number tables give them."""

IBANS = re.compile(r"[A-Z](?<!\w.)[A-Z][0-9]{2}(?=[ ]?[A-Z0-9]{4})")

IBAN_LENGTHS = dict(
    pair
    for length, codes in {
        15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK",
        21: "CH HR LI LV", 22: "BG BH CR DE GB GE IE ME RS", 23: "AE GI IL IQ OM SO TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG", 25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HN HU LB NI PL SV", 29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC",
        33: "RU",
    }.items()
    for pair in ((code, length) for code in codes.split())
)  # fmt: skip
"""Characters of a country's IBAN: SWIFT, IBAN Registry."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class National:
    """A country's number: the shape in which it is written, the python-stdnum modules that prove it, and the words
    one of which must stand before a number whose own proof is weak (one in ten or eleven numbers passes)."""

    shape: re.Pattern[str]
    modules: tuple[str, ...]
    cue: re.Pattern[str] | None = None


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


_END = r"(?![\w]|[.,-][0-9])"
_DIGIT = r"[0-9](?<![\w.,+/=#-].)"

NATIONAL = {
    "br": National(re.compile(_DIGIT + r"[0-9]{2}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}" + _END), ("br.cpf",)),
    "ch": National(re.compile(r"7(?<![\w.,+/=#-].)56\.?[0-9]{4}\.?[0-9]{4}\.?[0-9]{2}" + _END), ("ch.ssn",)),
    "de": National(
        re.compile(_DIGIT + r"(?:[0-9]{10}|[0-9] [0-9]{3} [0-9]{3} [0-9]{3})" + _END),
        ("de.idnr",),
        _words(
            "IdNr",
            "Steuer-?ID",
            "Steuer-?Identifikationsnummer",
            "Steueridentifikationsnummer",
            "TIN",
            "tax id",
            "tax number",
        ),
    ),
    "es": National(re.compile(r"[0-9XYZ](?<![\w.,+/=#-].)-?[0-9]{7}-?[A-Z]" + _END), ("es.dni", "es.nie")),
    "fr": National(
        re.compile(r"[12](?<![\w.,+/=#-].) ?[0-9]{2} ?[0-9]{2} ?[0-9][0-9AB] ?[0-9]{3} ?[0-9]{3} ?[0-9]{2}" + _END),
        ("fr.nir",),
    ),
    "gb": National(
        re.compile(_DIGIT + r"[0-9]{2}[ -]?[0-9]{3}[ -]?[0-9]{4}" + _END),
        ("gb.nhs",),
        _words("NHS(?: (?:number|no|num))?"),
    ),
    "in": National(
        re.compile(r"[2-9](?<![\w.,+/=#-].)[0-9]{3}[ -]?[0-9]{4}[ -]?[0-9]{4}" + _END),
        ("in_.aadhaar",),
        _words("aadhaar", "aadhar", "UIDAI", "UID"),
    ),
    "it": National(
        re.compile(r"[A-Z](?<!\w.)[A-Z]{5}[0-9LMNP-V]{2}[A-EHLMPRST][0-9LMNP-V]{2}[A-Z][0-9LMNP-V]{3}[A-Z]" + _END),
        ("it.codicefiscale",),
    ),
    "nl": National(
        re.compile(_DIGIT + r"[0-9]{3}[. ]?[0-9]{2}[. ]?[0-9]{3}" + _END),
        ("nl.bsn",),
        _words("BSN", "burgerservicenummer", "sofi-?nummer"),
    ),
    "pl": National(re.compile(_DIGIT + r"[0-9]{10}" + _END), ("pl.pesel",), _words("PESEL")),
    "se": National(re.compile(_DIGIT + r"(?:[0-9]{5}|[0-9]{7})[-+][0-9]{4}" + _END), ("se.personnummer",)),
    "us": National(re.compile(_DIGIT + r"[0-9]{2}-[0-9]{2}-[0-9]{4}" + _END), ("us.ssn",)),
}
"""Countries by their ISO 3166 code. The proof is python-stdnum's; a shape only says what is worth proving."""

CUE_CHARACTERS = 40
"""So far before a number its cue may stand."""


def cards(text: str) -> Iterator[Span]:
    """Where payment cards' numbers stand: an issuer's prefix and length (ISO/IEC 7812), and Luhn's checksum."""
    for found in CARDS.finditer(text):
        digits = re.sub("[ -]", "", found[0])
        prefix = int(digits[:4])
        known = any(low <= prefix <= high and len(digits) in lengths for low, high, lengths in ISSUERS)
        if known and luhn(digits):
            yield found.span()


def luhn(digits: str) -> bool:
    """Luhn's checksum (US patent 2,950,048; ISO/IEC 7812-1, annex B): every second digit from the right counts
    twice, its digits added; the sum ends in 0."""
    values = [int(digit) for digit in reversed(digits)]
    return sum(values[::2] + [sum(divmod(2 * value, 10)) for value in values[1::2]]) % 10 == 0


def ibans(text: str) -> Iterator[Span]:
    """Where bank accounts' numbers stand: the length of the country and the checksum of ISO 13616 (mod 97 = 1).

    Groups may be parted by single spaces.
    """
    end = 0
    for found in IBANS.finditer(text):
        length = IBAN_LENGTHS.get(found[0][:2])
        if length is None or found.start() < end:
            continue
        number, stop = "", found.start()
        window = text[stop : stop + 2 * length]
        for offset, character in enumerate(window):
            if character == " " and window[offset + 1 : offset + 2] != " ":
                continue
            if not (character.isascii() and character.isalnum()) or len(number) == length:
                break
            number += character
            stop = found.start() + offset + 1
        if len(number) == length and number.isupper() and not text[stop : stop + 1].isalnum() and mod97(number):
            end = stop
            yield found.start(), stop


def mod97(number: str) -> bool:
    """The checksum of ISO 13616: country and check digits moved to the end, letters read as 10 to 35."""
    return int("".join(str(int(character, 36)) for character in number[4:] + number[:4])) % 97 == 1


def national(text: str, country: str) -> Iterator[Span]:
    """Where a country's national numbers stand. Raises InputError when python-stdnum is not installed."""
    given = NATIONAL[country]
    proofs = [_proof(module) for module in given.modules]
    for found in given.shape.finditer(text):
        if given.cue is not None:
            before = text[max(found.start() - CUE_CHARACTERS, 0) : found.start()]
            if not given.cue.search(before):
                continue
        if any(proof(found[0]) for proof in proofs):
            yield found.span()


@cache
def _proof(module: str) -> Callable[[str], bool]:
    try:
        proof: Callable[[str], bool] = import_module(f"stdnum.{module}").is_valid
    except ImportError:
        raise InputError(
            "corpus.personal.national: the package python-stdnum is not installed; pip install 'bessemer[corpus]'"
        ) from None
    return proof
