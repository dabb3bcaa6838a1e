"""The configuration of a transformer: its options, and the sums over its sublayers. It does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pydantic_core import to_jsonable_python

from bessemer.common.console import amount
from bessemer.common.errors import InputError
from bessemer.model.options import SCALINGS, ModelOptions
from bessemer.model.sublayers import Parameter, Sublayer, attention_facts, feed_forward_facts, mixture_facts, norm_facts
from bessemer.recipe.model import RopeScaling


@dataclass(frozen=True)
class ModelConfig(ModelOptions):
    """The options of a transformer, with the parameter counts and costs that follow from its sublayers."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Build from the values of `to_dict`. Raises InputError for an option that is on and that this version does not know."""
        known = {field.name for field in fields(cls)}
        if unknown := [key for key, value in values.items() if key not in known and value]:
            raise InputError(f"model configuration: {unknown[0]!r} is unknown; update Bessemer")
        values = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items() if key in known}
        scalings = {key: RopeScaling.model_validate(values[key]) for key in SCALINGS if values.get(key)}
        return cls(**{**values, **scalings})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, as stored in checkpoints."""
        return dict(to_jsonable_python(self))

    def with_changes(self, **changes: Any) -> ModelConfig:
        """Return a copy with the given options changed."""
        return replace(self, **changes)

    def _attention(self) -> Sublayer:
        return attention_facts(self)

    @cached_property
    def kinds(self) -> dict[bool, tuple[int, tuple[Sublayer, ...]]]:
        """A dict from "has experts" to (number of such blocks, sublayers of one block); False comes first.

        Kinds without blocks are absent.
        """
        common, mixed = (norm_facts(self), self._attention()), self.mixture_layers
        kinds = {False: (self.layers - mixed, feed_forward_facts), True: (mixed, mixture_facts)}
        return {has: (count, (*common, facts(self))) for has, (count, facts) in kinds.items() if count}

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The sublayers of the last block: its norms, the attention, and the MLP or mixture of experts."""
        return self.kinds[self.mixture_layers > 0][1]

    @cached_property
    def block_table(self) -> dict[str, Parameter]:
        """A dict from the name of a parameter within its block to its description, for blocks with and without experts."""
        return {
            parameter.name: parameter
            for _, parts in self.kinds.values()
            for part in parts
            for parameter in part.parameters
        }

    def parameter_facts(self, name: str) -> Parameter | None:
        """Return the description of a block's parameter by its name in the model; None if the name is of no block."""
        return self.block_table[name.split(".", 2)[2]] if name.startswith("blocks.") else None

    def count_parameters(self, counts: Callable[[Parameter], float | bool] = lambda parameter: True) -> float:
        """Return the number of elements of all blocks, with those of each parameter multiplied by `counts(parameter)`.

        The default counts every element once. The first block counts with its attention norm even if `first_norm` is
        False.
        """
        return sum(
            number * parameter.size * counts(parameter)
            for number, parts in self.kinds.values() for part in parts for parameter in part.parameters
        )  # fmt: skip

    # Blocks may differ in a mixture of experts with dense layers. The following numbers are then the means over the blocks.

    def per_block(self, counts: Callable[[Parameter], float | bool] = lambda parameter: True) -> int:
        """Return the result of `count_parameters` for one block, averaged over the blocks."""
        return round(self.count_parameters(counts) / self.layers)

    @cached_property
    def block_matrix_parameters(self) -> int:
        """Number of elements in the matrices of one block, averaged over the blocks."""
        return self.per_block(lambda parameter: parameter.is_matrix)

    @cached_property
    def block_active_parameters(self) -> int:
        """Number of matrix elements of one block that each token uses, averaged over the blocks.

        These are all elements, except in a mixture of experts.
        """
        return self.per_block(lambda one: one.is_matrix and self._share(one))

    def _share(self, parameter: Parameter) -> float:
        """Return the fraction of a parameter's elements that a token uses: below 1 only for routed experts."""
        return self.experts_per_token / self.experts if parameter.is_routed else 1.0

    def score_flops(self, tokens_seen: float) -> float:
        """Return the attention FLOPs of a block per token that sees `tokens_seen` tokens, forward and backward.

        Matmuls with weights are not included.
        """
        return sum(part.score_flops for part in self.sublayers) * tokens_seen

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the token, position and type embeddings, and of the output matrix unless it is tied."""
        return (self.vocabulary * self.tables() + self.position_rows + self.token_types) * self.width

    @property
    def head_matrix_parameters(self) -> int:
        """Number of matrix parameters of a language model's head; 0 for a classifier, whose head reads one token of a text."""
        return 0 if self.labels else self.vocabulary * self.width + self.head_transform * self.width**2

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the model; a tied matrix counts once."""
        norm = self.norm_parameters
        norms = -norm * (not self.first_norm) + norm * (self.norm_position != "residual") + norm * self.embedding_norm
        return self.embedding_parameters + round(self.count_parameters()) + norms + self.head_parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that each token uses: all, except in a mixture of experts."""
        return self.parameters - round(self.count_parameters(lambda parameter: 1.0 - self._share(parameter)))

    @property
    def size(self) -> str:
        """The number of parameters in words; for a mixture of experts, with the active ones and the number of experts."""
        experts = f"({self.experts} experts, {self.experts_per_token} per token)"
        active = f", {amount(self.active_parameters)} active {experts}" if self.experts else ""
        return f"{amount(self.parameters)} parameters{active}"

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters in routed experts; 0 except in a mixture of experts."""
        return round(self.count_parameters(lambda parameter: parameter.is_routed))

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the head: its transform, its biases, and a classifier's output matrix.

        A language model's output matrix counts with the embeddings. If the transformer is frozen, only these are trained.
        """
        norm = 0 if self.pooler else self.norm_parameters
        transform = self.head_transform * (self.width**2 + self.width * self.transform_bias + norm)
        return transform + self.labels * self.width + (self.labels or self.vocabulary) * self.head_bias

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters in a token's matmuls: the blocks' matrices and the output head, without the embedding lookup."""
        return self.layers * self.block_active_parameters + self.head_matrix_parameters


MAX_DROPOUT_SCORES = 1 << 22  # scores in memory at once with dropout on them, but at least those of 16 queries


def dropping_chunk(batch: int, heads: int, length: int) -> int:
    """Return the number of queries per sequence whose scores are in memory at once with dropout on attention weights.

    Args:
        batch: Number of sequences.
        heads: Number of query heads.
        length: Number of keys.
    """
    return min(max(MAX_DROPOUT_SCORES // (batch * heads * length), 16), length)


def default_mlp_width(width: int, gated: bool = True) -> int:
    """Return the hidden width of the MLP when the recipe has none.

    It is 4 times the width, or for a gated MLP 8/3 of it, which has the same number of parameters (Shazeer 2020, section
    2), rounded up to a multiple of 64 for the hardware's tiles.
    """
    return -(-(8 * width) // (3 * 64)) * 64 if gated else 4 * width
