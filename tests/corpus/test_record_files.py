"""Files of records in other layouts than lines of JSON, and files that hold none: each costs itself at most."""

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from bessemer.corpus import record_files
from bessemer.corpus.record_files import look
from bessemer.errors import InputError
from tests.corpus.corpus_samples import prose, recipe

TEXTS = [prose(1), 'a "quoted" text,\nin two lines; with {braces] and café 日本語 ' * 9, prose(2)]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def as_csv(delimiter: str) -> str:
    made = io.StringIO()
    rows = csv.writer(made, delimiter=delimiter)
    rows.writerows([["id", "text"], *([record["id"], record["text"]] for record in RECORDS)])
    return made.getvalue()


LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
LAYOUTS = {
    "lines.ndjson": LINES.encode(),
    "lines-bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "lines-utf16.jsonl": LINES.encode("utf-16"),
    "lines-utf16-without-bom.jsonl": LINES.encode("utf-16-le"),
    "array.json": json.dumps(RECORDS).encode(),
    "array-bom.json": b"\xef\xbb\xbf" + json.dumps(RECORDS).encode(),
    "array-utf16.json": json.dumps(RECORDS, ensure_ascii=False).encode("utf-16"),
    "array-named-lines.jsonl": json.dumps(RECORDS, indent=2).encode(),
    "pretty.json": "\n".join(json.dumps(record, indent=4) for record in RECORDS).encode(),
    "pretty-compact.json": "\n".join(json.dumps(record).replace(", ", ",\n ") for record in RECORDS).encode(),
    "one-line-arrays.json": b"".join(json.dumps([record]).encode() + b"\n" for record in RECORDS),
    "table.csv": as_csv(",").encode(),
    "table.TSV": as_csv("\t").encode(),
    "table-bom.csv": b"\xef\xbb\xbf" + as_csv(";").encode(),
    "table-named-json.json": as_csv(",").encode(),
    "table-utf16.csv": as_csv(",").encode("utf-16"),
}
PACKERS = {"": bytes, ".gz": gzip.compress, ".BZ2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_records(name: str, data: Path, build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "READ_CHARACTERS", 300)  # so that records lie across the edge of what is read
    packers = PACKERS if name in ("lines.ndjson", "array.json", "table.csv") else {"": bytes}
    for ending, pack in packers.items():
        (data / (name + ending)).write_bytes(pack(LAYOUTS[name]))
    paths = [str(data / (name + ending)) for ending in packers]
    documents, rejected, statistics = build(
        recipe({"name": "s", "format": "jsonl", "paths": paths}, dedup="exact = false\nminhash = false")
    )
    assert rejected == []
    assert sorted(row["text"] for row in documents) == sorted([text.strip() for text in TEXTS] * len(packers))
    assert {str(json.loads(row["metadata"])["id"]) for row in documents} == {"0", "1", "2"}
    assert statistics["totals"]["files"] == len(packers)


WRONG = {
    "a.jsonl": (b"PK\x03\x04" + bytes(90), "wrong_format", "the file is a zip archive"),
    "b.jsonl": (bytes(5000), "wrong_format", "binary data, not JSON"),
    "c.json": (b"Dear all,\n\nhere is the text.\n", "wrong_format", "not JSON: it begins with 'Dear all,"),
    "d.json": (b"id,title\n1,x\n2,y\n", "no_text_key", "a table with no column 'text'; there are: id, title; set text_key"),
    "e.jsonl.gz": (gzip.compress(b"%PDF-1.7 ..."), "wrong_format", "the file is a PDF"),
    "f.json.xz": (b"not xz at all", "bad_record", "are no xz data"),
    "g.json": (b'{"license": "MIT",\n "body": "x"}', "no_text_key", "no field 'text'; there are: license, body; set text_key = \"body\""),
    "h.parquet": (b"id,text\n1,x\n", "wrong_format", "not a Parquet file: it begins with b'id,text"),
    "i.parquet": (b"PAR1" + bytes(99), "unreadable", "a damaged Parquet file"),
}  # fmt: skip


def test_a_wrong_file_costs_itself_and_is_told_by_name(data: Path, build) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (data / "good.jsonl").write_text(LINES)
    (data / "good.txt").write_text(prose(5))  # no Parquet file is good: the source is read all the same
    pq.write_table(pa.table({"id": ["x"], "content": [prose(6)]}), data / "other.parquet")
    for name, (content, _, _) in WRONG.items():
        (data / name).write_bytes(content)
    documents, rejected, _ = build(recipe({"name": "s", "paths": [str(data)]}))
    assert len(documents) == 4
    found = {row["path"].removeprefix("data/"): row for row in rejected}
    assert len(rejected) == len(found) == len(WRONG) + 1
    for name, (_, reason, detail) in WRONG.items():
        assert found[name]["reason"] == reason, name
        assert detail in found[name]["detail"]
    assert found["other.parquet"]["detail"] == "no column 'text'; there are: id, content; set text_key = \"content\""


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl", "d.json", "e.jsonl.gz", "h.parquet"])
def test_where_nothing_can_be_read_the_command_says_why(name: str, data: Path, build) -> None:
    (data / name).write_bytes(WRONG[name][0])
    with pytest.raises(InputError, match=rf"corpus.sources.s: its file cannot be read: data/{name}: ") as caught:
        build(recipe({"name": "s", "paths": [str(data)]}))
    assert WRONG[name][2] in str(caught.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_wrong_text_key_ends_the_command_before_anything_is_read(data: Path, build, pack) -> None:
    end = ".gz" if pack is gzip.compress else ""
    for name in ("a", "b"):
        (data / f"{name}.jsonl{end}").write_bytes(
            pack(b'{"id": "x", "content": "a text", "url": "http://a.example/b"}\n' * 9)
        )
    message = (
        rf"data/a.jsonl{end}: no field 'text'; there are: id, content, url; set text_key = \"content\" \(and 1 more"
    )
    with pytest.raises(InputError, match=message):
        build(recipe({"name": "s", "format": "jsonl", "paths": [str(data)]}))


def test_a_record_without_the_key_costs_itself(data: Path, build) -> None:
    (data / "a.jsonl").write_text('{"meta": "header"}\n' + LINES)
    documents, rejected, _ = build(recipe({"name": "s", "format": "jsonl", "paths": [str(data)]}))
    assert len(documents) == 3
    assert [row["reason"] for row in rejected] == ["no_text_key"]


BROKEN = {
    "cut array": (json.dumps(RECORDS).encode()[:-300], 2, "not JSON"),
    "broken element": (b'[{"text": "' + b"w " * 200 + b'"}, {"text": nothing}, {"text": "x"}]', 1, "follows in the array"),
    "numbers": (b'[1, 22, {"text": "' + b"w " * 200 + b'"}]', 1, "not an object but int"),
    "deep": (b'[{"text": "' + b"w " * 200 + b'"}, ' + b"[" * 200_000, 1, "not"),
    "bad byte": (b'[{"text": "\xff' + b"v " * 200 + b'"}, {"text": "' + b"w " * 200 + b'"}]', 1, "surrogate"),
    "between objects": (b'{\n"text": "' + b"w " * 200 + b'"}\n{\n"text": }\n{\n"text": "' + b"v " * 200 + b'"}', 2, "not JSON"),
    "csv quote": (b'id,text\n1,"' + b"w " * 200 + b'"\n2,"open', 1, "too_short"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_damage_within_a_file_costs_what_it_touches(name: str, data: Path, build) -> None:
    content, kept, told = BROKEN[name]
    (data / "a.json").write_bytes(content)
    documents, rejected, _ = build(
        recipe({"name": "s", "format": "jsonl", "paths": [str(data)]}, rules="min_unique_line_share = 0")
    )
    assert len(documents) == kept
    assert rejected
    assert all(told in row["detail"] + row["reason"] for row in rejected)


def test_a_large_array_is_read_in_little_memory(data: Path, tmp_path: Path) -> None:
    import tracemalloc

    path = data / "a.json"
    with open(path, "w") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "x" * 1000}) for _ in range(12_000)) + "]")
    tracemalloc.start()
    with open(path, "rb") as raw:
        assert sum(record.reason is None for record in record_files.read(raw, "values", "text")) == 12_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


@pytest.mark.parametrize(
    ("head", "layout"),
    [
        (b"", ""),
        (b" \n", ""),
        (b'{"text": "cut here\n{"text": "x"}\n', "lines"),
        (b'garbage\n{"text": "x"}\n', "lines"),
        (b'{"text": "x"}', "lines"),
        (b"  [\n", "values"),
        (b"{\n", "values"),
    ],
)
def test_the_beginning_tells_the_layout(head: bytes, layout: str) -> None:
    found = look(head, True, "a.jsonl", "text")
    assert (found.layout, found.reason) == (layout, "")


WHOLE = {
    "a.txt.gz": gzip.compress(prose(1).encode()),
    "b.md.XZ": lzma.compress(prose(2).encode()),
    "c.TXT": prose(3).encode("utf-16"),
    "d.txt": b"\xef\xbb\xbf" + prose(4).encode(),
    "e.txt": b"\xff\xfe\0\0" + prose(5).encode("utf-32-le"),
}


def test_compressed_and_wide_text(data: Path, build) -> None:
    for name, content in WHOLE.items():
        (data / name).write_bytes(content)
    (data / "f.txt.gz").write_bytes(WHOLE["a.txt.gz"][:60])
    (data / "g.txt.bz2").write_bytes(bz2.compress(b"x" * 120_000_000))
    documents, rejected, _ = build(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    assert sorted(row["text"] for row in documents) == sorted(prose(number) for number in range(1, 6))
    assert {row["path"]: row["reason"] for row in rejected} == {
        "data/f.txt.gz": "bad_record",
        "data/g.txt.bz2": "bad_record",
    }
