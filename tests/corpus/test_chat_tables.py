"""Conversations in Parquet: equal to those of JSON lines, and named in errors if another format is asked for."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.corpus_samples import prose, recipe

OFF = "exact = false\nminhash = false"


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Say {number}?"}, {"role": "assistant", "content": prose(number, 30)}]


def write(path: Path, rows: list[dict[str, Any]], **types: Any) -> None:
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    pq.write_table(table, path, row_group_size=3)


def test_conversations_in_parquet_equal_those_of_json_lines(data: Path, build) -> None:
    rows: list[dict[str, Any]] = [{"messages": talk(number), "id": number} for number in range(7)]
    # In Parquet all messages have a field that one message has: null where it was absent.
    rows[2]["messages"].append({"role": "tool", "content": "4", "name": "sum"})
    rows[4] = {"messages": [{"role": "user", "content": "nobody answers"}], "id": 4}
    found = []
    for name in ("a.parquet", "a.jsonl"):
        (data / name.partition(".")[2]).mkdir()
        path = data / name.partition(".")[2] / name
        if name == "a.parquet":
            write(path, rows)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        of = recipe({"name": "s", "format": "chat", "paths": [str(path.parent)]}, dedup=OFF)
        documents, rejected, statistics = build(of)
        assert statistics["totals"]["documents_in"] == 7
        assert [row["reason"] for row in rejected] == ["bad_record"]
        assert {json.loads(row["metadata"])["id"] for row in documents} == {0, 1, 2, 3, 5, 6}
        found.append(sorted(row["text"] for row in documents))
    assert found[0] == found[1]
    assert json.loads(found[0][2])[-1] == {"role": "tool", "content": "4", "name": "sum"}


@pytest.mark.parametrize("kind", ["string", "large_string", "json", "string_view"])
def test_conversations_as_json_in_a_column_are_read(kind: str, data: Path, build) -> None:
    texts = pa.array([json.dumps(talk(number)) for number in range(3)] + ["no JSON"], pa.string())
    column = (
        pa.ExtensionArray.from_storage(pa.json_(), texts) if kind == "json" else texts.cast(pa.type_for_alias(kind))
    )
    pq.write_table(pa.table({"messages": column}), data / "a.pq")
    documents, rejected, _ = build(recipe({"name": "s", "format": "chat", "paths": [str(data)]}, dedup=OFF))
    assert sorted(json.loads(row["text"])[1]["content"] for row in documents) == sorted(prose(n, 30) for n in range(3))
    assert [(row["reason"], row["place"]) for row in rejected] == [("bad_record", "0:3")]


def test_prompt_and_answer_pairs_in_parquet(data: Path, build) -> None:
    write(data / "a.parquet", [{"prompt": f"Say {n}?", "completion": prose(n, 30), "kind": "x"} for n in range(4)])
    source = {"name": "s", "format": "chat", "pair_keys": ["prompt", "completion"], "label_key": "kind"}
    documents, rejected, _ = build(recipe({**source, "paths": [str(data)]}, dedup=OFF))
    talks = (json.dumps(talk(number), ensure_ascii=False) for number in range(4))
    assert sorted(row["text"] for row in documents) == sorted(talks)
    assert ({row["label"] for row in documents}, rejected) == ({"x"}, [])
