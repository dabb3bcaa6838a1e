"""Wiki dumps: pages become articles in any packing, and damage affects one page and is reported."""

import bz2
import io
import itertools
import resource
from pathlib import Path

import pytest

from bessemer.corpus.document import Document
from bessemer.corpus.readers.formats.mediawiki import read_dump
from bessemer.corpus.readers.inflate import Damaged, InflatedFile
from tests.corpus.corpus_samples import prose
from tests.corpus.mediawiki_samples import HEAD, dump, page


def read(data: bytes, compression: str = "", end: int | None = None) -> list[Document]:
    file = io.BytesIO(data)
    return list(read_dump(io.BufferedReader(InflatedFile(file, compression)) if compression else file, end, 4_000_000))


def test_pages_become_articles() -> None:
    data = dump(page(1), page(2, "&lt;b&gt;Bold&lt;/b&gt; &amp;amp; [[link]]"))
    first, second = read(data)
    assert (first.text, second.text) == (prose(1, 40), "Bold & link")
    assert first.metadata == {"title": "Title 1", "page": "1", "revision": "91", "date": "2024-01-01T00:00:00Z"}
    assert (first.key, second.key) == ("page 1", "page 2")
    headless = "".join(map(page, range(3))).encode()  # a part of a dump, without a root
    assert [record.text for record in read(headless)] == [prose(number, 40) for number in range(3)]


def test_pages_that_are_not_articles_are_counted() -> None:
    redirect = page(3, "#REDIRECT [[Title 1]]", more='    <redirect title="Title 1" />\n')
    module = page(4).replace("<model>wikitext<", "<model>Scribunto<")
    german = page(6, "#WEITERLEITUNG [[Title 1]]")
    found = read(dump(page(2, namespace=1), redirect, page(5, "#redirect [[x]]"), german, module, page(1)))
    reasons = ["not_article", "redirect", "redirect", "redirect", "not_article", None]
    assert [record.reason for record in found] == reasons
    assert found[0].detail == "namespace 1: Title 2"
    assert found[1].detail == "Title 3 -> Title 1"


def test_links_to_files_and_categories_use_the_dumps_namespaces() -> None:
    names = (
        '<namespace key="6" case="first-letter">Lêer</namespace><namespace key="14" case="x">Kat &amp; x</namespace>'
    )
    text = prose(1, 20) + " [[Lêer:A.jpg|thumb|a cat]][[kat & x:Cats]][[Onbekend: Cats]] [[image:b.png]]"
    raw = dump(page(1, text.replace("&", "&amp;")), page(2)).replace(
        b"<siteinfo/>", f"<siteinfo>{names}</siteinfo>".encode()
    )
    for data, compression in ((raw, ""), (bz2.compress(raw), "bzip2")):
        assert read(data, compression)[0].text == prose(1, 20) + " Onbekend: Cats"


def test_the_last_revision_of_a_history_is_kept() -> None:
    older = "    <revision><id>1</id><text>the older text</text></revision>\n"
    (record,) = read(dump(page(1, more=older)))
    assert record.text == prose(1, 40)


BAD = {
    "not well-formed": (page(9).replace("</title>", "</titel>"), "bad_record"),
    "an entity": (page(9, "&bomb;"), "bad_record"),
    "a document type": (page(9).replace("<title>", '<!DOCTYPE x [<!ENTITY a "b">]><title>'), "bad_record"),
    "deep": (page(9, "<a>" * 5000 + "</a>" * 5000), "bad_record"),
    "an element in the text": (page(9, "<b>bold</b>"), "bad_record"),
    "11 MB of text": (page(9, "x" * 11_000_000), "bad_record"),
    "Latin-1": (page(9, "caf\udce9 au lait"), "not_utf8"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_page_loses_only_itself(bad: str) -> None:
    damaged, reason = BAD[bad]
    data = (HEAD + page(1) + damaged + page(2) + page(3) + "</mediawiki>").encode(errors="surrogateescape")
    found = read(data)
    assert [record.reason for record in found] == [None, reason, None, None]
    assert [found[0].text, found[2].text, found[3].text] == [prose(1, 40), prose(2, 40), prose(3, 40)]
    if bad == "not well-formed":
        assert found[1].detail.startswith("line 19: ")  # of the dump


def test_a_page_without_an_end_is_counted() -> None:
    found = read(dump(page(1), page(9).replace("</page>", ""), page(2)))
    assert [record.text for record in found] == [prose(1, 40), "", prose(2, 40)]
    assert [record.reason for record in found] == [None, "bad_record", None]
    cut = read(dump(page(1), page(2))[:-300])
    assert [record.reason for record in cut] == [None, "bad_record"]


def test_entities_declared_in_the_head_are_never_expanded() -> None:
    lines = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    head = f'<!DOCTYPE mediawiki [<!ENTITY l0 "lol">{lines}]>\n'
    found = read(head.encode() + dump(page(1, "&l9;"), page(2)))
    assert [record.reason for record in found] == ["bad_record", None]


def test_memory_does_not_grow_with_the_dump() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    many = (HEAD + "".join(map(page, range(5_000))) + "</mediawiki>").encode()
    pages = read_dump(io.BytesIO(many), None, 10)  # all too long, so nothing is parsed
    next(pages)
    before = resident()
    assert sum(1 for _ in itertools.islice(pages, 4_990)) == 4_990
    assert resident() - before < 5 << 20


def multistream(pages_each: int) -> bytes:
    """Pack like Wikipedia: the head, some pages per stream, the end."""
    parts = ["".join(map(page, range(n, n + pages_each))) for n in range(0, 60, pages_each)]
    return b"".join(bz2.compress(part.encode()) for part in [HEAD, *parts, "</mediawiki>"])


def in_blocks(size: int) -> bytes:
    """Pack like a parallel compressor: streams that end anywhere."""
    data = dump(*map(page, range(60)))
    return b"".join(bz2.compress(data[start : start + size]) for start in range(0, len(data), size))


@pytest.mark.parametrize("data", [multistream(6), in_blocks(137)], ids=["pages", "blocks"])
def test_concatenated_streams_are_read(data: bytes) -> None:
    whole = read(data, "bzip2")
    assert [record.text for record in whole] == [prose(number, 40) for number in range(60)]
    assert len({record.key for record in whole}) == 60
    some = read(data, "bzip2", len(dump(*map(page, range(20)))))
    assert some == whole[: len(some)]
    assert 19 <= len(some) <= 21


def test_damage_to_a_stream_loses_only_the_rest_of_it() -> None:
    data = multistream(6)
    starts = [at for at in range(len(data)) if data[at : at + 10] == b"BZh91AY&SY"]
    broken = bytearray(data)
    broken[starts[3] + 200] ^= 0xFF
    pages = read_dump(io.BufferedReader(InflatedFile(io.BytesIO(broken), "bzip2")), None, 4_000_000)
    assert [next(pages).text for _ in range(12)] == [prose(number, 40) for number in range(12)]
    with pytest.raises(Damaged):
        next(pages)


def test_invalid_or_non_utf8_dumps_are_counted() -> None:
    wiki = "<mediawiki>\n<page><title>A</title><ns>0</ns><id>1</id></page>\n</mediawiki>"
    for raw in (wiki.encode("utf-16"), b"<rss><item>text</item></rss>"):
        for data, compression in ((raw, ""), (bz2.compress(raw), "bzip2")):
            assert [record.reason for record in read(data, compression)] == ["wrong_format"]
