from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import BessemerError
from bessemer.tokens.held_out import held_out_samples, whole_texts
from bessemer.tokens.loader import LabelledTexts, Loader
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import Shard, ShardWriter, SplitTokens
from tests.tokens.token_samples import recipe_of

END = 0
PLAIN = recipe_of("concatenate", 6)
RECIPE = PLAIN.model_copy(update={"train": PLAIN.train.model_copy(update={"objective": "classify"})})
DOCUMENTS = {"a": [[5, 6, 7], [], [8] * 9], "b": [[11, 12], [13]], "c": [[4]]}


def store_of(folder: Path, labelled: bool = True) -> TokenStore:
    """Three sources of short documents, labelled by source and length, in shards of 8 tokens."""
    sources, files = {}, {}
    for number, (name, documents) in enumerate(DOCUMENTS.items()):
        splits = {}
        for split in ("train", "heldout"):
            writer = ShardWriter(folder, f"{name}-{split}", np.dtype("<u2"), 8, labelled)
            for place, ids in enumerate(documents):
                label = (number + place) % 3
                writer.add(f"{number:016x}{place:016x}", [*ids, END], len(ids), label if labelled else -1)
            writer.close()
            files |= writer.files
            splits[split] = {**writer.counts, "files": sorted(writer.files)}
        sources[name] = splits
    np.save(folder / "token_bytes.npy", np.array([0] + [1] * 19))
    manifest = {
        "sources": sources,
        "files": files,
        "labels": ["x", "y", "z"],
        "tokenizer": {"vocabulary": 20, "end_of_text": END},
    }
    return TokenStore(folder, manifest)


def open_loader(store: TokenStore, rank: int = 0, world: int = 1, length: int = 6) -> Loader:
    texts = [LabelledTexts(store.split(name, "train"), length, END) for name in "abc"]
    return Loader(texts, Mixture.from_weights(("a", "b", "c"), (3, 2, 1), (3.0, 2.0, 1.0), 7), rank, world)


def test_a_text_is_its_document_padded_or_cut(tmp_path: Path) -> None:
    texts = LabelledTexts(store_of(tmp_path).split("a", "train"), 6, END)
    assert len(texts) == 3
    assert len(store_of(tmp_path).split("a", "train").shards) == 2
    assert texts.rows(np.array([2, 0, 1])).inputs.tolist() == [
        [0, 8, 8, 8, 8, 8],
        [0, 5, 6, 7, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert texts.labels.tolist() == [0, 1, 2]


def test_every_epoch_has_each_document_once_with_its_label(tmp_path: Path) -> None:
    loader = open_loader(store_of(tmp_path))
    batch = loader.batch(0, 60)
    rows = [
        (int(source), tuple(tokens), int(target))
        for source, tokens, target in zip(batch.source, batch.inputs, batch.targets[:, 0], strict=True)
    ]
    wanted = {
        (number, tuple([0, *ids, *[0] * 6][:6]), (number + place) % 3)
        for number, documents in enumerate(DOCUMENTS.values())
        for place, ids in enumerate(documents)
    }
    assert set(rows) == wanted


def test_held_out_texts(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    parts = held_out_samples(RECIPE, store)
    assert [part.source for part in parts] == ["a", "b", "c"]
    assert parts[0].targets.tolist() == [[0], [1], [2]]
    assert parts[0].bytes.tolist() == [3, 0, 5]
    assert sum(len(part.inputs) for part in held_out_samples(RECIPE, store, max_tokens=1)) == 3  # one of each source
    assert whole_texts(RECIPE, store).tolist() == [[0], [0]]  # the second document is empty


def test_a_document_without_a_label_is_named(tmp_path: Path) -> None:
    store_of(tmp_path, labelled=False)
    with pytest.raises(BessemerError, match=f"document {0:032x} has no label"):
        LabelledTexts(SplitTokens([Shard(tmp_path / "a-train-00000.bin", np.dtype("<u2"))]), 6, END)
