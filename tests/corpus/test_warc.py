"""Crawl archives: what is a document, and what each kind of damage costs."""

import bz2
import gzip
import io
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import brotli
import pytest

from bessemer.corpus import warc
from bessemer.corpus.document import Record
from bessemer.recipe import Extract
from tests.corpus.corpus_samples import html_page, http, page_line, recipe, warc_record

INFO = warc_record(b"software: a crawler\r\n", "warcinfo")


def read(data: bytes, compression: str = "", end: int | None = None) -> list[Record]:
    return list(warc.read(io.BytesIO(data), end, compression, Extract()))


def page(number: int) -> bytes:
    return warc_record(http(html_page(number)), url=f"http://a.example/{number}")


def kept(records: list[Record]) -> list[str]:
    return [record.text for record in records if record.reason is None]


def one(block: bytes) -> Record:
    (record,) = read(warc_record(block))
    return record


def test_responses_are_documents_and_nothing_else_is() -> None:
    others = [warc_record(b"GET / HTTP/1.1\r\n\r\n", "request"), warc_record(b"fetchTimeMs: 7\r\n", "metadata")]
    for compression, pack in (("", bytes), ("gzip", gzip.compress)):
        parts = [INFO, others[0], page(1), others[1], page(2)]
        data = b"".join(map(pack, parts))
        records = read(data, compression)
        assert kept(records) == [page_line(1), page_line(2)]
        offsets = [len(b"".join(map(pack, parts[:number]))) for number in (2, 4)]
        assert [record.key for record in records] == list(map(str, offsets))
        assert records[0].metadata == {
            "byte": str(offsets[0]),
            "url": "http://a.example/1",
            "date": "2024-05-06T07:08:09Z",
            "record_id": f"urn:uuid:{len(http(html_page(1)))}",
            "content_type": "text/html; charset=utf-8",
        }


def test_records_that_are_no_pages_are_counted_by_type(data: Path, build) -> None:
    others = ["request", "metadata", "metadata", "revisit", "warcinfo"]
    archive = b"".join(page(number) + warc_record(b"x: y\r\n", kind) for number, kind in enumerate(others))
    (data / "a.warc.gz").write_bytes(b"".join(map(gzip.compress, (archive[:3000], archive[3000:]))))
    (data / "b.arc.gz").write_bytes(gzip.compress(b"filedesc://b.arc 0.0.0.0 20000101000000 text/plain 9\n1 0 X\n\n"))
    documents, rejected, statistics = build(recipe({"name": "s", "paths": [str(data)]}))
    assert len(documents) + len(rejected) == statistics["totals"]["documents_in"]
    assert statistics["totals"]["tables"]["passed_over"] == {"metadata": 2, "request": 1, "revisit": 1, "warcinfo": 1}
    assert ("data/b.arc.gz", "wrong_format") in {(row["path"], row["reason"]) for row in rejected}


def archived(kind: str, content_type: str, body: bytes) -> bytes:
    """A record without HTTP."""
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


def test_the_records_stand_where_another_library_finds_them() -> None:
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    data = b"".join(gzip.compress(part) for part in (INFO, page(1), page(2), page(3)))
    theirs = ArchiveIterator(io.BytesIO(data), record_types=WarcRecordType.response)
    found = [(str(record.stream_pos), record.headers["WARC-Target-URI"]) for record in theirs]
    assert [(record.key, record.metadata["url"]) for record in read(data, "gzip")] == found


@pytest.mark.parametrize(
    ("block", "reason", "detail"),
    [
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
def test_what_is_no_page_is_counted(block: bytes, reason: str, detail: str) -> None:
    record = one(block)
    assert (record.reason, record.detail) == (reason, detail)


def test_a_page_without_a_content_type_is_recognised() -> None:
    assert one(http(b" <!DOCTYPE html><p>A page that does not say so.", content_type="")).reason is None
    assert one(http(html_page(1), content_type="application/xhtml+xml")).text == page_line(1)


def chunked(
    body: bytes, size: int = 7, line_end: bytes = b"\r\n", extension: bytes = b"", last: bytes = b"0\r\n\r\n"
) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x%b%b%b%b" % (len(part), extension, line_end, part, line_end) for part in parts) + last


def deflated(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chunked(html_page(1)), ["Transfer-Encoding: chunked"]),
        (gzip.compress(html_page(1)), ["Content-Encoding: gzip"]),
        (chunked(gzip.compress(html_page(1))), ["Content-Encoding: gzip", "Transfer-Encoding: chunked"]),
        (zlib.compress(html_page(1)), ["Content-Encoding: deflate"]),
        (deflated(html_page(1)), ["Content-Encoding: deflate"]),
        # Stored decoded, with the headers as they came.
        (html_page(1), ["Content-Encoding: gzip"]),
        (html_page(1), ["Content-Encoding: br"]),
        (html_page(1), ["Transfer-Encoding: chunked"]),
        (html_page(1), ["Content-Encoding: gzip", "Transfer-Encoding: chunked"]),
        (chunked(html_page(1)), ["Content-Encoding: gzip", "Transfer-Encoding: chunked"]),
    ],
    ids=range(10),
)
def test_bodies_are_decoded(body: bytes, headers: list[str]) -> None:
    assert one(http(body, *headers)).text == page_line(1)


WORDS = (
    b"<html><body><main><p>" + b" ".join(b"word%dth" % number for number in range(3000)) + b"</p></main></body></html>"
)
WORDS_TEXT = " ".join(f"word{number}th" for number in range(3000))
LINES = WORDS.replace(b"word7th ", b"word7th\r\n")
IRREGULAR = {
    "extensions": chunked(WORDS, 500, extension=b';name="a;b"'),
    "padding": chunked(WORDS, 500, extension=b"    "),
    "LF for CRLF": chunked(WORDS, 500, b"\n", last=b"0\n\n"),
    "LF for CRLF, in the page as well": chunked(LINES.replace(b" ", b"\r\n"), 500).replace(b"\r\n", b"\n"),
    "trailers": chunked(WORDS, 500, last=b"0\r\nExpires: never\r\n\r\n"),
    "no last line end": chunked(WORDS, 500, last=b"0\r\n"),
    "a last chunk without a line end": chunked(WORDS, 500, last=b"0"),
    "no last chunk": chunked(WORDS, 500, last=b""),
    "no line end behind chunks": chunked(WORDS, 500).replace(b"\r\n1f4\r\n", b"1f4\r\n"),
    "a size that is wrong": chunked(WORDS, 500).replace(b"1f4\r\n", b"1e3\r\n", 1),
    "zeros before sizes": b"0000" + chunked(WORDS, 500),
}


@pytest.mark.parametrize("how", IRREGULAR)
@pytest.mark.parametrize("is_named", [True, False], ids=["header", "no header"])
def test_irregular_chunks_leave_no_sizes_in_the_text(how: str, is_named: bool) -> None:
    body = IRREGULAR[how]
    if not is_named and how.startswith(("LF for CRLF, in", "a size", "no line end")):
        pytest.skip("without the header only regular chunks show what the body is")
    assert one(http(body, *["Transfer-Encoding: chunked"] * is_named)).text.split() == WORDS_TEXT.split()
    packed = gzip.compress(WORDS)
    again = one(http(chunked(packed, 300, last=b"0"), "Content-Encoding: x-gzip", "Transfer-Encoding: chunked"))
    assert again.text == WORDS_TEXT


CODINGS = {"": bytes, "gzip": gzip.compress, "deflate": zlib.compress, "br": brotli.compress}


@pytest.mark.parametrize("coding", CODINGS)
def test_a_chunked_body_cut_anywhere_keeps_what_came(coding: str) -> None:
    body = chunked(CODINGS[coding](WORDS), 500)
    headers = ["Transfer-Encoding: chunked", *[f"Content-Encoding: {coding}"] * bool(coding)]
    least = 0
    for end in [*range(1500, 1520), *range(2000, len(body) - 20, 331)]:
        record = one(http(body[:end], *headers))
        assert record.metadata["damage"] == "chunked body cut short"
        assert WORDS_TEXT.startswith(record.text) and len(record.text) >= least
        least = len(record.text)
    assert least > 0.8 * len(WORDS_TEXT)
    assert "damage" not in one(http(body, *headers)).metadata


def test_a_body_cut_short_keeps_what_came() -> None:
    body = gzip.compress(b"<p>" + b" ".join(b"word%d" % number for number in range(50_000)))
    record = one(http(body[: len(body) // 2], "Content-Encoding: gzip"))
    assert record.text.startswith("word0 word1 word2 ")
    assert 100_000 < len(record.text) < 300_000
    assert record.metadata["damage"] == "gzip body cut short or damaged"
    archived = warc_record(http(b"<p>caf\xc3\xa9 caf\xc3")).replace(
        b"\r\nWARC-Date", b"\r\nWARC-Truncated: length\r\nWARC-Date"
    )
    (record,) = read(archived)
    assert (record.text, record.metadata["damage"]) == ("café caf", "truncated by the crawler: length")


@pytest.mark.parametrize("headers", [["Content-Encoding: gzip"], ["Content-Encoding: compress"]])
def test_a_body_that_cannot_be_decoded_is_rejected(headers: list[str]) -> None:
    assert one(http(b"\x00\x01\x02" * 99, *headers)).reason == "bad_record"


@pytest.mark.fault(30)
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_a_bomb_within_a_page_is_inflated_up_to_the_limit(coding: str) -> None:
    """In a process of its own, whose peak memory includes what libraries allocate."""
    packers = {
        "gzip": "zlib.compressobj(wbits=31)", "deflate": "zlib.compressobj()", "br": "brotli.Compressor(quality=1)",
        "zstd": "zstandard.ZstdCompressor().compressobj()",
    }  # fmt: skip
    program = f"""
import resource, zlib, brotli, zstandard
from bessemer.corpus.http_body import decode_body
packer, block = {packers[coding]}, bytes(1 << 20)
pack = getattr(packer, "compress", None) or packer.process
body = b"".join(pack(block) for _ in range(600)) + getattr(packer, "finish", packer.flush)()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(decode_body(body, ["{coding}"], 8 << 20)[0]) == (8 << 20) + 1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    is_limited, kilobytes = done.stdout.split()
    assert is_limited == "True"
    assert int(kilobytes) < 150_000
    assert one(http(gzip.compress(b"<p>" + bytes(9 << 20)), "Content-Encoding: gzip")).reason == "too_long"


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
def test_charsets(text: str, charset: str, header: str, meta: str) -> None:
    page = f'<html><meta charset="{meta}"><body><main><p>{text}</p></main></body></html>'
    content_type = "text/html" + (f"; charset={header}" if header else "")
    assert one(http(page.encode(charset), content_type=content_type)).text == text


def test_a_page_that_cannot_be_decoded_costs_one() -> None:
    noise = bytes(random.Random(1).choices(range(128, 256), k=3000))
    found = read(page(1) + warc_record(http(b"<p>" + noise, content_type="text/html; charset=utf-8")) + page(2))
    assert [record.reason for record in found] in ([None, "not_utf8", None], [None, None, None])
    assert kept(found)[0] == page_line(1) and kept(found)[-1] == page_line(2)


def lying(length: int) -> bytes:
    return warc_record(http(html_page(9)), length=length)


GARBAGE = b"\x07 some bytes that are no record \x00\xff" * 9
DAMAGES = {
    "a length too long": lying(10**6),
    "a length that swallows the next": lying(len(http(html_page(9))) + 700),
    "a length too short": lying(100),
    "a length of its own kind": page(9).replace(b"Content-Length: ", b"Content-Length: x"),
    "a length beyond the file": lying(10**17),
    "garbage": GARBAGE,
    "a header without an end": b"WARC/1.0\r\nWARC-Type: response\r\n" + b"X: y\r\n" * 20_000,
    "half a record": page(9)[:300],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_a_plain_archive_costs_no_good_record(damage: str) -> None:
    data = INFO + page(1) + DAMAGES[damage] + page(2) + page(3)
    found = read(data)
    assert kept(found) == [page_line(1), page_line(2), page_line(3)]
    assert [record.reason for record in found if record.reason] == ["bad_record"]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


PACKED: dict[str, Callable[[], bytes]] = {
    "a member cut short": lambda: gzip.compress(page(9))[:200],
    "a flipped bit": lambda: flipped(gzip.compress(page(9)), 150),
    "a wrong checksum": lambda: flipped(gzip.compress(page(9)), len(gzip.compress(page(9))) - 6),
    "garbage": lambda: GARBAGE,
    "a lying length": lambda: gzip.compress(lying(10**6)),
    "a length too short": lambda: gzip.compress(lying(100)),
    "a bomb": lambda: gzip.compress(warc_record(http(b"<p>" + b" " * (120 << 20)))),
}


@pytest.mark.parametrize("damage", PACKED)
@pytest.mark.fault(24)
def test_damage_in_a_packed_archive_costs_no_good_record(damage: str) -> None:
    parts = [
        gzip.compress(INFO),
        gzip.compress(page(1)),
        PACKED[damage](),
        gzip.compress(page(2)),
        gzip.compress(page(3)),
    ]
    found = read(b"".join(parts), "gzip")
    assert kept(found) == [page_line(1), page_line(2), page_line(3)]
    (bad,) = [record for record in found if record.reason]
    assert bad.reason == "bad_record"
    assert bad.key.split("+")[0] == str(len(parts[0] + parts[1]))


def test_a_file_cut_short_keeps_what_came() -> None:
    whole = b"".join(map(gzip.compress, [INFO, page(1), page(2)]))
    found = read(whole[:-30], "gzip")
    assert [record.reason for record in found] == [None, "bad_record"]
    together = gzip.compress(INFO + page(1) + page(2) + page(3))
    found = read(together[:-40], "gzip")
    assert kept(found) == [page_line(1), page_line(2)]
    assert found[-1].reason == "bad_record"
    assert "cut short" in found[-1].detail


def test_several_records_in_a_member_have_keys_of_their_own() -> None:
    head = gzip.compress(INFO)
    found = read(head + gzip.compress(page(1) + page(2)) + b"\0" * 512, "gzip")
    assert [record.key for record in found] == [str(len(head)), f"{len(head)}+{len(page(1))}"]


@pytest.mark.parametrize("packed", ["", "gzip", "as a whole"])
def test_of_an_archive_only_as_much_is_read_as_was_asked_for(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warc, "MEMBER_BYTES", 1000)
    monkeypatch.setattr("bessemer.corpus.inflate.BLOCK_BYTES", 500)
    parts = [INFO, *map(page, range(60))]
    data = (
        gzip.compress(b"".join(parts))
        if packed == "as a whole"
        else b"".join(map(gzip.compress if packed else bytes, parts))
    )
    whole, compression = read(data, "gzip" if packed else ""), "gzip" if packed else ""
    assert len(whole) == 60
    some = read(data, compression, sum(map(len, parts)) // 3)
    assert 17 <= len(some) <= 21
    assert [(record.key, record.text) for record in some] == [(one.key, one.text) for one in whole[: len(some)]]


def test_an_archive_within_an_archive_is_not_read() -> None:
    inner = b"".join(gzip.compress(page(number)) for number in range(100, 140))
    stored = gzip.compress(warc_record(http(inner, content_type="application/gzip")), compresslevel=0)
    data = b"".join([gzip.compress(INFO), gzip.compress(page(1)), stored, gzip.compress(page(2))])
    whole = read(data, "gzip")
    assert kept(whole) == [page_line(1), page_line(2)]


def test_zstandard_with_a_dictionary_of_the_file() -> None:
    import zstandard

    pages = [page(number) for number in range(200)]
    dictionary = zstandard.train_dictionary(4096, pages)
    packer = zstandard.ZstdCompressor(dict_data=dictionary)
    for stored in (dictionary.as_bytes(), zstandard.compress(dictionary.as_bytes())):
        head = b"\x5d\x2a\x4d\x18" + len(stored).to_bytes(4, "little") + stored
        data = head + b"".join(packer.compress(page) for page in [INFO, *pages])
        assert kept(read(data, "zstd")) == [page_line(number) for number in range(200)]


def test_what_is_no_archive_at_all() -> None:
    for data, compression in ((b"", ""), (b"", "gzip"), (b"\0" * 4096, "gzip")):
        assert read(data, compression) == []
    for data, compression in ((b"text\n" * 500, ""), (bz2.compress(b"x" * 5000), "gzip"), (b"x" * 70_000, "zstd")):
        (record,) = read(data, compression)
        assert record.reason == "bad_record"


def test_random_bytes_and_random_damage_raise_nothing() -> None:
    draw = random.Random(5)
    good = b"".join(map(gzip.compress, [INFO, *map(page, range(20))]))
    for _ in range(60):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(1, 40)] = draw.randbytes(draw.randrange(1, 40))
        found = read(bytes(data), "gzip")
        lost = 20 - len(set(kept(found)) & {page_line(number) for number in range(20)})
        assert lost <= 8  # two for each of the four places at the most
        assert lost == 0 or any(record.reason for record in found)
