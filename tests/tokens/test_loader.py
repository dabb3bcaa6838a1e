import threading
from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import load
from bessemer.tokens import trace
from bessemer.tokens.held_out import held_out
from bessemer.tokens.loader import open_loader, prefetch
from bessemer.tokens.shards import TokenStore


@pytest.fixture
def store(prepared: Path) -> TokenStore:
    return TokenStore.open(prepared / "runs" / "small" / "tokens")


def test_reading_ahead_changes_nothing(store: TokenStore, recipe_file: Path) -> None:
    loader = open_loader(load(recipe_file), store)
    ahead = list(prefetch(loader, ((40 + 8 * n, 8) for n in range(7))))
    assert [batch.first for batch in ahead] == [40 + 8 * n for n in range(7)]
    for batch in ahead:
        assert np.array_equal(batch.targets, loader.batch(batch.first, 8).targets)


def test_leaving_early_ends_the_thread(store: TokenStore, recipe_file: Path) -> None:
    batches = prefetch(open_loader(load(recipe_file), store), ((8 * n, 8) for n in range(1000)))
    next(batches)
    batches.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


def test_an_error_in_the_thread_is_raised_where_the_batch_is_asked_for(store: TokenStore, recipe_file: Path) -> None:
    loader = open_loader(load(recipe_file), store)
    loader.sources[0].rows = lambda numbers: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        list(prefetch(loader, [(0, 64), (64, 64)]))


def test_held_out_text_is_scored_once_and_whole(store: TokenStore) -> None:
    parts = held_out(store, 32)
    assert {part.source for part in parts} == set(store.sources)
    for part in parts:
        facts = store.manifest["sources"][part.source]["heldout"]
        first = int(store.split(part.source, "heldout").shards[0].tokens[0])
        assert part.bytes.sum() == facts["bytes"] - store.token_bytes[first]  # all but the first token of the stream
        assert part.num_targets == facts["tokens"] - facts["documents"] - 1


def test_the_ledger_names_paths_and_rejects_unknown_steps_and_documents(store: TokenStore, recipe_file: Path) -> None:
    recipe = resolve(load(recipe_file), store.vocabulary)
    corpus = recipe.run.folder / "corpus"
    assert all(row["path"] for row in trace.step_documents(recipe, store, corpus, 5))
    with pytest.raises(InputError, match="steps 1 to 24"):
        trace.step_documents(recipe, store, corpus, 25)
    with pytest.raises(InputError, match="in no training shard"):
        trace.document_steps(recipe, store, corpus, "0" * 32)
    with pytest.raises(InputError, match="not an identity"):
        trace.document_steps(recipe, store, corpus, "xyz")
