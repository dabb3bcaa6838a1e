import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import DamagedFile, InputError
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import Shard, ShardWriter, SplitTokens, token_dtype


def write(
    folder: Path, lengths: list[int], shard_tokens: int, vocabulary: int = 1000
) -> tuple[SplitTokens, np.ndarray]:
    dtype = token_dtype(vocabulary)
    writer = ShardWriter(folder, "s-train", dtype, shard_tokens)
    stream = np.arange(sum(lengths)) % vocabulary
    start = 0
    for number, length in enumerate(lengths):
        writer.add(f"{number:032x}", stream[start : start + length], length)
        start += length
    writer.close()
    return SplitTokens([Shard(folder / name, dtype) for name in sorted(writer.files) if name.endswith(".bin")]), stream


def test_documents_of_a_range(tmp_path: Path) -> None:
    split, _ = write(tmp_path, [30, 50, 20, 90, 10], shard_tokens=100)
    name = "{:032x}".format
    every = [(name(number), start) for number, start in enumerate((0, 30, 80, 100, 190))]
    for start, end, wanted in (
        (0, 30, every[:1]),
        (29, 31, every[:2]),
        (80, 81, every[2:3]),
        (99, 101, every[2:4]),
        (0, 200, every),
    ):
        assert split.documents(start, end) == wanted


def test_the_layout_is_plain(tmp_path: Path) -> None:
    write(tmp_path, [30, 50], shard_tokens=100)
    assert np.array_equal(np.fromfile(tmp_path / "s-train-00000.bin", dtype="<u2"), np.arange(80))
    index = (tmp_path / "s-train-00000.idx").read_bytes()
    assert index[:8] == b"BSMRIDX1"
    assert np.frombuffer(index[8:40], dtype="<u8").tolist() == [2, 0, 30, 80]
    assert index[40:] == bytes.fromhex(f"{0:032x}{1:032x}")


@pytest.mark.fault(23)
def test_a_missing_truncated_or_changed_shard_is_named(runs: Path) -> None:
    folder = runs / "small" / "tokens"
    shard = folder / "code-train-00000.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(DamagedFile, match=str(shard)):
        TokenStore.open(folder)
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    for reads in (TokenStore.verify, lambda store: store.split("code", "train").shards[0].tokens):
        with pytest.raises(DamagedFile, match=str(shard)):
            reads(TokenStore.open(folder))
    assert len(TokenStore.open(folder).split("code", "heldout").shards[0].tokens)
    shard.unlink()
    with pytest.raises(DamagedFile, match=str(shard)):
        TokenStore.open(folder)
    with pytest.raises(InputError, match="bessemer tokens"):
        TokenStore.open(runs)


def changed(folder: Path, name: str, content: bytes) -> Path:
    """Put other content into a file of a tokens folder, with its hash: as another tool would write it."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "stage.json").unlink(missing_ok=True)
    return folder / name


@pytest.mark.parametrize("place", [0, -1])
def test_an_id_outside_the_vocabulary_is_named(runs: Path, place: int) -> None:
    folder = runs / "small" / "tokens"
    ids = np.fromfile(folder / "prose-train-00000.bin", dtype="<u2")
    ids[place] = 400
    shard = changed(folder, "prose-train-00000.bin", ids.tobytes())
    for reads in (TokenStore.verify, lambda store: store.split("prose", "train").shards[0].tokens):
        with pytest.raises(DamagedFile, match=rf"{shard}.*\b400\b"):
            reads(TokenStore.open(folder))
    ids[place] = 399
    changed(folder, "prose-train-00000.bin", ids.tobytes())
    TokenStore.open(folder).verify()


@pytest.mark.parametrize(
    ("number", "value"),
    [(-1, 1), (-1, -1), (0, 1), (3, 10_000), (5, -3)],
    ids=["long", "short", "first", "far", "falls"],
)
def test_an_index_that_does_not_fit_its_shard_is_named(runs: Path, number: int, value: int) -> None:
    """value: added to an offset."""
    folder = runs / "small" / "tokens"
    raw = (folder / "code-train-00000.idx").read_bytes()
    count = int(np.frombuffer(raw[8:16], dtype="<u8")[0])
    offsets = np.frombuffer(raw[16 : 16 + 8 * (count + 1)], dtype="<i8").copy()
    offsets[number] = offsets[number - 1] + value if value == -3 else offsets[number] + value
    index = changed(folder, "code-train-00000.idx", raw[:16] + offsets.tobytes() + raw[16 + 8 * (count + 1) :])
    for reads in (TokenStore.verify, lambda store: store.split("code", "train").documents(0, 10)):
        with pytest.raises(DamagedFile, match=str(index)):
            reads(TokenStore.open(folder))


def test_the_manifest_counts_what_is_there(prepared: Path) -> None:
    folder = prepared / "runs" / "small" / "tokens"
    manifest = json.loads((folder / "manifest.json").read_text())
    store = TokenStore.open(folder)
    store.verify()
    for name, splits in manifest["sources"].items():
        for split, facts in splits.items():
            opened = store.split(name, split)
            assert opened.num_tokens == facts["tokens"]
            assert sum(len(shard.identities) for shard in opened.shards) == facts["documents"]
            ends = [shard.tokens[int(end) - 1] for shard in opened.shards for end in shard.offsets[1:]]
            assert set(map(int, ends)) == {store.end_of_text}
            counted = sum(store.token_bytes[np.asarray(shard.tokens)].sum() for shard in opened.shards)
            assert counted == facts["bytes"]


@pytest.mark.parametrize("sizes", [(500,), (100, 7, 130, 1, 200), (20, 20, 20), (33, 32, 1, 96)])
@pytest.mark.parametrize("length", [1, 8, 32])
def test_sequences_are_cut_from_the_stream_whatever_the_shards(
    tmp_path: Path, sizes: tuple[int, ...], length: int
) -> None:
    stream = np.arange(sum(sizes), dtype=np.uint16)
    shards = []
    for number, part in enumerate(np.split(stream, np.cumsum(sizes)[:-1])):
        path = tmp_path / f"a-{number:05d}.bin"
        part.tofile(path)
        shards.append(Shard(path, np.dtype("<u2")))
    split = SplitTokens(shards)
    count = split.num_sequences(length)
    numbers = np.random.default_rng(0).permutation(count)
    found = split.sequences(numbers, length)
    assert found.shape == (count, length + 1)
    assert np.array_equal(found, numbers[:, None] * length + np.arange(length + 1))
    assert split.sequences(numbers[:0], length).shape == (0, length + 1)
