"""Records of a crawl archive."""

from __future__ import annotations

from tests.corpus.corpus_samples import html_page, http, warc_record

INFO = warc_record(b"software: a crawler\r\n", "warcinfo")


def page(number: int) -> bytes:
    return warc_record(http(html_page(number)), url=f"http://a.example/{number}")
