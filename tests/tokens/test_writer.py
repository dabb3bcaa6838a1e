from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import BessemerError
from bessemer.tokens.shards import ShardWriter
from bessemer.tokens.stream import Shard

DTYPE = np.dtype("<u2")
LENGTHS = [30, 50, 20, 90, 10, 1, 1, 120, 5, 60, 33]


def writer(folder: Path, name: str = "s-train", labelled: bool = True) -> ShardWriter:
    return ShardWriter(folder, name, DTYPE, 100, labelled)


def add(to: ShardWriter, first: int, last: int) -> None:
    for number in range(first, last):
        ids = (np.arange(LENGTHS[number]) + number) % 1000
        to.add(f"{number:032x}", ids, LENGTHS[number] * 3, number % 3 - 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, object]]:
    folder = tmp_path_factory.mktemp("whole")
    made = writer(folder)
    add(made, 0, len(LENGTHS))
    made.close()
    return contents(folder), made.files


@pytest.mark.parametrize("recorded", range(len(LENGTHS) + 1))
@pytest.mark.parametrize("further", [0, 1, 3, 99])
def test_going_on_from_any_record_gives_the_same_shards(
    tmp_path: Path, whole: tuple[dict[str, bytes], dict[str, object]], recorded: int, further: int
) -> None:
    """Recorded after so many documents, killed after some more: closed shards, open ones, and half a write at the end."""
    made = writer(tmp_path)
    add(made, 0, recorded)
    state = json.loads(json.dumps(made.state()))
    killed = min(recorded + further, len(LENGTHS))
    add(made, recorded, killed)
    if further == 99:
        made.close()
    else:
        made.state()  # flushed: more is on the disk than the record says
        for path in tmp_path.glob("*.part"):
            path.write_bytes(path.read_bytes() + b"half a record")
    again = writer(tmp_path)
    again.resume(state)
    assert (again.documents, again.tokens) == (recorded, sum(LENGTHS[:recorded]))
    add(again, recorded, len(LENGTHS))
    again.close()
    assert (contents(tmp_path), again.files) == whole
    assert (again.documents, again.tokens, again.bytes, again.longest) == (11, sum(LENGTHS), 3 * sum(LENGTHS), 120)


def test_only_its_own_files_are_removed(tmp_path: Path) -> None:
    other = writer(tmp_path, "s-train-train")
    add(other, 0, 5)
    other.close()
    before = contents(tmp_path)
    made = writer(tmp_path)
    state = made.state()
    add(made, 0, 5)
    made.close()
    writer(tmp_path).resume(state)
    assert contents(tmp_path) == before


def test_what_is_gone_is_named(tmp_path: Path) -> None:
    made = writer(tmp_path)
    add(made, 0, 2)
    state = made.state()
    shutil.copytree(tmp_path, tmp_path / "copy")
    whole = (tmp_path / "s-train-00000.bin").read_bytes()
    for content in (b"1234", whole[:-1] + bytes([whole[-1] ^ 1]), whole[::-1]):
        (tmp_path / "copy" / "s-train-00000.bin").write_bytes(content)
        with pytest.raises(BessemerError, match=r"s-train-00000.bin"):
            writer(tmp_path / "copy").resume(state)
    (tmp_path / "s-train-00000.part").unlink()
    with pytest.raises(BessemerError, match=r"s-train-00000.part: missing or shorter"):
        writer(tmp_path).resume(state)


def test_tokens_go_to_disk_as_they_come(tmp_path: Path) -> None:
    made = ShardWriter(tmp_path, "s-train", DTYPE, 1 << 30)
    for number in range(8):
        made.add(f"{number:032x}", np.full(1 << 20, 7), 1)
    assert (tmp_path / "s-train-00000.bin").stat().st_size >= 7 * (1 << 21)
    made.close()
    assert Shard(tmp_path / "s-train-00000.bin", DTYPE).offsets.tolist() == [n << 20 for n in range(9)]
