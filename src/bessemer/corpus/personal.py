"""Replace personal data by typed placeholders and count it; what is found is never logged or kept.

E-mail and IP addresses, phone numbers, and checksummed numbers: payment cards (Luhn), IBANs (mod 97), national IDs.
Each pass is a regular expression with bounded repetition that begins with a literal or a character set, hence linear
time. (phonenumbers takes 7 to 16 times as long, and finds no national form without a region.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Any

from bessemer.errors import InputError
from bessemer.recipe import PersonalData

Span = tuple[int, int]
Finder = Callable[[str], Iterator[Span]]


def replace(text: str, settings: PersonalData) -> tuple[str, dict[str, int]]:
    """The text with placeholders instead of personal data, and counts by kind. Linear time. Of overlapping kinds the
    more specific one wins."""
    found: list[tuple[int, int, int, str]] = []
    for rank, (kind, find) in enumerate(_finders(settings)):
        found += [(start, rank, end, kind) for start, end in find(text)]
    if not found:
        return text, {}
    found.sort()
    chosen: list[tuple[int, int, int, str]] = []
    for start, rank, end, kind in found:
        if not chosen or start >= chosen[-1][2]:
            chosen.append((start, rank, end, kind))
        elif rank < chosen[-1][1]:
            chosen[-1] = (start, rank, end, kind)
    placeholders = settings.placeholders.model_dump()
    counts: dict[str, int] = {}
    parts, position = [], 0
    for start, _, end, kind in chosen:
        parts += [text[position:start], placeholders[kind]]
        counts[kind] = counts.get(kind, 0) + 1
        position = end
    return "".join([*parts, text[position:]]), counts


def _finders(settings: PersonalData) -> Iterator[tuple[str, Finder]]:
    """What is looked for; a form that proves more comes first."""
    before: dict[str, Finder] = {"email": emails, "iban": ibans, "card": cards}
    after: dict[str, Finder] = {"ip": addresses, "phone": phones}
    yield from ((kind, find) for kind, find in before.items() if kind in settings.kinds)
    yield from (("national", partial(national, country=country)) for country in settings.national)
    yield from ((kind, find) for kind, find in after.items() if kind in settings.kinds)


# --- E-mail and IP addresses

_DOMAIN = re.compile(
    r"@(?=[\w])(?P<labels>(?:[\w](?:[\w-]{0,61}[\w])?\.){1,8})(?P<top>[^\W\d_]{2,24}|xn--[a-z0-9-]{2,59})(?![\w@(]|-[\w]|\.[\w])"
)
_LOCAL_REVERSED = re.compile(r"[\w.%+'-]{1,65}+")

NOBODYS_DOMAINS = ("example", "test", "invalid", "localhost")
"""Top-level names that RFC 2606 keeps for documentation and tests; example.com, .net and .org are reserved with them.
"""

_FILES = "png jpg jpeg gif svg webp ico bmp css js mjs jsx tsx html htm xhtml json xml yml yaml txt tgz gz zip tar exe dll rb"
_UNITS = "service socket timer mount slice device path swap automount scope"
_NETWORK = "local localdomain internal lan"
FILE_ENDINGS = frozenset(f"{_FILES} {_UNITS} {_NETWORK}".split())
"""Ends of names with an @ that are files (icon@2x.png), systemd units (getty@tty1.service) or names of a local network,
and that no registry has as a top-level domain."""

_IPV4 = re.compile(
    r"[1-9](?<![\w.,@+#-].)[0-9]{0,2}(?:\.(?:0|[1-9][0-9]{0,2})){3}(?![\w@]|\.[0-9]|\.in-addr|-[A-Za-z])"
)
_VERSION_BEFORE = re.compile(
    r"(?:(?:\b(?:v|ver|versions?|release[ds]?|rev|revision|build|firmware|driver|kernel|update|upgrade[ds]?|sections?|chapters?|clauses?"
    r"|figures?|tables?|appendix|oid|rfc|windows|chrome|chromium|edge|since|until|before|after)\b|[§]|[<>=~!^]=|[<>~^])[\s:=(\"'`v]{0,3}"
    r"|[A-Za-z]/)$",
    re.IGNORECASE,
)
_IPV6 = re.compile(
    r":(?<=[23][0-9A-Fa-f]{3}:)(?<![\w:.][0-9A-Fa-f]{4}:)(?=[0-9A-Fa-f]{0,4}:)(?P<rest>[0-9A-Fa-f:]{2,36})(?![\w:])"
)

SMALL = 32
"""Parts of a version or a section number are below this; see `addresses`."""

SPECIAL_IPV4 = tuple(map(IPv4Network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4",
)))  # fmt: skip
"""IANA IPv4 Special-Purpose Address Registry (RFC 6890), and multicast: private, loopback, documentation, reserved."""

PUBLIC_IPV6 = IPv6Network("2000::/3")
"""The only block from which IANA gives out public unicast addresses (RFC 4291, 2.4)."""

SPECIAL_IPV6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""IANA IPv6 Special-Purpose Address Registry: protocol assignments, documentation (RFC 3849, RFC 9637), 6to4."""


def emails(text: str) -> Iterator[Span]:
    """Spans of e-mail addresses (RFC 5321's lengths, the characters that mail providers allow), except RFC 2606's
    example names, `git@` repositories, files and units."""
    if "@" not in text:
        return
    end = 0
    for domain in _DOMAIN.finditer(text):
        at = domain.start()
        local = _LOCAL_REVERSED.match(text[max(at - 65, end) : at][::-1])
        if local is None or len(local[0]) > 64:
            continue
        name = local[0][::-1].lstrip(".'%+-")
        if not name or name.endswith((".", "'")) or ".." in name or name == "git":
            continue
        top = domain["top"].lower()
        if top in FILE_ENDINGS or top in NOBODYS_DOMAINS:
            continue
        labels = domain["labels"].lower()
        if top in ("com", "net", "org") and (labels == "example." or labels.endswith(".example.")):
            continue
        end = domain.end()
        yield at - len(name), end


def addresses(text: str) -> Iterator[Span]:
    """Spans of public IP addresses, except special-purpose ones and likely version numbers: four parts below 32, such
    as 12.1.2.3, are a version or section far more often than an address, of which one in 4,096 looks so."""
    for found in _IPV4.finditer(text):
        small = all(int(part) < SMALL for part in found[0].split("."))
        if not small and not _VERSION_BEFORE.search(text[max(found.start() - 16, 0) : found.start()]):
            try:
                four = IPv4Address(found[0])
            except AddressValueError:
                continue
            if not any(four in block for block in SPECIAL_IPV4):
                yield found.span()
    if ":" in text:
        for found in _IPV6.finditer(text):
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

CARDS = re.compile(
    r"[1-6](?<![\w.,+/=#-].)(?:"
    r"[0-9]{3}(?P<sep>[ -])[0-9]{4}(?P=sep)[0-9]{4}(?P=sep)[0-9]{1,4}(?:(?P=sep)[0-9]{3})?"  # 4 4 4 4, 4 4 4 1, 4 4 4 4 3
    r"|[0-9]{3}[ -][0-9]{6}[ -][0-9]{4,5}"  # American Express and Diners Club: 4 6 5, 4 6 4
    r"|[0-9]{11,18}"
    r")(?![\w+/=]|[.,-][0-9])"
)
"""Shapes in which card numbers are printed; the first digit names the industry (ISO/IEC 7812-1: 1 to 6 are in use)."""

ISSUERS: tuple[tuple[int, int, set[int]], ...] = (
    (4000, 4999, {13, 16, 19}),  # Visa
    (5100, 5599, {16}), (2221, 2720, {16}),  # Mastercard
    (3400, 3499, {15}), (3700, 3799, {15}),  # American Express
    (6011, 6011, {16, 19}), (6440, 6599, {16, 19}),  # Discover
    (3528, 3589, {16}),  # JCB
    (3000, 3059, {14}), (3600, 3699, {14}), (3800, 3899, {14}),  # Diners Club
    (6200, 6299, {16, 17, 18, 19}),  # UnionPay
)  # fmt: skip
"""First four digits, from and to, and the lengths that the networks' own number tables give them."""

IBANS = re.compile(r"[A-Z](?<!\w.)[A-Z][0-9]{2}(?=[ ]?[A-Z0-9]{4})")


@dataclass(frozen=True, slots=True)
class National:
    """A country's number: the form in which it is written, the python-stdnum modules that validate it, and the words
    one of which must stand before a number whose checksum is weak (one in ten or eleven numbers passes)."""

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
        _words("IdNr", "Steuer-?ID", "Steuer-?Identifikationsnummer", "TIN", "tax id", "tax number"),
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
"""Countries by their ISO 3166 code."""

CUE_CHARACTERS = 40
"""So far before a number its cue may stand."""


def cards(text: str) -> Iterator[Span]:
    """Payment cards: an issuer's prefix and length (ISO/IEC 7812), and Luhn's checksum."""
    for match in CARDS.finditer(text):
        digits = re.sub("[ -]", "", match[0])
        prefix = int(digits[:4])
        known = any(low <= prefix <= high and len(digits) in lengths for low, high, lengths in ISSUERS)
        if known and _stdnum("luhn").is_valid(digits):
            yield match.span()


def ibans(text: str) -> Iterator[Span]:
    """Bank accounts: the length of the country's IBAN and the checksum of ISO 13616 (mod 97). Groups may be parted by
    single spaces."""
    end = 0
    for match in IBANS.finditer(text):
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
    form = NATIONAL[country]
    for match in form.shape.finditer(text):
        before = text[max(match.start() - CUE_CHARACTERS, 0) : match.start()]
        has_cue = form.cue is None or form.cue.search(before)
        if has_cue and any(_stdnum(module).is_valid(match[0]) for module in form.modules):
            yield match.span()


@cache
def _stdnum(module: str) -> Any:
    try:
        return import_module(f"stdnum.{module}")
    except ImportError:
        raise InputError(
            "corpus.personal: the package python-stdnum is not installed; pip install 'bessemer[corpus]'"
        ) from None


# --- Phone numbers: international, the common national forms, and after a word such as "tel."

CALLING_CODES = frozenset(
    {1, 7, 20, 27, 30, 31, 32, 33, 34, 36, 39, 40, 41, 43, 44, 45, 46, 47, 48, 49, 51, 52, 53, 54, 55, 56, 57, 58, 60, 61, 62}
    | {63, 64, 65, 66, 81, 82, 84, 86, 90, 91, 92, 93, 94, 95, 98, 211, 212, 213, 216, 218}
    | set(range(220, 228)) | set(range(228, 259)) | {260, 261, 262, 263, 264, 265, 266, 267, 268, 269, 290, 291, 297, 298, 299}
    | set(range(350, 360)) | {370, 371, 372, 373, 374, 375, 376, 377, 378, 380, 381, 382, 383, 385, 386, 387, 389, 420, 421}
    | {423} | set(range(500, 510)) | set(range(590, 600)) | {670, 672, 673, 674, 675, 676, 677, 678, 679, 680, 681, 682, 683}
    | {685, 686, 687, 688, 689, 690, 691, 692, 800, 850, 852, 853, 855, 856, 870, 878, 880, 881, 882, 883, 886, 888, 960, 961}
    | {962, 963, 964, 965, 966, 967, 968, 970, 971, 972, 973, 974, 975, 976, 977, 979, 992, 993, 994, 995, 996, 998}
)  # fmt: skip
"""Assigned country codes: ITU-T, List of Recommendation E.164 assigned country codes."""

MAX_PHONE_DIGITS = 15
"""Digits of an international number, the country code included (ITU-T E.164, 6.2)."""

_GAP = "[ \u00a0\u2009\u202f.\\-\u2010\u2011/]"
_INTERNATIONAL = re.compile(
    rf"\+(?<![\w+)\]}}=.].)(?P<number>[1-9](?:(?:{_GAP}|{_GAP}?\(0?\){_GAP}?|{_GAP}?\(|\){_GAP}?)?[0-9]){{6,17}}+)(?![^\W\d]|[.,][0-9])"
)
_DOUBLE_ZERO = re.compile(
    rf"0(?<![\w.,+/=#-].)(?<![0-9][ .-].)0[1-9][0-9]{{0,2}}[ \-/](?:{_GAP}?[0-9]){{6,14}}+(?!\w|[.,-][0-9])"
)
_NATIONAL = re.compile(
    r"[(0-9](?<![\w.,+/=#$€£%-].)(?<![0-9][ .-].)(?:"
    # North America: (212) 555-4321, 212-555-4321, 212.555.4321, 1-212-555-4321, 1 (212) 555-4321
    r"(?P<us>(?:(?<=1)[ .-]?\(?[2-9]|(?<=\()[2-9]|(?<=[2-9]))[0-9]{2}(?:\) ?|[.-])[2-9][0-9]{2}[ .-][0-9]{4})"
    r"|(?P<eu>(?<=0)(?:"
    r"[1-9](?<![0-9A-Fa-f][ .-]..)(?P<fr>[ .-])(?:[0-9]{2}(?P=fr)){3}[0-9]{2}(?!(?P=fr)[0-9])"  # France: 01 42 34 56 78
    r"|[1-9][0-9][ -][0-9]{4}[ -][0-9]{4}"  # Britain: 020 7946 0958
    r"|[1-9][0-9]{2}[ -][0-9]{3}[ -][0-9]{4}"  # Britain: 0161 496 0123
    r"|[1-9][0-9]{3}[ -][0-9]{3}[ -]?[0-9]{3}"  # Britain: 01632 960 123
    r"|[1-9][0-9]{1,3} ?/ ?[1-9][0-9]{2,8}(?:[ -][0-9]{1,4}){0,3}"  # Germany, Austria: 030/1234567, 089 / 123 45-0
    r"|[1-9][0-9]{2}-[1-9][0-9]{6,7}"  # Germany: 0171-1234567
    r"))"
    r"|(?P<paren>(?<=\()0[1-9][0-9]{1,3}\) ?[0-9]{2,4}(?:[ -]?[0-9]{2,4}){1,3})"  # (030) 123 4567, (020) 7946 0958
    r")(?!\w|[.,-][0-9]|/[0-9])"
)
_RUN = re.compile(r"[0-9](?<=[ .:)(\]\u00a0].)(?:[ .()/-]{0,2}[0-9]){6,14}+(?!\w|[.,-][0-9])")
_PHONE_CUE = re.compile(
    r"(?<!\w)(?:tele(?:phone|fon[eo]?|foon)|t[eé]l[eé]phone|tel[eé]fono|phone|t[eé]l|fax|telefax|mobile|mobil|m[oó]vil|handy"
    r"|whatsapp|телефон|тел|факс|電話|电话|전화)(?: (?:number|no|nr|num))?[ \u00a0]?[.:)\]]{0,3}[ \u00a0]{0,4}\(?$",
    re.IGNORECASE,
)


def phones(text: str) -> Iterator[Span]:
    """Spans of phone numbers, which may repeat and overlap; fictional ones (555-0100 to 555-0199) are left out."""
    for found in _INTERNATIONAL.finditer(text):
        end = _international(found["number"])
        if end:
            yield found.start(), found.start("number") + end
    for found in _DOUBLE_ZERO.finditer(text):
        if _international(found[0][2:]) == len(found[0]) - 2:
            yield found.span()
    for found in _NATIONAL.finditer(text):
        if _is_national(found):
            yield found.span()
    for found in _RUN.finditer(text):
        number = found[0]
        if _PHONE_CUE.search(text[max(found.start() - 32, 0) : found.start()]):
            digits = _digits(number)
            if len(set(digits)) > 1 and not _fiction(digits) and not _date(number):
                yield found.span()


def _digits(number: str) -> str:
    return "".join(character for character in number if "0" <= character <= "9")


def _international(number: str) -> int:
    """Characters of `number` (without its +) that are one phone number, in whole groups; 0 when it is none."""
    digits = _digits(number)
    code = next((digits[:size] for size in (1, 2, 3) if int(digits[:size]) in CALLING_CODES), "")
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
