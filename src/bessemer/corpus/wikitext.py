"""Wikitext as the text that a reader of the page sees, in linear time.

One scan over the markup with a stack for nesting, instead of a full parser (mwparserfromhell builds a tree). Tables,
references, files and unknown templates are removed; wikitext.toml lists the templates and tags that leave text. Links keep
their label; headings, lists and code keep their lines. What is removed between two words leaves a space.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from bessemer.corpus.extract import NotText
from bessemer.corpus.time_limit import is_left_out

FACTS = tomllib.loads(Path(__file__).with_name("wikitext.toml").read_text(encoding="utf-8"))
HIDDEN = frozenset(FACTS["hidden"])  # elements that go with what they hold
BLOCK = frozenset(FACTS["block"])  # elements that begin or end a line
INLINE = frozenset(FACTS["inline"])
FILE_PREFIXES = frozenset(FACTS["file_prefixes"])  # of pictures and categories, in the largest Wikipedias
LANGUAGES = frozenset(FACTS["languages"].split())
# elements in which wikitext markup may be literal; code keeps its lines
LITERAL = frozenset({"nowiki", "pre", "syntaxhighlight", "source", "code", "math", "chem", "ce"})
MAX_NESTING = 200  # templates, tables and links open at once; beyond it the outermost counts as one that never ends
SHOWN: dict[str, str | list[str]] = FACTS["shown"]  # templates that leave text, and the patterns of it
# Marks in a page; the longest of Wikipedia have half as many. More would take longer than a second.
MAX_MARKS = 400_000
MAX_TAG = 2000  # characters of a tag with its attributes
# Control characters, which XML cannot hold: before lines of code, which are not to be changed; where the arguments of a
# template part; where something was removed; around superscripts
_KEEP, _BAR, _HOLE, _RAISED, _LOWERED = "\x01", "\x02", "\x03", "\x04", "\x05"
_MARK = re.compile(
    r"<!--|\{{2,9}|\}{2,3}|\{\||\|\}|\[\[|\]\]|\[(?=(?:https?:|ftp:|mailto:|//))|\]|\|"
    rf"|</?[A-Za-z][A-Za-z0-9]{{0,20}}(?=[\s/>])|'{{2,5}}|__(?:{'|'.join(FACTS['switches'])})__"
)
_ATTRIBUTES = re.compile(r"(?:[^<>\"']|\"[^\"<>]*\"|'[^'<>]*'){0,2000}/?>")
_NAMED = re.compile(r"\s*([\w .#-]{1,40}?)\s*=(.*)", re.DOTALL)
_PREFIX = re.compile(r"^\s*(?:(?:safe)?subst|template)\s*:", re.IGNORECASE)
_FIELD = re.compile(r"\{([^{}]+)\}")
_OPTIONAL = re.compile(r"<([^<>]*)>")
_FAMILY = re.compile(r"[^-/]{1,40}[-/]")
_NUMBER = re.compile(r"[+-]?[\d.,\s⁄/+]*\d[\d.,]*|and|to|or|by|x|×|-|–|\+|\+/-|±|to\(-\)|and\(-\)")
_VARIANT = re.compile(r"-\{(?!\{)(?:([^{}|]{0,99})\|)?([^{}|]{0,999})\}-")
_VARIANT_OF = re.compile(r"\s*[a-z]{2,3}(-[a-z]+)?\s*:")
_ADDRESS = re.compile(r"^[^\s\]]{1,2000}")
_BLANKS = re.compile(r"\n{3,}")
_SPACES = re.compile(r"[ \t]{2,}")
_EMPTY_BRACKETS = re.compile(rf" ?\((?=[\s,;:]*{_HOLE})[\s,;:{_HOLE}]{{0,20}}\)")
_WORD_GAP = re.compile(rf"(?<=[0-9A-Za-z\u00c0-\u2dff]){_HOLE}+(?=[0-9A-Za-z\u00c0-\u2dff])")
_SUPERSCRIPT = re.compile(rf"{_RAISED}([0-9+−–n-]{{1,9}}){_LOWERED}")
_RAISED_DIGITS = str.maketrans("0123456789+-−–n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻ⁿ")
_UNMARKED = dict.fromkeys(map(ord, (_KEEP, _BAR, _HOLE, _RAISED, _LOWERED)))
_CLOSERS = {"}}": "{{", "|}": "{|", "]]": "[[", "]": "["}
_INDENT = re.compile(r"^[*#:;]{1,20}")


@dataclass(slots=True)
class _Open:
    """Something that began and has not ended: its mark, and the text within it so far."""

    mark: str
    length: int = 0  # of the mark: `{{{{{` may begin a parameter within a template
    parts: list[str] = field(default_factory=list)
    bar: int = -1  # where in `parts` the text after the first bar begins; -1 without one

    def as_text(self) -> list[str]:
        """Return what a reader sees if it never ends: it must not swallow the page."""
        return ["" if self.mark == "{|" else self.mark[:1] * self.length, *self.parts]


def plain_text(wikitext: str, title: str = "", prefixes: Collection[str] = FILE_PREFIXES) -> str:
    """The text a reader of the page sees, without tables, boxes, references and pictures.

    `prefixes` are those of links to files and categories, in lower case. Raises NotText when there are more marks than a
    page has.
    """
    if is_left_out():
        raise NotText("it took too long")
    page = _Page(_VARIANT.sub(_first_variant, wikitext) if "-{" in wikitext else wikitext, title, prefixes)
    page.scan()
    return _lines("".join(part for open_ in page.stack for part in open_.as_text()).replace(_BAR, "|"))


class _Page:
    """A page and what is open at the place that the scan has reached."""

    def __init__(self, text: str, title: str, prefixes: Collection[str]) -> None:
        self.text, self.title, self.prefixes = text, title, prefixes
        self.stack = [_Open("")]
        self.missing: set[str] = set()

    def scan(self) -> None:
        """Handle all marks. Raises NotText when there are too many."""
        position = num_marks = 0
        while found := _MARK.search(self.text, position):
            num_marks += 1
            if num_marks == MAX_MARKS:
                raise NotText(f"more than {MAX_MARKS} marks of wikitext")
            if found.start() > position:
                self.stack[-1].parts.append(self.text[position : found.start()])
            position = self._step(found)
        self.stack[-1].parts.append(self.text[position:])

    def _find(self, closer: str, start: int) -> int:
        """The next end tag or mark, in any case; -1 for none. A missing one is searched for once: linear time."""
        if closer not in self.missing:
            if found := re.compile(re.escape(closer), re.IGNORECASE | re.ASCII).search(self.text, start):
                return found.start()
            self.missing.add(closer)
        return -1

    def _step(self, found: re.Match[str]) -> int:
        """Handle one mark; returns the position to go on at."""
        mark, after, top = found[0], found.end(), self.stack[-1]
        if mark in ("{|", "|}"):  # of a table only where a line begins
            start = found.start()
            before = self.text[max(start - 20, 0) : start].rpartition("\n")[2].strip(" \t:*#")
            if before and before[-1] != ">":
                mark, after = mark[0], start + 1
        if mark == "<!--":
            closed = self._find("-->", after)
            return len(self.text) if closed < 0 else closed + 3
        if mark[0] == "<":
            return self._tag(found)
        if mark[:2] in _CLOSERS:
            return self._close(mark, after)
        if mark[:2] in _CLOSERS.values():
            if len(self.stack) > MAX_NESTING:
                self.stack[0].parts.extend(self.stack.pop(1).as_text())
            self.stack.append(_Open(mark[:2], len(mark)))
        elif mark == "{":
            top.parts.append(mark)
        elif mark == "|":
            if top.mark == "[[" and top.bar < 0:
                top.bar = len(top.parts)
            elif top.mark != "{|":
                top.parts.append(_BAR if top.mark == "{{" else mark)
        return after  # emphasis, switches such as __NOTOC__

    def _close(self, mark: str, after: int) -> int:
        opener, stack, top = _CLOSERS[mark[:2]], self.stack, self.stack[-1]
        if mark == "|}" and top.mark == "{{" and self.text[after : after + 1] == "}":
            return after - 1  # `|}}` ends a template with an empty last argument
        if top.mark == opener:
            stack.pop()
            if opener == "[[":
                stack[-1].parts.append(_label(top, self.prefixes))
            elif opener == "[":
                stack[-1].parts.append(_label_of_url("".join(top.parts)))
            elif opener == "{|":
                stack[-1].parts.append(_HOLE)
            else:
                num_closed = min(len(mark), top.length)
                left = top.length - num_closed
                if left > 1:
                    stack.append(_Open(opener, left))
                shown = self._template(top.parts) if num_closed == 2 else _default(top.parts)
                shown = _HOLE if shown is None else shown + _HOLE * shown.endswith("\n")
                stack[-1].parts.extend(("{" * (left == 1), shown))
                return after - len(mark) + num_closed
        elif mark == "]]" and top.mark == "[":  # `[http://x label]]`
            stack.pop()
            stack[-1].parts.append(_label_of_url("".join(top.parts)))
            return after - 1
        elif opener in ("{{", "{|") and any(open_.mark == opener for open_ in stack):
            while stack[-1].mark != opener:  # links left open within a template go with it
                stack.pop()
            stack[-1].parts.clear()
            return self._close(mark, after)
        elif mark in ("]", "]]"):
            top.parts.append(mark)
        return after - (len(mark) == 3)

    def _tag(self, found: re.Match[str]) -> int:
        """An HTML or extension tag: some go with what they hold, some hold text as it is, the others just go."""
        name, parts, after = found[0].lstrip("</").lower(), self.stack[-1].parts, found.end()
        tag = _ATTRIBUTES.match(self.text, after)
        closed = tag.end() if tag else self.text.find(">", after, after + MAX_TAG) + 1
        inside = self.text[after : closed - 1].strip(" /\n")
        # x<b and b>c: attributes of formatting have values
        is_comparison = "<" in inside or (bool(inside) and len(name) == 1 and "=" not in inside)
        if not closed or is_comparison or name not in HIDDEN | INLINE | BLOCK:
            parts.append(found[0])
            return after
        is_end, after = found[0].startswith("</"), closed
        if name in BLOCK:
            parts.append(f"\n{_HOLE}")
        elif name in HIDDEN:
            parts.append(_HOLE)
        elif name in ("sup", "q", "rt"):
            parts.append({"sup": (_RAISED, _LOWERED), "q": "“”", "rt": "()"}[name][is_end])
        if is_end or self.text[closed - 2] == "/" or name not in HIDDEN | LITERAL:
            return after
        end = self._find(f"</{name}", after)
        if end < 0:
            return after
        inside = self.text[after:end]
        if name in ("math", "chem", "ce"):
            parts.append(f"${' '.join(inside.split())}$")
        elif name not in HIDDEN:
            block = name != "nowiki" and "\n" in inside
            parts.append(f"\n{_KEEP}{inside.replace(chr(10), chr(10) + _KEEP)}\n" if block else inside)
        closed = self.text.find(">", end, end + MAX_TAG)
        return closed + 1 if closed >= 0 else end + len(name) + 2

    def _template(self, parts: list[str]) -> str | None:
        """The text that a template or parser function leaves; None for one of which nothing is known."""
        bar = parts.index(_BAR) if _BAR in parts else len(parts)
        name = _PREFIX.sub("", "".join(parts[:bar]).translate(_UNMARKED).replace("_", " ")).strip()
        if name.endswith("PAGENAME"):
            return self.title
        function, colon, first = name.partition(":")
        is_function = colon != "" and (function + ":").casefold() in SHOWN.keys() | COMPUTED.keys()
        name = (function + ":" if is_function else name).casefold()
        family = _FAMILY.match(name)
        patterns = SHOWN.get(name, SHOWN.get(family[0]) if family else None)
        if patterns is None and name not in COMPUTED:
            return None
        texts = [first] * is_function + ("".join(parts[bar + 1 :]).split(_BAR) if bar < len(parts) else [])
        arguments = _arguments(texts, has_names=not is_function or name == "#switch:")
        if patterns is None:
            return COMPUTED[name](arguments)
        filled = (_fill(pattern, arguments) for pattern in ([patterns] if isinstance(patterns, str) else patterns))
        return next((text for text in filled if text is not None), None)


def _default(parts: list[str]) -> str | None:
    """Return what a template parameter such as {{{1|text}}} shows on a page of its own: its default."""
    return "".join("".join(parts).split(_BAR)[1:2]) or None


Arguments = dict[str, str]


def _arguments(texts: list[str], has_names: bool) -> Arguments:
    """The arguments of a template by name; those without one are numbered from "1"."""
    arguments: Arguments = {}
    number = 0
    for text in texts:
        named = _NAMED.fullmatch(text) if has_names else None
        number += named is None
        arguments[named[1] if named else f"{number}"] = (named[2] if named else text).strip(f" \t\n{_HOLE}")
    return arguments


def _positional(arguments: Arguments) -> list[str]:
    return [text for name, text in arguments.items() if name.isdecimal() and text]


def _fill(pattern: str, arguments: Arguments) -> str | None:
    """A pattern with the values of its fields; None where one is missing."""

    def value(names: str) -> str:
        if names[0] == "*":
            return names[1:].join(_positional(arguments))
        return next(filter(None, map(arguments.get, names.lstrip("!").split("|"))), "")

    shown = ""
    for number, piece in enumerate(_OPTIONAL.split(pattern)):  # every second piece may be left out
        if all(map(value, _FIELD.findall(piece))):
            shown += _FIELD.sub(lambda field: "" if field[1][0] == "!" else value(field[1]), piece)
        elif number % 2 == 0:
            return None
    return shown


def _measure(arguments: Arguments) -> str:
    """Return what {{convert}} shows of the units given: 5 km; 5 to 10 km; 6 ft 2 in."""
    values = _positional(arguments)
    shown: list[str] = []
    for place, text in enumerate(values):
        shown.append({"C": "°C", "F": "°F"}.get(text, text))
        has_more = [bool(_NUMBER.fullmatch(more)) for more in values[place + 1 : place + 3]] == [True, False]
        if not _NUMBER.fullmatch(text) and not has_more:
            break
    return " ".join(shown).replace(" - ", "–").replace(" – ", "–")


COMPUTED: dict[str, Callable[[Arguments], str]] = {
    "convert": _measure,
    "cvt": _measure,
    "#if:": lambda of: of.get("2" if of["1"] else "3", ""),
    "#ifeq:": lambda of: of.get("3" if of["1"] == of.get("2") else "4", ""),
    "#switch:": lambda of: of.get(of["1"]) or of.get("#default") or "".join(_positional(of)[1:][-1:]),
    "lc:": lambda of: of["1"].lower(),
    "uc:": lambda of: of["1"].upper(),
}


def _first_variant(found: re.Match[str]) -> str:
    """The first of several spellings of a word, as -{zh-hans:中国;zh-hant:中國}-; nothing for rules that are not shown."""
    if found[1] and set(found[1].upper().split(";")) & {"H", "T", "-"}:
        return ""
    is_choice = _VARIANT_OF.match(found[2])
    return found[2][is_choice.end() :].partition(";")[0] if is_choice else found[2]


def _label(link: _Open, prefixes: Collection[str]) -> str:
    """Return what a link shows: the text after its first bar, else its target; nothing for pictures, categories and the same
    page in another language."""
    has_bar = link.bar >= 0
    target = "".join(link.parts[: link.bar] if has_bar else link.parts)
    prefix, colon, _ = target.partition(":")
    folded = prefix.strip().casefold().replace("_", " ")
    if colon and (folded in prefixes or (not has_bar and folded in LANGUAGES)):
        return _HOLE
    shown = "".join(link.parts[link.bar :]) if has_bar else ""
    return (shown or target).removeprefix(":")


def _label_of_url(inside: str) -> str:
    """Return what an external link shows: the words after the address."""
    return _ADDRESS.sub("", inside, count=1).strip()


def _lines(text: str) -> str:
    """Headings, lists and indentation by lines; entities; what removed templates leave behind."""
    lines: list[tuple[int, str]] = []
    text = _SUPERSCRIPT.sub(lambda found: found[1].translate(_RAISED_DIGITS), _WORD_GAP.sub(" ", html.unescape(text)))
    for line in text.split("\n"):
        level = 0
        if line.startswith(_KEEP):
            lines.append((0, line[1:]))
            continue
        line = _EMPTY_BRACKETS.sub("", line.lstrip(f"{_HOLE} ") if line.startswith(_HOLE) else line)
        line = line.translate(_UNMARKED).replace("\xa0", " ").rstrip()
        if line.startswith("=") and line.endswith("=") and len(line) > 2:
            level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
            line = line[level:-level].strip()
            level *= bool(line)
        elif line.startswith("----"):
            line = line.lstrip("-")
        elif marks := _INDENT.match(line):
            depth, rest = marks.end(), line[marks.end() :].strip()
            bullet = "  " * (depth - 1) + "- " if line[depth - 1] in "*#" else ""
            line = bullet + _SPACES.sub(" ", rest) if rest else ""
        else:
            line = _SPACES.sub(" ", line)
        lines.append((level, line))
    kept = [f"\n{line}\n" if level else line for level, line in _with_content(lines)]
    return _BLANKS.sub("\n\n", "\n".join(kept)).translate(_UNMARKED).strip("\n")


def _with_content(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Without the headings of sections in which nothing is left."""
    kept: list[tuple[int, str]] = []
    below = 7  # the level of the section that follows; 0 for text
    for level, line in reversed(lines):
        if not level:
            below = 0 if line.strip() else below
        elif below == 7 or 0 < below <= level:
            continue
        else:
            below = level
        kept.append((level, line))
    return kept[::-1]
