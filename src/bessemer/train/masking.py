"""Masked language modelling: which tokens are hidden, a pure function of (run seed, sample number).

The random numbers are Philox's (Salmon et al. 2011), a counter-based generator keyed by seed and sample; only its raw 64-bit
output is used, which numpy keeps stable. So masks do not depend on the micro-batch, the number of processes or a resume, and
every epoch hides other tokens.

Of the n ordinary tokens of a sequence, exactly max(round(share n), 1) are hidden. Devlin et al. (2019,
section 3.1 and appendix A.1): 80% of them become the mask token, 10% a random token, 10% stay as they are. Whole words
are hidden in random order as long as they fit into that number, as in BERT's published code; a word that does not fit is
skipped, and if none fits, the first one is cut.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.hashing import key_of
from bessemer.recipe import Masking
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.tokens.pieces import WordEdges

Ids = npt.NDArray[np.int64]

MASKED, RANDOM = 0.8, 0.9  # below the first a hidden token becomes the mask token, below the second a random one


@dataclass(frozen=True)
class Masker:
    """Hides tokens. key: of the random numbers; ordinary_V: ids that are not special tokens; edges: for whole words."""

    settings: Masking
    key: int
    mask_token: int
    ordinary_V: npt.NDArray[np.bool_]
    edges: WordEdges | None = None

    def hide(self, ids_T: Ids, sample: int) -> tuple[Ids, Ids]:
        """Inputs and targets of a sequence; targets of tokens that are not hidden are -1."""
        draws = np.random.Philox(key=np.array([self.key, sample], dtype=np.uint64))
        candidates = np.flatnonzero(self.ordinary_V[ids_T])
        inputs_T, targets_T = ids_T.copy(), np.full_like(ids_T, -1)
        if not len(candidates):
            return inputs_T, targets_T
        count = max(round(self.settings.share * len(candidates)), 1)
        if self.settings.whole_words:
            hidden = self._words(ids_T, candidates, count, draws)
        else:
            hidden = candidates[np.argsort(_uniform(draws, len(candidates)), kind="stable")[:count]]
        targets_T[hidden] = ids_T[hidden]
        inputs_T[hidden] = self._replacements(ids_T[hidden], draws)
        return inputs_T, targets_T

    def _words(self, ids_T: Ids, candidates: Ids, count: int, draws: Any) -> Ids:
        """Positions of whole words, at most `count` tokens in all."""
        assert self.edges is not None, "whole words need the table of their edges"
        firsts = self.edges.starts(ids_T)
        words = np.split(candidates, np.flatnonzero(firsts[candidates])[1:])  # a word begins with a candidate
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

    def _replacements(self, ids_N: Ids, draws: Any) -> Ids:
        """The inputs at hidden tokens."""
        input_N = np.full_like(ids_N, self.mask_token)
        if self.settings.mode == "bert":
            ordinary = np.flatnonzero(self.ordinary_V)
            what, which = _uniform(draws, len(ids_N)), _uniform(draws, len(ids_N))
            random_N = ordinary[(which * len(ordinary)).astype(np.int64)]
            input_N = np.where(what < MASKED, input_N, np.where(what < RANDOM, random_N, ids_N))
        return input_N

    def batch(self, batch: Batch) -> Batch:
        """A batch with hidden tokens; the targets are the tokens that were hidden."""
        inputs, targets = self._hidden(batch.inputs, batch.samples.tolist())
        return replace(batch, inputs=inputs, targets=targets)

    def held_out(self, part: HeldOut, token_bytes: Ids) -> HeldOut:
        """Held-out sequences with masks that are the same at every validation."""
        fixed = replace(self, key=key_of("held-out masks", part.source))
        inputs, targets = fixed._hidden(part.inputs, range(len(part.inputs)))
        hidden_bytes = np.where(targets >= 0, token_bytes[targets], 0).sum(axis=1)
        return HeldOut(part.source, inputs, targets, hidden_bytes, part.starts)

    def _hidden(self, ids_BT: Ids, samples: Iterable[int]) -> tuple[Ids, Ids]:
        inputs, targets = zip(*(self.hide(*pair) for pair in zip(ids_BT, samples, strict=True)), strict=True)
        return np.stack(inputs), np.stack(targets)


def _uniform(draws: Any, count: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits of as many raw draws."""
    raw: npt.NDArray[np.uint64] = draws.random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
