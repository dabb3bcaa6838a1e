import gzip
import json
import random
from pathlib import Path

import pytest
from corpus_samples import prose

from bessemer.corpus.document import Document
from bessemer.corpus.partition import PARTITION_BYTES, cut, read
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.files import find
from bessemer.corpus.readers.parts import plan
from bessemer.recipe import Corpus, Source


def planned(folder: Path, format: str = "text", **more: object) -> list[Part]:
    source = Source.model_validate({"name": "s", "format": format, "paths": [str(folder)], **more})
    return plan(source, find(source))


def documents(parts: list[Part]) -> list[Document]:
    source = Source(name="s", paths=("x",))
    return list(read(source, parts, Corpus()))


def test_small_files_share_a_partition_and_large_ones_do_not(data: Path) -> None:
    small, large = 2 * PARTITION_BYTES[0] // 5, 5 * PARTITION_BYTES[0]
    for number, size in enumerate((small, small, small, large)):
        with (data / f"{number}.txt").open("wb") as file:
            file.truncate(size)
    partitions = cut({"s": planned(data)}, data)
    assert [[part.size for part in one.parts] for one in partitions] == [[small, small], [small], [large]]


def test_max_bytes_takes_the_same_files_each_time(data: Path) -> None:
    for number in range(100):
        (data / f"{number}.txt").write_text("x" * 100)
    chosen = [part.name for part in planned(data, max_bytes=1000)]
    assert chosen == [part.name for part in planned(data, max_bytes=1000)]
    assert len(chosen) == 10
    assert chosen != sorted(f"data/{number}.txt" for number in range(100))[:10]
    more = [part.name for part in planned(data, max_bytes=2000)]
    assert set(chosen) < set(more)
    assert len(planned(data, max_bytes=10)) == 1


def test_max_bytes_takes_ranges_of_one_long_jsonl(data: Path) -> None:
    (data / "a.jsonl").write_text('{"text":""}\n' * 300_000)
    taken = planned(data, "jsonl", max_bytes=400_000)
    assert 300_000 < sum(part.size for part in taken) <= 400_000
    assert any(part.start > 400_000 for part in taken)


@pytest.mark.parametrize("damage", [0, 200])
def test_compressed_jsonl_is_one_part(data: Path, damage: int) -> None:
    lines = [
        json.dumps({"text": f"{number} {random.Random(number).randbytes(60_000).hex()}"}).encode() + b"\n"
        for number in range(90)
    ]
    packed = gzip.compress(b"".join(lines), 1)
    assert len(packed) > 4 << 20, "plain, it would be two"
    (data / "a.jsonl.gz").write_bytes(packed[: len(packed) - damage])
    (part,) = planned(data, "jsonl")
    *found, last = documents([part])
    if damage:
        assert last.reason == "unreadable" and last.detail.startswith("cut short")
    else:
        found.append(last)
    assert (len(found) < 90) is (damage > 0) and len(found) > 50
    assert [record.text.split()[0] for record in found] == [str(number) for number in range(len(found))]
    assert [int(record.key) for record in found] == [sum(map(len, lines[:number])) for number in range(len(found))]


@pytest.mark.parametrize("num_files", [1, 40])
def test_max_bytes_takes_the_beginnings_of_compressed_files(data: Path, num_files: int) -> None:
    for number in range(num_files):
        lines = "".join(json.dumps({"text": prose(place, 30)}) + "\n" for place in range(20_000 // num_files))
        (data / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    taken = planned(data, "jsonl", max_bytes=1_600_000)
    assert len(taken) == min(num_files, 16)
    num_bytes = sum(document.num_bytes for document in documents(taken))
    assert 0.8 * 1_600_000 < num_bytes < 1.1 * 1_600_000
