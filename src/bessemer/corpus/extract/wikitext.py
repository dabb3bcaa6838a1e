"""Rendering of wikitext as the text that a reader of the page sees, from the syntax tree of mwparserfromhell.

Tables, references, files and unknown templates are removed. wikitext.toml lists the templates and tags that produce text,
which the library's `strip_code()` would drop. Links become their label, and headings, lists and code keep their lines. An
element that is removed between two words leaves a space.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Collection
from pathlib import Path

import mwparserfromhell
from mwparserfromhell.nodes import Argument, Comment, ExternalLink, Heading, Node, Tag, Template, Text, Wikilink
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from bessemer.common.errors import NotText
from bessemer.run_tasks.time_limit import is_left_out

FACTS = tomllib.loads(Path(__file__).with_name("wikitext.toml").read_text(encoding="utf-8"))
HIDDEN = frozenset(FACTS["hidden"])  # elements that are removed with their content
BLOCK = frozenset(FACTS["block"])  # elements that begin or end a line
INLINE = frozenset(FACTS["inline"])
FILE_PREFIXES = frozenset(FACTS["file_prefixes"])  # link prefixes of files and categories in the largest Wikipedias
LANGUAGES = frozenset(FACTS["languages"].split())
CODE = frozenset({"pre", "syntaxhighlight", "source", "code"})  # elements whose lines are kept
# Patterns of the text that templates produce
SHOWN = {name: [patterns] if isinstance(patterns, str) else patterns for name, patterns in FACTS["shown"].items()}
# Markers of lines of code, of removed elements, and of the start and end of superscripts. They are control characters that
# XML cannot contain.
_KEEP, _HOLE, _RAISED, _LOWERED = "\x01", "\x03", "\x04", "\x05"
_WRAPPED = {"sup": (_RAISED, _LOWERED), "q": "“”", "rt": "()"}
# Markup that the parser leaves in text nodes: emphasis, switches, and unclosed tags
_MARK = re.compile(
    rf"'{{2,5}}|__(?:{'|'.join(FACTS['switches'])})__|</?([A-Za-z][A-Za-z0-9]{{0,20}})((?:\s[^<>]{{0,500}})?)/?>"
)
_PREFIX = re.compile(r"^\s*(?:(?:safe)?subst|template)\s*:", re.IGNORECASE)
_FIELD = re.compile(r"\{([^{}]+)\}")
_OPTIONAL = re.compile(r"<([^<>]*)>")
_FAMILY = re.compile(r"[^-/]{1,40}[-/]")
_NUMBER = r"(?:[+-]?[\d.,\s⁄/+]*\d[\d.,]*|and|to|or|by|x|×|-|–|\+|\+/-|±|to\(-\)|and\(-\))"
# Numbers and units in the arguments of {{convert}}, such as 5|to|10|km and 6|ft|2|in
_MEASURE = re.compile(rf"(?:{_NUMBER}\|)*[^|]+(?:\|{_NUMBER}\|(?!{_NUMBER}(?:\||$))[^|]+)*")
# Spelling variants of a word, of which the first is used: -{zh-hans:中国;zh-hant:中國}-. One with a flag is a hidden rule.
_VARIANT = re.compile(
    r"-\{(?!\{)(?:([^{}|]{0,99})\|)?(?:\s*[a-z]{2,3}(?:-[a-z]+)?\s*:([^{}|;]{0,999});?)?([^{}|]{0,999})\}-"
)
_EMPTY_BRACKETS = re.compile(rf" ?\((?=[\s,;:]*{_HOLE})[\s,;:{_HOLE}]{{0,20}}\)")
_WORD_GAP = re.compile(rf"(?<=[0-9A-Za-z\u00c0-\u2dff]){_HOLE}+(?=[0-9A-Za-z\u00c0-\u2dff])")
_SUPERSCRIPT = re.compile(rf"{_RAISED}([0-9+−–n-]{{1,9}}){_LOWERED}")
_RAISED_DIGITS = str.maketrans("0123456789+-−–n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁻ⁿ")
_UNMARKED = dict.fromkeys(map(ord, (_KEEP, _HOLE, _RAISED, _LOWERED)))
_INDENT = re.compile(r"^[*#:;]{1,20}")


def plain_text(wikitext: str, title: str = "", prefixes: Collection[str] = FILE_PREFIXES) -> str:
    """Return the text that a reader of the page sees, without tables, boxes, references and pictures.

    `title` replaces {{PAGENAME}}, and `prefixes` are the lower-case prefixes of links to files and categories. The
    parser takes quadratic time for unclosed marks, so a page that took too long in an earlier attempt raises NotText.
    """
    if is_left_out():
        raise NotText("it took too long")
    page = _Page(title, prefixes)
    if "-{" in wikitext:
        wikitext = _VARIANT.sub(lambda match: "" if match[1] in ("H", "T", "-") else match[2] or match[3], wikitext)
    try:
        code = mwparserfromhell.parse(wikitext, skip_style_tags=True)
    except ParserError as error:
        raise NotText(f"mwparserfromhell failed: {error}") from None
    return _lines(page.render(code))


class _Page:
    """A renderer of a page's syntax tree as text. Control characters mark lines of code and removed elements."""

    def __init__(self, title: str, prefixes: Collection[str]) -> None:
        self.title, self.prefixes = title, prefixes

    def render(self, code: Wikicode | None) -> str:
        return "".join(map(self._node, code.nodes)) if code else ""

    def _node(self, node: Node) -> str:
        match node:
            case Text():
                return _MARK.sub(_rest_of_mark, node.value)
            case Wikilink():
                return self._link(node)
            case Template():
                shown = self._template(node)
                return _HOLE if shown is None else shown + _HOLE * shown.endswith("\n")
            case Tag():
                return self._tag(node)
            case ExternalLink():
                return self.render(node.title).strip() if node.brackets else str(node)
            case Heading():
                return f"{'=' * node.level}{self.render(node.title)}{'=' * node.level}"
            case Argument():  # a page shows the default text of {{{1|text}}}
                return self.render(node.default) or _HOLE
            case Comment():
                return ""
        return str(node)  # an entity

    def _link(self, link: Wikilink) -> str:
        """Return the label of a link, or its target if it has none; _HOLE for pictures, categories and other languages."""
        target = self.render(link.title)
        prefix, colon, _ = target.partition(":")
        folded = prefix.strip().casefold().replace("_", " ")
        if colon and (folded in self.prefixes or (link.text is None and folded in LANGUAGES)):
            return _HOLE
        return (self.render(link.text) or target).removeprefix(":")

    def _tag(self, tag: Tag) -> str:
        name, markup = str(tag.tag).strip().lower(), tag.wiki_markup
        if name in HIDDEN:
            return _HOLE
        if markup:  # list items and horizontal rules
            return str(markup)
        if name in ("math", "chem", "ce"):
            return f"${' '.join(str(tag.contents or '').split())}$"
        if name == "nowiki":
            return str(tag.contents or "")
        if name in CODE:
            inside = str(tag.contents or "")
            return "\n{}{}\n".format(_KEEP, inside.replace("\n", f"\n{_KEEP}")) if "\n" in inside else inside
        inside = self.render(tag.contents)
        if name in BLOCK:
            return f"\n{_HOLE}" + (f"{inside}\n{_HOLE}" if inside else "")
        if name in INLINE:
            return inside.join(_WRAPPED.get(name, ("", "")))
        return str(tag).replace(str(tag.contents), inside) if inside else str(tag)

    def _template(self, template: Template) -> str | None:
        """Return the text that a template or parser function produces; None for an unknown one."""
        name = _PREFIX.sub("", self.render(template.name).translate(_UNMARKED).replace("_", " ")).strip()
        if name.endswith("PAGENAME"):
            return self.title
        function, colon, first = name.partition(":")
        is_function = colon != "" and f"{function}:".casefold() in SHOWN
        name = f"{function}:".casefold() if is_function else name.casefold()
        family = _FAMILY.match(name)
        patterns = SHOWN.get(name) or (SHOWN.get(family[0]) if family else None)
        if not patterns:
            return None
        arguments = {"1": first.strip()} if is_function else {}
        number = len(arguments)
        for parameter in template.params:
            key, value = str(parameter.name).strip(), self.render(parameter.value)
            if is_function or not parameter.showkey:
                number += 1
                key, value = f"{number}", f"{parameter.name}={value}" if parameter.showkey else value
            arguments[key] = value.strip(f" \t\n{_HOLE}")
        filled = (_fill(pattern, arguments) for pattern in patterns)
        return next((text for text in filled if text is not None), None)


def _rest_of_mark(match: re.Match[str]) -> str:
    name, attributes = (match[1] or "").lower(), match[2] or ""
    if name not in BLOCK | INLINE | HIDDEN | {""} or (attributes.strip() and "=" not in attributes):
        return match[0]  # a comparison such as x<b and b>c
    return f"\n{_HOLE}" if name in BLOCK else ""


def _fill(pattern: str, arguments: dict[str, str]) -> str | None:
    """Fill a wiki template's arguments into the pattern of its text from wikitext.toml; None if a required one is missing."""
    positional = [text for name, text in arguments.items() if name.isdecimal() and text]

    def value(names: str) -> str:
        if names == "measure":
            match = _MEASURE.match("|".join({"C": "°C", "F": "°F"}.get(text, text) for text in positional))
            return match[0].replace("|", " ").replace(" - ", "–").replace(" – ", "–") if match else ""
        if names[0] == "*":
            return names[1:].join(positional)
        return next(filter(None, map(arguments.get, names.lstrip("!").split("|"))), "")

    shown = ""
    for number, piece in enumerate(_OPTIONAL.split(pattern)):  # every second piece is optional
        if all(map(value, _FIELD.findall(piece))):
            shown += _FIELD.sub(lambda field: "" if field[1][0] == "!" else value(field[1]), piece)
        elif number % 2 == 0:
            return None
    return shown


def _lines(text: str) -> str:
    """Clean up the rendered text line by line, and drop headings of sections without text."""
    text = _SUPERSCRIPT.sub(lambda match: match[1].translate(_RAISED_DIGITS), _WORD_GAP.sub(" ", html.unescape(text)))
    kept: list[str] = []
    below = 7  # level of the heading that follows; 0 for text, 7 at the end
    for marked in reversed(text.split("\n")):
        level, line = _line(marked)
        if not level:
            below = 0 if line.strip() else below
        elif below == 7 or 0 < below <= level:
            continue
        else:
            below, line = level, f"\n{line}\n"
        kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(reversed(kept))).translate(_UNMARKED).strip("\n")


def _line(line: str) -> tuple[int, str]:
    """Return the heading level (0 for other lines) and the text of a line, without the marks of removed elements."""
    if line.startswith(_KEEP):
        return 0, line[1:]
    line = _EMPTY_BRACKETS.sub("", line.lstrip(f"{_HOLE} ") if line.startswith(_HOLE) else line)
    line = line.translate(_UNMARKED).replace("\xa0", " ").rstrip()
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    if level and len(line) > 2:
        line = line[level:-level].strip()
        return level * bool(line), line
    if line.startswith("----"):
        return 0, line.lstrip("-")
    marks = _INDENT.match(line)
    bullet = "  " * (marks.end() - 1) + "- " if marks and marks[0][-1] in "*#" else ""
    line = re.sub(r"[ \t]{2,}", " ", line[marks.end() :].strip() if marks else line)
    return 0, bullet + line if line else ""
