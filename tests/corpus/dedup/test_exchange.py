"""Exchange of records between tasks: each task reads what the others wrote for it."""

from pathlib import Path

import numpy as np
import pytest

from bessemer.corpus.dedup.task import SplitWriter, read_split


@pytest.mark.parametrize("run_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("num_targets", [1, 2, 7])
def test_records_and_ragged_arrays_are_read_by_target(num_targets: int, run_bytes: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    expected: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_targets)]
    paths = []
    number = 0
    for writer in range(3):
        paths.append((tmp_path / f"records-{writer}", tmp_path / f"values-{writer}"))
        with (
            SplitWriter(paths[-1][0], num_targets, run_bytes) as records,
            SplitWriter(paths[-1][1], num_targets, run_bytes) as values,
        ):
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
        records_read = read_split(
            [path for path, _ in paths], range(target, target + 1), [("name", "<i8"), ("length", "<i4")]
        )
        values_read = read_split([path for _, path in paths], range(target, target + 1), np.uint64)
        parts = np.split(values_read, np.cumsum(records_read["length"])[:-1])
        got = list(zip(records_read["name"].tolist(), (part.tolist() for part in parts), strict=False))
        assert got == expected[target]
    for targets in (range(num_targets), range(num_targets // 2, num_targets)):
        found = read_split([path for path, _ in paths], targets, [("name", "<i8"), ("length", "<i4")])
        assert sorted(found["name"]) == sorted(name for target in targets for name, _ in expected[target])
