"""What an encoder puts where a word of held-out text is hidden: the samples of a model that does not write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.tokens.held_out import held_out
from bessemer.tokens.pieces import WordEdges
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.restored import Restored

EXAMPLES = 8  # in all, spread over the sources
GUESSES = 3
CONTEXT = 24  # tokens shown to each side


@torch.no_grad()
def fill_ins(recipe: Recipe, store: TokenStore, restored: Restored, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Words of one token in the middle of held-out sequences, hidden one at a time.

    Each: source, before, word, after (text), and guesses, the likeliest tokens with their probabilities.
    """
    length, step = recipe.tokens.sequence_length, restored.step
    if store.mask_token is None:
        raise InputError(f"{store.folder}: its tokenizer has no mask token")
    edges = WordEdges.of(tokenizer.token_pieces())
    found: list[dict[str, Any]] = []
    parts = held_out(store, length, max_tokens=4 * EXAMPLES * length)
    for part in parts:
        wanted = -(-EXAMPLES // len(parts))
        for ids_T in part.tokens[:, :length]:
            position = word_near_the_middle(ids_T, edges, store.token_bytes)
            if wanted == 0 or position is None:
                continue
            wanted -= 1
            hidden_T = ids_T.copy()
            hidden_T[position] = store.mask_token
            inputs_BT = torch.from_numpy(hidden_T[None]).to(step.device.place)
            with step.autocast():
                hidden_BTD = step.hidden(inputs_BT)
                logits_V = step.model.head.logits(hidden_BTD[0, position]).float()
            best = logits_V.softmax(dim=0).topk(GUESSES)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found.append(
                {
                    "source": part.source,
                    "before": tokenizer.decode(ids_T[max(position - CONTEXT, 0) : position].tolist()),
                    "word": tokenizer.decode([int(ids_T[position])]),
                    "after": tokenizer.decode(ids_T[position + 1 : position + 1 + CONTEXT].tolist()),
                    "guesses": [{"word": tokenizer.decode([token]), "probability": share} for token, share in pairs],
                }
            )
    return found[:EXAMPLES]


def word_near_the_middle(ids_T: Any, edges: WordEdges, token_bytes: Any) -> int | None:
    """Position of the word of one token that is nearest to the middle, two bytes long at least; None: there is none."""
    starts_T = edges.starts(ids_T)
    alone_T = starts_T & np.append(starts_T[1:], True) & (token_bytes[ids_T] > 1) & ~edges.closes[ids_T]
    places = np.flatnonzero(alone_T)
    return int(places[np.argmin(np.abs(places - len(ids_T) // 2))]) if len(places) else None
