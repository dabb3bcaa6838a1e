"""[tokenizer] of the recipe, and [[tokens.sources]]: tokens that others have written."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Words

TRAINED_ONLY = ("sample", "special_tokens", "pattern", "digits", "white_space", "prefix_space")


class Tokenizer(Section):
    """Text to token ids."""

    vocabulary: int | None = Field(
        None,
        ge=257,
        description="Size of the byte-level BPE vocabulary to train, the end-of-text token included. "
        "Left out with `path`; else 32768.",
    )
    path: str | None = Field(
        None,
        description="A tokenizer.json to load instead of training one: byte-level or SentencePiece-like BPE, Unigram, WordPiece; "
        "a folder, hf:FOLDER or hf:ORG/NAME: that of a model.",
    )
    end_of_text: str = Field(
        "<|endoftext|>",
        min_length=1,
        description="The token put after each document; left out with `path` or model.from: the one that its folder names "
        "(eos, or sep for an encoder).",
    )
    mask_token: str = Field(
        "<|mask|>",
        min_length=1,
        description="The token that stands where one is hidden; a trained tokenizer has it when train.objective is masked; "
        "left out with `path` or model.from: the one that its folder names.",
    )
    special_tokens: tuple[str, ...] = Words(
        (),
        "Further special tokens of a trained tokenizer, such as those of a chat template; their ids follow "
        "end_of_text's in this order, whatever the text.",
    )
    sample_bytes: Positive = Field(
        64_000_000,
        description="The BPE is trained on about this many bytes of documents that are not held out.",
    )
    sample: Literal["corpus", "mixture"] = Field(
        "corpus",
        description="What the BPE is trained on: corpus (every source by its bytes) or mixture (by the sources' shares "
        "of the training, over all phases of tokens.schedule; a source with too little text gives all it has).",
    )
    pattern: str = Field(
        "gpt4",
        min_length=1,
        description="How text is cut before merging: gpt4, llama3 (the same), gpt2, or a regular expression of your own that "
        "takes linear time.",
    )
    digits: Literal["groups-of-three", "single", "runs"] | None = Field(
        None,
        description="How digits are cut: groups of up to three from the left, one by one, or whole runs; left out: as the "
        "pattern does (gpt4: groups-of-three, gpt2: runs).",
    )
    white_space: Literal["runs", "indentation", "single"] = Field(
        "runs",
        description="How white space is cut: runs (all but the space that goes to the next word), indentation (line ends "
        "with the indentation after them) or single (each character alone).",
    )
    prefix_space: bool = Field(
        False, description="Put a space before every text, so that its first word is the same token as inside a text."
    )
    compare: tuple[str, ...] = Words(
        (), "tokenizer.json files whose fertility stands in the report beside this one's, on the same documents."
    )
    fertility_bytes: Positive = Field(
        16_000_000, description="Fertility is measured on about this many bytes, documents chosen by their hash."
    )

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
        names = (self.end_of_text, *self.special_tokens)
        twice = [name for name in names if names.count(name) > 1]
        if twice or "" in names:
            raise ValueError(
                f"special_tokens: {twice[0] if twice else ''!r} is empty or named twice; each needs a name of its own"
            )
        return self


class TokenSource(Section):
    """One source of tokens that others have written; no corpus is needed for it."""

    name: str = Field(
        description="Name of the source; used in shard names, metrics and reports.", pattern=r"^[a-z0-9][a-z0-9-]*$"
    )
    format: Literal["nanogpt", "megatron"] = Field(
        description="nanogpt: uint16 ids in .bin files, documents set apart by end-of-text; megatron: .bin files with an .idx "
        "beside each."
    )
    paths: tuple[str, ...] = Field(
        strict=False, min_length=1, description="The .bin files, folders or globs, relative to the recipe's folder."
    )
    tokenizer: str | None = Field(
        None, description="The tokenizer.json they were written with; refused unless it is the same as tokenizer.path."
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Relative share of the training tokens drawn from this source; as corpus.sources.weight.",
    )
