"""The whole stage: every format, every reason, determinism, errors, and the state after a failure."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose, recipe

from bessemer.common.errors import BessemerError, InputError
from bessemer.corpus import global_steps, partition, pipeline, publish
from bessemer.corpus.document import COLUMNS, REJECTED_COLUMNS, Document
from bessemer.corpus.filters.base import CleaningStep
from bessemer.corpus.filters.chain import Chain, Tally, list_step_counts
from bessemer.corpus.inputs import inputs_digest
from bessemer.corpus.statistics import REASONS
from bessemer.recipe import Corpus, dump
from bessemer.run.directory import RunDirectory
from bessemer.run.stage import stage_is_current


def source(*paths: Path | str, format: str = "text", **more: Any) -> dict[str, Any]:
    return {"name": "s", "format": format, "paths": [str(path) for path in paths], **more}


def fill(data: Path, count: int = 20) -> None:
    for number in range(count):
        (data / f"{number}.txt").write_text(prose(number))


def test_every_format(data: Path, build) -> None:
    texts = {
        name: prose(number)
        for number, name in enumerate(("text", "code", "html", "jsonl", "gz", "zst", "parquet", "about"))
    }
    (data / "a.md").write_text(texts["text"])
    (data / "a.py").write_text(texts["code"])
    paragraphs = "".join(f"<p>{line}</p>" for line in texts["html"].split("\n"))
    (data / "a.html").write_text(f"<html><body><main>{paragraphs}</main></body></html>")
    (data / "a.jsonl").write_text(json.dumps({"text": texts["jsonl"], "url": "https://example.org/"}))
    (data / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"text": texts["gz"]}).encode()))
    with pa.output_stream(data / "c.jsonl.zst", compression="zstd") as stream:
        stream.write(json.dumps({"text": texts["zst"]}).encode())
    pq.write_table(pa.table({"text": [texts["parquet"]]}), data / "a.parquet")
    (data / "METADATA").write_text("Name: a\n\n" + texts["about"])
    formats = ("text", "code", "html", "jsonl", "parquet")
    sources = [{**source(data, format=name), "name": name} for name in formats]
    sources.append({**source(data, format="descriptions", suffixes=["METADATA"]), "name": "descriptions"})
    documents, rejected, statistics = build(recipe(*sources))
    assert rejected == []
    found = {(row["source"], row["path"]): row for row in documents}
    assert found["text", "data/a.md"]["text"] == texts["text"]
    assert found["code", "data/a.py"]["text"] == texts["code"]
    assert found["html", "data/a.html"]["text"].split() == texts["html"].split()
    assert found["jsonl", "data/a.jsonl"]["text"] == texts["jsonl"]
    assert json.loads(found["jsonl", "data/a.jsonl"]["metadata"]) == {"byte": 0, "url": "https://example.org/"}
    assert found["jsonl", "data/b.jsonl.gz"]["text"] == texts["gz"]
    assert found["jsonl", "data/c.jsonl.zst"]["text"] == texts["zst"]
    assert found["parquet", "data/a.parquet"]["text"] == texts["parquet"]
    assert found["descriptions", "data/METADATA"]["text"] == texts["about"]
    assert statistics["totals"]["documents_kept"] == len(documents) == 8

    # Without a format each file is read by its ending; unknown endings in a folder are skipped.
    (data / "a.png").write_bytes(b"\x89PNG")
    (data / "settings.xml").write_text("<a/>")
    mixed = {"name": "mixed", "paths": [str(data)]}
    again, rejected, statistics = build(recipe(mixed))
    assert rejected == [] and statistics["sources"][0]["format"] == "by ending"
    assert {row["path"]: row["text"] for row in again} == {
        path: row["text"] for (name, path), row in found.items() if name != "descriptions"
    }
    few, _, _ = build(recipe({**mixed, "max_bytes": 3000}))
    assert {row["path"] for row in few} < {row["path"] for row in again}


ELSEWHERE = {
    "no_label", "step_failed", "low_quality", "only_repeats", "language_unsure", "language_other", "contaminated", "binary",
    "http_status", "not_html", "not_article", "redirect", "too_slow",
}  # fmt: skip


def test_every_reason_and_the_counts_add_up(data: Path, build) -> None:
    base = prose(1, 400)
    good = {"good.txt": base, "copy.txt": base.upper(), "near.txt": base + "\nand a few more words"}
    bad = {
        "empty.txt": b" \n",
        "short.txt": b"too short",
        "long.txt": prose(2, 3000).encode(),
        "lines.txt": b"0.125 3e-5;" * 300,
        "symbols.txt": b"+-*/ ()[]\n" * 40,
        "repeats.txt": b"the same line again\n" * 40,
        "latin.txt": prose(4).encode() + b"\xe9",
        "archive.txt": b"PK\x03\x04" + bytes(300),
    }

    for name, content in {**{name: text.encode() for name, text in good.items()}, **bad}.items():
        (data / name).write_bytes(content)
    (data / "gone.txt").symlink_to(data / "nowhere")
    lines = [json.dumps({"text": prose(10)}), "{broken", json.dumps({"text": prose(11)}), '{"body": 1}']
    (data / "a.jsonl").write_text("\n".join(lines))
    of = recipe(
        source(data),
        {**source(data, format="jsonl"), "name": "j"},
        rules="max_characters = 15_000\nmin_characters = 200",
    )
    documents, rejected, statistics = build(of)
    counts = Counter(row["reason"] for row in rejected)
    always = [reason for reason in REASONS if "." not in reason and reason not in ELSEWHERE]
    assert counts == dict.fromkeys(always, 1)
    for per_source in statistics["sources"]:
        per_reason = {reason: entry["documents"] for reason, entry in per_source["rejected"].items()}
        assert per_source["documents_in"] == per_source["documents_kept"] + sum(per_reason.values())
        mine = [row for row in documents if row["source"] == per_source["source"]]
        assert per_source["documents_kept"] == len(mine)
        assert per_source["bytes_kept"] == sum(len(row["text"].encode()) for row in mine)
        assert sum(entry["documents"] for entry in per_source["length_histogram"]) == len(mine)
    totals = statistics["totals"]
    assert totals["documents_in"] == len(documents) + len(rejected) == 16
    size = sum(path.stat().st_size for path in data.iterdir() if path.exists())
    assert totals["bytes_in"] == size


def test_columns_and_order_of_documents(data: Path, run: RunDirectory, build) -> None:
    fill(data)
    (data / "short.txt").write_text("x")
    last, first = source(data / "1*.txt"), source(data / "[2-9]*.txt", data / "short.txt")
    documents, rejected, _ = build(recipe({**last, "name": "z"}, {**first, "name": "a"}, rules="min_characters = 200"))
    assert tuple(documents[0]) == COLUMNS
    assert tuple(rejected[0]) == REJECTED_COLUMNS
    keys = [(row["source"], row["identity"]) for row in documents]
    assert keys == sorted(keys)
    names = ["documents", "rejected", "sources.json", "stage.json", "statistics.json"]
    assert sorted(path.name for path in run.corpus.iterdir()) == names


def test_two_builds_are_byte_for_byte_equal(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "PARTITION_BYTES", (2000, 2000))
    fill(data, 30)
    for number in range(10):
        (data / f"copy-{number}.txt").write_text(prose(number).upper())
        (data / f"near-{number}.txt").write_text(prose(number + 1) + "\nand some more words")
    of = recipe(source(data), dedup="bands = 14\nrows = 8\nlines = true")
    contents = []
    # Neither does the split of the work change the corpus, nor do buckets that are deduplicated together.
    for name, buckets, run_bytes, group_bytes in (
        ("one", 1, 1 << 30, 1 << 30), ("two", 7, 1 << 30, 0), ("some", 7, 1 << 30, 20_000), ("runs", 7, 5000, 1 << 30),
    ):  # fmt: skip
        monkeypatch.setattr(pipeline, "num_buckets", lambda size, buckets=buckets: buckets)
        monkeypatch.setattr(partition, "RUN_BYTES", run_bytes)
        monkeypatch.setattr(partition, "CHUNK_BYTES", 2000)
        monkeypatch.setattr(global_steps, "GROUP_BYTES", group_bytes)
        folder = RunDirectory(tmp_path / name)
        rejected = pipeline.build(of, folder)["rejected"]
        assert rejected["exact_duplicate"] >= 5 and rejected["near_duplicate"] >= 5
        contents.append([pq.read_table(folder.corpus / kind).to_pylist() for kind in ("documents", "rejected")])
        if name == "one":
            first = {path.name: path.read_bytes() for path in folder.corpus.rglob("*.parquet")}
            pipeline.build(of, folder)
            assert first == {path.name: path.read_bytes() for path in folder.corpus.rglob("*.parquet")}
    assert contents[0] == contents[1] == contents[2] == contents[3]
    two, *others = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.*")} for name in ("two", "some", "runs")
    )
    assert [name for other in others for name in two.keys() | other.keys() if two.get(name) != other.get(name)] == []


def test_half_a_surrogate_pair_rejects_one_document(data: Path, build) -> None:
    half = '{"text": "' + "x" * 300 + ' \\ud800"}'
    (data / "a.jsonl").write_text(half + "\n" + json.dumps({"text": prose(1)}))
    documents, rejected, _ = build(recipe(source(data, format="jsonl")))
    assert len(documents) == 1
    assert rejected[0]["reason"] == "not_utf8"


def test_file_names_that_are_not_utf8(data: Path, build) -> None:
    (data / "caf\udce9.txt").write_text(prose(1))
    documents, _, _ = build(recipe(source(data)))
    assert documents[0]["path"] == "data/caf\\udce9.txt"


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [("a.txt", "short", "text"), ("a.jsonl", '{"body": "x"}\n', "jsonl"), ("a.jsonl", "", "jsonl"), ("a.parquet", "not parquet", "parquet")],
)  # fmt: skip
def test_a_source_without_kept_documents(data: Path, run: RunDirectory, name: str, content: str, format: str) -> None:
    (data / name).write_text(content)
    fill(data, 1)
    sources = [{**source(data / "0.txt"), "name": "fine"}, source(data / name, format=format)]
    with pytest.raises(InputError, match=r"corpus\.sources\.s") as caught:
        pipeline.build(recipe(*sources, rules="min_characters = 200"), run)
    assert "\n" not in str(caught.value)
    assert list(run.path.iterdir()) == []


def loses(kind: str) -> tuple[object, str, object]:
    """Faults that lose a document or a count, as arguments of `setattr`."""
    look, part = pq.ParquetFile.read_row_group, global_steps.BucketPart.__call__
    merge = Tally.merge
    return {
        "a row": (pq.ParquetFile, "read_row_group", lambda *given, **more: look(*given, **more).slice(1)),
        "in the search": (
            global_steps.BucketPart,
            "__call__",
            lambda *given: (table.slice(1) for table in part(*given)),
        ),
        "a count": (
            Tally,
            "merge",
            lambda self, other: merge(
                self, {name: one for name, one in other.items() if name != "in" or "kept" in other}
            ),
        ),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "counts"), [("a row", "source s, bucket 0: 20.*19"), ("in the search", "20.*19"), ("a count", "0.*20")]
)
def test_a_lost_document_fails_the_stage(
    data: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, kind: str, counts: str
) -> None:
    fill(data)
    monkeypatch.setattr(*loses(kind))
    with pytest.raises(BessemerError, match=counts):
        pipeline.build(recipe(source(data)), run)
    assert not run.corpus.exists()


def test_a_failing_step_rejects_its_document() -> None:
    class Odd(CleaningStep):
        """A step with a fault."""

        def judge(self, document: Document) -> None:
            if document.text == "odd":
                raise ZeroDivisionError("by nought")

    failing, tally = Chain(Corpus(), (Odd(),)), Tally()
    documents = [Document("", 4, "even"), Document("", 3, "odd")]
    for document in documents:
        failing.clean(document, tally)
    assert [(one.reason, one.detail) for one in documents] == [
        (None, ""), ("step_failed", "odd: ZeroDivisionError: by nought")
    ]  # fmt: skip
    assert list_step_counts(tally, failing.filters)[1:] == [{"step": "odd", "documents_in": 2, "rejected": 1}]


@pytest.mark.parametrize("keep", ["excerpt", "text", "none"])
def test_stored_parts_of_rejected_documents(data: Path, build, keep: str) -> None:
    (data / "a.txt").write_text(prose(1))
    (data / "copy.txt").write_text(prose(1))
    (data / "long.txt").write_text("0.25, 3e-5; " * 200)
    of = recipe(source(data))
    _, rejected, _ = build(of.changed(corpus={"keep_rejected": keep}))
    found = {row["reason"]: (row["excerpt"], row["text"]) for row in rejected}
    long = ("0.25, 3e-5; " * 200).strip()
    whole = {"exact_duplicate": prose(1), "long_lines": long}
    assert found == {
        reason: ("" if keep == "none" else text[:300], text if keep == "text" else "") for reason, text in whole.items()
    }


def test_the_digest_follows_the_inputs(data: Path, run: RunDirectory) -> None:
    fill(data, 3)
    of = recipe(source(data))
    before = inputs_digest(of)
    pipeline.build(of, run)
    assert stage_is_current(run.corpus, before)
    assert inputs_digest(recipe(source(data, weight=2.0))) == before
    for update in ({"engine": "ray", "address": "head:6379"}, {"workers": 7}):
        assert inputs_digest(of.changed(corpus=update)) == before
    assert inputs_digest(of.changed(corpus={"keep_rejected": "text"})) != before
    assert inputs_digest(recipe(source(data), rules="min_characters = 100")) != before
    os.utime(data / "0.txt", ns=(1, 1))
    assert inputs_digest(of) != before
    (data / "3.txt").write_text("new")
    assert not stage_is_current(run.corpus, inputs_digest(of))


def test_a_failed_build_leaves_the_old_corpus(data: Path, run: RunDirectory) -> None:
    fill(data, 3)
    pipeline.build(recipe(source(data)), run)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(InputError):
        pipeline.build(recipe(source(data), rules="min_characters = 100_000"), run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_disk_error_is_reported_and_nothing_is_published(
    data: Path, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    fill(data, 3)
    monkeypatch.setattr(publish, "write_parts", full)
    with pytest.raises(OSError, match="No space left"):
        pipeline.build(recipe(source(data)), run)
    assert [path.name for path in run.path.iterdir()] == ["corpus.work"]


def test_an_interrupt_ends_the_build_and_publishes_nothing(data: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    for file in range(40):
        text = "\n".join(" ".join(str(draw.random()) for _ in range(8)) for _ in range(2000))
        (data / f"{file}.txt").write_text(text)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, pathlib\n"
        "from bessemer.common import interrupt\n"
        "from bessemer.corpus import pipeline\n"
        "from bessemer.corpus.filters import chain\n"
        "from bessemer.recipe import parse\n"
        "from bessemer.run.directory import RunDirectory\n"
        "interrupt.listen()\n"
        "whole = chain.apply\n"
        "def slow(*given):\n"
        "    print('working', flush=True)\n"
        "    return whole(*given)\n"
        "chain.apply = slow\n"
        "try:\n"
        "    recipe = parse(pathlib.Path(sys.argv[1]).read_text(), 'test')\n"
        "    pipeline.build(recipe, RunDirectory(pathlib.Path(sys.argv[2])))\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(75)\n"
    )
    (tmp_path / "r.toml").write_text(dump(recipe(source(data)).changed(corpus={"workers": 1})))
    arguments = [sys.executable, str(program), str(tmp_path / "r.toml"), str(tmp_path / "run")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("working")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(timeout=300) == 75
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["corpus.work"]


def test_labels_reach_the_documents(data: Path, build) -> None:
    fill(data, 4)
    lines = [{"text": prose(100 + number), "kind": f"k{number % 2}"} for number in range(5)]
    (data / "a.jsonl").write_text("\n".join(json.dumps(line) for line in [*lines, {"text": prose(200)}]))
    documents, rejected, _ = build(
        recipe(
            {**source(data / "*.txt"), "label": "prose"},
            {"name": "j", "format": "jsonl", "paths": [str(data / "a.jsonl")], "label_key": "kind"},
        )
    )
    by_text = {row["text"]: row["label"] for row in documents}
    assert {by_text[prose(100 + number)] for number in (0, 2, 4)} == {"k0"}
    assert {by_text[prose(100 + number)] for number in (1, 3)} == {"k1"}
    assert sorted(row["label"] for row in documents if row["source"] != "j") == ["prose"] * 4
    assert [row["detail"] for row in rejected] == ["line 6: field 'kind': no label (missing)"]
