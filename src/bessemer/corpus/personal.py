"""Personal data replaced by typed placeholders, and counted; what was found is never logged or kept.

Every pass is a regular expression without unbounded repetition that begins with a literal or a set of characters, so
that plain text is skipped at the speed of a byte search and hostile text costs linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network

from bessemer.corpus.checksums import cards, ibans, national
from bessemer.corpus.phones import phones
from bessemer.recipe import PersonalData

Span = tuple[int, int]

_DOMAIN = re.compile(
    r"@(?=[\w])(?P<labels>(?:[\w](?:[\w-]{0,61}[\w])?\.){1,8})(?P<top>[^\W\d_]{2,24}|xn--[a-z0-9-]{2,59})(?![\w@(]|-[\w]|\.[\w])"
)
_LOCAL_REVERSED = re.compile(r"[\w.%+'-]{1,65}+")

NOBODYS_DOMAINS = ("example", "test", "invalid", "localhost")
"""Top-level names that RFC 2606 keeps for documentation and tests; example.com, .net and .org are reserved with them."""

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


def replace(text: str, settings: PersonalData) -> tuple[str, dict[str, int]]:
    """The text with placeholders in place of personal data, and how many of each kind.

    Linear in the text's length. Where two kinds overlap, the one whose form proves more wins. A pure function.
    """
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


def emails(text: str) -> Iterator[Span]:
    """Where e-mail addresses stand (RFC 5321's lengths, the characters that mail providers allow).

    Left alone: the names RFC 2606 keeps for examples, `git@` (a way to name a repository), files and units.
    """
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
    """Where public IP addresses stand; special-purpose ones and what looks like a version number are left alone.

    Four parts below 32 are taken for a version or a section: 12.1.2.3 is one far more often than somebody's address, of
    which one in 4,096 looks so.
    """
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


def _finders(settings: PersonalData) -> Iterator[tuple[str, Callable[[str], Iterator[Span]]]]:
    """What is looked for; a form that proves more comes first."""
    every: tuple[tuple[str, Callable[[str], Iterator[Span]]], ...] = (
        ("email", emails),
        ("iban", ibans),
        ("card", cards),
    )
    yield from ((kind, find) for kind, find in every if kind in settings.kinds)
    for country in settings.national:
        yield "national", _national(country)
    if "ip" in settings.kinds:
        yield "ip", addresses
    if "phone" in settings.kinds:
        yield "phone", phones


def _national(country: str) -> Callable[[str], Iterator[Span]]:
    return lambda text: national(text, country)
