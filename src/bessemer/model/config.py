"""A transformer's configuration: its options, and the sums over its parts. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from bessemer.common.errors import InputError
from bessemer.model.options import SCALINGS, ModelOptions, RotaryScaling
from bessemer.model.sublayers import Parameter, Sublayer, attention_facts, feed_forward_facts, norm_facts


@dataclass(frozen=True)
class ModelConfig(ModelOptions):
    """The options of a transformer, and what follows from its sublayers."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises InputError on a field this version does not know."""
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"model configuration: {unknown[0]!r} is unknown to this version")
        scalings = {key: RotaryScaling.from_dict(values[key]) for key in SCALINGS if values.get(key)}
        return cls(**{**values, **scalings})

    def to_dict(self) -> dict[str, Any]:
        """Plain values as JSON has them, for checkpoints."""
        return asdict(self, dict_factory=_plain)

    def with_changes(self, **changes: Any) -> ModelConfig:
        """The same model but for `changes`."""
        return replace(self, **changes)

    @cached_property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """The parts of a block: its norms, attention, and the feed-forward sublayer."""
        return norm_facts(self), attention_facts(self), feed_forward_facts(self)

    @cached_property
    def block_table(self) -> dict[str, Parameter]:
        """The parameters of a block by their names in it; without first_norm the first block has a norm fewer."""
        return {parameter.name: parameter for part in self.sublayers for parameter in part.parameters}

    def parameter_facts(self, name: str) -> Parameter | None:
        """Return the facts of a parameter of the model, by its name; None: it lies outside of the blocks."""
        return self.block_table[name.split(".", 2)[2]] if name.startswith("blocks.") else None

    @cached_property
    def block_matrix_parameters(self) -> int:
        """Parameters of one block that are in matrices."""
        return sum(parameter.size for parameter in self.block_table.values() if parameter.is_matrix)

    @property
    def block_active_parameters(self) -> int:
        """Those of them that a token multiplies with: all, but in a mixture of experts (plan/mixture_of_experts.py)."""
        return self.block_matrix_parameters

    @cached_property
    def block_parameters(self) -> int:
        """All parameters of one block; without first_norm the first block has a norm fewer."""
        return sum(parameter.size for parameter in self.block_table.values())

    def score_flops(self, tokens_seen: float) -> float:
        """FLOPs of a block without its matmuls with weights, forward and backward, for a token that sees `tokens_seen` tokens."""
        return sum(part.score_flops for part in self.sublayers) * tokens_seen

    @cached_property
    def block_sharded_parameters(self) -> int:
        """Parameters of one block that a tensor group divides."""
        vectors = (p.size for p in self.block_table.values() if p.tensor_dim is not None and not p.is_matrix)
        return self.block_matrix_parameters + sum(vectors)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens, positions and types, and of the output matrix unless it is tied."""
        positions = self.position_rows if self.positions == "learned" else 0
        return (self.vocabulary * self.tables() + positions + self.token_types) * self.width

    @property
    def head_matrix_parameters(self) -> int:
        """Parameters that a token multiplies with after the last block: the transform and the output matrix."""
        outputs = self.labels or self.vocabulary
        return outputs * self.width + (self.width**2 if self.head_transform else 0)

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        norm = self.norm_parameters
        norms = -norm * (not self.first_norm) + norm * (self.norm_position != "residual") + norm * self.embedding_norm
        return self.embedding_parameters + self.layers * self.block_parameters + norms + self._head_parameters

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: all, but in a mixture of experts."""
        return self.parameters

    @property
    def expert_parameters(self) -> int:
        """Those of routed experts, which only a mixture has."""
        return 0

    @property
    def classifier_parameters(self) -> int:
        """Parameters of a classifier's head, which are all that is trained when the transformer is frozen."""
        return self._head_parameters if self.labels else 0

    @property
    def _head_parameters(self) -> int:
        """Parameters of the head, without the output matrix of a language model, which counts with the embeddings."""
        norm = 0 if self.pooler else self.norm_parameters
        transform = self.head_transform * (self.width**2 + self.width * self.transform_bias + norm)
        return transform + self.labels * self.width + (self.labels or self.vocabulary) * self.head_bias

    @property
    def matrix_parameters(self) -> int:
        """Parameters of a token's matmuls: the blocks' matrices and the output head; not the embedding, which is looked up."""
        return self.layers * self.block_active_parameters + (self.head_matrix_parameters if not self.labels else 0)


MAX_DROPOUT_SCORES = 1 << 22  # scores in memory at one time where attention weights are dropped, if 16 queries fit


def dropping_chunk(batch: int, heads: int, length: int) -> int:
    """Queries of each sequence whose scores are in memory at one time where attention weights are dropped. length: keys."""
    return min(max(MAX_DROPOUT_SCORES // (batch * heads * length), 16), length)


# Logits of a chunk on a CPU: 8 MiB of fp32 stay in the last cache, where every pass over them is faster; with 8,192 ids
# that is 256 rows. Matmuls of fewer than 128 rows run slowly (docs/background/cpu-step.md).
CACHED_LOGITS, MIN_ROWS = 1 << 21, 128


def loss_chunk(asked: int, vocabulary: int, is_cuda: bool) -> int:
    """Tokens whose logits are held at one time, of the number asked for."""
    return asked if is_cuda else min(asked, max(CACHED_LOGITS // vocabulary, MIN_ROWS))


def default_mlp_width(width: int, gated: bool = True) -> int:
    """Hidden width of the MLP when the recipe gives none: 4 times the width, or when gated 8/3 of it, which has as many
    parameters (Shazeer 2020, section 2), rounded up to a multiple of 64 for the hardware's tiles."""
    return -(-(8 * width) // (3 * 64)) * 64 if gated else 4 * width


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}
