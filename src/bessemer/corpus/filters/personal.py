"""Replacement of personal data by typed placeholders, with counts. The data itself is never logged or stored.

It covers e-mail and IP addresses, payment cards (Luhn), IBANs (mod 97), numbers with a validator in python-stdnum, and phone
numbers by phonenumbers. The other patterns are regular expressions that start with a literal or a character set and have
bounded repetition, so they take linear time.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError, require_import
from bessemer.recipe import PersonalData

Span = tuple[int, int]
Finder = Callable[[str], Iterator[Span]]

FACTS = tomllib.loads(Path(__file__).with_name("personal.toml").read_text(encoding="utf-8"))
PATTERNS = {name: re.compile(pattern, re.VERBOSE) for name, pattern in FACTS["patterns"].items()}


def replace(text: str, settings: PersonalData) -> tuple[str, dict[str, int]]:
    """Return the text with personal data replaced by placeholders, and the number of replacements by kind.

    Of two overlapping spans the one of the more specific kind is replaced. The time is linear in the length of the
    text.
    """
    spans: list[tuple[int, int, int, str]] = []
    for rank, (kind, find) in enumerate(_finders(settings)):
        spans += [(start, rank, end, kind) for start, end in find(text)]
    chosen: list[tuple[int, int, int, str]] = []
    for start, rank, end, kind in sorted(spans):
        if not chosen or start >= chosen[-1][2]:
            chosen.append((start, rank, end, kind))
        elif rank < chosen[-1][1]:
            chosen[-1] = (start, rank, end, kind)
    parts, position = [], 0
    for start, _, end, kind in chosen:
        parts += [text[position:start], getattr(settings.placeholders, kind)]
        position = end
    return "".join([*parts, text[position:]]), dict(Counter(kind for *_, kind in chosen))


def _finders(settings: PersonalData) -> Iterator[tuple[str, Finder]]:
    """Yield (kind of personal data, function that yields its spans in a text) for each kind that the recipe names.

    Kinds with a more specific form come first.
    """
    finders: dict[str, Finder] = {
        "email": emails,
        "iban": ibans,
        "card": cards,
        "national": partial(numbers, names=settings.numbers),
        "ip": addresses,
        "phone": partial(phones, region=settings.phone_region),
    }
    chosen = {*settings.kinds, *(["national"] if settings.numbers else [])}
    yield from ((kind, find) for kind, find in finders.items() if kind in chosen)


# --- E-mail and IP addresses


NO_DOMAINS = frozenset(FACTS["no_domains"].split())


SMALL = 32  # an IPv4 address with all parts below this is probably a version or a section number
SPECIAL_IPV4 = tuple(map(IPv4Network, FACTS["special_ipv4"].split()))
SPECIAL_IPV6 = tuple(map(IPv6Network, FACTS["special_ipv6"].split()))
# The only block from which IANA assigns public unicast addresses (RFC 4291, 2.4)
PUBLIC_IPV6 = IPv6Network("2000::/3")


def emails(text: str) -> Iterator[Span]:
    """Yield spans of e-mail addresses with the length limits of RFC 5321.

    It skips example domains (RFC 2606), `git@`, and names with an @ that end like a file (icon@2x.png) or a systemd
    unit.
    """
    if "@" not in text:
        return
    end = 0
    for domain in PATTERNS["domain"].finditer(text):
        at = domain.start()
        local = PATTERNS["local_reversed"].match(text[max(at - 65, end) : at][::-1])
        if local is None or len(local[0]) > 64:
            continue
        name = local[0][::-1].lstrip(".'%+-")
        if not name or name.endswith((".", "'")) or ".." in name or name == "git":
            continue
        top = domain["top"].lower()
        if top in NO_DOMAINS:
            continue
        labels = domain["labels"].lower()
        if top in ("com", "net", "org") and (labels == "example." or labels.endswith(".example.")):
            continue
        end = domain.end()
        yield at - len(name), end


def addresses(text: str) -> Iterator[Span]:
    """Yield spans of public IP addresses, without special-purpose ones and probable version numbers.

    Four parts below 32, such as 12.1.2.3, are far more often a version or section number; only 1 in 4,096 addresses has this
    form.
    """
    for match in PATTERNS["ipv4"].finditer(text):
        largest = max(map(int, match[0].split(".")))
        before = text[max(match.start() - 16, 0) : match.start()]
        if SMALL <= largest < 256 and not PATTERNS["version_before"].search(before):
            address = IPv4Address(match[0])
            if not any(address in block for block in SPECIAL_IPV4):
                yield match.span()
    for match in PATTERNS["ipv6"].finditer(text) if ":" in text else ():
        start = match.start() - 4
        shown = text[start : match.end()]
        if shown.endswith(":") and not shown.endswith("::"):
            shown = shown[:-1]
        try:
            six = IPv6Address(shown)
        except AddressValueError:
            continue
        # 2001::1 could be a ratio or a slice. Real addresses have more groups.
        enough = sum(bool(group) for group in shown.split(":")) >= 3
        if enough and six in PUBLIC_IPV6 and not any(six in block for block in SPECIAL_IPV6):
            yield start, start + len(shown)


# --- Numbers with a checksum


MIN_BARE_DIGITS = 11  # of a number without letters and separators; shorter ones too often pass weak checksums by chance


def cards(text: str) -> Iterator[Span]:
    """Yield spans of payment card numbers by issuer prefix and length (ISO/IEC 7812) and Luhn checksum."""
    for match in PATTERNS["card"].finditer(text):
        digits = re.sub("[ -]", "", match[0])
        prefix = int(digits[:4])
        known = any(row["from"] <= prefix <= row["to"] and len(digits) in row["lengths"] for row in FACTS["issuers"])
        if known and _package("stdnum.luhn").is_valid(digits):
            yield match.span()


def ibans(text: str) -> Iterator[Span]:
    """Yield spans of bank account numbers by the country's IBAN length and the checksum of ISO 13616 (mod 97).

    Single spaces may separate groups.
    """
    end = 0
    for match in PATTERNS["iban"].finditer(text):
        pattern = iban_pattern(match[0][:2]) if match.start() >= end else None
        if pattern is None or (iban := pattern.match(text, match.start())) is None:
            continue
        number = iban[0].replace(" ", "")
        if _package("stdnum.iso7064.mod_97_10").is_valid(number[4:] + number[:4]):
            end = iban.end()
            yield iban.span()


@cache
def iban_pattern(country: str) -> re.Pattern[str] | None:
    """Return a regular expression that matches IBANs of a country, a two-letter code; None for an unknown country.

    The length is from python-stdnum's copy of the SWIFT IBAN Registry.
    """
    structure = _package("stdnum.numdb").get("iban").info(f"{country}00")[0][1].get("bban", "")
    length = sum(int(number) for number in re.findall(r"(\d+)!", structure))
    return re.compile(rf"{country}[0-9]{{2}}(?: ?[A-Z0-9]){{{length}}}(?![^\W_])") if length else None


def numbers(text: str, names: tuple[str, ...]) -> Iterator[Span]:
    """Yield spans of numbers that one of the named python-stdnum validators accepts.

    Raises InputError without python-stdnum.
    """
    validators = [_package(f"stdnum.{name.removeprefix('stdnum.')}") for name in names]
    for pattern in (PATTERNS["number"], PATTERNS["spaced_number"]):
        for match in pattern.finditer(text):
            number = match[0]
            is_bare = number.isdecimal() and len(number) < MIN_BARE_DIGITS
            if not is_bare and any(_is_valid(validator, number) for validator in validators):
                yield match.span()


def _is_valid(validator: Any, number: str) -> bool:
    """Return whether a validator accepts a number at its full length. Some validators pad shorter numbers with zeros."""
    return bool(validator.is_valid(number)) and len(validator.compact(number)) <= len(number.replace(".", ""))


def phones(text: str, region: str | None = None) -> Iterator[Span]:
    """Yield spans of valid phone numbers in international format, and with `region` also in this country's national one.

    Raises InputError if the package phonenumbers is not installed.
    """
    library = _package("phonenumbers")
    if region is not None and region not in library.SUPPORTED_REGIONS:
        raise InputError(
            f"corpus.personal.phone_region: phonenumbers does not know the region {region}; set a country code such as US or DE"
        )
    for match in library.PhoneNumberMatcher(text, region):
        yield match.start, match.end


@cache
def _package(name: str) -> Any:
    package = "python-stdnum" if name.startswith("stdnum") else name
    with require_import(
        f"corpus.personal: the package {package} is not installed; pip install 'bessemer[corpus,phones]', or remove the kind"
    ):
        return import_module(name)
