"""Masked language modelling: the choice of hidden tokens and of their replacements.

Shapes: T tokens of a sequence, N hidden tokens.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from bessemer.recipe import Masking
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import WordEdges
from bessemer.train.objective import Objective, Sample

MASKED, RANDOM = 0.8, 0.9  # cumulative: 80% of hidden tokens become the mask token, 10% a random token
Ids = npt.NDArray[np.int64]


class Masked(Objective, Masking):
    """The objective that predicts hidden tokens from both sides. Only hidden tokens go through the head.

    Of the n ordinary tokens of a sequence, exactly max(round(share n), 1) are hidden. Of these, 80% become the mask token, 10%
    a random token, and 10% stay as they are (Devlin et al. 2019, section 3.1 and appendix A.1). Whole words are hidden in
    random order while they fit into that number, as in BERT's published code. A word that does not fit is skipped, and if none
    fits, the first one is cut.

    Only the raw 64-bit output of the random number generator is used, which numpy keeps stable.
    """

    model = "encoder"

    def example(self, sample: Sample) -> tuple[Ids, Ids]:
        ids_T, draws = sample.inputs, sample.random.bit_generator
        candidates = np.flatnonzero(sample.is_text[ids_T])
        inputs_T, targets_T = ids_T.copy(), np.full_like(ids_T, -1)
        if not len(candidates):
            return inputs_T, targets_T
        count = max(round(self.share * len(candidates)), 1)
        if self.whole_words:
            hidden = _words(word_edges(sample.tokenizer).starts(ids_T), candidates, count, draws)
        else:
            hidden = candidates[np.argsort(_uniform(draws, len(candidates)), kind="stable")[:count]]
        targets_T[hidden] = ids_T[hidden]
        inputs_T[hidden] = self._replacements(ids_T[hidden], sample, draws)
        return inputs_T, targets_T

    def _replacements(self, ids_N: Ids, sample: Sample, draws: np.random.BitGenerator) -> Ids:
        """Return the input of each hidden token: the mask token, or in mode "bert" for 20% of them a random or its own token."""
        input_N = np.full_like(ids_N, sample.tokenizer.mask_token)
        if self.mode == "bert":
            ordinary = np.flatnonzero(sample.is_text)
            what, which = _uniform(draws, len(ids_N)), _uniform(draws, len(ids_N))
            random_N = ordinary[(which * len(ordinary)).astype(np.int64)]
            input_N = np.where(what < MASKED, input_N, np.where(what < RANDOM, random_N, ids_N))
        return input_N


def _words(starts_T: npt.NDArray[np.bool_], candidates: Ids, count: int, draws: np.random.BitGenerator) -> Ids:
    """Return the positions of random whole words with at most `count` tokens in total.

    `starts_T` is True where a word starts, and `candidates` are the positions of ordinary tokens.
    """
    words = np.split(candidates, np.flatnonzero(starts_T[candidates])[1:])  # every word starts with a candidate
    order = np.argsort(_uniform(draws, len(words)), kind="stable").tolist()
    chosen: list[Ids] = []
    left = count
    for number in order:
        if len(words[number]) <= left:
            chosen.append(words[number])
            left -= len(words[number])
        if not left:
            break
    return np.concatenate(chosen) if chosen else words[order[0]][:count]


@cache
def word_edges(tokenizer: Tokenizer) -> WordEdges:
    """Return the token ids that start a word, computed once for a tokenizer."""
    return WordEdges.from_pieces(tokenizer.token_byte_values())


def _uniform(draws: np.random.BitGenerator, count: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) from the upper 53 bits of `count` raw draws."""
    raw: npt.NDArray[np.uint64] = draws.random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
