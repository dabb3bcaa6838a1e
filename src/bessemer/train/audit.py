"""The mixture held against what was asked, counted from the order that was really read."""

from __future__ import annotations

from typing import Any

from bessemer.recipe import Recipe
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.shards import TokenStore

REPEATS_WORTH_A_WARNING = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)


def mixture_audit(recipe: Recipe, store: TokenStore, mixture: Mixture, samples: int) -> dict[str, Any]:
    """Asked and drawn shares of each source after `samples` sequences, and how often it was repeated."""
    weights = {source.name: source.weight for source in recipe.corpus.sources}
    asked = [float(weights.get(name) or count) for name, count in zip(mixture.names, mixture.sequences, strict=True)]
    drawn = mixture.drawn(samples)
    rows = {
        name: {
            "target_share": wanted / sum(asked),
            "drawn_share": count / max(samples, 1),
            "sequences": count,
            "tokens": count * recipe.tokens.sequence_length,
            "epochs": count / available,
            "repeated_often": count / available > REPEATS_WORTH_A_WARNING,
        }
        for name, wanted, count, available in zip(mixture.names, asked, drawn, mixture.sequences, strict=True)
    }
    largest = max(abs(row["target_share"] - row["drawn_share"]) for row in rows.values())
    return {"samples": samples, "block": mixture.block, "sources": rows, "largest_deviation": largest}
