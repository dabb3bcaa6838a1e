"""[tokenizer] and [tokens] of the recipe: text to token ids, documents to shards and training sequences."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Words, repeated

TRAINED_ONLY = ("sample", "special_tokens", "pattern", "digits", "white_space", "prefix_space")


class TokenizerChoice(Section):
    """Text to token ids."""

    vocabulary: int | None = Field(None, ge=257)
    """Size of the byte-level BPE vocabulary to train, end-of-text included; 32768 where no `path` is given."""
    path: str | None = None
    """A tokenizer.json to load instead of training one: byte-level or SentencePiece-like BPE, Unigram, WordPiece; a
    folder, hf:FOLDER or hf:ORG/NAME: that of a model."""
    end_of_text: str = Field("<|endoftext|>", min_length=1)
    """The token put after each document; left out with `path` or model.from: the one that its folder names (eos, or sep
    for an encoder)."""
    mask_token: str = Field("<|mask|>", min_length=1)
    """The token that stands where one is hidden; a trained tokenizer has it when train.objective is masked; left out
    with `path` or model.from: the one that its folder names."""
    special_tokens: Words = ()
    """Further special tokens of a trained tokenizer, such as those of a chat template; their ids follow end_of_text's
    in this order, whatever the text."""
    sample_bytes: Positive = 64_000_000
    """The BPE is trained on about this many bytes of documents that are not held out."""
    sample: Literal["corpus", "mixture"] = "corpus"
    """What the BPE is trained on: corpus (every source by its bytes) or mixture (by the sources' shares of the
    training, over all phases of tokens.schedule; a source with too little text gives all it has)."""
    pattern: str = Field("gpt4", min_length=1)
    """How text is cut before merging: gpt4, llama3 (the same), gpt2, or a regular expression in linear time."""
    digits: Literal["groups-of-three", "single", "runs"] | None = None
    """How digits are cut: groups of up to three from the left, one by one, or whole runs; left out: as the pattern does
    (gpt4: groups-of-three, gpt2: runs)."""
    white_space: Literal["runs", "indentation", "single"] = "runs"
    """How white space is cut: runs (all but the space that goes to the next word), indentation (line ends with the
    indentation after them) or single (each character alone)."""
    prefix_space: bool = False
    """Put a space before every text, so that its first word is the same token as inside a text."""
    compare: Words = ()
    """tokenizer.json files whose fertility stands in the report beside this one's, on the same documents."""
    fertility_bytes: Positive = 16_000_000
    """Fertility is measured on about this many bytes, documents chosen by their hash."""

    @model_validator(mode="after")
    def _train_or_load(self) -> Self:
        if self.path is not None and self.vocabulary is not None:
            raise ValueError(
                "vocabulary and path exclude each other: a loaded tokenizer brings its own size; remove one"
            )
        if self.path is not None:
            fields = type(self).model_fields
            changed = [key for key in TRAINED_ONLY if getattr(self, key) != fields[key].default]
            if changed:
                raise ValueError(
                    f"{changed[0]} and path exclude each other: a loaded tokenizer brings its own; remove one"
                )
        if self.mask_token == self.end_of_text:
            raise ValueError(f"mask_token and end_of_text are both {self.mask_token!r}; name two tokens")
        twice = repeated((self.end_of_text, *self.special_tokens))
        if twice or "" in self.special_tokens:
            raise ValueError(f"special_tokens: {twice or ''!r} is empty or named twice; each needs a name of its own")
        return self


class TokenSource(Section):
    """One source of tokens that others have written; no corpus is needed for it."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the source; used in shard names, metrics and reports."""
    format: Literal["nanogpt", "megatron"]
    """nanogpt: .bin files of uint16 ids with end-of-text between documents; megatron: .bin files with .idx."""
    paths: tuple[str, ...] = Field(strict=False, min_length=1)
    """The .bin files, folders or globs, relative to the recipe's folder."""
    tokenizer: str | None = None
    """The tokenizer.json they were written with; refused unless it is the same as tokenizer.path."""
    weight: float | None = Field(None, gt=0)
    """Relative share of the training tokens drawn from this source; as corpus.sources.weight."""


Packing = Literal["concatenate", "best-fit", "document"]


class MixturePhase(Section):
    """A stretch of the training with a mixture of its own, up to the next one or the end."""

    from_: float | Literal["decay"] = Field(alias="from")
    """Where it begins: a share of the run's samples in [0, 1), or decay: with the decay of a wsd schedule."""
    weights: dict[str, float]
    """Each source's share of the tokens in this phase, in proportion; 0: the source is not read in it."""

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if not isinstance(self.from_, str) and not 0.0 <= self.from_ < 1.0:
            raise ValueError(f"from = {self.from_}: a share of the run's samples lies in [0, 1)")
        negative = [name for name, weight in self.weights.items() if weight < 0.0]
        if negative:
            raise ValueError(f"weights: {negative[0]} is negative; a source that is not to be read has 0")
        if not any(self.weights.values()):
            raise ValueError("weights: no source has a share; give one at least")
        return self


class Tokens(Section):
    """Documents to token shards, and shards to training sequences."""

    sequence_length: Positive = 1024
    """Tokens in a training sequence; left out: follows from the corpus's size, 1024 where that is not known."""
    held_out: float = Field(0.01, gt=0.0, lt=1.0)
    """Share of the documents kept out of training for validation, chosen by the hash of their identity; left out:
    follows from the corpus's size, 0.01 where that is not known."""
    held_out_from: Literal["documents", "passages"] = "documents"
    """What is held out: documents (whole ones) or passages (one of every document, for a text of few documents)."""
    seed: int = Field(0, ge=0)
    """Seed of the held-out split and the tokenizer's sample; runs of two run.seed are scored on the same text."""
    document_mask: bool = Field(False, description="Attention stays within a document; positions start at 0 in each.")
    pack_short_documents: bool = False
    """Allow a sequence_length longer than every document; each sequence then holds several."""
    shard_tokens: Positive = Field(100_000_000, description="Tokens in a shard file, at most; no document is cut.")
    sources: tuple[TokenSource, ...] = Field((), strict=False)
    """Sources of tokens that others have written, beside or instead of the corpus."""
    workers: int | None = Field(None, gt=0)
    """Threads that encode; left out: one a core. The shards do not depend on it."""
    packing: Packing = "concatenate"
    """How documents fill sequences: concatenate (one stream, cut every sequence_length tokens), best-fit (documents are
    cut only where longer than a sequence, the rest is padded) or document (one a sequence, padded)."""
    temperature: float | None = Field(None, gt=0)
    """Shares in proportion to tokens^(1 / temperature), for sources without weights; 1: to their tokens."""
    max_epochs: float | None = Field(None, gt=0)
    """How often a source may be read over the whole run, unless it has a max_epochs of its own; what it then lacks goes
    to the others in proportion."""
    schedule: tuple[MixturePhase, ...] = Field((), strict=False)
    """How the mixture changes over the training, in order."""

    @model_validator(mode="after")
    def _phases_in_order(self) -> Self:
        places = [phase.from_ for phase in self.schedule if not isinstance(phase.from_, str)]
        if places != sorted(set(places)) or sum(phase.from_ == "decay" for phase in self.schedule) > 1:
            raise ValueError("schedule: its phases must begin one after the other; sort them by from")
        return self
