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

from pydantic import Field, model_validator

from bessemer.recipe.cluster import Cluster
from bessemer.recipe.corpus import Corpus
from bessemer.recipe.families import DECODERS, ENCODERS
from bessemer.recipe.model import Model
from bessemer.recipe.objective import Classify, Masking
from bessemer.recipe.optimization import BatchRamp, Dropout, Optimizer, Revision, Schedule
from bessemer.recipe.parallel import Parallel
from bessemer.recipe.parts import Part
from bessemer.recipe.section import Positive, Section, Words
from bessemer.recipe.tokenizer import Tokenizer
from bessemer.recipe.tokens import Tokens


class Run(Section):
    """Which run this is and where it lies."""

    name: str = Field(description="Name of the run; its folder is DIR/NAME.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = Field("runs", description="Folder that holds run folders.")
    seed: int = Field(0, ge=0, description="Seed of the training: initial weights, order of the data, samples.")

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.dir).expanduser() / self.name


class Train(Section):
    """The step and the loop."""

    objective: Literal["causal", "masked", "classify"] = Field(
        "causal",
        description="What is predicted: causal (the next token), masked (hidden tokens, from both sides; needs an encoder) "
        "or classify (each document's label).",
    )
    masking: Masking = Field(default_factory=Masking, description="Which tokens are hidden (objective masked).")
    classify: Classify = Field(
        default_factory=Classify, description="How a classifier is trained (objective classify)."
    )
    start: str | None = Field(
        None,
        min_length=1,
        description="A run folder whose newest checkpoint gives the starting weights. Model, tokenizer and sequence_length "
        "follow from it where they are left out, and the learning rate is a tenth of its own; the head is new where the "
        "objective differs.",
    )
    steps: int | None = Field(None, gt=0, description="Optimizer steps; wins over minutes.")
    tokens: int | None = Field(None, gt=0, description="Tokens to train on, instead of steps.")
    minutes: float | None = Field(
        None,
        gt=0,
        description="Wall time of the training, its validations and checkpoints included, instead of steps: the step is "
        "measured once on this machine and the number of steps written into the run folder's recipe.",
    )
    revised: tuple[Revision, ...] = Field(
        (),
        strict=False,
        description="Written by a run that is given minutes: when its number of steps was decided again by the measured rate.",
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        description="How often the training text is read at the most, however many minutes there are; steps and tokens win "
        "over it. Left out: as often as the minutes allow.",
    )
    global_batch_tokens: int | None = Field(
        None, gt=0, description="Tokens in an optimizer step; a multiple of sequence_length."
    )
    batch_ramp: BatchRamp | None = Field(
        None,
        description="A global batch that grows to global_batch_tokens, by whole micro-batches; left out: it is fixed.",
    )
    micro_batch: int | None = Field(
        None, gt=0, description="Sequences in one forward and backward pass; left out: chosen to fit."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning rate over the steps.")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of an exponential moving average of the weights, which validation, samples and export then use; "
        "at update n (from 0) at most (1 + n) / (10 + n), so that it leaves the initial weights behind; 0: none.",
    )
    z_loss: float = Field(
        0.0, ge=0, description="Weight of the square of the log partition function (PaLM, section 5); 0: off."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the target's probability spread evenly over the vocabulary (Szegedy et al. 2016); the "
        "reported loss stays the plain cross-entropy.",
    )
    dropout: Dropout = Field(
        default_factory=Dropout, description="What is dropped at random in training; by default nothing."
    )
    loss_chunk: Positive = Field(
        4096, description="Tokens whose logits are held at one time, at the most; a CPU holds what fits its cache."
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp64"] = Field(
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
        description="torch.compile; auto: on CUDA, where it pays, and not on a CPU, where it gains nothing after a long start.",
    )
    log_every: Positive = Field(1, description="Steps between lines of metrics.jsonl.")
    watch_every: int = Field(
        50,
        ge=0,
        description="Steps between looks inside the model: activations, attention logits, gradients and updates by "
        "block; 0: none.",
    )
    validate_every: int | None = Field(
        None,
        gt=0,
        description="Steps between validations; left out: 4 to 10 validations in all, which take about 8% of the "
        "time at the most where 4 of them do.",
    )

    def steps_at(self, step: int) -> int:
        """The number of steps that the run had at update `step` (0-based), which its learning rate follows."""
        assert self.steps is not None, "the recipe is resolved"
        return next((revision.planned for revision in self.revised if step < revision.at), self.steps)

    @property
    def has_horizon(self) -> bool:
        """Whether the recipe says how long to train."""
        return any(value is not None for value in (self.steps, self.tokens, self.minutes))

    @model_validator(mode="after")
    def _one_horizon(self) -> Self:
        if self.tokens is not None and (self.steps is not None or self.minutes is not None):
            other = "steps" if self.steps is not None else "minutes"
            raise ValueError(f"tokens and {other} exclude each other; give one of them")
        if self.objective == "classify" and self.z_loss:
            raise ValueError("z_loss has no meaning for a classifier; leave it out, or choose another objective")
        if self.objective != "classify" and self.dropout.classifier:
            raise ValueError(
                f"dropout.classifier = {self.dropout.classifier} has no effect with objective = {self.objective!r}; it needs "
                "objective = 'classify'"
            )
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
        None,
        gt=0,
        description="Steps between checkpoints; left out: a tenth of the steps, at most 1000, with "
        "train.minutes about 30 seconds at the least.",
    )
    keep: Positive = Field(3, description="Newest verified checkpoints kept; the older ones are removed.")
    asynchronous: bool | None = Field(
        None,
        description="Write checkpoints beside the training, from a copy in the CPU's memory; left out: on CUDA devices.",
    )


class Evaluate(Section):
    """What is measured on the held-out documents and shown as samples."""

    max_tokens: int | None = Field(
        None,
        gt=0,
        description="Held-out tokens used for a validation during training, at the most; left out: 2,000,000, with "
        "train.minutes as many as keep all validations within about 8% of the time.",
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
    top_p: float = Field(
        1.0, gt=0, le=1, description="Samples draw from the most likely tokens that together have this probability."
    )


class Report(Section):
    """What is shown."""

    tensorboard: bool = Field(True, description="Write TensorBoard event files beside metrics.jsonl.")


class Export(Section):
    """What leaves the run."""

    hf: bool = Field(True, description="`bessemer run` ends with a checked export to the Hugging Face layout.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="Of the exported weights, to which they are rounded; left out: float32, or what an imported model came in.",
    )
    stream: bool | None = Field(
        None,
        description="Export tensor by tensor, and read each back, without loading the model to compare logits; left out: where "
        "the model and transformers' copy of it do not fit into free memory.",
    )


class Recipe(Section):
    """One run, from raw text to an exported model."""

    run: Run = Field(description="Which run this is and where it lies.")
    corpus: Corpus = Field(default_factory=Corpus, description="Raw sources to clean documents.")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="Text to token ids.")
    tokens: Tokens = Field(default_factory=Tokens, description="Documents to token shards and sequences.")
    model: Model = Field(default_factory=Model, description="The transformer.")
    train: Train = Field(default_factory=Train, description="The step and the loop.")
    parallel: Parallel = Field(default_factory=Parallel, description="How the run is split over processes.")
    cluster: Cluster = Field(default_factory=Cluster, description="Machines of a training on several nodes.")
    guard: Guard = Field(default_factory=Guard, description="What happens when a number is not finite.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="When the run is saved.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="What is measured after training.")
    report: Report = Field(default_factory=Report, description="What is shown.")
    export: Export = Field(default_factory=Export, description="What leaves the run.")

    @model_validator(mode="after")
    def _objective_fits(self) -> Self:
        objective, family = self.train.objective, self.model.family
        if self.model.from_ is None and objective == "causal" and family in ENCODERS:
            raise ValueError(
                f"train.objective = causal needs a decoder, but model.family = {family} sees both sides; set "
                f"train.objective = masked, or model.family to one of {', '.join(DECODERS)}"
            )
        if self.model.from_ is None and objective == "masked" and family not in ENCODERS:
            raise ValueError(
                f"train.objective = masked needs an encoder, but model.family = {family} sees only what came before; set "
                f"model.family to one of {', '.join(ENCODERS)}, or train.objective = causal"
            )
        if objective == "classify":
            bare = [source.name for source in self.corpus.sources if source.label is None and source.label_key is None]
            if bare:
                raise ValueError(
                    f"train.objective = classify needs a label for every document, but source {bare[0]!r} has none; give it "
                    "label (one for all its documents) or label_key (a field of each record)"
                )
            if self.tokens.held_out_from == "passages":
                raise ValueError(
                    "tokens.held_out_from = passages has no meaning for a classifier: a text is scored as a whole"
                )
        if self.train.start is not None and self.model.from_ is not None:
            raise ValueError("train.start and model.from both give the starting weights; remove one")
        return self

    @model_validator(mode="after")
    def _foreign_tokens_fit(self) -> Self:
        if not self.tokens.sources:
            return self
        names = [*(source.name for source in self.corpus.sources), *(source.name for source in self.tokens.sources)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"two sources are named {twice[0]!r}; give each source a name of its own")
        if self.tokenizer.path is None and self.model.from_ is None:
            raise ValueError(
                "tokens.sources needs tokenizer.path: the tokenizer.json that the tokens were written with"
            )
        if self.train.objective == "classify":
            raise ValueError("train.objective = classify needs labels, and tokens.sources have none")
        weights = self.source_weights
        if len({weight is None for weight in weights.values()}) > 1:
            missing = next(name for name, weight in weights.items() if weight is None)
            raise ValueError(f"source {missing!r} has no weight but another has one; give a weight to all or to none")
        return self

    @property
    def parts(self) -> dict[str, Part]:
        """Every name under which tokens can be stored and mixed, with the source that it is a part of."""
        found = {name: part for source in self.corpus.sources for name, part in self.corpus.parts_of(source).items()}
        return found | {source.name: Part(source.name) for source in self.tokens.sources}

    @property
    def source_weights(self) -> dict[str, float | None]:
        """Each source's weight, those of the corpus and those of foreign tokens; None where none is given."""
        weights = {source.name: source.weight for source in self.corpus.sources}
        return weights | {source.name: source.weight for source in self.tokens.sources}

    @model_validator(mode="after")
    def _mixture_fits(self) -> Self:
        names, tokens = list(self.source_weights), self.tokens
        weighted = [name for name, weight in self.source_weights.items() if weight is not None]
        if tokens.temperature is not None and weighted:
            raise ValueError(
                f"tokens.temperature says the shares, and so does the weight of source {weighted[0]!r}; remove one"
            )
        for phase in tokens.schedule:
            where = f"tokens.schedule (from = {phase.from_}): weights"
            strange = [name for name in phase.weights if name not in names]
            if strange:
                raise ValueError(f"{where} names {strange[0]!r}, which is no source; there are: {', '.join(names)}")
            missing = [name for name in names if name not in phase.weights]
            if missing:
                raise ValueError(f"{where} lacks source {missing[0]!r}; give it 0 if it is not to be read")
            if phase.from_ == "decay" and self.train.schedule.kind != "wsd":
                raise ValueError(f"{where} has no decay phase to begin with; set train.schedule.kind = wsd")
        return self

    @model_validator(mode="after")
    def _packing_fits(self) -> Self:
        packing, objective = self.tokens.packing, self.train.objective
        if packing == "concatenate":
            return self
        if objective == "classify":
            raise ValueError(f"tokens.packing = {packing} has no meaning for a classifier: a text is a sequence there")
        if objective == "masked" and not self.tokens.document_mask:
            raise ValueError(
                f"tokens.packing = {packing} pads sequences, and train.objective = masked would look at the padding; set "
                "tokens.document_mask = true"
            )
        return self

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        batch, length = self.train.global_batch_tokens, self.tokens.sequence_length
        if batch is not None and batch % length:
            low = max(batch // length, 1) * length
            raise ValueError(
                f"train.global_batch_tokens = {batch} is not a multiple of tokens.sequence_length = {length}; "
                f"the nearest are {low} and {low + length}"
            )
        ramp = self.train.batch_ramp
        if ramp is not None and (ramp.start_tokens % length or (batch is not None and ramp.start_tokens > batch)):
            raise ValueError(
                f"train.batch_ramp.start_tokens = {ramp.start_tokens} is not a multiple of tokens.sequence_length = {length} "
                f"up to train.global_batch_tokens{'' if batch is None else f' = {batch}'}"
            )
        micro = self.train.micro_batch
        if ramp is not None and micro is not None and (ramp.start_tokens // length) % micro:
            raise ValueError(
                f"train.micro_batch = {micro} does not divide the {ramp.start_tokens // length} sequences of the first "
                "batch of train.batch_ramp"
            )
        if batch is not None and self.parallel.data > 1:
            complaint = self.parallel.batch_complaint(batch // length, micro, length)
            if complaint is not None:
                raise ValueError(complaint)
        if batch is not None and micro is not None and (batch // length) % micro:
            raise ValueError(
                f"train.micro_batch = {micro} does not divide the {batch // length} sequences of a global batch; "
                f"possible: {[m for m in range(1, batch // length + 1) if (batch // length) % m == 0]}"
            )
        return self

    @model_validator(mode="after")
    def _width_transfer_needs_a_head(self) -> Self:
        if self.train.optimizer.base_width is not None and self.model.tie_embeddings:
            raise ValueError(
                "train.optimizer.base_width needs model.tie_embeddings = false: a tied matrix cannot have both the "
                "embedding's and the head's learning rate"
            )
        return self
