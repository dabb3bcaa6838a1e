"""Files looked at and unpacked by tasks: the units are those of one process that looks at all of them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import prose, recipe

from bessemer.corpus import engine, look, pipeline, units, worker
from bessemer.corpus.files import Listing, listing
from bessemer.corpus.units import Unit, plan
from bessemer.errors import InputError, Stopped
from bessemer.recipe import Recipe
from bessemer.run import RunFolder


@pytest.fixture
def of(data: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Sources with compressed and plain JSON lines, one of them cut short, a dump packed as a whole, Parquet and text."""
    monkeypatch.setattr(units, "MEMBER_BYTES", 1000)
    monkeypatch.setattr(units, "RANGE_BYTES", 5000)
    for name in ("lines", "dumps", "tables", "texts"):
        (data / name).mkdir()
    for number in range(6):
        lines = "\n".join(json.dumps({"text": prose(100 * number + row)}) for row in range(8)).encode()
        (data / "lines" / f"{number}.jsonl").write_bytes(lines)
        (data / "lines" / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines[::-1] if number == 3 else lines))
        pages = "".join(
            f"<page><title>{row}</title><revision><text>{prose(7000 + row)}</text></revision></page>\n"
            for row in range(9)
        )
        (data / "dumps" / f"{number}.xml.gz").write_bytes(gzip.compress(f"<mediawiki>{pages}</mediawiki>".encode()))
        pq.write_table(pa.table({"text": [prose(900 + number)]}), data / "tables" / f"{number}.parquet")
        (data / "texts" / f"{number}.txt").write_text(prose(500 + number))
    whole = (data / "lines" / "5.jsonl.gz").read_bytes()
    (data / "lines" / "5.jsonl.gz").write_bytes(whole[:-200])
    formats = {"lines": "jsonl", "dumps": "mediawiki", "tables": "parquet", "texts": "text"}
    return recipe(*({"name": name, "format": kind, "paths": [str(data / name)]} for name, kind in formats.items()))


def listings(of: Recipe) -> dict[str, Listing]:
    return {source.name: listing(source) for source in of.corpus.sources}


def comparable(planned: list[Unit]) -> list[object]:
    """Units, with the content of files that were unpacked in place of where they lie."""
    return [
        (unit.source, unit.format, [
            replace(piece, path="") if piece.stamp else (replace(piece, path=""), Path(piece.path).read_bytes())
            for piece in unit.pieces if not piece.damage
        ], [piece.damage for piece in unit.pieces])
        for unit in planned
    ]  # fmt: skip


@pytest.mark.parametrize("task_bytes", [1, 1 << 30])
def test_units_are_equal(of: Recipe, tmp_path: Path, task_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "TASK_BYTES", task_bytes)
    found = listings(of)
    tasks = look.look_tasks(of.corpus, found, tmp_path)
    assert {task.source.name for task in tasks} == {"lines", "dumps", "tables"}, "texts need no look"
    assert len(tasks) == (24 if task_bytes == 1 else 3)
    for task in reversed(tasks):
        task.run()
    looked = look.looked_by_source(tasks)
    for source in of.corpus.sources:
        files = found[source.name].read
        here = plan(source, files, tmp_path / "spool")
        there = plan(source, files, tmp_path / "other", looked.get(source.name))
        assert comparable(there) == comparable(here)
    assert not (tmp_path / "other").exists()
    assert list((tmp_path / "files" / "lines-jsonl").rglob("unpacked"))


def test_a_source_of_few_bytes_is_left_to_the_driver(of: Recipe, tmp_path: Path) -> None:
    sources = tuple(source.changed(max_bytes=10_000) for source in of.corpus.sources)
    assert look.look_tasks(of.corpus.changed(sources=sources), listings(of), tmp_path) == []


def test_a_task_that_was_stopped_publishes_nothing(of: Recipe, tmp_path: Path) -> None:
    task = look.look_tasks(of.corpus, listings(of), tmp_path)[0]
    engine.STOP.set()
    with pytest.raises(Stopped):
        task.run()
    engine.STOP.clear()
    assert task.receipt() is None


def test_fields_that_no_file_has_are_named_as_ever(data: Path, run: RunFolder) -> None:
    for number in range(3):
        (data / f"{number}.jsonl.gz").write_bytes(gzip.compress(b'{"body": "x"}\n' * 9))
    wrong = recipe({"name": "s", "format": "jsonl", "paths": [str(data)]})
    with pytest.raises(InputError, match=r"corpus.sources.s: data/0.jsonl.gz: .*body.*and 2 more files"):
        pipeline.build(wrong, run)


@pytest.mark.long
def test_workers_unpack(of: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = RunFolder(tmp_path / "one"), RunFolder(tmp_path / "two")
    pipeline.build(of, one)
    monkeypatch.setattr(worker, "SMALL_BYTES", 1 << 20)  # less than the looks are counted, more than the other steps
    monkeypatch.setattr(units.FilePlanner, "_unpacked", lambda *given: pytest.fail("the driver unpacked a file"))
    pipeline.build(of.changed(corpus={"workers": 2}), two)
    for name in ("documents", "rejected"):
        mine, theirs = ({path.name: path.read_bytes() for path in (run.corpus / name).iterdir()} for run in (one, two))
        assert mine == theirs
