"""Packing of documents into sequences, and batches of packed documents, compared with the documents."""

from __future__ import annotations

import itertools
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.common.errors import BessemerError, InputError
from bessemer.tokens.held_out import held_out_samples
from bessemer.tokens.loader import Loader, open_loader
from bessemer.tokens.packing import Pack, facts, open_pack, pack
from bessemer.tokens.shards import TokenStore
from tests.tokens.token_samples import END, documents, recipe_of, store_of

SIZES = st.lists(st.integers(1, 70), min_size=0, max_size=80)


def packed(sizes: list[int], length: int, packing: str) -> tuple[Pack, np.ndarray]:
    ends = np.cumsum(np.array([0, *sizes], dtype=np.int64))
    return pack(ends[:-1], np.array(sizes, dtype=np.int64), length, packing), ends  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["best-fit", "document"])
@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 40))
def test_every_token_is_in_one_piece_and_no_sequence_is_too_long(packing: str, sizes: list[int], length: int) -> None:
    found, ends = packed(sizes, length, packing)
    covered = np.zeros(ends[-1], dtype=np.int64)
    of_document = np.repeat(np.arange(len(sizes)), sizes)
    pieces_of = np.zeros(len(sizes), dtype=np.int64)
    for start, size in zip(found.starts.tolist(), found.sizes.tolist(), strict=True):
        assert 1 <= size <= length
        covered[start : start + size] += 1
        inside = set(of_document[start : start + size].tolist())
        assert len(inside) == 1
        pieces_of[inside.pop()] += 1
    assert (covered == 1).all()
    assert pieces_of.tolist() == [-(-size // length) for size in sizes]  # a document that fits is not cut
    begins = []
    for low, high in pairwise(found.first.tolist()):
        assert high > low
        assert found.sizes[low:high].sum() <= length
        assert found.starts[low:high].tolist() == sorted(found.starts[low:high].tolist())
        assert packing == "best-fit" or high == low + 1
        begins.append(int(found.starts[low]))
    assert begins == sorted(begins)


def reference_bins(sizes: list[int], length: int) -> list[tuple[int, ...]]:
    """Return bin contents by best-fit decreasing with a list: the fullest bin that an item fits in."""
    bins: list[list[int]] = []
    for size in sorted((size % length for size in sizes if size % length), reverse=True):
        fitting = [held for held in bins if sum(held) + size <= length]
        if fitting:
            max(fitting, key=sum).append(size)
        else:
            bins.append([size])
    whole = [(length,)] * sum(size // length for size in sizes)
    return sorted([*whole, *(tuple(sorted(held)) for held in bins)])


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(2, 40))
def test_packing_uses_as_few_sequences_as_the_reference(sizes: list[int], length: int) -> None:
    """If two bins have equal room either may be chosen, so the remaining room is compared, not the bins."""
    found, _ = packed(sizes, length, "best-fit")
    used = sorted(found.sizes[low:high].sum() for low, high in pairwise(found.first.tolist()))
    assert used == sorted(map(sum, reference_bins(sizes, length)))


@settings(max_examples=100, deadline=None)
@given(SIZES.filter(bool), st.integers(1, 40), st.data())
def test_a_range_of_the_stream_is_found_in_its_sequences(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, data: st.DataObject
) -> None:
    """Compare with every token, through a file."""
    made, ends = packed(sizes, length, "best-fit")
    start = data.draw(st.integers(0, int(ends[-1]) - 1))
    end = data.draw(st.integers(start + 1, int(ends[-1])))
    of_token = np.empty(ends[-1], dtype=np.int64)
    for number, (low, high) in enumerate(pairwise(made.first.tolist())):
        for begin, size in zip(made.starts[low:high].tolist(), made.sizes[low:high].tolist(), strict=True):
            of_token[begin : begin + size] = number
    path = tmp_path_factory.mktemp("pack") / "x.pack"
    path.write_bytes(made.to_bytes())
    read = Pack.open(path)
    assert np.array_equal(read.sizes, made.sizes)
    assert np.array_equal(read.samples_in(start, end), np.unique(of_token[start:end]))


def test_a_truncated_file_is_detected(tmp_path: Path) -> None:
    whole = packed([3, 4, 5, 20], 10, "best-fit")[0].to_bytes()
    for keep in range(len(whole)):
        (tmp_path / "x.pack").write_bytes(whole[:keep])
        with pytest.raises(BessemerError, match=r"\.pack"):
            Pack.open(tmp_path / "x.pack")


@pytest.mark.parametrize("packing", ["concatenate", "best-fit", "document"])
@pytest.mark.parametrize("length", [7, 16, 200])
def test_packing_statistics_equal_a_count(tmp_path: Path, packing: str, length: int) -> None:
    texts = {"a": documents(1, 40), "b": documents(2, 9, longest=300)}
    recipe = recipe_of(packing, length)
    store = store_of(tmp_path, recipe, texts)
    found, used, room, cuts, count = facts(store, recipe), 0, 0, 0, 0
    for name, rows in texts.items():
        row = found["sources"][name]["train"]
        stream = np.repeat(np.arange(len(rows)), [len(ids) + 1 for ids in rows])
        if packing == "concatenate":
            sequences = [stream[at : at + length] for at in range(0, len(stream) - length, length)]
            places: list[set[int]] = [{n for n, held in enumerate(sequences) if d in held} for d in range(len(rows))]
            cut, real = sum(len(place) > 1 for place in places), sum(map(len, sequences))
        else:
            sequences, real = [stream] * row["sequences"], len(stream)
            cut = sum(len(ids) + 1 > length for ids in rows)
        assert (row["documents"], row["documents_cut"], row["targets"]) == (len(rows), cut, real)
        assert row["sequences"] == len(sequences)
        assert row["utilisation"] == pytest.approx(real / max(length * len(sequences), 1))
        used, room, cuts, count = used + real, room + length * len(sequences), cuts + cut, count + len(rows)
    assert found["utilisation"] == pytest.approx(used / room)
    assert found["cut_share"] == pytest.approx(cuts / count)


def test_another_packing_than_that_of_the_shards_is_an_error(tmp_path: Path) -> None:
    store = store_of(tmp_path, recipe_of("best-fit"), {"a": documents(1, 40), "b": documents(2, 9)})
    for other in (recipe_of("document"), recipe_of("best-fit", 32)):
        with pytest.raises(InputError, match="tokens.packing"):
            open_pack(store, other, "a", "train")


TEXTS = {"a": documents(1, 40), "b": documents(2, 15, longest=30)}
PACKINGS = ["best-fit", "document"]


def made(folder: Path, packing: str, length: int = 16) -> tuple[Loader, TokenStore]:
    recipe = recipe_of(packing, length)
    store = store_of(folder, recipe, TEXTS)
    return open_loader(recipe, store), store


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("length", [5, 16, 64])
def test_an_epoch_has_every_token_of_every_document_once(tmp_path: Path, packing: str, length: int) -> None:
    loader, _ = made(tmp_path, packing, length)
    for number, texts in enumerate(TEXTS.values()):
        split = loader.sources[number]
        inputs, targets, starts, real = split.rows(np.arange(len(split.pack)))
        assert inputs.shape == targets.shape == starts.shape == (len(split.pack), length)
        assert ((targets >= 0).sum(axis=1) == real).all()
        pieces: list[tuple[int, tuple[int, ...]]] = []
        for row in range(len(inputs)):
            begins = [*np.flatnonzero(starts[row]).tolist(), length]
            assert begins[0] == 0
            for begin, end in itertools.pairwise(begins):
                if begin >= real[row]:
                    assert (inputs[row, begin:] == END).all()  # padding
                    assert (targets[row, begin:] == -1).all()
                    continue
                assert np.array_equal(inputs[row, begin + 1 : end], targets[row, begin : end - 1])
                pieces.append((int(inputs[row, begin]), tuple(targets[row, begin:end].tolist())))
        wanted: list[tuple[int, tuple[int, ...]]] = []
        for ids in texts:
            whole = [*ids, END]
            cuts = [whole[at : at + length] for at in range(0, len(whole), length)]
            befores = [END, *(part[-1] for part in cuts)]
            wanted += [(before, tuple(part)) for before, part in zip(befores, cuts, strict=False)]
        assert Counter(pieces) == Counter(wanted)


@pytest.mark.parametrize("packing", ["concatenate", *PACKINGS])
def test_batches_depend_neither_on_processes_nor_on_earlier_calls(tmp_path: Path, packing: str) -> None:
    loader, store = made(tmp_path, packing)
    whole, recipe = loader.batch(48, 24), recipe_of(packing)
    arrays = {name: array for name, array in vars(whole).items() if isinstance(array, np.ndarray)}
    assert len(arrays) == (3 if packing == "concatenate" else 5)
    for world in (2, 3, 8):
        for rank in range(world):
            part = open_loader(recipe, store, rank, world).batch(48, 24)
            assert all(np.array_equal(getattr(part, name), array[rank::world]) for name, array in arrays.items())
    again = loader.batch(60, 3)
    assert np.array_equal(again.inputs, whole.inputs[12:15])
    assert np.array_equal(again.targets, whole.targets[12:15])


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("length", [5, 16])
def test_held_out_text_is_scored_completely_and_once(tmp_path: Path, packing: str, length: int) -> None:
    recipe = recipe_of(packing, length)
    store = store_of(tmp_path, recipe, TEXTS)
    for part in held_out_samples(recipe, store):
        scored = Counter(part.targets[part.targets >= 0].tolist())
        assert scored == Counter(token for ids in TEXTS[part.source] for token in ids)
        # One byte per token here; end-of-text counts nothing.
        assert part.bytes.sum() == part.num_targets == scored.total()
    few = held_out_samples(recipe, store, max_tokens=100)
    assert {part.source for part in few} == set(TEXTS)
    assert sum(int(part.num_targets) for part in few) <= 100 + 2 * length
