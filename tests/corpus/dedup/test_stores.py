"""What is written to disk comes back, by number and in any order."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bessemer.corpus.dedup.judging import first_of_equal
from bessemer.corpus.dedup.signatures import Records, ShingleSets, Signatures
from bessemer.corpus.dedup.verdicts import packed


@pytest.mark.parametrize("gap", [0, 40, 1 << 20])
def test_ranges_are_gathered(gap: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.corpus.dedup.signatures.JOINED_GAP", gap)
    values = np.random.default_rng(0).integers(0, 1 << 60, 1000, dtype=np.uint64)
    with closing(Records(tmp_path / "r", np.uint64)) as records:
        for part in np.array_split(values, 7):
            records.append(part)
        starts, counts = np.array([0, 3, 3, 17, 500, 503, 999]), np.array([2, 0, 5, 1, 3, 100, 1])
        expected = np.concatenate([values[s : s + c] for s, c in zip(starts, counts, strict=True)])
        assert records.gather(starts, counts).tolist() == expected.tolist()
        assert records.gather(starts[:0], counts[:0]).tolist() == []
        assert np.concatenate(list(records.chunks(64))).tolist() == values.tolist()
        records.write(10, np.arange(5, dtype=np.uint64))
        assert records.range(9, 7).tolist() == [values[9], 0, 1, 2, 3, 4, values[15]]
        with pytest.raises(OSError, match="ends before"):
            records.range(999, 2)


def test_signatures_and_sets_by_number(tmp_path: Path) -> None:
    signed = np.random.default_rng(0).integers(0, 1 << 32, (50, 6), dtype=np.uint32)
    stores = Signatures(tmp_path, 3, 2)
    stores.append(signed[:20], np.zeros(20))
    stores.append(signed[20:], np.zeros(30))
    places = np.array([7, 49, 7, 0, 20, 19])
    assert stores.of(places).tolist() == signed[places].tolist()
    stores.close()
    sets = ShingleSets(tmp_path / "sets", 10)
    rng = np.random.default_rng(1)
    kept = {row: rng.integers(0, 1 << 60, rng.integers(0, 9), dtype=np.uint64) for row in (4, 9, 0, 5)}
    for row, values in kept.items():
        sets.put(row, values)
    rows = np.array([5, 4, 4, 0, 9, 5])
    found, starts = sets.of(rows)
    got = [found[starts[i] : starts[i + 1]].tolist() for i in range(len(rows))]
    assert got == [kept[int(row)].tolist() for row in rows]
    sets.close()


def test_first_of_equal() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.integers(0, 5, (40, 2), dtype=np.uint64)
        seen: dict[tuple[int, ...], int] = {}
        pairs = list(map(tuple, values.tolist()))
        assert first_of_equal(values.view("S16")[:, 0]).tolist() == [
            seen.setdefault(pair, i) for i, pair in enumerate(pairs)
        ]
    assert first_of_equal(np.zeros(0, dtype="S16")).tolist() == []


def test_order_of_identities_is_that_of_their_names() -> None:
    names = ["00" * 16, "ff" * 16, "01" + "00" * 15, "0100" + "01" * 14, "00" * 15 + "01", "80" + "00" * 15]
    assert [names[i] for i in packed(names).argsort()] == sorted(names)
