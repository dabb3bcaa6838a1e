"""What the studies stand on: labelled snippets of real text, held out by file."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the corpus extra is not installed")

from bessemer.studies.library import PACKAGES, ClassifierStudy, Snippets, tokens_of
from bessemer.tokens.shards import TokenStore

TINY = ClassifierStudy(layers=1, width=32, heads=2, length=32, vocabulary=512, max_bytes=200_000, steps=4, snippet=24,
                train_snippets=8, test_snippets=4, class_steps=3, class_batch=8)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return tokens_of(TINY, tmp_path_factory.mktemp("library"))


def stream(store: TokenStore, name: str, split: str) -> np.ndarray:
    return np.concatenate([shard.tokens for shard in store.split(name, split).shards]).astype(np.int64)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_snippets_are_pieces_of_their_packages_files(store: TokenStore, split: str) -> None:
    found = Snippets.of(store, split, 24, 8, seed=1)
    assert found.label.tolist() == [number for number in range(len(PACKAGES)) for _ in range(8)]
    for tokens, label in zip(found.tokens, found.label, strict=True):
        assert tokens[0] == store.end_of_text and not (tokens[1:] == store.end_of_text).any()
        text = stream(store, PACKAGES[label], split)
        windows = np.lib.stride_tricks.sliding_window_view(text, 23)
        assert (windows == tokens[1:]).all(axis=1).any()
    again = Snippets.of(store, split, 24, 8, seed=1)
    assert np.array_equal(again.tokens, found.tokens)


def test_no_file_is_on_both_sides(store: TokenStore) -> None:
    for name in PACKAGES:
        sides = [
            {row.tobytes() for shard in store.split(name, split).shards for row in shard.identities}
            for split in ("train", "heldout")
        ]
        assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_every_epoch_of_snippets_has_each_once(store: TokenStore) -> None:
    found = Snippets.of(store, "train", 24, 8, seed=1)
    read = found.reader(12, seed=3)
    rows = np.concatenate([read(number).inputs for number in range(8)])  # two epochs of 48
    labels = np.concatenate([read(number).targets[:, 0] for number in range(8)])
    wanted = sorted(
        (tuple(tokens), label) for tokens, label in zip(found.tokens.tolist(), found.label.tolist(), strict=True)
    )
    for epoch in (slice(0, 48), slice(48, 96)):
        seen = sorted(
            (tuple(tokens), label) for tokens, label in zip(rows[epoch].tolist(), labels[epoch].tolist(), strict=True)
        )
        assert seen == wanted
    assert not np.array_equal(rows[:48], rows[48:])


def test_the_packages_are_there(tmp_path: Path) -> None:
    import sysconfig

    assert all((Path(sysconfig.get_paths()["stdlib"]) / name).is_dir() for name in PACKAGES)
