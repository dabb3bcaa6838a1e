import gzip
import pickle
from pathlib import Path

import pytest

from bessemer.corpus import inflate, partition, units
from bessemer.corpus.files import find
from bessemer.corpus.readers import read
from bessemer.corpus.units import Unit, plan
from bessemer.recipe import Rules, Source


def planned(folder: Path, spool: Path, format: str = "text", **more: object) -> list[Unit]:
    source = Source.model_validate({"name": "s", "format": format, "paths": [str(folder)], **more})
    return plan(source, find(source), spool)


def test_small_files_share_a_unit_and_large_ones_do_not(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    for number, size in enumerate((40, 40, 40, 500)):
        (data / f"{number}.txt").write_text("x" * size)
    assert [[piece.size for piece in unit.pieces] for unit in planned(data, tmp_path)] == [
        [40, 40],
        [40],
        [500],
    ]


def test_ranges_grow_with_the_source(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "RANGE_BYTES", 100)
    monkeypatch.setattr(units, "MANY_UNITS", 4)
    (data / "a.jsonl").write_text('{"text": ""}\n' * 200)
    assert [unit.size for unit in planned(data, tmp_path, "jsonl")] == [650] * 4


def test_a_source_of_few_ranges_is_cut_finer(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 100)
    for num_lines, expected in ((2000, 26_000 // units.FEW_UNITS), (100, 100)):
        (data / "a.jsonl").write_text('{"text": ""}\n' * num_lines)
        assert {unit.size for unit in planned(data, tmp_path, "jsonl")[:-1]} == {expected}


def test_units_survive_the_way_through_the_engine(data: Path, tmp_path: Path) -> None:
    (data / "caf\udce9.txt").write_text("x")
    (unit,) = planned(data, tmp_path)
    (one,) = partition.cut([unit], tmp_path)
    assert pickle.loads(pickle.dumps(one)) == one


def test_max_bytes_takes_the_same_files_each_time(data: Path, tmp_path: Path) -> None:
    for number in range(100):
        (data / f"{number}.txt").write_text("x" * 100)
    chosen = [piece.name for unit in planned(data, tmp_path, max_bytes=1000) for piece in unit.pieces]
    assert chosen == [piece.name for unit in planned(data, tmp_path, max_bytes=1000) for piece in unit.pieces]
    assert len(chosen) == 10
    assert chosen != sorted(f"data/{number}.txt" for number in range(100))[:10]
    more = [piece.name for unit in planned(data, tmp_path, max_bytes=2000) for piece in unit.pieces]
    assert set(chosen) < set(more)


def test_max_bytes_does_not_fill_up_with_empty_files(data: Path, tmp_path: Path) -> None:
    for number in range(100):
        (data / f"{number}.txt").write_text("x" * 100)
        (data / f"{number}.md").write_text("")
    chosen = [piece for unit in planned(data, tmp_path, max_bytes=1000) for piece in unit.pieces]
    assert sum(not piece.size for piece in chosen) < 30


def test_one_file_over_the_budget_is_still_read(data: Path, tmp_path: Path) -> None:
    (data / "a.txt").write_text("x" * 1000)
    assert len(planned(data, tmp_path, max_bytes=10)) == 1


def test_max_bytes_takes_ranges_of_one_long_jsonl(data: Path, tmp_path: Path) -> None:
    (data / "a.jsonl").write_text('{"text":""}\n' * 300_000)
    taken = planned(data, tmp_path, "jsonl", max_bytes=400_000)
    assert 300_000 < sum(unit.size for unit in taken) <= 400_000
    assert any(unit.pieces[0].start > 400_000 for unit in taken)


def test_compressed_jsonl_is_read_in_ranges(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "RANGE_BYTES", 100)
    monkeypatch.setattr(inflate, "BLOCK_BYTES", 50)
    lines = [f'{{"text": "{number}"}}\n'.encode() for number in range(30)]
    (data / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    pieces = [piece for unit in planned(data, tmp_path / "spool", "jsonl") for piece in unit.pieces]
    assert len(pieces) > 3
    assert Path(pieces[0].path).read_bytes() == b"".join(lines)
    units_ = planned(data, tmp_path / "again", "jsonl")
    read_ = [record for unit in units_ for _, record in read(unit, Rules())]
    assert [record.text for record in read_] == [str(number) for number in range(30)]
    assert [int(record.key) for record in read_] == [sum(map(len, lines[:number])) for number in range(30)]


def test_a_bomb_is_cut_off(data: Path, tmp_path: Path) -> None:
    (data / "a.jsonl.gz").write_bytes(gzip.compress(b" " * 50_000_000))
    spool = tmp_path / "spool"
    (piece,) = [piece for unit in planned(data, spool, "jsonl") for piece in unit.pieces]
    assert piece.damage.startswith("expands more than 100 times")
    assert sum(path.stat().st_size for path in spool.rglob("*") if path.is_file()) == 0
