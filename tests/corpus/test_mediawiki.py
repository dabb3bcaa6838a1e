"""Wiki dumps: pages are cut and parsed one by one, however the dump is packed and wherever it is damaged."""

import bz2
import gzip
import io

import pytest

from bessemer.corpus import mediawiki
from bessemer.corpus.document import Record
from tests.corpus.corpus_samples import prose

HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">\n<siteinfo/>\n'


def page(number: int, text: str | None = None, namespace: int = 0, more: str = "") -> str:
    words = text if text is not None else prose(number, 40)
    return (
        f"  <page>\n    <title>Title {number}</title>\n    <ns>{namespace}</ns>\n    <id>{number}</id>\n{more}"
        f"    <revision>\n      <id>9{number}</id>\n      <timestamp>2024-01-01T00:00:00Z</timestamp>\n"
        f'      <contributor><id>5</id></contributor>\n      <model>wikitext</model>\n      <text xml:space="preserve">'
        f"{words}</text>\n    </revision>\n  </page>\n"
    )


def dump(*pages: str) -> bytes:
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()


def read(data: bytes, compression: str = "", end: int | None = None) -> list[Record]:
    return list(mediawiki.read(io.BytesIO(data), end, compression, 4_000_000))


def test_articles() -> None:
    data = dump(page(1), page(2, "&lt;b&gt;Bold&lt;/b&gt; &amp;amp; [[link]]"))
    first, second = read(data)
    assert (first.text, second.text) == (prose(1, 40), "Bold & link")
    assert first.metadata == {
        "byte": str(data.index(b"<page>")),
        "title": "Title 1",
        "page": "1",
        "revision": "91",
        "date": "2024-01-01T00:00:00Z",
    }
    assert data[int(second.key) :].startswith(b"<page>")


def test_what_is_no_article_is_counted() -> None:
    redirect = page(3, "#REDIRECT [[Title 1]]", more='    <redirect title="Title 1" />\n')
    module = page(4).replace("<model>wikitext<", "<model>Scribunto<")
    german = page(6, "#WEITERLEITUNG [[Title 1]]")
    found = read(dump(page(2, namespace=1), redirect, page(5, "#redirect [[x]]"), german, module, page(1)))
    reasons = ["not_article", "redirect", "redirect", "redirect", "not_article", None]
    assert [record.reason for record in found] == reasons
    assert found[0].detail == "namespace 1: Title 2"
    assert found[1].detail == "Title 3 -> Title 1"


def test_links_to_files_and_categories_are_those_of_the_dump() -> None:
    names = (
        '<namespace key="6" case="first-letter">Lêer</namespace><namespace key="14" case="x">Kat &amp; x</namespace>'
    )
    text = prose(1, 20) + " [[Lêer:A.jpg|thumb|a cat]][[kat & x:Cats]][[Onbekend: Cats]] [[image:b.png]]"
    raw = dump(page(1, text.replace("&", "&amp;")), page(2)).replace(
        b"<siteinfo/>", f"<siteinfo>{names}</siteinfo>".encode()
    )
    for data, compression in ((raw, ""), (bz2.compress(raw), "bzip2")):
        assert read(data, compression)[0].text == prose(1, 20) + " Onbekend: Cats"


def test_of_a_history_the_last_revision_stays() -> None:
    older = "    <revision><id>1</id><text>the older text</text></revision>\n"
    (record,) = read(dump(page(1, more=older)))
    assert record.text == prose(1, 40)


BAD = {
    "not well-formed": page(9).replace("</title>", "</titel>"),
    "no end": page(9).replace("</page>", ""),
    "an entity": page(9, "&bomb;"),
    "a document type": page(9).replace("<title>", '<!DOCTYPE x [<!ENTITY a "b">]><title>'),
    "deep": page(9, "<a>" * 5000 + "</a>" * 5000),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_damaged_page_costs_one(bad: str) -> None:
    found = read(dump(page(1), BAD[bad], page(2)))
    assert [record.reason for record in found] == [None, "bad_record", None]
    assert [found[0].text, found[2].text] == [prose(1, 40), prose(2, 40)]


def test_entities_declared_in_the_head_are_never_expanded() -> None:
    lines = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    head = f'<!DOCTYPE mediawiki [<!ENTITY l0 "lol">{lines}]>\n'
    found = read(head.encode() + dump(page(1, "&l9;"), page(2)))
    assert [record.reason for record in found] == ["bad_record", None]


def test_bytes_that_are_not_utf8_cost_one() -> None:
    data = dump(page(1), page(2, "MARK"), page(3)).replace(b"MARK", b"caf\xe9")
    assert [record.reason for record in read(data)] == [None, "not_utf8", None]


def test_a_page_too_long_costs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mediawiki, "MAX_PAGE_BYTES", 5000)
    monkeypatch.setattr(mediawiki, "READ_BYTES", 1000)
    long = page(2, "x" * 50_000)
    found = read(dump(page(1), long, page(3)))
    assert [record.reason for record in found] == [None, "bad_record", None]
    assert found[1].detail == f"a page of {len(long) - 3} bytes"


def multistream(pages_each: int) -> bytes:
    """As Wikipedia packs it: the head, some pages a stream, the end."""
    parts = ["".join(map(page, range(n, n + pages_each))) for n in range(0, 60, pages_each)]
    return b"".join(bz2.compress(part.encode()) for part in [HEAD, *parts, "</mediawiki>"])


def in_blocks(size: int) -> bytes:
    """As a parallel packer does it: streams that end anywhere."""
    data = dump(*map(page, range(60)))
    return b"".join(bz2.compress(data[start : start + size]) for start in range(0, len(data), size))


@pytest.mark.parametrize(
    "data", [multistream(6), in_blocks(1500), in_blocks(37)], ids=["pages", "blocks", "tiny blocks"]
)
def test_streams_follow_each_other(data: bytes) -> None:
    whole = read(data, "bzip2")
    assert [record.text for record in whole] == [prose(number, 40) for number in range(60)]
    assert len({record.key for record in whole}) == 60
    some = read(data, "bzip2", len(dump(*map(page, range(20)))))
    assert [(record.key, record.text) for record in some] == [(one.key, one.text) for one in whole[: len(some)]]
    assert 19 <= len(some) <= 21


def test_damage_to_a_stream_costs_its_pages() -> None:
    data = multistream(6)
    starts = [at for at in range(len(data)) if data[at : at + 10] == b"BZh91AY&SY"]
    broken = bytearray(data)
    broken[starts[3] + 200] ^= 0xFF
    found = read(bytes(broken), "bzip2")
    kept = {record.text for record in found if record.reason is None}
    assert kept == {prose(number, 40) for number in range(60) if number not in range(12, 18)}
    (bad,) = [record for record in found if record.reason]
    assert (bad.reason, bad.key) == ("bad_record", f"{starts[3]}!")


@pytest.mark.parametrize(("compression", "pack"), [("gzip", gzip.compress), ("bzip2", bz2.compress)])
def test_a_dump_cut_short_keeps_what_came(compression: str, pack) -> None:
    data = pack(dump(*map(page, range(20_000, 20_600))))
    found = read(data[: len(data) // 2], compression)
    kept = [record.text for record in found if record.reason is None]
    assert kept == [prose(20_000 + number, 40) for number in range(len(kept))]
    assert found[-1].reason == "bad_record"
    assert "cut short" in found[-1].detail
    if compression == "gzip":
        assert 250 < len(kept) < 350


def test_a_dump_that_is_not_utf8_and_other_xml_are_counted() -> None:
    page = "<mediawiki>\n<page><title>A</title><ns>0</ns><id>1</id></page>\n</mediawiki>"
    for raw, reason in (
        (page.encode("utf-16"), "UTF-16-LE"),
        (b"<rss><item>text</item></rss>", "not a MediaWiki dump"),
    ):
        (record,) = mediawiki.read(io.BytesIO(raw), None, "", 10_000)
        assert record.reason == "wrong_format" and reason in record.detail, record
        packed = bz2.compress(raw)
        (record,) = mediawiki.read(io.BytesIO(packed), None, "bzip2", 10_000)
        assert record.reason == "wrong_format" and reason in record.detail, record
