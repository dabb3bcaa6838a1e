"""[tokens] of the recipe: documents to shards and training sequences."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.mixture import MixturePhase, Packing
from bessemer.recipe.section import Positive, Section
from bessemer.recipe.tokenizer import TokenSource


class Tokens(Section):
    """Documents to token shards, and shards to training sequences."""

    sequence_length: Positive = Field(
        1024,
        description="Tokens in a training sequence; left out: follows from the corpus's size, "
        "1024 where that is not known.",
    )
    held_out: float = Field(
        0.01,
        gt=0.0,
        lt=1.0,
        description="Share of the documents kept out of training for validation, chosen by the hash of their identity; left "
        "out: follows from the corpus's size, 0.01 where that is not known.",
    )
    held_out_from: Literal["documents", "passages"] = Field(
        "documents",
        description="What is held out: documents (whole ones) or passages (one of every document, for a text of few "
        "documents).",
    )
    seed: int = Field(
        0,
        ge=0,
        description="Seed of the held-out split and of the tokenizer's sample; apart from run.seed, so that runs of two "
        "seeds are scored on the same text.",
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
    packing: Packing = Field(
        "concatenate",
        description="How documents fill sequences: concatenate (one stream, cut every sequence_length tokens), best-fit "
        "(documents are cut only where longer than a sequence, the rest is padded) or document (one a sequence, padded).",
    )
    temperature: float | None = Field(
        None,
        gt=0,
        description="Shares in proportion to tokens^(1 / temperature), for sources without weights; 1: to their tokens.",
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        description="How often a source may be read over the whole run, unless it has a max_epochs of its own; what it then "
        "lacks goes to the others in proportion.",
    )
    schedule: tuple[MixturePhase, ...] = Field(
        (), strict=False, description="How the mixture changes over the training, in order."
    )

    @model_validator(mode="after")
    def _phases_in_order(self) -> Self:
        places = [phase.from_ for phase in self.schedule if not isinstance(phase.from_, str)]
        if places != sorted(set(places)) or sum(phase.from_ == "decay" for phase in self.schedule) > 1:
            raise ValueError("schedule: its phases must begin one after the other; sort them by from")
        return self
