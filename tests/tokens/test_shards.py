"""Shards on disk, labelled texts, and batches read ahead."""

from __future__ import annotations

import hashlib
import json
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import BessemerError, DamagedFile, InputError
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import load
from bessemer.tokens import trace
from bessemer.tokens.held_out import held_out_samples, whole_texts
from bessemer.tokens.loader import LabelledTexts, Loader, open_loader, prefetch
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import Shard, ShardWriter, SplitTokens, token_dtype
from tests.tokens.token_samples import END, recipe_of, store_of


def test_documents_of_a_range_in_the_plain_layout(tmp_path: Path) -> None:
    ends, writer = [0, 30, 80, 100, 190, 200], ShardWriter(tmp_path, "s-train", token_dtype(1000), 100)
    for number, (start, end) in enumerate(pairwise(ends)):
        writer.add(f"{number:032x}", np.arange(start, end), 0)
    writer.close()
    split = SplitTokens([Shard(tmp_path / f"s-train-{number:05d}.bin", writer.dtype) for number in range(2)])
    names = [f"{number:032x}" for number in range(5)]
    every = list(zip(names, ends[:-1], strict=True))
    places = {(0, 30): (0, 1), (29, 31): (0, 2), (80, 81): (2, 3), (99, 101): (2, 4), (0, 200): (0, 5)}
    assert all(split.documents(*span) == every[slice(*wanted)] for span, wanted in places.items())
    assert np.array_equal(np.fromfile(tmp_path / "s-train-00000.bin", dtype="<u2"), np.arange(100))
    index = (tmp_path / "s-train-00000.idx").read_bytes()
    assert index[:8] == b"BSMRIDX1" and index[48:] == bytes.fromhex("".join(names[:3]))
    assert np.frombuffer(index[8:48], dtype="<u8").tolist() == [3, 0, 30, 80, 100]


def require_named(path: Path, source: str, why: str = "") -> None:
    """Check that the error names the file, on verification and on reading."""

    def read(store: TokenStore) -> None:
        split = store.split(source, "train")
        _ = split.documents(0, 10), split.shards[0].tokens

    for reads in (TokenStore.verify, read):
        with pytest.raises(DamagedFile, match=rf"{path}.*{why}"):
            reads(TokenStore.open(path.parent))


@pytest.mark.fault(23)
def test_a_missing_truncated_or_changed_shard_is_named(runs: Path) -> None:
    shard = runs / "small" / "tokens" / "code-train-00000.bin"
    data = shard.read_bytes()
    for content in (data[:-2], None):
        shard.unlink() if content is None else shard.write_bytes(content)
        with pytest.raises(DamagedFile, match=str(shard)):
            TokenStore.open(shard.parent)
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    require_named(shard, "code")
    assert len(TokenStore.open(shard.parent).split("code", "heldout").shards[0].tokens)
    with pytest.raises(InputError, match="bessemer tokens"):
        TokenStore.open(runs)


def changed(folder: Path, name: str, content: bytes) -> Path:
    """Replace the content of a token file together with its hash, as another tool might."""
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
    require_named(shard, "prose", r"\b400\b")
    ids[place] = 399
    changed(folder, "prose-train-00000.bin", ids.tobytes())
    TokenStore.open(folder).verify()


@pytest.mark.parametrize(
    ("number", "value"),
    [(-1, 1), (-1, -1), (0, 1), (3, 10_000), (5, -3)],
    ids=["long", "short", "first", "far", "falls"],
)
def test_an_index_that_contradicts_its_shard_is_named(runs: Path, number: int, value: int) -> None:
    """`value` is added to an offset."""
    folder = runs / "small" / "tokens"
    raw = (folder / "code-train-00000.idx").read_bytes()
    count = int(np.frombuffer(raw[8:16], dtype="<u8")[0])
    offsets = np.frombuffer(raw[16 : 16 + 8 * (count + 1)], dtype="<i8").copy()
    offsets[number] = offsets[number - 1] + value if value == -3 else offsets[number] + value
    index = changed(folder, "code-train-00000.idx", raw[:16] + offsets.tobytes() + raw[16 + 8 * (count + 1) :])
    require_named(index, "code")


def test_the_manifest_has_the_counts_of_the_shards(prepared: Path) -> None:
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
def test_sequences_are_cut_from_the_stream_across_shards(tmp_path: Path, sizes: tuple[int, ...], length: int) -> None:
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


PLAIN = recipe_of("concatenate", 6)
RECIPE = PLAIN.model_copy(update={"train": PLAIN.train.model_copy(update={"objective": "classify"})})
DOCUMENTS = {"a": [[5, 6, 7], [], [8] * 9], "b": [[11, 12], [13]], "c": [[4]]}


@pytest.fixture
def labelled(tmp_path: Path) -> TokenStore:
    """Three sources of short documents, labelled by source and length, in shards of 8 tokens."""
    return store_of(tmp_path, PLAIN, DOCUMENTS, "xyz", shard_tokens=8)


def test_every_epoch_has_each_document_once_with_its_label_padded_or_cut(labelled: TokenStore) -> None:
    texts = [LabelledTexts(labelled.split(name, "train"), 6, END) for name in "abc"]
    assert len(texts[0]) == 3 and len(labelled.split("a", "train").shards) == 2
    loader = Loader(texts, Mixture.from_weights(("a", "b", "c"), (3, 2, 1), (3.0, 2.0, 1.0), 7))
    batch = loader.batch(0, 60)
    rows = zip(batch.source.tolist(), batch.inputs.tolist(), batch.targets[:, 0].tolist(), strict=True)
    wanted = {
        (number, tuple([0, *ids, *[0] * 6][:6]), (number + place) % 3)
        for number, documents in enumerate(DOCUMENTS.values())
        for place, ids in enumerate(documents)
    }
    assert {(source, tuple(ids), label) for source, ids, label in rows} == wanted


def test_held_out_texts_of_each_source_are_read(labelled: TokenStore) -> None:
    parts = held_out_samples(RECIPE, labelled)
    assert [part.source for part in parts] == ["a", "b", "c"]
    assert parts[0].targets.tolist() == [[0], [1], [2]]
    assert parts[0].bytes.tolist() == [3, 0, 5]
    few = held_out_samples(RECIPE, labelled, max_tokens=1)
    assert sum(len(part.inputs) for part in few) == 3  # one of each source
    assert whole_texts(RECIPE, labelled).tolist() == [[0], [0]]  # the second document is empty


def test_a_document_without_a_label_is_named(tmp_path: Path) -> None:
    store_of(tmp_path, PLAIN, DOCUMENTS)
    with pytest.raises(BessemerError, match=f"document {0:032x}"):
        LabelledTexts(SplitTokens([Shard(tmp_path / "a-train-00000.bin", np.dtype("<u2"))]), 6, END)


@pytest.fixture
def store(prepared: Path) -> TokenStore:
    return TokenStore.open(prepared / "runs" / "small" / "tokens")


def test_reading_ahead_changes_no_batch_and_closing_early_ends_the_thread(store: TokenStore, recipe_file: Path) -> None:
    loader = open_loader(load(recipe_file), store)
    ahead = list(prefetch(loader, ((40 + 8 * n, 8) for n in range(7))))
    assert [batch.first for batch in ahead] == [40 + 8 * n for n in range(7)]
    for batch in ahead:
        assert np.array_equal(batch.targets, loader.batch(batch.first, 8).targets)
    batches = prefetch(loader, ((8 * n, 8) for n in range(1000)))
    next(batches)
    batches.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_an_error_in_the_thread_is_raised_where_the_batch_is_read(store: TokenStore, recipe_file: Path) -> None:
    loader = open_loader(load(recipe_file), store)
    loader.sources[0].rows = lambda numbers: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        list(prefetch(loader, [(0, 64), (64, 64)]))


def test_the_ledger_names_paths_and_rejects_unknown_steps_and_documents(store: TokenStore, recipe_file: Path) -> None:
    recipe = resolve(load(recipe_file), store.vocabulary)
    corpus = recipe.run.folder / "corpus"
    assert all(row["path"] for row in trace.step_documents(recipe, store, corpus, 5))
    with pytest.raises(InputError, match="--step: .* 24"):
        trace.step_documents(recipe, store, corpus, 25)
    with pytest.raises(InputError, match="--document"):
        trace.document_steps(recipe, store, corpus, "0" * 32)
    with pytest.raises(InputError, match="--document"):
        trace.document_steps(recipe, store, corpus, "xyz")
