"""[tokenizer] and [tokens] of the recipe: text to token ids, documents to shards and training sequences."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from bessemer.recipe.mixture import MixturePhase, Packing
from bessemer.recipe.section import Positive, Section


class Tokenizer(Section):
    """Text to token ids."""

    vocabulary: int | None = Field(
        None,
        ge=257,
        description="Size of the byte-level BPE vocabulary to train, the end-of-text token included. "
        "Left out with `path`; else 32768.",
    )
    path: str | None = Field(None, description="A tokenizer.json to load instead of training one.")
    end_of_text: str = Field("<|endoftext|>", min_length=1, description="The token put after each document.")
    mask_token: str = Field(
        "<|mask|>",
        min_length=1,
        description="The token that stands where one is hidden; a trained tokenizer has it when train.objective is masked, "
        "a loaded one must.",
    )
    sample_bytes: Positive = Field(
        64_000_000,
        description="The BPE is trained on about this many bytes, taken evenly over the corpus.",
    )

    @model_validator(mode="after")
    def _train_or_load(self) -> Self:
        if self.path is not None and self.vocabulary is not None:
            raise ValueError(
                "vocabulary and path exclude each other: a loaded tokenizer brings its own size; remove one"
            )
        if self.mask_token == self.end_of_text:
            raise ValueError(f"mask_token and end_of_text are both {self.mask_token!r}; name two tokens")
        return self


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
