"""Smaller models of a recipe's own shape, and the learning rate and batch of each small run.

Shape: as on the depth dial, one number sets it: width goes with depth in the recipe's own proportion (within a factor of
1.5, over which the loss hardly changes: Kaplan et al. 2020, section 3.1, figure 5), the MLP and the key/value heads with the
width and the heads.

Which parameters count as N: those that a token multiplies with, blocks and output matrix; the input embedding is looked up
and not counted. In small models the output matrix is much of the work: leaving it out, as Kaplan et al. did, bends the curve
at small sizes and is most of why they found N_opt ~ C^0.73 where Hoffmann et al. found 0.50 (Pearce and Song 2024, section 3;
Porian et al. 2024, section 3.1). C is then close to 6 N D at every size, attention apart, which is counted exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.config import ModelConfig
from bessemer.plan.cost import step_flops_per_token
from bessemer.recipe import Model, Recipe

ASPECT_RANGE = 1.5
FEWEST_HEAD_ELEMENTS = 16  # of a head that is narrower than the recipe's, where a model is
WIDTH_STEP = 16  # of an MLP
RATE_EXPONENT, BATCH_EXPONENT = -0.1250, 0.3271  # in the FLOPs of a run (Bi et al. 2024, DeepSeek LLM, section 3.1)
RATE_RULES = {
    "mup": "the recipe's at every width, hidden matrices and head by base_width / width (muP, Yang et al. 2022)",
    "dial": "the recipe's, times (C / C of the recipe)^-0.125, the depth dial's law through the recipe's own point",
}


@dataclass(frozen=True)
class Size:
    """A model of the ladder. parameters: N, those in matrix products; flops: of a training step, a token."""

    model: Model
    parameters: int
    flops: float

    @property
    def name(self) -> str:
        """Layers and width, as in l2-w64."""
        return f"l{self.model.layers}-w{self.model.width}"


def size_of(recipe: Recipe, vocabulary: int) -> Size:
    """The size of a resolved recipe's model."""
    config = ModelConfig.of(recipe, vocabulary)
    return Size(recipe.model, config.matrix_parameters, step_flops_per_token(recipe, config))


def smaller(recipe: Recipe, vocabulary: int) -> list[Size]:
    """All models of a resolved recipe's shape that are smaller than its own, by N.

    Depths from 1 on; widths in whole heads, of the recipe's width of a head or, below it, half of it.
    """
    model = recipe.model
    layers, width, heads, kv_heads = model.layers, model.width, model.heads, model.kv_heads
    head_dim, mlp_width = model.head_dim, model.mlp_width
    assert layers and width and heads and kv_heads and head_dim and mlp_width, "the recipe is resolved"
    planned = size_of(recipe, vocabulary).parameters
    narrow = head_dim // 2 if head_dim % 4 == 0 and head_dim // 2 >= FEWEST_HEAD_ELEMENTS else head_dim
    aspect, found = width / layers, dict[int, Size]()
    for depth in range(1, layers + 1):
        least, most = depth * aspect / ASPECT_RANGE, depth * aspect * ASPECT_RANGE
        for wide in range(narrow, width + 1, narrow):
            of_head = head_dim if wide % head_dim == 0 else narrow
            if not least <= wide <= most:
                continue
            count = max(round(wide * heads / width * head_dim / of_head), 1)
            groups = max(round(count * kv_heads / heads), 1)
            while count % groups:
                groups -= 1
            mlp = max(round(mlp_width * wide / width / WIDTH_STEP), 1) * WIDTH_STEP
            made = model.model_copy(
                update={
                    "depth": None, "layers": depth, "width": wide, "heads": count, "kv_heads": groups,
                    "head_dim": of_head, "mlp_width": mlp,
                }
            )  # fmt: skip
            size = size_of(recipe.model_copy(update={"model": made}), vocabulary)
            nearer = found.get(size.parameters)
            if size.parameters < planned and (nearer is None or _bent(size, aspect) < _bent(nearer, aspect)):
                found[size.parameters] = size
    return [found[number] for number in sorted(found)]


def learning_rate(recipe: Recipe, flops: float, planned_flops: float) -> float:
    """Of a run of so many FLOPs in all, by the rule that `rate_rule` names; recipe: resolved."""
    peak = recipe.train.optimizer.learning_rate
    assert peak is not None, "the recipe is resolved"
    if rate_rule(recipe) == "mup":
        return peak
    return float(f"{peak * (flops / planned_flops) ** RATE_EXPONENT:.4g}")


def rate_rule(recipe: Recipe) -> str:
    """mup where the recipe has train.optimizer.base_width, else dial."""
    return "dial" if recipe.train.optimizer.base_width is None else "mup"


def batch_tokens(recipe: Recipe, flops: float, planned_flops: float) -> int:
    """Tokens of the global batch of a run: the depth dial's law through the recipe's own batch, whole sequences, at least 1,
    rounded down to a power of two of them where it is below the recipe's; recipe: resolved."""
    batch, length = recipe.train.global_batch_tokens, recipe.tokens.sequence_length
    assert batch is not None, "the recipe is resolved"
    sequences = batch // length * (flops / planned_flops) ** BATCH_EXPONENT
    if sequences >= batch // length:
        return batch
    return length << max(int(sequences).bit_length() - 1, 0)


def _bent(size: Size, aspect: float) -> float:
    """How far a size's proportion is from the recipe's, as a factor."""
    own = (size.model.width or 1) / (size.model.layers or 1)
    return max(own / aspect, aspect / own)
