"""Crawl archives: the records that become documents, and the loss from each kind of damage."""

import bz2
import gzip
import io
import random
import resource
import zlib
from functools import partial
from pathlib import Path

import brotli
import pytest
import zstandard

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import build_reader
from bessemer.corpus.readers.formats import warc
from bessemer.recipe import Source
from tests.corpus.corpus_samples import html_page, http, page_line, recipe, warc_record
from tests.corpus.warc_samples import INFO, page

READER = build_reader(Source(name="s", paths=("a",)), "warc")
NO_DEDUP = "exact = false\nminhash = false"


def read(data: bytes, end: int | None = None) -> list[Document]:
    return list(READER.read_archive(io.BytesIO(data), end))


def kept(records: list[Document]) -> list[str]:
    return [record.text for record in records if record.reason is None]


def one(block: bytes) -> Document:
    (record,) = read(warc_record(block))
    return record


def test_only_responses_are_documents() -> None:
    others = [warc_record(b"GET / HTTP/1.1\r\n\r\n", "request"), warc_record(b"fetchTimeMs: 7\r\n", "metadata")]
    for pack in (bytes, gzip.compress, zstandard.compress):
        parts = [INFO, others[0], page(1), others[1], page(2)]
        data = b"".join(map(pack, parts))
        records = read(data)
        assert kept(records) == [page_line(1), page_line(2)]
        offsets = [len(b"".join(map(pack, parts[:number]))) for number in (2, 4)]
        assert [record.key for record in records] == list(map(str, offsets))
        assert records[0].metadata == {
            "byte": str(offsets[0]), "url": "http://a.example/1", "date": "2024-05-06T07:08:09Z",
            "record_id": f"urn:uuid:{len(http(html_page(1)))}", "content_type": "text/html; charset=utf-8",
        }  # fmt: skip


def test_records_that_are_not_pages_are_counted_by_type(data: Path, build) -> None:
    others = ["request", "metadata", "metadata", "revisit", "warcinfo"]
    archive = b"".join(page(number) + warc_record(b"x: y\r\n", kind) for number, kind in enumerate(others))
    (data / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, (archive[:3000], archive[3000:]))))
    documents, rejected, statistics = build(recipe({"name": "s", "paths": [str(data)]}))
    assert len(documents) + len(rejected) == statistics["totals"]["documents_in"]
    assert statistics["totals"]["tables"]["passed_over"] == {"metadata": 2, "request": 1, "revisit": 1, "warcinfo": 1}


def archived(kind: str, content_type: str, body: bytes) -> bytes:
    """Return a record without HTTP."""
    return warc_record(body, kind).replace(b"application/http; msgtype=response", content_type.encode())


def test_records_without_http_are_read_by_their_type() -> None:
    text = "größer, später – für 5 €\nand more"
    found = read(
        archived("conversion", "text/plain", text.encode())
        + archived("resource", "text/html; charset=utf-8", html_page(1))
        + archived("resource", 'text/plain; charset="iso-8859-1"', text[:14].encode("latin-1"))
        + archived("resource", "image/png", b"\x89PNG")
        + archived("response", "text/dns", b"20240506 a.example. 1.2.3.4")
    )
    assert kept(found) == [text, page_line(1), text[:14]]
    assert [record.reason for record in found[3:]] == ["not_html", "not_html"]
    assert found[0].metadata["url"] == "http://a.example/"


@pytest.mark.parametrize(
    ("block", "reason", "detail"),
    [
        (http(b" <!DOCTYPE html><p>A page that does not say so.", content_type=""), None, ""),
        (http(html_page(1), content_type="application/xhtml+xml"), None, ""),
        (http(b"x", status="404 Not Found"), "http_status", "404"),
        (http(b"", status="301 Moved"), "http_status", "301"),
        (http(b"%PDF-1.4", content_type="application/pdf"), "not_html", "application/pdf"),
        (http(b'{"a": 1}', content_type="application/json; charset=utf-8"), "not_html", "application/json"),
        (http(b"\x89PNG", content_type=""), "not_html", "no content type"),
        (b"no answer at all", "http_status", "no status"),
        (http(b"<b>" * 5000), "bad_record", "HTML nested too deeply: 5000 formatting elements are open at one time"),
        (http(b"<p>" + b"x" * (9 << 20)), "too_long", f"more than {8 << 20} bytes of HTML"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_responses_that_are_not_pages_are_counted(block: bytes, reason: str, detail: str) -> None:
    record = one(block)
    assert (record.reason, record.detail) == (reason, detail)


def chunked(
    body: bytes, size: int = 7, line_end: bytes = b"\r\n", extension: bytes = b"", last: bytes = b"0\r\n\r\n"
) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x%b%b%b%b" % (len(part), extension, line_end, part, line_end) for part in parts) + last


PACK = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": partial(brotli.compress, quality=2),
    "zstd": zstandard.compress,
}
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize("coding", PACK)
def test_bodies_are_decoded(coding: str) -> None:
    html, named, packed = html_page(1), f"Content-Encoding: {coding}", PACK[coding](html_page(1))
    bodies = [(packed, [named]), (chunked(packed), [named, CHUNKED]), (chunked(html), [CHUNKED])]
    # Stored decoded, with the original headers.
    bodies += [(html, [named]), (html, [CHUNKED]), (html, [named, CHUNKED]), (chunked(html), [named, CHUNKED])]
    bodies += [(packed, [named, CHUNKED])]
    for body, headers in bodies:
        record = one(http(body, *headers))
        assert (record.text, "damage" in record.metadata) == (page_line(1), False)


WORDS = (
    b"<html><body><main><p>" + b" ".join(b"word%dth" % number for number in range(3000)) + b"</p></main></body></html>"
)
WORDS_TEXT = " ".join(f"word{number}th" for number in range(3000))
IRREGULAR = {
    "extensions": chunked(WORDS, 500, extension=b';name="a;b"'),
    "LF for CRLF": chunked(WORDS, 500, b"\n", last=b"0\n\n"),
    "trailers": chunked(WORDS, 500, last=b"0\r\nExpires: never\r\n\r\n"),
    "no last chunk": chunked(WORDS, 500, last=b""),
    "no line end behind chunks": chunked(WORDS, 500).replace(b"\r\n1f4\r\n", b"1f4\r\n"),
    "a size that is wrong": chunked(WORDS, 500).replace(b"1f4\r\n", b"1e3\r\n", 1),
    "zeros before sizes": b"0000" + chunked(WORDS, 500),
}


@pytest.mark.parametrize("how", IRREGULAR)
@pytest.mark.parametrize("headers", [[CHUNKED], []])
def test_irregular_chunks_leave_no_sizes_in_the_text(how: str, headers: list[str]) -> None:
    record = one(http(IRREGULAR[how], *headers))
    assert WORDS_TEXT.startswith(record.text)
    assert record.reason or len(record.text) == len(WORDS_TEXT) or record.metadata["damage"] == warc.CUT_CHUNKS


@pytest.mark.parametrize("coding", ["", *PACK])
def test_a_truncated_body_keeps_the_received_text(coding: str) -> None:
    draw = random.Random(4)
    text = " ".join("".join(draw.choices("abcdefghij", k=7)) for _ in range(20_000))
    html = f"<html><body><main><p>{text}</p></main></body></html>".encode()
    named = [f"Content-Encoding: {coding}"] * bool(coding)
    packed = PACK.get(coding, bytes)(html)
    for body, headers in ((chunked(packed, 500), [CHUNKED]), (packed, [f"Content-Length: {len(packed)}"])):
        whole, cut = (one(http(body[:end], *headers, *named)) for end in (len(body), len(body) // 2))
        assert (whole.text, "damage" in whole.metadata) == (text, False)
        assert text.startswith(cut.text)
        assert 0.3 * len(text) < len(cut.text) < 0.7 * len(text) or (coding == "zstd" and cut.reason)
        assert cut.reason or cut.metadata["damage"].startswith(("chunked body cut", "body cut"))
    archived = warc_record(http(b"<p>caf\xc3\xa9 caf\xc3")).replace(
        b"\r\nWARC-Date", b"\r\nWARC-Truncated: length\r\nWARC-Date"
    )
    (record,) = read(archived)
    assert (record.text, record.metadata["damage"]) == ("café caf", "truncated by the crawler: length")


@pytest.mark.parametrize("coding", ["gzip", "compress"])
def test_a_body_that_cannot_be_decoded_is_rejected(coding: str) -> None:
    assert one(http(b"\x00\x01\x02" * 99, f"Content-Encoding: {coding}")).reason == "bad_record"
    assert one(http(gzip.compress(WORDS))).reason == "bad_record"  # no header names its compression


@pytest.mark.fault(30)
@pytest.mark.parametrize("coding", PACK)
def test_a_decompression_bomb_in_a_page_is_inflated_up_to_the_limit(coding: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = PACK[coding](b"<p>" + bytes(150 << 20))
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert one(http(body, f"Content-Encoding: {coding}")).reason == "too_long"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(before, made) < 60_000


@pytest.mark.parametrize(
    ("text", "charset", "header", "meta"),
    [
        ("Zażółć gęślą jaźń, mój miły przyjacielu", "iso8859-2", "iso-8859-2", ""),
        ("Zażółć gęślą jaźń, mój miły przyjacielu", "cp1250", "", "windows-1250"),
        ("В чащах юга жил бы цитрус? Да, но фальшивый экземпляр!" * 3, "koi8-r", "", ""),
        ("いろはにほへと ちりぬるを わかよたれそ つねならむ" * 3, "shift_jis", "", ""),
        ("いろはにほへと ちりぬるを", "iso2022_jp", "", "iso-2022-jp"),
        ("Grüße aus Köln", "utf-8", "iso-8859-1", "iso-8859-1"),
        ("“quotes” of Windows", "cp1252", "iso-8859-1", ""),
        ("Grüße aus Köln", "utf-16", "utf-8", ""),
    ],
)
def test_charsets_of_pages_are_detected(text: str, charset: str, header: str, meta: str) -> None:
    page = f'<html><meta charset="{meta}"><body><main><p>{text}</p></main></body></html>'
    content_type = "text/html" + (f"; charset={header}" if header else "")
    assert one(http(page.encode(charset), content_type=content_type)).text == text


def lying(length: int) -> bytes:
    return warc_record(http(html_page(9)), length=length)


GARBAGE = b"\x07 some bytes that are no record \x00\xff" * 9
DAMAGES = {
    "a length too long": lying(10**6),
    "a length too short": lying(100),
    "a length of its own kind": page(9).replace(b"Content-Length: ", b"Content-Length: x"),
    "garbage": GARBAGE,
    "a header without an end": b"WARC/1.0\r\nWARC-Type: response\r\n" + b"X: y\r\n" * 20_000,
}


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


PACKED = {
    "a member cut short": gzip.compress(page(9))[:200],
    "a flipped bit": flipped(gzip.compress(page(9)), 150),
    "a wrong checksum": flipped(gzip.compress(page(9)), len(gzip.compress(page(9))) - 6),
    "a bomb": gzip.compress(warc_record(b" " * (150 << 20), "metadata")),
}
CASES = [(bytes, bad) for bad in DAMAGES.values()] + [(gzip.compress, bad) for bad in PACKED.values()]


@pytest.mark.parametrize(("pack", "bad"), CASES, ids=[*DAMAGES, *(f"packed, {name}" for name in PACKED)])
@pytest.mark.fault(24)
def test_damage_ends_an_archive_and_the_loss_is_reported(pack, bad: bytes, data: Path, build) -> None:
    parts = [*map(pack, (INFO, page(1), page(2))), bad, *map(pack, (page(3), page(4)))]
    (data / "a.warc").write_bytes(b"".join(parts))
    (data / "b.warc").write_bytes(page(5))
    documents, rejected, statistics = build(recipe({"name": "s", "paths": [str(data)]}, dedup=NO_DEDUP))
    assert {row["text"] for row in documents} >= {page_line(1), page_line(5)}
    assert not {page_line(number) for number in (3, 4, 9)} & {row["text"] for row in documents}
    assert [(row["path"], row["reason"]) for row in rejected] == [("data/a.warc", "bad_record")]
    # The record before the damage is lost if the damage may be in it.
    is_kept = page_line(2) in {row["text"] for row in documents}
    place = len(b"".join(parts[: 3 if is_kept else 2]))
    assert rejected[0]["place"] == f"{place}!"
    assert f"{sum(map(len, parts)) - place} of {sum(map(len, parts))} bytes, from {place} on" in rejected[0]["detail"]
    assert statistics["totals"]["documents_in"] == len(documents) + 1


def test_a_truncated_file_keeps_its_complete_records() -> None:
    found = read(b"".join(map(gzip.compress, [INFO, page(1), page(2)]))[:-30])
    assert [(record.text, record.reason) for record in found] == [(page_line(1), None), ("", "bad_record")]
    together = gzip.compress(INFO + page(1) + page(2) + page(3))
    assert kept(read(together[:-40])) == [page_line(1), page_line(2)]
    for size in (len(INFO) + 50, len(INFO) + 300):  # in the header, and in the page
        assert [record.reason for record in read((INFO + page(1))[:size])] == ["bad_record"]


def test_a_file_that_cannot_be_read_raises() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError(5, "Input/output error")
            return super().read(size)

    with pytest.raises(OSError, match="Input/output"):
        list(READER.read_archive(Failing(b"".join(map(page, range(500)))), None))


@pytest.mark.parametrize("pack", ["", "by record", "as a whole"])
def test_only_the_requested_part_of_an_archive_is_read(pack: str) -> None:
    parts = [INFO, *map(page, range(60))]
    data = b"".join(map(gzip.compress if pack else bytes, [b"".join(parts)] if pack == "as a whole" else parts))
    whole = read(data)
    some = read(data, sum(map(len, parts)) // 3)
    assert len(whole) == 60 and 17 <= len(some) <= 22
    assert [(record.key, record.text) for record in some] == [(one.key, one.text) for one in whole[: len(some)]]


def test_zstandard_with_a_dictionary_of_the_file() -> None:
    pages = [page(number) for number in range(200)]
    dictionary = zstandard.train_dictionary(4096, pages)
    packer = zstandard.ZstdCompressor(dict_data=dictionary)
    for stored in (dictionary.as_bytes(), zstandard.compress(dictionary.as_bytes())):
        head = b"\x5d\x2a\x4d\x18" + len(stored).to_bytes(4, "little") + stored
        data = head + b"".join(packer.compress(page) for page in [INFO, *pages])
        assert kept(read(data)) == [page_line(number) for number in range(200)]


def test_files_that_are_not_archives_are_reported() -> None:
    assert read(b"") == []
    for data in (b"text\n" * 500, bz2.compress(b"x" * 5000), b"x" * 70_000, b"\0" * 4096):
        (record,) = read(data)
        assert (record.reason, record.num_bytes) == ("bad_record", len(data))


def test_random_damage_raises_nothing_and_is_reported() -> None:
    draw = random.Random(5)
    good = b"".join(map(gzip.compress, [INFO, *map(page, range(20))]))
    for _ in range(100):
        data = bytearray(good)
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(1, 40)] = draw.randbytes(draw.randrange(1, 40))
        found = read(bytes(data))
        assert kept(found) == [page_line(number) for number in range(len(kept(found)))]
        assert len(kept(found)) == 20 or found[-1].reason == "bad_record"
