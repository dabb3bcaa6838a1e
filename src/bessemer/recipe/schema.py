"""One run as one frozen, validated value.

The recipe is the only configuration there is. Every key is declared here once, with its type, its default
and one sentence that says what it means; `bessemer recipe --explain KEY` prints that sentence. Keys that are
not declared are errors, so no setting can be silently ignored.

Values left out (`None`) are derived: by the depth dial, from the corpus, or from the device. The run folder
keeps the recipe with every derived value filled in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.model import Model
from bessemer.recipe.section import Positive, Section, Share, Words

Format = Literal["text", "code", "html", "jsonl", "parquet", "descriptions"]


class Run(Section):
    """Which run this is and where it lies."""

    name: str = Field(description="Name of the run; its folder is DIR/NAME.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = Field("runs", description="Folder that holds run folders.")
    seed: int = Field(0, ge=0, description="Seed of everything random: initial weights, order of the data, samples.")

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.dir).expanduser() / self.name


class Source(Section):
    """One source of raw text."""

    name: str = Field(
        description="Name of the source; used in shard names, metrics and reports.", pattern=r"^[a-z0-9][a-z0-9-]*$"
    )
    format: Format = Field(
        description="What the files are: text (one document a file), code (one document a file, licence header kept), "
        "html (main content extracted), jsonl or parquet (one document a record), "
        "descriptions (the long description in a Python package's METADATA file)."
    )
    paths: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description="Files, folders (read recursively) or globs, relative to the recipe's folder; python://stdlib and "
        "python://site-packages name the folders of the running Python.",
    )
    suffixes: tuple[str, ...] | None = Field(
        None, strict=False, description="File endings taken from folders, e.g. ['.py']; each format has its default."
    )
    text_key: str = Field("text", description="Field or column that holds the text (jsonl, parquet).")
    weight: float | None = Field(
        None,
        gt=0,
        description="Relative share of the training tokens drawn from this source; give it for every source "
        "or for none (none: in proportion to the tokens each source has).",
    )
    max_bytes: int | None = Field(
        None,
        gt=0,
        description="Read about this many bytes and no more; which files are read is decided by the hash of "
        "their paths, so the same ones are chosen each time.",
    )


class Rules(Section):
    """Which documents are kept. A document that breaks a rule is rejected under that rule's name."""

    min_characters: int = Field(200, ge=0, description="Shorter documents are rejected (too_short).")
    max_characters: Positive = Field(1_000_000, description="Longer documents are rejected (too_long).")
    max_mean_line_length: float = Field(
        1000.0,
        gt=0,
        description="Documents with a longer mean line are rejected (long_lines): minified code, data blobs.",
    )
    min_alphanumeric_share: Share = Field(
        0.25,
        description="Documents in which a smaller share of the characters other than white space is a letter or a "
        "digit are rejected (not_text).",
    )
    min_unique_line_share: Share = Field(
        0.2,
        description="Documents in which a smaller share of the non-empty lines is distinct are rejected (repetitive).",
    )


class Dedup(Section):
    """Removal of documents that stand in the corpus already."""

    exact: bool = Field(
        True, description="Remove documents whose normalised text (case and white space folded) is equal."
    )
    minhash: bool = Field(True, description="Remove near duplicates by MinHash and locality-sensitive hashing.")
    bands: Positive = Field(
        14, description="Bands of the MinHash signature; 14 x 8 finds a Jaccard of 0.8 with 92% (FineWeb)."
    )
    rows: Positive = Field(8, description="Hash values in a band.")
    shingle_words: Positive = Field(5, description="Words in a shingle.")


class Corpus(Section):
    """Raw sources to clean documents."""

    sources: tuple[Source, ...] = Field((), strict=False, description="The sources of raw text.")
    rules: Rules = Field(default_factory=Rules, description="Which documents are kept.")
    dedup: Dedup = Field(default_factory=Dedup, description="Removal of duplicates.")

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are named {twice[0]!r}; give each source a name of its own")
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(names):
            missing = next(name for name in names if name not in weighted)
            raise ValueError(
                f"source {missing!r} has no weight but {weighted[0]!r} has one; give a weight to all or to none"
            )
        return self


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


class Optimizer(Section):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019)."""

    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; derived by the depth dial when left out."
    )
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="Decay of the first and second moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay of the matrices; norms and biases have none."
    )
    decay_embeddings: bool = Field(False, description="Apply weight decay to the embedding and the head as well.")
    embedding_rate: float = Field(
        1.0, gt=0, description="Learning rate of the input embedding, as a multiple of learning_rate."
    )
    clip_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")

    @field_validator("betas")
    @classmethod
    def _betas_are_decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"each beta lies in [0, 1), got {list(betas)}")
        return betas


class Schedule(Section):
    """Learning rate over the steps."""

    kind: Literal["cosine", "wsd"] = Field(
        "cosine",
        description="cosine: warmup, then half a cosine to the final share. wsd: warmup, stable, then a linear decay.",
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps of linear warmup; left out: 2% of the steps, at most 2000."
    )
    decay_share: Share = Field(0.2, description="Share of all steps in the decay phase (wsd).")
    final_share: Share = Field(0.1, description="The learning rate at the last step, as a share of the peak.")


class Train(Section):
    """The step and the loop."""

    objective: Literal["causal"] = Field("causal", description="What is predicted: causal (the next token).")
    steps: int | None = Field(None, gt=0, description="Optimizer steps; wins over minutes.")
    tokens: int | None = Field(None, gt=0, description="Tokens to train on, instead of steps.")
    minutes: float | None = Field(
        None,
        gt=0,
        description="Wall time to train for, instead of steps: the step is measured once on this machine and the "
        "number of steps written into the run folder's recipe.",
    )
    global_batch_tokens: int | None = Field(
        None, gt=0, description="Tokens in an optimizer step; a multiple of sequence_length."
    )
    micro_batch: int | None = Field(
        None, gt=0, description="Sequences in one forward and backward pass; left out: chosen to fit."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning rate over the steps.")
    z_loss: float = Field(
        0.0, ge=0, description="Weight of the square of the log partition function (PaLM, section 5); 0: off."
    )
    loss_chunk: Positive = Field(4096, description="Tokens whose logits are held at one time.")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise"] = Field(
        "auto",
        description="Arithmetic of the matrix products; auto: bf16 where a GPU has it, else fp32; fp16 scales the loss "
        "dynamically; fp8: the blocks' products, with one scale a tensor or a row. Master weights, gradients and "
        "optimizer are fp32.",
    )
    recompute: Literal["none", "selective", "full", "budget"] = Field(
        "none",
        description="What blocks compute again on the way back instead of keeping it: none; selective: all but matrix "
        "products and attention; full: all; budget: all, in as few blocks as make the predicted peak fit.",
    )
    memory_budget: float | None = Field(
        None,
        gt=0,
        description="Memory that recompute = budget keeps to: bytes, or up to 1 a share of what is free on the device; "
        "left out: all that is free.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train; auto: cuda when there is one.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile; auto: on CUDA, where it pays, and not on a CPU, where it gains 6% after a long start.",
    )
    log_every: Positive = Field(1, description="Steps between lines of metrics.jsonl.")
    watch_every: int = Field(
        50,
        ge=0,
        description="Steps between looks inside the model: activations, attention logits, gradients and updates by "
        "block; 0: none.",
    )
    validate_every: int | None = Field(
        None, gt=0, description="Steps between validations; left out: a tenth of the steps."
    )

    @model_validator(mode="after")
    def _one_horizon(self) -> Self:
        if self.tokens is not None and (self.steps is not None or self.minutes is not None):
            other = "steps" if self.steps is not None else "minutes"
            raise ValueError(f"tokens and {other} exclude each other; give one of them")
        if self.memory_budget is not None and self.recompute != "budget":
            raise ValueError(
                f"memory_budget has no effect with recompute = {self.recompute!r}; use recompute = 'budget'"
            )
        return self


class Guard(Section):
    """What happens when a number is not finite."""

    skips_in_a_row: Positive = Field(3, description="So many skipped steps in a row stop the run.")


class Checkpoint(Section):
    """When the run is saved and how many saves are kept."""

    every: int | None = Field(
        None, gt=0, description="Steps between checkpoints; left out: a tenth of the steps, at most 1000."
    )
    keep: Positive = Field(3, description="Newest verified checkpoints kept; the older ones are removed.")


class Evaluate(Section):
    """What is measured on the held-out documents and shown as samples."""

    max_tokens: Positive = Field(
        2_000_000, description="Held-out tokens used for a validation during training, at the most."
    )
    ngram: bool = Field(True, description="Compare with an interpolated byte 5-gram model trained on the same text.")
    ngram_max_bytes: Positive = Field(
        200_000_000,
        description="Training text for the byte 5-gram, at the most; a longer text is cut and the report says so.",
    )
    prompts: tuple[str, ...] = Words(("The ", "def "), "Beginnings from which samples are written.")
    sample_tokens: Positive = Field(120, description="Tokens in a sample.")
    temperature: float = Field(0.8, ge=0, description="Temperature of the samples; 0: greedy.")
    top_k: int = Field(50, ge=0, description="Samples draw from the so many most likely tokens; 0: from all.")


class Report(Section):
    """What is shown."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files beside metrics.jsonl.")


class Export(Section):
    """What leaves the run."""

    hf: bool = Field(True, description="`bessemer run` ends with a checked export to the Hugging Face layout.")


class Recipe(Section):
    """One run, from raw text to an exported model."""

    run: Run = Field(description="Which run this is and where it lies.")
    corpus: Corpus = Field(default_factory=Corpus, description="Raw sources to clean documents.")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="Text to token ids.")
    tokens: Tokens = Field(default_factory=Tokens, description="Documents to token shards and sequences.")
    model: Model = Field(description="The decoder.")
    train: Train = Field(default_factory=Train, description="The step and the loop.")
    guard: Guard = Field(default_factory=Guard, description="What happens when a number is not finite.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When the run is saved.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="What is measured after training.")
    report: Report = Field(default_factory=Report, description="What is shown.")
    export: Export = Field(default_factory=Export, description="What leaves the run.")

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        batch, length = self.train.global_batch_tokens, self.tokens.sequence_length
        if batch is not None and batch % length:
            low = max(batch // length, 1) * length
            raise ValueError(
                f"train.global_batch_tokens = {batch} is not a multiple of tokens.sequence_length = {length}; "
                f"the nearest are {low} and {low + length}"
            )
        micro = self.train.micro_batch
        if batch is not None and micro is not None and (batch // length) % micro:
            raise ValueError(
                f"train.micro_batch = {micro} does not divide the {batch // length} sequences of a global batch; "
                f"possible: {[m for m in range(1, batch // length + 1) if (batch // length) % m == 0]}"
            )
        return self
