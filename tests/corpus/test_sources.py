"""Sources end to end: crawls and dumps through the corpus stage, and every kind of bad input."""

import bz2
import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bessemer.common.errors import FileChanged, InputError
from bessemer.corpus import pipeline
from bessemer.corpus.document import Document, identity
from bessemer.corpus.partition import read
from bessemer.corpus.readers.files import find
from bessemer.corpus.readers.formats.jsonl import JsonlReader
from bessemer.corpus.readers.formats.text import TextReader
from bessemer.corpus.readers.parts import plan
from bessemer.recipe import Corpus, Source
from bessemer.run.directory import RunDirectory
from tests.corpus.corpus_samples import http, page_line, prose, recipe, warc_record
from tests.corpus.mediawiki_samples import HEAD
from tests.corpus.mediawiki_samples import page as wiki_page
from tests.corpus.warc_samples import INFO, page
from tests.costs import no_quadratic_pass


def source(folder: Path, format: str, **more: object) -> dict[str, object]:
    return {"name": format, "format": format, "paths": [str(folder)], **more}


def records(folder: Path, format: str, **more: object) -> list[Document]:
    of = Source.model_validate(source(folder, format, **more))
    planned = plan(of, find(of))
    return list(read(of, planned, Corpus()))


def test_a_crawl_and_a_dump_become_documents(data: Path, build) -> None:
    for name, pack in (("a.warc", bytes), ("b.warc.gz", gzip.compress)):
        first = 0 if name == "a.warc" else 10
        answers = [page(number) for number in range(first, first + 8)]
        bad = [
            warc_record(http(b"x", status="404 Not Found")),
            warc_record(http(b"%PDF", content_type="application/pdf")),
        ]
        (data / name).write_bytes(b"".join(map(pack, [INFO, *answers, *bad])))
    dump = [HEAD, *(wiki_page(number) for number in range(100, 106)), wiki_page(7, namespace=3), "</mediawiki>"]
    (data / "wiki.xml.bz2").write_bytes(b"".join(bz2.compress(part.encode()) for part in dump))
    of = recipe(source(data, "warc"), source(data, "mediawiki"), rules="min_characters = 20")
    documents, rejected, statistics = build(of)
    crawled = {row["text"]: row for row in documents if row["source"] == "warc"}
    assert set(crawled) == {page_line(number) for number in (*range(8), *range(10, 18))}
    assert {row["text"] for row in documents if row["source"] == "mediawiki"} == {prose(n, 40) for n in range(100, 106)}
    assert Counter(row["reason"] for row in rejected) == {"http_status": 2, "not_html": 2, "not_article": 1}
    assert statistics["totals"]["documents_in"] == len(documents) + len(rejected) == 27
    # A document can be found in the raw file.
    row = crawled[page_line(12)]
    metadata = json.loads(row["metadata"])
    assert metadata["url"] == "http://a.example/12"
    assert row["identity"] == identity("warc", "data/b.warc.gz", metadata["byte"])
    with open(data / "b.warc.gz", "rb") as file:
        file.seek(int(metadata["byte"]))
        raw = gzip.GzipFile(fileobj=file).read(len(page(12)))
    assert raw == page(12)


def word() -> bytes:
    return b"x" * 50_000_000


MONSTERS: dict[str, tuple[str, str, Callable[[], bytes], str | None]] = {
    "one word of text": ("text", "a.txt", word, None),
    "one word of JSON": ("jsonl", "a.jsonl", lambda: b'{"text": "' + word() + b'"}', None),
    "one word of HTML": ("html", "a.html", lambda: b"<p>" + word(), "too_long"),
    "one word of a crawl": ("warc", "a.warc", lambda: warc_record(http(b"<p>" + word())), "too_long"),
    "one word of wikitext": ("mediawiki", "a.xml", lambda: wiki_page(1, word().decode()).encode(), "bad_record"),
    "nothing but NUL": ("code", "a.py", lambda: bytes(10_000_000), "binary"),
    "a program": ("code", "a.c", lambda: b"int x;\n\0\x7fELF", "binary"),
}


@pytest.mark.parametrize("name", MONSTERS)
def test_extreme_documents_reject_only_themselves(name: str, data: Path) -> None:
    format, file, content, reason = MONSTERS[name]
    (data / file).write_bytes(content())
    with no_quadratic_pass():
        (record,) = records(data, format)
    assert record.reason == reason


def test_an_empty_source_is_named(data: Path, build) -> None:
    (data / "a.warc.gz").write_bytes(gzip.compress(INFO))
    with pytest.raises(InputError, match=r"corpus.sources.warc: .*: 1 warcinfo passed over"):
        build(recipe(source(data, "warc")))


def test_errors_of_several_sources_are_reported_together(data: Path, build) -> None:
    (data / "c.txt").write_text(prose(1))
    missing = [{"name": name, "paths": [str(data / name)]} for name in ("one", "two")]
    good = {"name": "good", "paths": [str(data / "c.txt")]}
    with pytest.raises(InputError) as caught:
        build(recipe(missing[0], good, missing[1]))
    lines = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert lines == ["corpus.sources.one", "corpus.sources.two"]


CHANGES = {
    "a.txt": lambda number: prose(number),
    "a.jsonl": lambda number: "".join(json.dumps({"text": prose(number + of)}) + "\n" for of in range(3)),
    "a.csv": lambda number: "text\n" + prose(number, 40).replace("\n", " ") + "\n",
    "a.jsonl.gz": lambda number: gzip.compress(json.dumps({"text": prose(number)}).encode()),
}


@pytest.mark.parametrize(("name", "times"), [*((name, 1) for name in CHANGES), ("a.jsonl", 2)])
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_file_that_changes_during_reading_is_read_once_more(
    name: str, moment: str, times: int, data: Path, build, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(number: int) -> None:
        made = CHANGES[name](number)
        (data / name).write_bytes(made if isinstance(made, bytes) else made.encode())
        os.utime(data / name, ns=(number, number))

    changes = iter([10]) if times == 1 else count(10, 10)

    def disturbed(read: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def reading(*given: Any) -> Iterator[Any]:
            found = read(*given)
            for number, one in enumerate(found):
                if moment == "meanwhile" and number == 0 and (new := next(changes, None)):
                    change(new)
                yield one

        return reading

    def planned(*given: Any) -> Any:
        found = plan(*given)
        if moment == "before" and (new := next(changes, None)):
            change(new)
        return found

    for reader in (TextReader, JsonlReader):
        monkeypatch.setattr(reader, "read", disturbed(reader.read))
    monkeypatch.setattr(pipeline, "plan", planned)
    (data / "other.txt").write_text(prose(99))
    change(1)
    of = recipe({"name": "s", "paths": [str(data)]}, dedup="exact = false\nminhash = false")
    if times == 2:
        with pytest.raises(FileChanged):
            build(of)
        assert FileChanged.exit_code and not run.corpus.exists()
        return
    documents, rejected, _ = build(of)
    expected = {"a.jsonl": [prose(number) for number in (10, 11, 12)], "a.csv": [prose(10, 40).replace("\n", " ")]}
    assert sorted(row["text"] for row in documents) == sorted([prose(99), *expected.get(name, [prose(10)])])
    assert rejected == []
