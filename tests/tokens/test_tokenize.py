"""Documents to shards and back from Python, without a recipe file or a device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.recipe import dump
from bessemer.tokens.build import tokenize
from bessemer.tokens.documents import StoredDocument
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer.files import open_tokenizer
from bessemer.tokens.trace import find_document, step_batch
from tests.corpus.corpus_samples import prose
from tests.tokens.token_samples import recipe_of


def test_texts_become_shards_whose_documents_come_back(tmp_path: Path) -> None:
    texts = [prose(number) for number in range(40)]
    store = tokenize(tmp_path / "run", iter(texts), vocabulary=300, sequence_length=32, held_out=0.2)
    assert TokenStore.open(tmp_path / "run" / "tokens").digest == store.digest and store.sources == ("text",)
    tokenizer = open_tokenizer(tmp_path / "run")
    assert tokenizer.vocabulary == 300 and tokenizer.sha256 == store.manifest["tokenizer"]["sha256"]
    found = [one for split in ("train", "heldout") for one in store.documents(split)]
    assert sorted(tokenizer.decode(one.ids) for one in found) == sorted(texts)
    assert all(one.ids[-1] == store.end_of_text and one.label is None for one in found)
    assert find_document(store, tmp_path / "run" / "corpus", found[0].identity, text=True)["text"] in texts[
        0
    ] + "".join(texts)
    again = tokenize(tmp_path / "run", tokenizer=tmp_path / "run" / "tokens", sequence_length=32, held_out=0.2)
    assert again.manifest["files"] == store.manifest["files"], (
        "the corpus that is there, and the tokenizer that it trained"
    )


def test_documents_keep_their_sources_and_labels(tmp_path: Path) -> None:
    given = [StoredDocument(f"{n:032x}", "ab"[n % 2], prose(n), ["x", "y"][n % 2]) for n in range(60)]
    store = tokenize(tmp_path / "run", given, vocabulary=300, sequence_length=32, held_out=0.3)
    found = {(one.identity, one.source, one.label) for split in ("train", "heldout") for one in store.documents(split)}
    assert found == {(one.identity, one.source, one.label) for one in given}
    assert {one.source for one in store.documents("train", "b")} == {"b"}


@pytest.mark.parametrize(
    ("documents", "settings", "named"),
    [([], {}, "documents"), (["a", 1], {}, "number 1"), (None, {}, "no documents"), (["a"], {"no_key": 1}, "no_key")],
)
def test_what_cannot_be_tokenized(
    documents: list[object] | None, settings: dict[str, int], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=named):
        tokenize(tmp_path / "run", documents, **settings)
    assert not (tmp_path / "run" / "tokens").exists()


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_the_batch_of_a_step_without_a_device(packing: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = tokenize(
        run, [prose(n, 40) for n in range(60)], vocabulary=300, sequence_length=64, packing=packing, held_out=0.2
    )
    (run / "recipe.toml").write_text(dump(recipe_of(packing, 64, text="")))
    batch, ids = step_batch(run, 3), {one.identity: one.ids for one in store.documents()}
    shift = int(packing == "concatenate")  # the first token of a concatenated sequence is an input alone
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
