"""Which tokens are hidden: exact counts, the 80/10/10 rule, whole words, and independence of how the work is cut."""

import numpy as np
import pytest

from bessemer.recipe import Masking
from bessemer.tokens.loader import Batch
from bessemer.tokens.tokenizer.description import WordEdges
from bessemer.train.objective import Masker

END, MASK, VOCABULARY = 0, 1, 500
ORDINARY = np.arange(VOCABULARY) >= 2


def masker(edges: WordEdges | None = None, key: int = 5, **settings: object) -> Masker:
    return Masker(Masking(**settings), key, MASK, ORDINARY, edges)  # type: ignore[arg-type]


def text(length: int = 200, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(2, VOCABULARY, length)
    ids[[0, 40, 41, 150][: max(length // 50, 1)]] = END
    return ids


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("length", [200, 50, 7])
def test_exactly_the_share_is_hidden(share: float, length: int) -> None:
    ids = text(length)
    wanted = max(round(share * int((ids != END).sum())), 1)
    for sample in range(50):
        inputs, targets = masker(share=share, mode="all").hide(ids, sample)
        hidden = targets >= 0
        assert hidden.sum() == wanted
        assert (inputs[hidden] == MASK).all()
        assert np.array_equal(targets[hidden], ids[hidden])
        assert np.array_equal(inputs[~hidden], ids[~hidden])
        assert not hidden[ids == END].any()


def test_eighty_ten_ten() -> None:
    """Of many hidden tokens: within five standard deviations of a binomial law, and random tokens over all ordinary ids."""
    ids, one = text(), masker(mode="bert")
    masked = other = kept = 0
    seen = np.zeros(VOCABULARY, dtype=np.int64)
    for sample in range(4000):
        inputs, targets = one.hide(ids, sample)
        hidden = targets >= 0
        now, true = inputs[hidden], ids[hidden]
        masked += int((now == MASK).sum())
        kept += int((now == true).sum())
        other += int(((now != true) & (now != MASK)).sum())
        np.add.at(seen, now[(now != MASK) & (now != true)], 1)
        assert (inputs == END).sum() == (ids == END).sum()
    total = masked + other + kept
    assert total == 4000 * round(0.15 * 196)
    # A random token is the true one once in 498 times: it counts as kept.
    for found, share in ((masked, 0.8), (other, 0.1 * 497 / 498), (kept, 0.1 + 0.1 / 498)):
        assert abs(found - share * total) <= 5 * (total * share * (1 - share)) ** 0.5
    assert seen[:2].sum() == 0
    expected = other / 498
    assert ((seen[2:] - expected) ** 2 / expected).sum() <= 498 + 5 * (
        2 * 498
    ) ** 0.5  # chi-squared over the vocabulary


def test_the_draws_are_philox_by_hand() -> None:
    """The hidden places are those of the smallest raw numbers, so no library's notion of a shuffle comes in."""
    ids = text()
    candidates = np.flatnonzero(ids != END)
    raw = np.random.Philox(key=np.array([5, 77], dtype=np.uint64)).random_raw(len(candidates)).tolist()
    ranked = sorted(range(len(candidates)), key=lambda place: raw[place] >> 11)
    wanted = sorted(int(candidates[place]) for place in ranked[: round(0.15 * len(candidates))])
    assert np.flatnonzero(masker().hide(ids, 77)[1] >= 0).tolist() == wanted


def test_whole_words_are_hidden_whole() -> None:
    opens = np.arange(VOCABULARY) % 3 == 0  # every third id begins a word
    opens[:2] = True
    edges = WordEdges(opens, np.arange(VOCABULARY) < 2)
    for seed in range(40):
        ids = text(seed=seed)
        starts = edges.starts(ids)
        words = np.cumsum(starts)
        _, targets = masker(edges, whole_words=True).hide(ids, seed)
        hidden = targets >= 0
        budget = round(0.15 * int((ids != END).sum()))
        for word in np.unique(words[hidden]):
            assert hidden[words == word].all()
        assert budget - 1 <= hidden.sum() <= budget  # words of one token are there to fill up with
        assert not hidden[ids == END].any()


def test_a_word_longer_than_the_share_is_cut_when_there_is_no_other() -> None:
    edges = WordEdges(np.arange(VOCABULARY) < 2, np.arange(VOCABULARY) < 2)  # all text is one word
    ids = text(50)
    _, targets = masker(edges, whole_words=True).hide(ids, 0)
    assert (targets >= 0).sum() == round(0.15 * int((ids != END).sum()))


def test_there_is_a_target_unless_there_is_no_text() -> None:
    ids = np.full(30, END)
    inputs, targets = masker().hide(ids, 0)
    assert np.array_equal(inputs, ids) and (targets == -1).all()
    ids[7] = 9
    assert masker(share=0.01).hide(ids, 0)[1].tolist() == [-1] * 7 + [9] + [-1] * 22


def test_masks_do_not_depend_on_how_a_batch_is_cut() -> None:
    tokens = np.stack([np.append(text(seed=row), 9) for row in range(12)])
    source = np.zeros(12, dtype=np.int64)
    whole = masker().batch(Batch.next_token(100, tokens, source))
    assert whole.inputs.shape == whole.targets.shape == (12, 200)
    for world in (2, 3):
        for rank in range(world):
            part = masker().batch(Batch.next_token(100, tokens, source).part(rank, world))
            assert np.array_equal(part.inputs, whole.inputs[rank::world])
            assert np.array_equal(part.targets, whole.targets[rank::world])
    later = masker().batch(Batch.next_token(104, tokens[4:], source[4:]))
    assert np.array_equal(later.inputs, whole.inputs[4:])
