"""Rows are found by identity, and what is found is what stands in the Parquet files."""

import random
from pathlib import Path

import pytest
from corpus_samples import prose, recipe

from bessemer.corpus import index, publish
from bessemer.errors import BessemerError, DamagedFile
from bessemer.run import RunFolder


def test_every_document_and_every_reject_is_found(
    data: Path, run: RunFolder, build, monkeypatch: pytest.MonkeyPatch
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
    sources = [
        {"name": "z-last", "format": "text", "paths": [str(data / "*.txt")]},
        {"name": "a", "format": "text", "paths": [str(data / "other")]},
    ]
    documents, rejected, _ = build(recipe(*sources, rules="min_characters = 200"))
    assert len(documents) == 100
    assert len(rejected) == 50
    assert len(list((run.corpus / "documents").iterdir())) > 4
    every = [row["identity"] for row in (*documents, *rejected)]
    columns = ("text", "source", "path", "place", "reason", "excerpt")
    found = index.look_up(run.corpus, every, columns)
    assert set(found) == set(every)
    for row in documents:
        place = found[row["identity"]]
        assert place["kind"] == "documents"
        assert {key: place[key] for key in ("text", "source", "path", "place")} == {
            key: row[key] for key in ("text", "source", "path", "place")
        }
    for row in rejected:
        assert (found[row["identity"]]["kind"], found[row["identity"]]["reason"]) == ("rejected", "too_short")
    assert index.find(run.corpus, "0" * 32) is None
    assert index.find(run.corpus, "f" * 32) is None


def test_an_index_of_another_corpus_is_refused(data: Path, run: RunFolder, build) -> None:
    for number in range(10):
        (data / f"{number}.txt").write_text(prose(number))
    documents, _, _ = build(recipe({"name": "s", "format": "text", "paths": [str(data)]}))
    path = index.index_file(run.corpus, "documents", "s")
    raw = path.read_bytes()
    path.write_bytes(raw[:-5])
    with pytest.raises(BessemerError, match="not a document index"):
        index.find(run.corpus, documents[0]["identity"])
    swapped = bytearray(raw)
    swapped[8 + 24 : 8 + 28] = (7).to_bytes(4, "little")
    path.write_bytes(swapped)
    with pytest.raises(DamagedFile, match=str(path)):
        index.look_up(run.corpus, [documents[0]["identity"]], ())


def test_look_ups_do_not_read_the_whole_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: 19 records unpacked at the most for 200,000 of them."""
    draw = random.Random(0)
    names = sorted(draw.randbytes(16).hex() for _ in range(200_000))
    (tmp_path / "index").mkdir()
    raw = index.records(names, [(0, 150_000), (0, 40_000), (1, 10_000)])
    index.index_file(tmp_path, "documents", "s").write_bytes(index.MAGIC + index.shifted(raw, 3))
    assert index.find(tmp_path, names[0]) == index.IndexEntry("documents", "s", 3, 0, 0)
    assert index.find(tmp_path, names[150_001]) == index.IndexEntry("documents", "s", 3, 1, 1)
    assert index.find(tmp_path, names[-1]) == index.IndexEntry("documents", "s", 4, 0, 9_999)

    class Counted:
        size = index.RECORD.size
        calls = 0

        def unpack_from(self, *given: object) -> tuple[object, ...]:
            Counted.calls += 1
            return index.RECORD_.unpack_from(*given)  # type: ignore[attr-defined]

    monkeypatch.setattr(index, "RECORD_", index.RECORD, raising=False)
    monkeypatch.setattr(index, "RECORD", Counted())
    assert index.find(tmp_path, names[77_777]) is not None
    assert Counted.calls <= 19
