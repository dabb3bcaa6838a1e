"""Object stores: listing, fetching, and no credentials in errors, logs or the run directory."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bessemer.common.errors import BessemerError, FileChanged, InputError
from bessemer.corpus.document import Document
from bessemer.corpus.partition import read
from bessemer.corpus.readers import parts
from bessemer.corpus.readers.base import File
from bessemer.corpus.readers.files import find
from bessemer.corpus.readers.parts import plan
from bessemer.recipe import Corpus, Source
from bessemer.storage import filesystem
from tests.corpus.corpus_samples import html_page, http, page_line, prose, warc_record
from tests.corpus.object_store import Store, store


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "ENDPOINT_URL", "ENDPOINT_URL_S3"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "store" / "b").mkdir(parents=True)
    with store(tmp_path / "store") as running:
        yield running


def put(bucket: Store, name: str, data: bytes) -> None:
    path = bucket.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def source(bucket: Store, path: str, format: str = "jsonl", **more: object) -> Source:
    values = {"name": "s", "format": format, "paths": [path], "anonymous": True, "endpoint": bucket.endpoint, **more}
    return Source.model_validate(values)


def records(of: Source) -> list[Document]:
    planned = plan(of, find(of))
    return list(read(of, planned, Corpus()))


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_folders_globs_and_files_of_a_bucket(bucket: Store, tmp_path: Path, scheme: str) -> None:
    put(bucket, "b/x/a.jsonl", lines("one", "two"))
    put(bucket, "b/x/y/b.jsonl.gz", gzip.compress(lines("three")))
    put(bucket, "b/x/y/vendor/c.jsonl", lines("four"))
    put(bucket, "b/x/.hidden/d.jsonl", lines("five"))
    put(bucket, "b/x/readme.md", b"no")
    put(bucket, "b/xy/e.jsonl", lines("six"))
    found = {
        "b/x": ["one", "two", "three"],
        "b/x/": ["one", "two", "three"],
        "b/x/*.jsonl": ["one", "two"],
        "b/x/**/*.jsonl*": ["one", "two", "three"],
        "b/*/?.jsonl": ["one", "two", "six"],
        "b/x/a.jsonl": ["one", "two"],
    }
    for path, texts in found.items():
        of = source(bucket, f"{scheme}://{path}", exclude=["vendor"])
        assert [record.text for record in records(of)] == texts, path
    (file,) = find(source(bucket, f"{scheme}://b/x/a.jsonl"))
    size = (bucket.folder / "b/x/a.jsonl").stat().st_size
    assert file == File(f"{scheme}://b/x/a.jsonl", f"{scheme}://b/x/a.jsonl", size, 1714979289 * 10**9)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_source_without_an_endpoint_uses_the_environment(
    bucket: Store, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket, "b/x/a.jsonl", lines("one", "two"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, bucket.endpoint)
    of = source(bucket, "s3://b/x", endpoint=None)
    assert [record.text for record in records(of)] == ["one", "two"]
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert [record.text for record in records(source(bucket, "s3://b/x"))] == ["one", "two"]


def test_every_format(bucket: Store, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), table, row_group_size=2)
    contents = {
        "parquet": ("a.parquet", table.getvalue(), ["a", "b", "c"]),
        "html": ("a.html", html_page(1), [page_line(1)]),
        "warc": ("a.warc.gz", gzip.compress(warc_record(http(html_page(2)))), [page_line(2)]),
        "text": ("a.txt", b"text", ["text"]),
        "code": ("a.py", b"x = 1", ["x = 1"]),
    }
    for format, (name, data, texts) in contents.items():
        put(bucket, f"b/{format}/{name}", data)
        found = records(source(bucket, f"s3://b/{format}", format))
        assert [record.text.strip() for record in found] == texts


def test_ranges_of_a_large_file_fetch_only_their_part(
    bucket: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 200_000)
    monkeypatch.setattr(filesystem, "READ_BYTES", 20_000)
    texts = [prose(number, 50) for number in range(3000)]
    data = lines(*texts)
    put(bucket, "b/a.jsonl", data)
    of = source(bucket, "s3://b/a.jsonl")
    planned = plan(of, find(of))
    assert len(planned) > 3
    before = len(bucket.requests())
    assert [record.text for record in read(of, planned[2:3], Corpus())]
    ranges = [line.split()[2].removeprefix("bytes=") for line in bucket.requests()[before:] if "bytes=" in line]
    fetched = [int(end) - int(start) + 1 for start, _, end in (text.partition("-") for text in ranges)]
    assert 200_000 <= sum(fetched) <= 260_000
    assert [record.text for record in read(of, planned, Corpus())] == texts


def test_vanished_objects_are_counted_and_failures_stop_the_build(bucket: Store, tmp_path: Path) -> None:
    put(bucket, "b/a.jsonl", lines("one"))
    put(bucket, "b/b.jsonl", lines("two"))
    of = source(bucket, "s3://b")
    planned = plan(of, find(of))
    (bucket.folder / "b/a.jsonl").unlink()
    found = list(read(of, planned, Corpus()))
    assert [record.reason for record in found] == ["unreadable", None]
    put(bucket, "b/b.jsonl", lines("two", "more"))
    with pytest.raises(FileChanged):
        next(read(of, planned[1:2], Corpus()))
    bucket.refuse()
    with pytest.raises(BessemerError, match=r"s3://b/b\.jsonl: the object store failed: .*check the credentials"):
        list(read(of, planned[1:2], Corpus()))
    with pytest.raises(InputError, match=r"corpus.sources.s: s3://b cannot be listed: .*anonymous and endpoint"):
        find(of)


@pytest.mark.parametrize(
    "path",
    ["s3://KEY:SECRET@b/x", "s3://", "hf://models/x", "s3://b/none", "gs://b/none", "s3://none/x", "s3://none/x/**/*.jsonl"],
)  # fmt: skip
def test_unusable_urls_are_errors(bucket: Store, path: str) -> None:
    with pytest.raises(InputError) as caught:
        find(source(bucket, path))
    assert "SECRET" not in str(caught.value)


def test_credentials_are_sent_but_never_shown(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-very-secret-key")
    put(bucket, "b/a.jsonl", lines("one"))
    of = source(bucket, "s3://b/a.jsonl", anonymous=False)
    assert [record.text for record in records(of)] == ["one"]
    assert any("Credential=AKIAEXAMPLE" in line for line in bucket.requests())
    planned = plan(of, find(of))
    bucket.refuse()
    with pytest.raises(BessemerError) as caught:
        list(read(of, planned[:1], Corpus()))
    said = OSError("signing with a-very-secret-key for http://h/x?X-Amz-Signature=abc failed")
    shown = [str(caught.value), filesystem.redact(said), *capfd.readouterr(), *map(str, planned)]
    assert not any("a-very-secret-key" in text or "AKIAEXAMPLE" in text or "abc" in text for text in shown)
    assert filesystem.redact(said) == "signing with *** for http://h/x?*** failed"


def test_datasets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from pyarrow import fs

    class Hub(DirFileSystem):  # type: ignore[misc]
        """Stand-in for the Hub's file system."""

        def info(self, path: str, **more: object) -> dict[str, object]:
            facts = super().info(path, **more)
            return {**facts, "blob_id": f"id-{facts['size']}"}

    packed = gzip.compress(lines("three"))
    files = {"train-0.jsonl": lines("one", "two"), "train-1.jsonl.gz": packed, "test-0.jsonl": lines("no")}
    folder = tmp_path / "datasets" / "owner" / "name" / "data"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    system = fs.PyFileSystem(fs.FSSpecHandler(Hub(str(tmp_path), LocalFileSystem())))
    monkeypatch.setattr(filesystem, "arrow_filesystem", lambda scheme, *_: {"hf": system}[scheme])
    of = SimpleNamespace(endpoint="")
    wanted = source(of, "hf://datasets/owner/name/data/train-*", endpoint=None)  # type: ignore[arg-type]
    found = find(wanted)
    place = "hf://datasets/owner/name/data"
    assert [(file.name, file.etag) for file in found] == [
        (f"{place}/train-0.jsonl", "id-32"),
        (f"{place}/train-1.jsonl.gz", f"id-{len(packed)}"),
    ]
    assert [record.text for record in records(wanted)] == ["one", "two", "three"]
