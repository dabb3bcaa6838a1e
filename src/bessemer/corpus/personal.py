"""Replace personal data by typed placeholders and count it; what is found is never logged or kept.

E-mail and IP addresses, phone numbers, and checksummed numbers: payment cards (Luhn), IBANs (mod 97), national IDs.
Each pass is a regular expression with bounded repetition that begins with a literal or a character set, hence linear
time. (phonenumbers takes 7 to 16 times as long, and finds no national form without a region.)
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

from bessemer.errors import InputError
from bessemer.recipe import PersonalData

Span = tuple[int, int]
Finder = Callable[[str], Iterator[Span]]

FACTS = tomllib.loads(Path(__file__).with_name("personal.toml").read_text(encoding="utf-8"))
PATTERNS = {
    name: re.compile(pattern.replace("{gap}", FACTS["gap"]), re.VERBOSE) for name, pattern in FACTS["patterns"].items()
}


def replace(text: str, settings: PersonalData) -> tuple[str, dict[str, int]]:
    """The text with placeholders, and counts by kind; of overlapping kinds the more specific one wins. Linear time."""
    found: list[tuple[int, int, int, str]] = []
    for rank, (kind, find) in enumerate(_finders(settings)):
        found += [(start, rank, end, kind) for start, end in find(text)]
    chosen: list[tuple[int, int, int, str]] = []
    for start, rank, end, kind in sorted(found):
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
    """What is looked for; a form that proves more comes first."""
    nationals: list[tuple[str, Finder]] = [
        ("national", partial(national, country=country)) for country in settings.national
    ]
    finders = [("email", emails), ("iban", ibans), ("card", cards), *nationals, ("ip", addresses), ("phone", phones)]
    yield from ((kind, find) for kind, find in finders if kind == "national" or kind in settings.kinds)


# --- E-mail and IP addresses


NO_DOMAINS = frozenset(FACTS["no_domains"].split())


SMALL = 32  # parts of a version or a section number are below this; see `addresses`
SPECIAL_IPV4 = tuple(map(IPv4Network, FACTS["special_ipv4"].split()))
SPECIAL_IPV6 = tuple(map(IPv6Network, FACTS["special_ipv6"].split()))
# the only block from which IANA gives out public unicast addresses (RFC 4291, 2.4)
PUBLIC_IPV6 = IPv6Network("2000::/3")


def emails(text: str) -> Iterator[Span]:
    """Spans of e-mail addresses (RFC 5321's lengths), except example names (RFC 2606), `git@`, files and units."""
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
    """Spans of public IP addresses, except special-purpose ones and likely version numbers: four parts below 32, such
    as 12.1.2.3, are a version or section far more often than an address, of which one in 4,096 looks so."""
    for found in PATTERNS["ipv4"].finditer(text):
        largest = max(map(int, found[0].split(".")))
        before = text[max(found.start() - 16, 0) : found.start()]
        if SMALL <= largest < 256 and not PATTERNS["version_before"].search(before):
            address = IPv4Address(found[0])
            if not any(address in block for block in SPECIAL_IPV4):
                yield found.span()
    for found in PATTERNS["ipv6"].finditer(text) if ":" in text else ():
        start = found.start() - 4
        shown = text[start : found.end()]
        if shown.endswith(":") and not shown.endswith("::"):
            shown = shown[:-1]
        try:
            six = IPv6Address(shown)
        except AddressValueError:
            continue
        # 2001::1 could be a ratio or a slice; an address that somebody has names more.
        enough = sum(bool(group) for group in shown.split(":")) >= 3
        if enough and six in PUBLIC_IPV6 and not any(six in block for block in SPECIAL_IPV6):
            yield start, start + len(shown)


# --- Numbers with a checksum


CUE_CHARACTERS = 40  # so far before a number its cue may stand


def cards(text: str) -> Iterator[Span]:
    """Payment cards: an issuer's prefix and length (ISO/IEC 7812), and Luhn's checksum."""
    for match in PATTERNS["card"].finditer(text):
        digits = re.sub("[ -]", "", match[0])
        prefix = int(digits[:4])
        known = any(row["from"] <= prefix <= row["to"] and len(digits) in row["lengths"] for row in FACTS["issuers"])
        if known and _stdnum("luhn").is_valid(digits):
            yield match.span()


def ibans(text: str) -> Iterator[Span]:
    """Bank accounts: a country's IBAN length and the checksum of ISO 13616 (mod 97); single spaces between groups."""
    end = 0
    for match in PATTERNS["iban"].finditer(text):
        length = iban_length(match[0][:2])
        if not length or match.start() < end:
            continue
        number, stop = "", match.start()
        window = text[stop : stop + 2 * length]
        for offset, character in enumerate(window):
            if character == " " and window[offset + 1 : offset + 2] != " ":
                continue
            if not (character.isascii() and character.isalnum()) or len(number) == length:
                break
            number += character
            stop = match.start() + offset + 1
        complete = len(number) == length and number.isupper() and not text[stop : stop + 1].isalnum()
        if complete and _stdnum("iso7064.mod_97_10").is_valid(number[4:] + number[:4]):
            end = stop
            yield match.start(), stop


@cache
def iban_length(country: str) -> int:
    """Characters of a country's IBAN, by python-stdnum's copy of SWIFT's IBAN Registry; 0 for no such country."""
    structure = _stdnum("numdb").get("iban").info(f"{country}00")[0][1].get("bban", "")
    groups = [int(number) for number in re.findall(r"(\d+)!", structure)]
    return 4 + sum(groups) if groups else 0


def national(text: str, country: str) -> Iterator[Span]:
    """A country's national IDs. Raises InputError when python-stdnum is not installed."""
    shape, cue = _national_shape(country)
    for match in shape.finditer(text):
        before = text[max(match.start() - CUE_CHARACTERS, 0) : match.start()]
        has_cue = cue is None or cue.search(before)
        if has_cue and any(_stdnum(module).is_valid(match[0]) for module in FACTS["national"][country]["modules"]):
            yield match.span()


@cache
def _national_shape(country: str) -> tuple[re.Pattern[str], re.Pattern[str] | None]:
    """The form in which a country's number is written, and of the words before it."""
    facts = FACTS["national"][country]
    cue = re.compile(rf"\b(?:{facts['cue']})\b", re.IGNORECASE) if "cue" in facts else None
    return re.compile(facts["shape"] + r"(?![\w]|[.,-][0-9])"), cue


@cache
def _stdnum(module: str) -> Any:
    try:
        return import_module(f"stdnum.{module}")
    except ImportError:
        raise InputError(
            "corpus.personal: the package python-stdnum is not installed; pip install 'bessemer[corpus]'"
        ) from None


# --- Phone numbers: international, the common national forms, and after a word such as "tel."

CALLING_CODES = {
    str(code)
    for first, _, last in (codes.partition("-") for codes in FACTS["calling_codes"].split())
    for code in range(int(first), int(last or first) + 1)
}
MAX_PHONE_DIGITS = 15  # of an international number, the country code included (ITU-T E.164, 6.2)


def phones(text: str) -> Iterator[Span]:
    """Spans of phone numbers, which may repeat and overlap; fictional ones (555-0100 to 555-0199) are left out."""
    for found in PATTERNS["phone_international"].finditer(text):
        end = _international(found["number"])
        if end:
            yield found.start(), found.start("number") + end
    for found in PATTERNS["phone_double_zero"].finditer(text):
        if _international(found[0][2:]) == len(found[0]) - 2:
            yield found.span()
    for found in PATTERNS["phone_national"].finditer(text):
        if _is_national(found):
            yield found.span()
    for found in PATTERNS["phone_run"].finditer(text):
        number = found[0]
        if PATTERNS["phone_cue"].search(text[max(found.start() - 32, 0) : found.start()]):
            digits = _digits(number)
            if len(set(digits)) > 1 and not _fiction(digits) and not _date(number):
                yield found.span()


def _digits(number: str) -> str:
    return "".join(character for character in number if "0" <= character <= "9")


def _international(number: str) -> int:
    """Characters of `number` (without its +) that are one phone number, in whole groups; 0 when it is none."""
    digits = _digits(number)
    code = next((digits[:size] for size in (1, 2, 3) if digits[:size] in CALLING_CODES), "")
    if not code:
        return 0
    # North America (1), Russia and Kazakhstan (7) have one length for all.
    most = 11 if code in "17" else MAX_PHONE_DIGITS
    taken = end = 0
    groups = list(re.finditer("[0-9]+", number))
    for place, group in enumerate(groups):
        # One figure alone is an extension (030 1234-0) or, in brackets, the (0) that is left out; else it is no group.
        single = place > 1 and len(group[0]) == 1 and number[group.start() - 1] not in "-("
        if single or taken + len(group[0]) > most:
            break
        taken, end = taken + len(group[0]), group.end()
    digits = digits[:taken]
    # Groups say that a number is for people; one without any must be long to say it.
    if taken < (8 if len(groups) > 2 or (len(groups) == 2 and groups[0][0] == code) else 10) or len(set(digits)) < 3:
        return 0
    if code in "17" and taken != most:
        return 0
    return 0 if code == "1" and (digits[1] in "01" or digits[4] in "01" or _fiction(digits)) else end


def _is_national(found: re.Match[str]) -> bool:
    digits = _digits(found[0])
    if found["us"]:
        digits = digits[-10:]
        inner = found[0][found[0].index(digits[0]) :]
        marks = {mark for mark in inner if mark in ".-"}
        # 212.555-4321 mixes two styles, which people do not; N11 is a service, not an area.
        return (len(marks) == 1 or ")" in inner) and digits[1:3] != "11" and not _fiction(digits)
    return 9 <= len(digits) <= 12 and len(set(digits[1:])) > 2


def _fiction(digits: str) -> bool:
    """North America keeps 555-0100 to 555-0199 for films and books."""
    return len(digits) in (7, 10, 11) and digits[-7:-2] == "55501"


def _date(number: str) -> bool:
    return re.fullmatch(r"\d{4}([-/.])\d\d\1\d\d|\d\d([-/.])\d\d\2\d{4}", number) is not None
