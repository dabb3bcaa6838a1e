import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bessemer.corpus.document import Document
from bessemer.corpus.partition import read
from bessemer.corpus.readers import records as json_records
from bessemer.corpus.readers.base import Part
from bessemer.recipe import Corpus, Source


def records(path: Path, format: str, start: int = 0, end: int | None = None, key: str = "text") -> list[Document]:
    size = path.stat().st_size if path.exists() else 0
    layout = "lines" if format == "jsonl" else ""
    part = Part(str(path), path.name, format, start, size if end is None else end, size, layout=layout)
    return read_part(part, text_key=key)


def read_part(part: Part, **keys: str) -> list[Document]:
    source = Source.model_validate({"name": "s", "paths": [part.path], **keys})
    return list(read(source, [part], Corpus()))


@pytest.mark.fault(24)
def test_a_bad_byte_in_a_file_is_named(data: Path) -> None:
    path = data / "a.txt"
    path.write_bytes(b"good \xff bad")
    (record,) = records(path, "text")
    assert (record.reason, record.detail) == ("not_utf8", "byte 0xff at 5; probably cp1252")


def test_a_file_that_is_too_long_is_not_read(data: Path) -> None:
    path = data / "a.txt"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    (record,) = records(path, "text")
    assert (record.reason, record.num_bytes, record.text) == ("too_long", 1 << 40, "")


def test_descriptions(data: Path) -> None:
    path = data / "METADATA"
    path.write_text("Name: x\n\nAbout x.")
    (record,) = records(path, "descriptions")
    assert record.text == "About x."
    (data / "pydoc_data").mkdir()
    path = data / "pydoc_data" / "topics.py"
    path.write_text("topics = {'if': 'The if statement', 'for': 'The for statement'}")
    found = read_part(Part(str(path), "python://stdlib/pydoc_data/topics.py", "descriptions"))
    texts = [(record.key, record.text) for record in found]
    assert texts == [("if", "The if statement"), ("for", "The for statement")]


BAD_LINES = {
    b'{"text": "a \xff b"}': "not_utf8",
    b'{"text": "cut': "bad_record",
    b'{"body": "x", "n": 1}': "no_text_key",
    b'{"text": 7}': "bad_record",
    b"[1]": "bad_record",
    b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "bad_record",
    b'{"text": ' + b"9" * 10_000 + b"}": "bad_record",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20])
@pytest.mark.fault(24)
def test_a_bad_line_rejects_one_record(data: Path, line: bytes) -> None:
    path = data / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n\n{"text": "after"}')
    found = records(path, "jsonl")
    assert [record.reason for record in found] == [None, BAD_LINES[line], None]
    assert [found[0].text, found[2].text] == ["before", "after"]


def test_metadata_carries_small_fields_only(data: Path) -> None:
    path = data / "a.jsonl"
    odd = {"long": "y" * 1000, "list": [1], "nan": float("nan"), "huge": 10**30}
    line = {"text": "x", "url": "u", **odd, "ok": True}
    path.write_text(json.dumps(line))
    (record,) = records(path, "jsonl")
    assert record.metadata == {"byte": 0, "url": "u", "ok": True}


@pytest.mark.parametrize("length", [1, 7, 19, 100])
def test_ranges_read_each_line_once(data: Path, length: int) -> None:
    path = data / "a.jsonl"
    lines = [json.dumps({"text": "x" * (number % 13) + str(number)}) for number in range(50)]
    path.write_text("\n".join(lines) + "\n")
    size = path.stat().st_size
    parts = [records(path, "jsonl", start, min(start + length, size)) for start in range(0, size, length)]
    found = [record for part in parts for record in part]
    whole = records(path, "jsonl")
    assert [(record.key, record.text) for record in found] == [(record.key, record.text) for record in whole]
    assert len(whole) == 50


def test_a_line_over_the_limit_rejects_one_record(data: Path) -> None:
    path, length = data / "a.jsonl", json_records.MAX_RECORD_BYTES + 5000
    path.write_bytes(b'{"text": "a"}\n' + b"x" * length + b'\n{"text": "b"}\n')
    found = records(path, "jsonl")
    assert [record.reason for record in found] == [None, "bad_record", None]
    assert found[1].num_bytes == length + 1


def test_parquet_cell_by_cell(data: Path) -> None:
    path = data / "a.parquet"
    bad = pa.array([b"good", b"b\xffd", None, b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), path, row_group_size=2)
    found = [record for group in (0, 1) for record in records(path, "parquet", group)]
    assert [record.reason for record in found] == [None, "not_utf8", "bad_record", None]
    assert [record.key for record in found] == ["0:0", "0:1", "1:0", "1:1"]
    assert found[3].text == "fine"


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "binary", "binary_view", "dictionary"])
def test_text_of_parquet_is_read_from_every_type_of_strings(kind: str, data: Path) -> None:
    type_: Any = pa.dictionary(pa.int8(), pa.large_string()) if kind == "dictionary" else pa.type_for_alias(kind)
    labels = [f"größer {number}" * 9 for number in range(20)]
    texts = [label * 11_000 for label in labels]  # more than is read of a row group at a time
    columns = {}
    for name, values in (("text", texts), ("kind", labels)):
        columns[name] = pa.array(values, pa.string()).cast(type_)
    pq.write_table(pa.table(columns), data / "a.parquet")
    found = read_part(Part(str(data / "a.parquet"), "a.parquet", "parquet", 0, 1, 10), label_key="kind")
    assert [(record.label, record.key) for record in found] == [(label, f"0:{row}") for row, label in enumerate(labels)]
    assert all(record.text == text for record, text in zip(found, texts, strict=True))


@pytest.mark.long
def test_nested_text_of_over_2_gib_in_a_row_group_is_read(data: Path) -> None:
    chunk = pa.StructArray.from_arrays([pa.array(["word " * (12 << 20)])], ["text"])
    pq.write_table(pa.table({"data": pa.chunked_array([chunk] * 36)}), data / "a.parquet", compression="zstd")
    source = Source.model_validate({"name": "s", "paths": ["x"], "text_key": "data.text"})
    part = Part(str(data / "a.parquet"), "a.parquet", "parquet", 0, 1, 1)
    assert [len(record.text) for record in read(source, [part], Corpus())] == [60 << 20] * 36


def test_damage_inside_a_parquet_file_loses_its_row_group(data: Path) -> None:
    """The bytes of a lost row group are counted."""
    path = data / "a.parquet"
    table = pa.table({"text": [str(number) * 50 for number in range(100)]})
    for number, compression in enumerate(("none", "snappy", "zstd")):
        pq.write_table(table, path, row_group_size=20, compression=compression, use_dictionary=False)
        column = pq.read_metadata(path).row_group(2).column(0)
        raw = bytearray(path.read_bytes())
        start, size = column.data_page_offset, column.total_compressed_size
        raw[start : start + size] = bytes([0, 255, 7][number] for _ in range(size))
        path.write_bytes(raw)
        found = [record for group in range(5) for record in records(path, "parquet", group)]
        lost = [record for record in found if record.reason is not None]
        assert len(found) == 81 and [(record.key, record.reason) for record in lost] == [("2!", "unreadable")]
        assert sum(record.num_bytes for record in lost) == path.stat().st_size


def test_labels_of_records(data: Path) -> None:
    path = data / "a.jsonl"
    lines = [{"text": "a", "kind": "good"}, {"text": "b", "kind": 3}, {"text": "c", "kind": True}, {"text": "d"},
             {"text": "e", "kind": ["x"]}, {"text": "f", "kind": "  "}, {"text": "g", "kind": "x" * 300}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    part = Part(str(path), path.name, "jsonl", 0, path.stat().st_size, layout="lines")
    found = read_part(part, label_key="kind")
    assert [record.label for record in found] == ["good", "3", "True", "", "", "", ""]
    assert [record.reason for record in found] == [None] * 3 + ["no_label"] * 4
    assert [record.detail for record in found[3:]] == [
        f"line {line}: field 'kind': no label ({why})"
        for line, why in enumerate(("missing", "list", "empty", "too long"), 4)
    ]
