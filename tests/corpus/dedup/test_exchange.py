"""What a task writes for the others is what each of them reads."""

from pathlib import Path

import numpy as np
import pytest

from bessemer.corpus.dedup import exchange
from bessemer.corpus.dedup.exchange import SplitWriter, read_split, take_ragged
from bessemer.corpus.dedup.task import is_new, range_of, runs, spread
from bessemer.corpus.dedup.verdicts import packed


@pytest.mark.parametrize("run_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("num_targets", [1, 2, 7])
def test_records_and_ragged_arrays_are_read_by_target(
    num_targets: int, run_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "RUN_BYTES", run_bytes)
    rng = np.random.default_rng(0)
    expected: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_targets)]
    paths = []
    number = 0
    for writer in range(3):
        paths.append((tmp_path / f"records-{writer}", tmp_path / f"values-{writer}"))
        with SplitWriter(paths[-1][0], num_targets) as records, SplitWriter(paths[-1][1], num_targets) as values:
            for count in (0, 5, 40)[: writer + 1]:
                targets, lengths = rng.integers(0, num_targets, count), rng.integers(0, 4, count)
                flat = rng.integers(0, 1 << 60, lengths.sum(), dtype=np.uint64)
                made = np.zeros(count, dtype=[("name", "<i8"), ("length", "<i4")])
                made["name"], made["length"] = np.arange(number, number + count), lengths
                number += count
                records.write(targets, made)
                values.write(targets, flat, lengths)
                for target, name, part in zip(
                    targets.tolist(), made["name"].tolist(), np.split(flat, np.cumsum(lengths)[:-1]), strict=False
                ):
                    expected[target].append((name, part.tolist()))
    for target in range(num_targets):
        records_read = read_split([path for path, _ in paths], target, [("name", "<i8"), ("length", "<i4")])
        values_read = read_split([path for _, path in paths], target, np.uint64)
        parts = np.split(values_read, np.cumsum(records_read["length"])[:-1])
        got = list(zip(records_read["name"].tolist(), (part.tolist() for part in parts), strict=False))
        assert got == expected[target]
    assert len(read_split([path for path, _ in paths], None, [("name", "<i8"), ("length", "<i4")])) == number


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    with SplitWriter(tmp_path / "values", 1) as file:
        file.write(np.zeros(100, dtype=int), np.arange(100))
    whole = (tmp_path / "values").read_bytes()
    (tmp_path / "values").write_bytes(whole[:50] + whole[-32:])
    with pytest.raises(OSError, match="values: ends before byte 800"):
        read_split([tmp_path / "values"], 0, np.int64)


def test_ranges_hold_neighbouring_keys_and_numbers_are_spread() -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, 10_000, dtype=np.uint64)
    ranges = range_of(np.sort(keys), 5)
    assert (np.diff(ranges.astype(int)) >= 0).all()
    assert np.bincount(ranges.astype(int)).min() > 1800
    assert range_of(keys, 1).max() == 0
    numbers = np.arange(10_000, dtype=np.uint64)
    assert np.bincount(spread(numbers, 5).astype(int)).min() > 1800


def test_runs_and_ragged_arrays() -> None:
    starts, sizes = runs(np.array([3, 3, 5, 7, 7, 7]))
    assert (starts.tolist(), sizes.tolist()) == ([0, 2, 3], [2, 1, 3])
    assert [part.tolist() for part in runs(np.zeros(0))] == [[], []]
    assert is_new(np.array([1, 1, 1]), np.array([0, 0, 1])).tolist() == [True, False, True]
    values, lengths = np.array([10, 11, 20, 30, 31, 32]), np.array([2, 1, 0, 3])
    assert take_ragged(values, lengths, np.array([3, 0, 2, 3])).tolist() == [30, 31, 32, 10, 11, 30, 31, 32]
    assert take_ragged(values, lengths, np.array([], dtype=int)).tolist() == []


def test_order_of_identities_is_that_of_their_names() -> None:
    names = ["00" * 16, "ff" * 16, "01" + "00" * 15, "0100" + "01" * 14, "00" * 15 + "01", "80" + "00" * 15]
    assert [names[i] for i in packed(names).argsort()] == sorted(names)
