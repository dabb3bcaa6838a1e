"""Articles of MediaWiki XML dumps, as plain text.

Pages are cut at <page> ... </page> by bytes and parsed one by one: a damaged page costs that page, and no document type
is read, so that no entity can be declared. (mwxml parses a dump as a whole and cannot recover or start in the middle.)
In a multistream dump a page belongs to the range in which the stream with its first byte begins.

Wikitext becomes text in linear time: one scan over the markup with a stack for nesting, instead of a full parser
(mwparserfromhell builds a tree). Templates, tables, references and files are removed; links keep their label; headings, lists and
code keep their lines.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

from bessemer.corpus.document import Record
from bessemer.corpus.encodings import unicode_of
from bessemer.corpus.extract import NotText
from bessemer.corpus.inflate import CompressedMember, Damaged, beginning, find_member, next_member

MAX_PAGE_BYTES = 64 << 20
READ_BYTES = 1 << 20

_OPEN, _CLOSE = b"<page>", b"</page>"
# elements of a page, and the names of their contents in `metadata`
_FIELDS = {
    "title": "title",
    "ns": "namespace",
    "id": "page",
    "revision/id": "revision",
    "revision/timestamp": "date",
    "revision/model": "model",
    "revision/text": "text",
}


def read(
    file: BinaryIO, start: int, end: int, compression: str, max_characters: int, prefix: str = ""
) -> Iterator[Record]:
    """The pages that begin in [start, end), as articles or with the reason why they are none; wikitext of more than
    `max_characters` is not read, and `prefix` goes before the offsets in keys. Reading resumes at the member after a
    damaged one. OSError when the file cannot be read."""
    if start == 0 and (problem := _no_dump(file, compression)):
        yield Record("0!", 0, reason="wrong_format", detail=problem)
        return
    position: int | None = start
    while position is not None and (position < end or position == start):
        dump = _DumpBytes(file, position, end, compression, prefix)
        try:
            yield from _pages(dump, max_characters)
            return
        except Damaged as error:
            at = position if dump.damaged is None else dump.damaged
            yield Record(f"{at}!", 0, reason="bad_record", detail=str(error))
            position = None
            if dump.damaged is not None:
                position = find_member(file, compression, at + 1, file.seek(0, 2), b"", b"")


def _no_dump(file: BinaryIO, compression: str) -> str:
    """Why a file is no dump in UTF-8, by its first bytes; "" where it may be one, or cannot be decompressed."""
    head = beginning(file, compression)
    file.seek(0)
    if not head:
        return ""
    if unicode_of(head)[0] not in ("", "utf-8"):
        return f"the dump is {unicode_of(head)[0].upper()}; write it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > NEW.xml"
    if b"<mediawiki" not in head and _OPEN not in head:
        return "not a MediaWiki dump: neither <mediawiki> nor <page> is near its beginning; exclude the file"
    return ""


@dataclass
class _DumpBytes:
    """The decompressed bytes of a dump from `start`, or from the first member behind it."""

    file: BinaryIO
    start: int
    end: int
    compression: str
    prefix: str
    # where each member begins in the decompressed bytes, and in the file
    members: list[tuple[int, int]] = field(default_factory=list)
    damaged: int | None = None  # where the member begins in the file that could not be decoded

    def blocks(self) -> Iterator[bytes]:
        """Raises Damaged, after everything before the damage."""
        if not self.compression:
            self.members.append((0, self.start))
            self.file.seek(self.start)
            yield from iter(lambda: self.file.read(READ_BYTES), b"")
            return
        produced, offset = 0, self.start or None
        if offset is not None:
            offset = find_member(self.file, self.compression, self.start, self.end, b"", b"")
            if offset is None:
                return
        while (offset := next_member(self.file, self.compression, offset or 0)) is not None:
            self.members.append((produced, offset))
            member = CompressedMember(self.file, offset, self.compression)
            try:
                for block in member.blocks():
                    produced += len(block)
                    yield block
            except Damaged:
                self.damaged = offset
                raise
            offset = member.end

    def key(self, position: int) -> str | None:
        """The key of a page at this position of the decompressed bytes; None for one that begins beyond the range."""
        while len(self.members) > 1 and self.members[1][0] <= position:
            self.members.pop(0)
        before, offset = self.members[0]
        if self.compression:
            return f"{offset}+{position - before}" if offset < self.end else None
        return f"{self.prefix}{offset + position}" if offset + position < self.end else None


def _pages(dump: _DumpBytes, max_characters: int) -> Iterator[Record]:
    """Cut pages out of the blocks. Raises Damaged, after the pages before."""
    buffer = bytearray()
    base = 0  # where the buffer begins in the decompressed bytes
    searched = 0  # how far the buffer was searched for the end of the page
    key: str | None = None  # of the page with which the buffer begins; None between pages
    dropped_bytes = 0  # of a page too long for the buffer
    for block in dump.blocks():
        buffer += block
        while True:
            if key is None:
                found = buffer.find(_OPEN)
                skipped = found if found >= 0 else max(len(buffer) - len(_OPEN) + 1, 0)
                del buffer[:skipped]
                base += skipped
                if found < 0:
                    break
                if (key := dump.key(base)) is None:
                    return
                searched, dropped_bytes = len(_OPEN), 0
            closed = buffer.find(_CLOSE, searched)
            another = buffer.find(_OPEN, searched, closed if closed >= 0 else len(buffer))
            if another >= 0:  # within a page's text the tag would be escaped
                length = another
                yield Record(key, length, reason="bad_record", detail="the page has no end")
            elif closed >= 0:
                length = closed + len(_CLOSE)
                if dropped_bytes:
                    yield Record(key, 0, reason="bad_record", detail=f"a page of {dropped_bytes + length} bytes")
                else:
                    yield _article(key, bytes(buffer[:length]), max_characters)
            else:
                searched = max(len(buffer) - len(_CLOSE) + 1, searched)
                if len(buffer) > MAX_PAGE_BYTES:
                    del buffer[:searched]
                    base, dropped_bytes, searched = base + searched, dropped_bytes + searched, 0
                break
            del buffer[:length]
            base, key = base + length, None
    if key is not None:
        yield Record(key, min(len(buffer), READ_BYTES), reason="bad_record", detail="the page has no end")


def _article(key: str, page: bytes, max_characters: int) -> Record:
    """A page as an article, or with the reason why it is none."""
    record = Record(key, len(page), metadata={"byte": key})
    try:
        root = ElementTree.fromstring(page.decode())
    except UnicodeDecodeError as error:
        record.reject("not_utf8", f"byte 0x{page[error.start]:02x} at {error.start}")
        return record
    except ElementTree.ParseError as error:
        record.reject("bad_record", f"not a page: {error}"[:300])
        return record
    # Of a page with its history the last revision stays.
    elements = {name: found[-1] for path, name in _FIELDS.items() if (found := root.findall(path))}
    values = {name: element.text or "" for name, element in elements.items()}
    text = values.pop("text", "")
    namespace, model = values.pop("namespace", "0").strip(), values.pop("model", "wikitext").strip()
    record.metadata.update({name: value[:2000] for name, value in values.items()})
    redirect, title = root.find("redirect"), values.get("title", "")[:200]
    if "text" in elements and len(elements["text"]):
        record.reject("bad_record", "not a page: elements within its text")
    elif namespace != "0":
        record.reject("not_article", f"namespace {namespace[:20]}: {title}")
    elif redirect is not None or text[:20].lstrip().upper().startswith("#REDIRECT"):
        target = "" if redirect is None else redirect.get("title", "")
        record.reject("redirect", f"{title} -> {target[:200]}")
    elif model != "wikitext":
        record.reject("not_article", f"a page of kind {model[:40]}")
    elif len(text) > max_characters:
        record.reject("too_long", f"{len(text)} characters of wikitext")
    else:
        try:
            record.text = plain_text(text)
        except NotText as error:
            record.reject("bad_record", str(error))
    return record


# --- Wikitext

FACTS = tomllib.loads(Path(__file__).with_name("wikitext.toml").read_text(encoding="utf-8"))
HIDDEN = frozenset(FACTS["hidden"])  # elements that go with what they hold
FILE_PREFIXES = frozenset(FACTS["file_prefixes"])  # of pictures and categories, in the largest Wikipedias
# elements in which wikitext markup may be literal; code keeps its lines
LITERAL = frozenset({"nowiki", "pre", "syntaxhighlight", "source", "code"})
MAX_NESTING = 200  # deeper templates, tables and links are dropped with what encloses them
SHOWN: dict[str, int] = FACTS["shown"]  # templates that show one of their arguments, and which
MAX_PARTS = 40  # templates of more pieces are boxes
# Marks in a page; the longest of Wikipedia have half as many. More would take longer than a second.
MAX_MARKS = 400_000
MAX_TAG = 2000  # characters of a tag with its attributes
_MARK = re.compile(
    r"<!--|\{\{|\}\}|\{\||\|\}|\[\[|\]\]|\[(?=(?:https?:|ftp:|mailto:|//))|\]|\|"
    r"|</?[A-Za-z][A-Za-z0-9]{0,20}(?=[\s/>])|'{2,5}|__[A-Z]{3,24}__|~{3,5}"
)
_ADDRESS = re.compile(r"^[^\s\]]{1,2000}")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-.{0,10})?", re.DOTALL)
_BLANKS = re.compile(r"\n{3,}")
_SPACES = re.compile(r"[ \t]{2,}")
_EMPTY_BRACKETS = re.compile(r" ?\([\s,;:]{0,20}\)")
_OPENERS = {"}}": "{{", "|}": "{|", "]]": "[[", "]": "["}
_INDENT = re.compile(r"^[*#:;]{1,20}")


@dataclass(slots=True)
class _Open:
    """Something that began and has not ended: its mark, and the text within it so far."""

    mark: str
    parts: list[str] = field(default_factory=list)
    bar: int = -1  # where in `parts` the text after the last bar begins; -1 without one


def plain_text(wikitext: str) -> str:
    """The text a reader of the page sees, without tables, boxes, references and pictures. Raises NotText when there are
    more marks than a page has."""
    page = _Page(wikitext)
    page.scan()
    while len(page.stack) > 1:  # what never ended: its text stays, except of templates and tables
        open_ = page.stack.pop()
        if open_.mark in ("[[", "["):
            page.stack[-1].parts.extend((open_.mark, *open_.parts))
        elif open_.mark == "{{" and len("".join(open_.parts)) > 2000:
            page.stack[-1].parts.extend(open_.parts)  # an unbalanced template must not swallow the page
    return _lines("".join(page.stack[0].parts))


class _Page:
    """A page and what is open at the place that the scan has reached."""

    def __init__(self, text: str) -> None:
        self.text = text
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
        if mark == "<!--":
            closed = self._find("-->", after)
            return len(self.text) if closed < 0 else closed + 3
        if mark[0] == "<":
            return self._tag(found)
        if mark in _OPENERS:
            return self._close(mark, after)
        if mark in _OPENERS.values():
            if len(self.stack) <= MAX_NESTING:
                self.stack.append(_Open(mark))
        elif mark == "|":
            if top.mark == "[[":
                top.bar = len(top.parts)
            elif top.mark != "{|":
                top.parts.append(_BAR if top.mark == "{{" else mark)
        return after  # emphasis, switches such as __NOTOC__, signatures

    def _close(self, mark: str, after: int) -> int:
        opener, stack, top = _OPENERS[mark], self.stack, self.stack[-1]
        if mark == "|}" and top.mark == "{{" and self.text[after : after + 1] == "}":
            return after - 1  # `|}}` ends a template with an empty last argument
        if top.mark == opener:
            stack.pop()
            if opener == "[[":
                stack[-1].parts.append(_label(top))
            elif opener == "[":
                stack[-1].parts.append(_label_of_url("".join(top.parts)))
            elif opener == "{{" and len(top.parts) <= MAX_PARTS:
                stack[-1].parts.append(_shown_by_template("".join(top.parts)))
        elif mark == "]]" and top.mark == "[":  # `[http://x label]]`
            stack.pop()
            stack[-1].parts.append(_label_of_url("".join(top.parts)))
            return after - 1
        elif opener in ("{{", "{|") and any(open_.mark == opener for open_ in stack):
            while stack.pop().mark != opener:  # links left open within a template go with it
                pass
        elif mark in ("]", "]]") and top.mark not in ("{{", "{|"):
            top.parts.append(mark)
        return after

    def _tag(self, found: re.Match[str]) -> int:
        """An HTML or extension tag: some go with what they hold, some hold text as it is, the others just go."""
        name, parts = found[0].lstrip("</").lower(), self.stack[-1].parts
        closed = self.text.find(">", found.end(), found.end() + MAX_TAG)
        if closed < 0:
            parts.append(found[0])
            return found.end()
        after = closed + 1
        if name in ("br", "p", "div", "li", "tr", "blockquote"):
            parts.append("\n")
            return after
        if found[0].startswith("</") or self.text[closed - 1] == "/" or name not in HIDDEN | LITERAL:
            return after
        end = self._find(f"</{name}", after)
        if end < 0:
            return after
        if name in LITERAL:
            inside = self.text[after:end]
            block = name != "nowiki" and "\n" in inside
            parts.append(f"\n{_KEEP}{inside.replace(chr(10), chr(10) + _KEEP)}\n" if block else inside)
        closed = self.text.find(">", end, end + MAX_TAG)
        return closed + 1 if closed >= 0 else end + len(name) + 2


def _shown_by_template(inside: str) -> str:
    """The text of templates that only mark text; nothing for all others."""
    name, *arguments = (part.strip() for part in inside.split(_BAR))
    positional = [argument for argument in arguments if "=" not in argument]
    name = name.casefold().replace("_", " ")
    shown = SHOWN.get(name, 1 if name.startswith("lang-") else 0)
    if name in ("convert", "cvt") and len(positional) >= 2:
        return f"{positional[0]} {positional[1]}"
    return positional[shown - 1] if shown and len(positional) >= shown else ""


def _label(link: _Open) -> str:
    """What a link shows: the text after its last bar, else its target; nothing for pictures, categories and the same
    page in another language."""
    has_bar = link.bar >= 0
    target = "".join(link.parts[: link.bar] if has_bar else link.parts)
    prefix, colon, _ = target.partition(":")
    folded = prefix.strip().casefold()
    if colon and (folded in FILE_PREFIXES or (not has_bar and _LANGUAGE.fullmatch(folded))):
        return ""
    shown = "".join(link.parts[link.bar :]) if has_bar else ""
    return (shown or target).removeprefix(":")


def _label_of_url(inside: str) -> str:
    """What an external link shows: the words after the address."""
    return _ADDRESS.sub("", inside, count=1).strip()


# of the private use area, taken out again: put before lines of code, which are not to be changed; and where the
# arguments of a template part
_KEEP, _BAR = "\ue000", "\ue001"


_UNMARKED = dict.fromkeys(map(ord, (_KEEP, _BAR)))


def _lines(text: str) -> str:
    """Headings, lists and indentation by lines; entities; what removed templates leave behind."""
    lines: list[tuple[int, str]] = []
    for line in html.unescape(text).split("\n"):
        level = 0
        if line.startswith(_KEEP):
            lines.append((0, line[1:]))
            continue
        line = line.replace("\xa0", " ").rstrip()
        if line.startswith("=") and line.endswith("=") and len(line) > 2:
            level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
            line = line[level:-level].strip()
            level *= bool(line)
        elif line.startswith("----"):
            line = line.lstrip("-")
        elif marks := _INDENT.match(line):
            depth, rest = marks.end(), line[marks.end() :].strip()
            bullet = "  " * (depth - 1) + "- " if line[depth - 1] in "*#" else ""
            line = bullet + rest if rest else ""
        else:
            line = _SPACES.sub(" ", line)
        lines.append((level, _EMPTY_BRACKETS.sub("", line)))
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
