"""The decoder's dimensions as numbers; no torch, so that plans can be made without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.errors import InputError
from bessemer.recipe import Recipe


def swiglu_width(width: int) -> int:
    """Hidden width that gives a SwiGLU the parameters of a 4x MLP: 8/3 of the width (Shazeer 2020, section 2),
    rounded up to a multiple of 64 for the hardware's tiles."""
    return -(-(8 * width) // (3 * 64)) * 64


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder. All widths in elements."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    sequence_length: int
    qk_norm: bool = True
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int) -> ModelConfig:
        """The dimensions of a resolved recipe (every dimension given) with a tokenizer's vocabulary."""
        model = recipe.model
        if model.layers is None or model.width is None or model.heads is None:
            raise InputError("model: the dimensions are not derived yet; resolve the recipe first")
        return cls(
            vocabulary=vocabulary,
            layers=model.layers,
            width=model.width,
            heads=model.heads,
            kv_heads=model.kv_heads or model.heads,
            head_dim=model.head_dim or model.width // model.heads,
            mlp_width=model.mlp_width or swiglu_width(model.width),
            sequence_length=recipe.tokens.sequence_length,
            qk_norm=model.qk_norm,
            tie_embeddings=model.tie_embeddings,
            rope_theta=model.rope_theta,
            norm_eps=model.norm_eps,
        )

    @property
    def block_matrix_parameters(self) -> int:
        """Parameters of one block that are in matrices: queries, keys, values, output, gate, up, down."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.mlp_width

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding and, unless tied, of the output head."""
        return self.vocabulary * self.width * (1 if self.tie_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        norms = self.layers * (2 * self.width + (2 * self.head_dim if self.qk_norm else 0)) + self.width
        return self.embedding_parameters + self.layers * self.block_matrix_parameters + norms

    @property
    def matrix_parameters(self) -> int:
        """Parameters that multiply every token: the blocks' matrices and the output head; not the embedding, which is
        looked up."""
        return self.layers * self.block_matrix_parameters + self.vocabulary * self.width

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints."""
        return asdict(self)
