"""Smaller models of a recipe's own shape, and the learning rate and batch of each small run.

Shape: as on the depth dial, one number sets it: depth, MLP and heads follow the width in the recipe's own proportion. Two
layers at least: models of one fall off the line of the others (Kaplan et al. 2020, section 3.2, figure 6).

N counts the parameters of matmuls, blocks and output matrix, without the input embedding. Leaving out the output
matrix too, as Kaplan et al. did, bends the curve at small sizes and is most of why they found N_opt ~ C^0.73 where Hoffmann
et al. found 0.50 (Pearce and Song 2024; Porian et al. 2024 count as here). C is counted exactly, with attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, sqrt

from bessemer.defaults.scaling_rules import BATCH_EXPONENT, RATE_EXPONENT
from bessemer.layout.flops import step_flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Model, Recipe

ASPECT_RANGE = 3.0  # no model is deeper for its width than by this factor
FEWEST_LAYERS = 2
# In a batch. From one sequence to two the demo's rungs get better by 1 to 3% of the loss at any rate, and a ladder with that
# step in it bends where the batch does.
FEWEST_SEQUENCES = 2
WIDTH_STEP = 8
RATE_RULES = {
    "mup": "the recipe's at every width, hidden matrices and head by base_width / width (muP, Yang et al. 2022); "
    "its batch by C^0.327",
    "dial": "the recipe's, by (C / C of the recipe)^-0.125, its batch by ^0.327: the depth dial's laws "
    "through the recipe's own point",
}


@dataclass(frozen=True)
class Size:
    """A model of the ladder. parameters: N, those in matmuls; flops: of a training step, a token."""

    model: Model
    parameters: int
    flops: float

    @property
    def name(self) -> str:
        """Layers and width, as in l2-w64."""
        return f"l{self.model.layers}-w{self.model.width}"


def size_of(recipe: Recipe, vocabulary: int) -> Size:
    """The size of a resolved recipe's model."""
    config = model_config(recipe, vocabulary)
    return Size(recipe.model, config.matrix_parameters, step_flops_per_token(recipe.train, config))


def smaller(recipe: Recipe, vocabulary: int) -> list[Size]:
    """All models of a resolved recipe's shape that are smaller than its own, by N: one for each width.

    Widths in steps of a sixteenth of the power of two below them; the number of heads whose width is nearest to the recipe's;
    the depth nearest to the recipe's proportion (of two as near, the smaller one).
    """
    model = recipe.model
    layers, width, heads, kv_heads = model.layers, model.width, model.heads, model.kv_heads
    head_dim, mlp_width = model.head_dim, model.mlp_width
    assert layers and width and heads and kv_heads and head_dim and mlp_width, "the recipe is resolved"
    planned = size_of(recipe, vocabulary).parameters
    found: list[Size] = []
    for wide in _widths(width):
        depth = max(ceil(layers * wide / width - 0.5), min(FEWEST_LAYERS, layers))
        if wide / depth < width / layers / ASPECT_RANGE:
            continue
        inner = round(wide / width * heads * head_dim / WIDTH_STEP) * WIDTH_STEP  # of all heads together
        count = _heads(max(inner, WIDTH_STEP), head_dim)
        groups = max(round(count * kv_heads / heads), 1)
        while count % groups:
            groups -= 1
        shape = {
            "depth": None, "layers": depth, "width": wide, "heads": count, "kv_heads": groups,
            "head_dim": max(inner, WIDTH_STEP) // count,
            "mlp_width": max(round(mlp_width * wide / width / WIDTH_STEP), 1) * WIDTH_STEP,
        }  # fmt: skip
        size = size_of(recipe.changed(model=shape), vocabulary)
        if size.parameters < planned:
            found.append(size)
    return sorted(found, key=lambda size: size.parameters)


def _widths(below: int) -> list[int]:
    """16, 24, 32, ... in steps of at least 8."""
    found, wide = [], 2 * WIDTH_STEP
    while wide < below:
        found.append(wide)
        wide += max(WIDTH_STEP, 1 << max(wide.bit_length() - 5, 0))
    return found


def _heads(inner: int, head_dim: int) -> int:
    """The number of heads of an even width whose width is nearest, as a factor, to head_dim."""
    fitting = [count for count in range(1, inner // 2 + 1) if inner % count == 0 and inner // count % 2 == 0]
    return min(fitting, key=lambda count: abs(log(inner / count / head_dim)))


def learning_rate(recipe: Recipe, flops: float, planned_flops: float) -> float:
    """Of a run of so many FLOPs in all, by the rule that `rate_rule` names; recipe: resolved.

    A batch is whole sequences, so a small run's is a little larger or smaller than the law's; the rate then goes with the
    square root of that (Malladi et al. 2022, the square-root scaling rule of Adam), or the loss has a step where the batch
    has one.
    """
    peak, batch = recipe.train.optimizer.learning_rate, recipe.train.global_batch_tokens
    assert peak is not None and batch is not None, "the recipe is resolved"
    by_law = batch * min((flops / planned_flops) ** BATCH_EXPONENT, 1.0)
    rounded = sqrt(batch_tokens(recipe, flops, planned_flops) / by_law)
    rule = (flops / planned_flops) ** RATE_EXPONENT if rate_rule(recipe) == "dial" else 1.0
    return float(f"{peak * rule * rounded:.4g}")


def rate_rule(recipe: Recipe) -> str:
    """mup where the recipe has train.optimizer.base_width, else dial."""
    return "dial" if recipe.train.optimizer.base_width is None else "mup"


def batch_tokens(recipe: Recipe, flops: float, planned_flops: float) -> int:
    """Tokens of the global batch of a run: the depth dial's law through the recipe's own batch, the nearest number of whole
    sequences by its factor, at least 2 and not above the recipe's; recipe: resolved."""
    batch, length = recipe.train.global_batch_tokens, recipe.tokens.sequence_length
    assert batch is not None, "the recipe is resolved"
    sequences = batch // length * (flops / planned_flops) ** BATCH_EXPONENT
    below = max(int(sequences), FEWEST_SEQUENCES)
    nearest = below + (sequences > sqrt(below * (below + 1)))
    return int(min(nearest * length, batch))
