"""Rows are found by identity and equal those of the Parquet files."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from corpus_samples import prose, recipe

from bessemer.corpus import publish
from bessemer.run.directory import RunDirectory


def test_every_document_and_every_reject_is_found(
    data: Path, run: RunDirectory, build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bessemer.corpus import partition

    monkeypatch.setattr(publish, "ROW_GROUP_BYTES", 3000)
    monkeypatch.setattr(publish, "PART_BYTES", 9000)
    monkeypatch.setattr(partition, "BUCKET_BYTES", 20_000)
    (data / "other").mkdir()
    for number in range(50):
        (data / f"{number}.txt").write_text(prose(number))
        (data / f"short-{number}.txt").write_text("short")
        (data / "other" / f"{number}.md").write_text(prose(1000 + number))
    sources = {"z-last": "*.txt", "a": "other"}
    of = [{"name": name, "format": "text", "paths": [str(data / path)]} for name, path in sources.items()]
    documents, rejected, _ = build(recipe(*of, rules="min_characters = 200"))
    assert (len(documents), len(rejected)) == (100, 50)
    assert len(list((run.corpus / "documents").iterdir())) > 4
    every = [row["identity"] for row in (*documents, *rejected)]
    columns = ("text", "source", "path", "place", "reason", "excerpt")
    found = publish.look_up(run.corpus, [*every, "0" * 32, "f" * 32], columns)
    assert set(found) == set(every)
    for kind, rows in (("documents", documents), ("rejected", rejected)):
        for row in rows:
            place = found[row["identity"]]
            assert place["kind"] == kind
            assert all(place[key] == row[key] for key in columns if key in row)
            part = pq.ParquetFile(run.corpus / kind / f"part-{place['part']:05d}.parquet")
            assert row["identity"] in part.read(columns=["identity"])["identity"].to_pylist()
