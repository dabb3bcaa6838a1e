"""Phone numbers as people write them: international, the common national forms, and after a word such as "tel."."""

from __future__ import annotations

import re
from collections.abc import Iterator

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

MAX_DIGITS = 15
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
_CUE = re.compile(
    r"(?<!\w)(?:tele(?:phone|fon[eo]?|foon)|t[eé]l[eé]phone|tel[eé]fono|phone|t[eé]l|fax|telefax|mobile|mobil|m[oó]vil|handy"
    r"|whatsapp|телефон|тел|факс|電話|电话|전화)(?: (?:number|no|nr|num))?[ \u00a0]?[.:)\]]{0,3}[ \u00a0]{0,4}\(?$",
    re.IGNORECASE,
)
_CUE_CHARACTERS = 32

Span = tuple[int, int]


def phones(text: str) -> Iterator[Span]:
    """Where phone numbers stand. A span can come twice, and spans can overlap.

    Numbers for fiction (555-0100 to 555-0199 in North America) are nobody's and are left alone.
    """
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
        if _CUE.search(text[max(found.start() - _CUE_CHARACTERS, 0) : found.start()]):
            digits = _digits(number)
            if len(set(digits)) > 1 and not _fiction(digits) and not _date(number):
                yield found.span()


def _digits(number: str) -> str:
    return "".join(character for character in number if "0" <= character <= "9")


def _international(number: str) -> int:
    """Characters of `number` (without its +) that are one phone number; 0 when it is none.

    What follows after a space may belong to the sentence, so whole groups are taken, as many as a number can have.
    """
    digits = _digits(number)
    code = next((digits[:size] for size in (1, 2, 3) if int(digits[:size]) in CALLING_CODES), "")
    if not code:
        return 0
    # North America (1), Russia and Kazakhstan (7) have one length for all.
    most = 11 if code in "17" else MAX_DIGITS
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
