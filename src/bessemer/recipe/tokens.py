"""[tokenizer] and [tokens] of the recipe: the tokenizer, token shards and training sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat

from bessemer.recipe.section import Positive, Section, Words, first_duplicate

TRAINED_ONLY = ("sample", "sample_bytes", "pattern", "digits", "white_space", "prefix_space")


class TokenizerChoice(Section):
    """The tokenizer: a trained one with its settings, or one that is loaded."""

    vocabulary: int | None = Field(None, ge=257)
    path: str | None = None
    end_of_text: str = Field("<|endoftext|>", min_length=1)
    mask_token: str = Field("<|mask|>", min_length=1)
    special_tokens: Words = ()
    sample_bytes: Positive = 64_000_000
    sample: Literal["corpus", "mixture"] = "corpus"
    pattern: Literal["gpt4", "llama3", "gpt2", "qwen2"] = "gpt4"
    digits: Literal["groups-of-three", "single", "runs"] | None = None
    white_space: Literal["runs", "indentation", "single"] = "runs"
    prefix_space: bool = False

    def _complaints(self) -> Iterator[str]:
        if self.path is not None and self.vocabulary is not None:
            yield "vocabulary and path exclude each other: a loaded tokenizer brings its own size; remove one"
        if self.mask_token == self.end_of_text:
            yield f"mask_token and end_of_text are both {self.mask_token!r}; name two tokens"
        twice = first_duplicate((self.end_of_text, *self.special_tokens))
        if twice or "" in self.special_tokens:
            yield f"special_tokens: {twice or ''!r} is empty or listed twice; give each token a different name"


Packing = Literal["concatenate", "best-fit", "document"]


class MixturePhase(Section):
    """A phase of the training with other weights of the sources, until the next phase or the end of the run."""

    from_: float | Literal["decay"] = Field(alias="from")
    weights: dict[str, NonNegativeFloat]

    def _complaints(self) -> Iterator[str]:
        if not isinstance(self.from_, str) and not 0.0 <= self.from_ < 1.0:
            yield f"from = {self.from_}: not a share of the run's samples; give a number from 0 up to 1, without 1"
        if not any(self.weights.values()):
            yield "weights: all are 0; give at least one source a positive weight"


class Tokens(Section):
    """Settings of token shards, training sequences and the mixture."""

    sequence_length: Positive = 1024
    held_out: float = Field(0.01, gt=0.0, lt=1.0)
    held_out_from: Literal["documents", "passages"] = "documents"
    seed: int = Field(0, ge=0)
    document_mask: bool = False
    shard_tokens: Positive = 100_000_000
    gate: bool = False
    workers: int | None = Field(None, gt=0)
    packing: Packing = "concatenate"
    chat_template: str | None = Field(None, min_length=1)
    temperature: float | None = Field(None, gt=0)
    max_epochs: float | None = Field(None, gt=0)
    schedule: tuple[MixturePhase, ...] = Field((), strict=False)

    def _complaints(self) -> Iterator[str]:
        places = [phase.from_ for phase in self.schedule if not isinstance(phase.from_, str)]
        if places != sorted(set(places)) or sum(phase.from_ == "decay" for phase in self.schedule) > 1:
            yield "schedule: the phases are not in order; sort them by from, without duplicates"
