"""The batch of a step, read without a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bessemer as bs
from bessemer.common.errors import InputError
from bessemer.recipe import dump
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.trace import step_batch
from tests.corpus.corpus_samples import prose
from tests.tokens.token_samples import recipe_of


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_batch_of_a_step_is_read_without_a_device(packing: str, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(prose(number, 40))
    tokens = bs.read(folder).tokenize(vocabulary=300, sequence_length=64, packing=packing, held_out=0.2)
    tokens.write(run)
    store = TokenStore.open(run / "tokens")
    (run / "recipe.toml").write_text(dump(recipe_of(packing, 64, text="")))
    batch, ids = step_batch(run, 3), {one.identity: one.ids for one in store.documents()}
    shift = int(packing == "concatenate")  # the first token of a concatenated sequence is only an input
    whole = np.concatenate([batch.inputs[:, :shift], batch.targets], axis=1)
    assert batch.inputs.shape == (8, 64) and batch.sources == ["text"] * 8
    for row, names, offsets in zip(whole, batch.documents, batch.offsets, strict=True):
        assert offsets[0] == 0 and offsets == sorted(offsets)
        for name, start, end in zip(names, offsets, [*offsets[1:], len(row)], strict=True):
            found = row[start:end][row[start:end] >= 0].astype(np.uint16)
            assert found.tobytes() in ids[name].tobytes() and (start == 0 or len(found))
            assert start == 0 or packing == "best-fit" or np.array_equal(found, ids[name][: len(found)])
    with pytest.raises(InputError, match="step"):
        step_batch(run, 13)
