"""Files of records in layouts other than JSON lines, and files without records, which affect no other file."""

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bessemer.common.errors import InputError
from bessemer.corpus.partition import read
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.formats.jsonl import inspect_head
from bessemer.recipe import Corpus, Source
from tests.corpus.corpus_samples import prose, recipe

NO_DEDUP = "exact = false\nminhash = false"
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
    "array.json": json.dumps(RECORDS).encode(),
    "array-utf16.json": json.dumps(RECORDS, ensure_ascii=False).encode("utf-16"),
    "array-named-lines.jsonl": json.dumps(RECORDS, indent=2).encode(),
    "pretty.json": "\n".join(json.dumps(record, indent=4) for record in RECORDS).encode(),
    "pretty-compact.json": "\n".join(json.dumps(record).replace(", ", ",\n ") for record in RECORDS).encode(),
    "elements.jsonl": "".join(json.dumps(record) + ",\n" for record in RECORDS).encode(),
    "one-line-arrays.json": b"".join(json.dumps([record]).encode() + b"\n" for record in RECORDS),
    "table.csv": as_csv(",").encode(),
    "table.TSV": as_csv("\t").encode(),
    "table-bom.csv": b"\xef\xbb\xbf" + as_csv(";").encode(),
    "table-utf16.csv": as_csv(",").encode("utf-16"),
}
PACKERS = {"": bytes, ".gz": gzip.compress, ".BZ2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_records(name: str, data: Path, build) -> None:
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
    "a.jsonl": (b"PK\x03\x04" + bytes(90), "wrong_format"),
    "b.jsonl": (bytes(5000), "wrong_format"),
    "c.json": (b"Dear all,\n\nhere is the text.\n", "wrong_format"),
    "d.csv": (b"id,title\n1,a title of words\n2,y\n", "no_text_key"),
    "e.jsonl.gz": (gzip.compress(b"%PDF-1.7 ..."), "wrong_format"),
    "f.json.xz": (b"not xz at all", "unreadable"),
    "g.json": (b'{"license": "MIT",\n "body": "x"}', "no_text_key"),
    "h.parquet": (b"id,text\n1,x\n", "wrong_format"),
    "i.parquet": (b"PAR1" + bytes(99), "unreadable"),
}


def test_a_wrong_file_is_skipped_and_named(data: Path, build) -> None:
    (data / "good.jsonl").write_text(LINES)
    (data / "good.txt").write_text(prose(5))  # no Parquet file is good: the source is read all the same
    pq.write_table(pa.table({"id": ["x"], "content": [prose(6)]}), data / "j.parquet")
    for name, (content, _) in WRONG.items():
        (data / name).write_bytes(content)
    documents, rejected, _ = build(recipe({"name": "s", "paths": [str(data)]}))
    assert len(documents) == 4
    expected = {name: reason for name, (_, reason) in WRONG.items()} | {"j.parquet": "no_text_key"}
    assert sorted((row["path"].removeprefix("data/"), row["reason"]) for row in rejected) == sorted(expected.items())


BROKEN = {
    "cut array": (json.dumps(RECORDS).encode()[:-300], 2, "unreadable"),
    "broken element": (b'[{"text": "' + b"w " * 200 + b'"}, {"text": nothing}, {"text": "x"}]', 1, "unreadable"),
    "numbers": (b'[1, 22, {"text": "' + b"w " * 200 + b'"}]', 1, "bad_record"),
    "deep": (b'[{"text": "' + b"w " * 200 + b'"}, ' + b"[" * 200_000, 1, "unreadable"),
    "bad byte": (b'[{"text": "\xff' + b"v " * 200 + b'"}, {"text": "' + b"w " * 200 + b'"}]', 1, "not_utf8"),
    "between objects": (b'{\n"text": "' + b"w " * 200 + b'"}\n{\n"text": }\n{\n"text": "' + b"v " * 200 + b'"}', 1, "unreadable"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.fault(24)
def test_damage_inside_a_file_rejects_only_affected_records(name: str, data: Path, build) -> None:
    content, kept, reason = BROKEN[name]
    (data / "a.json").write_bytes(content)
    documents, rejected, _ = build(
        recipe({"name": "s", "format": "jsonl", "paths": [str(data)]}, rules="min_unique_line_share = 0")
    )
    assert len(documents) == kept
    assert {row["reason"] for row in rejected} == {reason}


def test_a_large_array_is_read_in_little_memory(data: Path, tmp_path: Path) -> None:
    import tracemalloc

    path = data / "a.json"
    with open(path, "w") as file:
        file.write("[" + ",\n".join(json.dumps({"text": "x" * 3000}) for _ in range(6000)) + "]")
    tracemalloc.start()
    found = read(Source(name="s", paths=("a",)), [Part(str(path), "a.json", "jsonl", layout="values")], Corpus())
    assert sum(record.reason is None for record in found) == 6000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 2


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
    documents, rejected, _ = build(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    assert sorted(row["text"] for row in documents) == sorted(prose(number) for number in range(1, 6))
    assert {row["path"]: row["reason"] for row in rejected} == {"data/f.txt.gz": "unreadable"}


WESTERN = 'größer, "später" – für 5 € über die Straße. ' * 9
CYRILLIC = "Мой дядя самых честных правил, когда не в шутку занемог. " * 9


@pytest.mark.parametrize("encoding", ["cp1252", "koi8-r", "shift_jis"])
def test_a_named_encoding_is_read_next_to_utf8(encoding: str, data: Path, build) -> None:
    prose_of = {"koi8-r": CYRILLIC, "shift_jis": "日本語の文章、表と裏。\n" * 30}.get(encoding, WESTERN)
    prose_of = prose_of.encode(encoding, "ignore").decode(encoding)
    texts = [f"{number} {prose_of}".strip() for number in range(6)]
    records = [{"text": text} for text in texts]
    table = io.StringIO()
    csv.writer(table).writerows([["text"], *([text] for text in texts)])
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (data / "a.txt").write_bytes(texts[0].encode(encoding))
    (data / "b.txt").write_bytes(texts[0].encode())
    (data / "c.csv").write_bytes(table.getvalue().encode(encoding))
    (data / "d.json").write_bytes(json.dumps(records, ensure_ascii=False).encode(encoding))
    (data / "e.jsonl").write_bytes(lines.encode(encoding))
    (data / "f.jsonl").write_bytes(lines.encode())
    (data / "g.csv.gz").write_bytes(gzip.compress(table.getvalue().encode(encoding)))
    source = {"name": "s", "paths": [str(data)], "encoding": encoding}
    off = "exact = false\nminhash = false"
    documents, rejected, _ = build(recipe(source, dedup=off, rules="min_unique_line_share = 0"))
    assert rejected == []
    assert sorted(row["text"] for row in documents) == sorted([texts[0]] * 2 + texts * 5)


def test_bytes_invalid_in_the_named_encoding_reject_the_record(data: Path, build) -> None:
    (data / "a.jsonl").write_bytes(b'{"text": "a \x81 b"}\n' + json.dumps(RECORDS[0]).encode())
    documents, rejected, _ = build(recipe({"name": "s", "paths": [str(data)], "encoding": "cp1252"}))
    assert len(documents) == 1
    assert [(row["reason"], row["detail"]) for row in rejected] == [
        ("not_utf8", "line 1: not charmap: byte 0x81 at 12")
    ]


def test_an_unknown_encoding_is_an_error() -> None:
    for wrong in ("cp125", "rot13", ""):
        with pytest.raises(InputError, match="encoding"):
            recipe({"name": "s", "paths": ["x"], "encoding": wrong})
    with pytest.raises(InputError, match="files of format warc say or fix theirs"):
        recipe({"name": "s", "paths": ["x"], "format": "warc", "encoding": "cp1252"})


def test_nested_text_is_suggested_and_read_with_a_dotted_key(data: Path, build) -> None:
    rows = [{"id": number, "data": {"lang": "en", "body": {"text": text}}} for number, text in enumerate(TEXTS)]
    pq.write_table(pa.Table.from_pylist([*rows, {"id": 9, "data": None}]), data / "a.parquet")
    (data / "b.json").write_text(json.dumps(rows))
    (data / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "s", "label_key": "data.lang"}
    documents, rejected, _ = build(
        recipe({**source, "paths": [str(data)], "text_key": "data.body.text"}, dedup="exact = false\nminhash = false")
    )
    assert sorted(row["text"] for row in documents) == sorted([text.strip() for text in TEXTS] * 3)
    assert {row["label"] for row in documents} == {"en"}
    assert [row["reason"] for row in rejected] == ["no_text_key"]


JOINED = [  # a record, its text by a list of two fields, and by a template
    ({"title": "A title", "body": "Words."}, "A title\n\nWords.", "[A title] Words."),
    ({"title": "", "body": "Words."}, "Words.", "[] Words."),
    ({"title": "{body}", "body": "Words."}, "{body}\n\nWords.", "[{body}] Words."),
    ({"body": "Words."}, "Words.", None),
    ({"title": None, "body": "Words."}, "Words.", None),
    ({"title": 1999, "body": "Words."}, None, "[1999] Words."),
    ({"title": ["A"], "body": "Words."}, None, None),
    ({"other": "x"}, None, None),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
@pytest.mark.parametrize("is_template", [False, True])
def test_text_of_several_fields_is_joined(name: str, is_template: bool, data: Path, build) -> None:
    rows = [one for one in JOINED if {"title": str, "body": str} == {key: type(value) for key, value in one[0].items()}]
    if name in ("a.jsonl", "a.json"):
        rows = JOINED
    expected = [row[1 + is_template] for row in rows]
    records = [{**record, "number": number} for number, (record, *_) in enumerate(rows)]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(records), data / name, row_group_size=2)
    elif name == "a.csv":
        with open(data / name, "w") as file:
            csv.writer(file).writerows([records[0], *(record.values() for record in records)])
    else:
        lines = map(json.dumps, records)
        (data / name).write_text("\n".join(lines) if name == "a.jsonl" else f"[{', '.join(lines)}]")
    source = {"name": "s", "paths": [str(data)], "text_key": "[{title}] {body}" if is_template else ["title", "body"]}
    documents, rejected, statistics = build(recipe(source, dedup=NO_DEDUP, rules="min_characters = 1"))
    places = [json.loads(row["metadata"]) for row in documents]
    numbers = [int(place["number"]) if "number" in place else 2 * place["row_group"] + place["row"] for place in places]
    found = dict(zip(numbers, (row["text"] for row in documents), strict=True))
    assert found == {number: text for number, text in enumerate(expected) if text is not None}
    assert {row["reason"] for row in rejected} == ({"bad_record", "no_text_key"} if None in expected else set())
    assert statistics["totals"]["documents_in"] == len(rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_a_field_missing_from_all_files_is_an_error(name: str, data: Path, build) -> None:
    if name == "a.parquet":
        pq.write_table(pa.table({"text": [prose(1)]}), data / name)
    else:
        (data / name).write_text(json.dumps({"text": prose(1)}) if name == "a.jsonl" else "text,id\nwords,1\n")
    with pytest.raises(InputError, match="corpus.sources.s.text_key: .* 'titel'"):
        build(recipe({"name": "s", "paths": [str(data)], "text_key": ["titel", "text"]}))


@pytest.mark.parametrize(
    ("name", "key", "reason"), [("a.csv", "review", None), ("a.tsv", "review", None), ("b.csv", "text", "no_text_key")]
)
def test_a_table_with_code_in_its_fields_is_a_table(name: str, key: str, reason: str | None) -> None:
    delimiter = "\t" if name.endswith("tsv") else ","
    head = f'id{delimiter}review\n1{delimiter}"int main()\n{{\n  return 0;\n}}\n"\n2{delimiter}fine\n'.encode()
    found = inspect_head(head, name, Source(name="s", paths=("a",), text_key=key))
    assert (found.layout, found.reason) == (("csv", "") if reason is None else ("", reason))
