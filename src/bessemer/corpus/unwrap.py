"""Hard-wrapped prose to paragraphs of one line each.

Plain text of manuals, mail and books is often cut into lines of about 72 characters. Rules that judge lines take such a line for
a sentence: those that end without a full stop go, from the middle of a paragraph. A text is hard-wrapped when its lines end where
the next word would not have fitted; verse, lists, tables and code do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, repeat
from operator import contains

MIN_WIDTH, MAX_WIDTH = 40, 150  # characters of the longest line of a block that was wrapped
SLACK = 3  # characters by which the next word may have fitted after all: wrapping by hand, two spaces after a full stop
FULL_SHARE = 0.8  # of the lines that another follows in their block
MIN_LINES = 4  # of them, in a text
PROSE_SHARE = 0.5  # of the lines that are not blank, in a text: one that is mostly code or tables is left alone
CODE_SIGNS, MAX_CODE_SHARE = "{}[]()<>=;_\\", 0.04  # of the characters of a block of prose
LIST_ITEM = re.compile(r"(?:[-*+•·–—]|\(?(?:\d{1,3}|[A-Za-z])[.)]|\.\.)\s")
ITEM_SIGNS = "-*+•·–—(."  # with which items begin, but for those of digits and of a letter and a mark
LIST_REACH = 20  # lines before and after one that begins like an item, among which the others of its list would be
RAGGED = 12  # characters by which full lines of a paragraph differ
CLOSING_MARKS = tuple(".!?:;")
MARKED = frozenset(">|#=~`$<{}@:")  # how lines begin that are no prose
COLUMNS = re.compile(r"\S(?: {3,}|\t)\S")  # a gap within a line: a table
CUT_WORD = re.compile(r"[^\W\d_]-$")


def unwrapped(text: str) -> str | None:
    """The text with each paragraph on one line, where it is hard-wrapped; else None."""
    if "\n" not in text or len(text) > (MAX_WIDTH + 1) * (text.count("\n") + 1):
        return None
    lines = text.split("\n")
    blocks, prose, followed, full = list[list[str]](), 0, 0, 0
    left = sum(map(bool, lines))
    needed = PROSE_SHARE * left
    for block in _blocks(lines):
        blocks.append(block)
        if len(block) == 1:
            left -= bool(block[0])
        elif _is_prose(block):
            prose, followed, full = prose + len(block), followed + len(block) - 1, full + _num_full(block)
            continue
        else:
            left -= len(block)
        if left < needed:  # most texts end here: so many lines are no prose
            return None
    if followed < MIN_LINES or full < FULL_SHARE * followed:
        return None
    words = set(text.split())
    return "\n".join(line for block in blocks for line in (_joined(block, words) if _is_wrapped(block) else block))


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """Lines that belong together: of one indentation, between blank lines and the beginnings of list items."""
    block: list[str] = []
    indent, ended = 0, True  # of the block's last line; it is blank
    for number, line in enumerate(lines):
        text = line.lstrip()
        here = len(line) - len(text)
        if (
            text
            and not ended
            and (
                here == indent or (len(block) == 1 and (indent - 8 <= here < indent or _hangs(block[0], here > indent)))
            )
            and not _begins_item(lines, number, text)
        ):
            block.append(line)
            indent = here
            continue
        if block:
            yield block
        block, indent, ended = [line], here, not text
    if block:
        yield block


def _hangs(first: str, is_deeper: bool) -> bool:
    """Whether a second line may hang below the first one: an item's text does."""
    return is_deeper and LIST_ITEM.match(first.lstrip()) is not None


def _begins_item(lines: list[str], number: int, text: str) -> bool:
    """Whether a line, `text` without its indentation, begins an item of a list."""
    # a few signs are compared many times as fast as the pattern
    if text[0] not in ITEM_SIGNS and text[1:2] not in (".", ")") and not text[0].isdigit():
        return False
    item = LIST_ITEM.match(text)
    return item is not None and not _is_within(lines, number, item[0])


def _is_within(lines: list[str], number: int, marker: str) -> bool:
    """Whether a line that begins like a list item goes on with the sentence of the line before ("in World War\nI. After that"):
    that one is full and ends without a closing mark, and no line near begins with a marker of the same kind."""
    before, here = lines[number - 1].rstrip(), lines[number]
    if len(before) < MIN_WIDTH or before.endswith(CLOSING_MARKS, 0, len(before.rstrip("\"'”’)]*_"))):
        return False
    near = [*lines[number + 1 : number + 1 + LIST_REACH], *lines[max(number - LIST_REACH, 0) : number]]
    kind = _kind(marker)
    if any(kind == _kind(found[0]) for line in near if (found := LIST_ITEM.match(line.lstrip()))):
        return False
    indent = len(here) - len(here.lstrip())
    width = max(len(line) for line in (here, *near[:-1]) if len(line) - len(line.lstrip()) == indent)
    return width - SLACK < len(before) + len(marker) and width > len(before) - RAGGED


def _kind(marker: str) -> str:
    """What the markers of one list have in common: bullets their sign, numbers and letters what is around them."""
    sign = next((sign for sign in marker if sign.isalnum()), "")
    return (
        re.sub(r"\w+", "1" if sign.isdigit() else "A" if sign.isupper() else "a", marker.rstrip())
        if sign
        else marker[:1]
    )


def _is_prose(block: list[str]) -> bool:
    """Words between spaces, and not a table, a quotation, a heading that is underlined or marked up text."""
    if not MIN_WIDTH <= max(map(len, block)) <= MAX_WIDTH:
        return False
    stripped = [line.strip() for line in block]
    if not MARKED.isdisjoint([line[:1] for line in stripped]) or not all(map(contains, stripped[:-1], repeat(" "))):
        return False
    whole = "\n".join(block)
    is_code = sum(map(whole.count, CODE_SIGNS)) > MAX_CODE_SHARE * sum(map(len, block))
    has_gaps = "   " in whole or "\t" in whole  # seldom, and found many times as fast as columns
    return not is_code and not (has_gaps and COLUMNS.search(whole))


def _num_full(block: list[str]) -> int:
    """Lines after which the first word of the next would not have fitted."""
    width = max(map(len, block)) - SLACK
    return sum(len(line) + 1 + len(after.split(maxsplit=1)[0]) > width for line, after in pairwise(block))


def _is_wrapped(block: list[str]) -> bool:
    """Whether a block of a hard-wrapped text is a paragraph of it: nearly all of its lines are full."""
    return len(block) > 1 and _is_prose(block) and _num_full(block) >= FULL_SHARE * (len(block) - 1)


def _joined(block: list[str], words: set[str]) -> list[str]:
    """A paragraph on one line. A word that was cut at a hyphen is mended where it stands whole elsewhere in the text."""
    joined = block[0]
    for line in block[1:]:
        after = line.lstrip()
        if not CUT_WORD.search(joined):
            joined += f" {after}"
            continue
        whole = joined.rsplit(maxsplit=1)[-1][:-1] + after.split(maxsplit=1)[0]
        joined = (joined[:-1] if whole.strip(".,;:!?)") in words else joined) + after
    return [joined]
