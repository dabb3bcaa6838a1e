"""Batches of packed documents, held against the documents themselves."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bessemer.tokens import trace
from bessemer.tokens.held_out import held_out_samples
from bessemer.tokens.loader import Loader, open_loader
from bessemer.tokens.shards import TokenStore
from tests.tokens.token_samples import END, documents, recipe_of, store_of

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
def test_batches_know_nothing_of_processes_and_of_what_was_asked_before(tmp_path: Path, packing: str) -> None:
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
def test_held_out_text_is_scored_whole_and_once(tmp_path: Path, packing: str, length: int) -> None:
    recipe = recipe_of(packing, length)
    store = store_of(tmp_path, recipe, TEXTS)
    for part in held_out_samples(recipe, store):
        scored = Counter(part.targets[part.targets >= 0].tolist())
        assert scored == Counter(token for ids in TEXTS[part.source] for token in ids)
        assert (
            part.bytes.sum() == part.num_targets == scored.total()
        )  # one byte a token here; end-of-text counts nothing
    few = held_out_samples(recipe, store, max_tokens=100)
    assert {part.source for part in few} == set(TEXTS)
    assert sum(int(part.num_targets) for part in few) <= 100 + 2 * length


@pytest.mark.parametrize("packing", ["concatenate", *PACKINGS])
def test_the_ledger_goes_both_ways(tmp_path: Path, packing: str) -> None:
    recipe = recipe_of(packing)
    store = store_of(tmp_path / "tokens", recipe, TEXTS)
    batch = open_loader(recipe, store).batch(32, 8)
    rows = trace.step_documents(recipe, store, tmp_path, 5)
    for slot in range(8):
        named = [row["document"] for row in rows if row["sample"] == 32 + slot]
        name = "ab"[int(batch.source[slot])]
        assert named
        texts = [[*TEXTS[name][int(identity[2:], 16)], END] for identity in named]
        assert all(int(identity[:2], 16) == "ab".index(name) for identity in named)
        if packing != "concatenate":  # the tokens of the sequence are those documents' and no others'
            held = Counter(batch.targets[slot][batch.targets[slot] >= 0].tolist())
            assert not held - Counter(token for text in texts for token in text)
    samples = {
        name: {row["sample"] for row in rows if row["document"] == name} for name in {row["document"] for row in rows}
    }
    for name, held_in in samples.items():
        traced = trace.document_steps(recipe, store, tmp_path, name)
        assert {row["sample"] for row in traced if row["step"] == 5} == held_in
