"""[tokens] of the recipe: documents to shards and training sequences."""

from __future__ import annotations

from pydantic import Field

from bessemer.recipe.section import Positive, Section
from bessemer.recipe.tokenizer import TokenSource


class Tokens(Section):
    """Documents to token shards, and shards to training sequences."""

    sequence_length: Positive = Field(1024, description="Tokens in a training sequence.")
    held_out: float = Field(
        0.01,
        gt=0.0,
        lt=1.0,
        description="Share of the documents kept out of training for validation, chosen by the hash of their identity.",
    )
    document_mask: bool = Field(
        False,
        description="Attention stays within a document and positions start at 0 in each one.",
    )
    pack_short_documents: bool = Field(
        False,
        description="Allow a sequence_length longer than every document; each sequence then holds several.",
    )
    shard_tokens: Positive = Field(
        100_000_000, description="Tokens in a shard file, at the most (a document is never cut)."
    )
    sources: tuple[TokenSource, ...] = Field(
        (), strict=False, description="Sources of tokens that others have written, beside or instead of the corpus."
    )
    workers: int | None = Field(
        None, gt=0, description="Threads that encode; left out: one a core. The shards do not depend on it."
    )
