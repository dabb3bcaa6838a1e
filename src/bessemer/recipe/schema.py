"""The schema of the recipe: the tables and keys that configure one run.

The recipe is the only configuration. Every key is declared here once, with its type and default; keys.toml has the
sentence that explains it, which `bessemer recipe --explain KEY` prints. Undeclared keys are errors, so no setting is
ignored silently.

Values that are not set (`None`) are derived from the model's depth, the corpus, or the device. The run directory keeps
the recipe with every derived value filled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from bessemer.recipe.corpus import Corpus
from bessemer.recipe.model import DECODERS, ENCODERS, Model
from bessemer.recipe.parallel import Cluster, Parallel
from bessemer.recipe.section import Positive, Section, StoreOrFolder, Words
from bessemer.recipe.tokens import TRAINED_ONLY, TokenizerChoice, Tokens
from bessemer.recipe.train import Train
from bessemer.recipe.uses import built_in_classes


class Run(Section):
    """The name, folder and seed of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: str = "runs"
    seed: int = Field(0, ge=0)

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.dir).expanduser() / self.name


class Checkpoint(Section):
    """Settings of checkpoints: when they are saved, how many are kept, and where copies go."""

    every: int | None = Field(None, gt=0)
    keep: Positive = 3
    keep_best: bool = False
    asynchronous: bool | None = None
    mirror: StoreOrFolder = None


SHORTEST_HANG = 5


class Guard(Section):
    """Settings of the checks for loss spikes, divergence and hangs during training, and of the response to them."""

    skip_spikes: bool = True
    max_skipped: float = Field(0.01, gt=0, le=1)
    rollback_distance: int | None = Field(None, gt=0)
    skip_batches: int | None = Field(None, ge=0)
    max_rollbacks: int = Field(3, ge=0)

    compare_replicas_every: int = Field(100, ge=0)
    stragglers_every: int = Field(50, ge=0)
    hang_seconds: float | None = Field(None, ge=0)

    def _complaints(self) -> Iterator[str]:
        if self.hang_seconds and self.hang_seconds < SHORTEST_HANG:
            yield f"hang_seconds = {self.hang_seconds:g}: take {SHORTEST_HANG} or more; 0 turns it off"
        for key in ("rollback_distance", "skip_batches"):
            if not self.max_rollbacks and getattr(self, key) is not None:
                yield f"{key} has no effect with max_rollbacks = 0; leave one of them out"


class Evaluate(Section):
    """Settings of the evaluation: held-out documents, evaluation tasks and generated samples."""

    max_tokens: int | None = Field(None, gt=0)
    ngram: bool = True
    ngram_max_bytes: Positive = 200_000_000
    prompts: Words = ("The ", "def ")
    sample_tokens: Positive = 120
    samples: int = Field(10, ge=0)
    tasks: Words = ()
    task_items: Positive = 200
    temperature: float = Field(0.8, ge=0)
    top_k: int = Field(50, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class Report(Section):
    """Reports of a run: TensorBoard, trackers and a webhook."""

    tensorboard: bool = True
    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field((), strict=False)
    webhook: str | None = None

    @field_validator("webhook")
    @classmethod
    def _is_a_variable(cls, webhook: str | None) -> str | None:
        if webhook is not None and not webhook.isidentifier():
            raise ValueError("give the name of the environment variable with the URL; the URL itself is a secret")
        return webhook


class Export(Section):
    """Settings of the exported model."""

    hf: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    stream: bool | None = None


class Recipe(Section):
    """The settings of one run, from raw text to an exported model."""

    run: Run
    corpus: Corpus = Corpus()
    tokenizer: TokenizerChoice = TokenizerChoice()
    tokens: Tokens = Tokens()
    model: Model = Model()
    train: Train = Train()
    parallel: Parallel = Parallel()
    cluster: Cluster = Cluster()
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    export: Export = Export()

    @property
    def predicts_hidden(self) -> bool:
        """True if the tokenizer needs a mask token, because an encoder learns to predict hidden tokens.

        An encoder with a user's objective counts too, since that objective may hide tokens.
        """
        train = self.train
        is_own = self.model.family in ENCODERS and not train.objective_rule.is_built_in
        return is_own or train.objective == "masked"

    @property
    def is_continued(self) -> bool:
        """True if the run starts from trained weights."""
        return self.model.from_ is not None or self.train.start is not None

    @property
    def is_pretraining(self) -> bool:
        """True if a language model is trained from random weights, as scaling laws assume."""
        return not self.is_continued and self.train.objective != "classify"

    @property
    def adds_tokens(self) -> bool:
        """True if special tokens are added to the tokenizer of model.from."""
        is_of_model = self.model.from_ is not None and self.tokenizer.vocabulary is None
        return is_of_model and bool(self.tokenizer.special_tokens)

    @property
    def parts(self) -> dict[str, str]:
        """A dict from each name under which tokens are stored and mixed to its source.

        A source has its own name, and one more per language that language.split splits off.
        """
        return {name: source.name for source in self.corpus.sources for name in self.corpus.parts_of(source)}

    @property
    def chat_parts(self) -> frozenset[str]:
        """Names in `parts` under which conversations are stored."""
        return frozenset(name for name, source in self.parts.items() if source in self.corpus.chats)

    @property
    def source_weights(self) -> dict[str, float | None]:
        """A dict from each source's name to its weight in the mixture, None if the recipe sets none."""
        return {source.name: source.weight for source in self.corpus.sources}

    def _complaints(self) -> Iterator[str]:
        yield from self._objective_fits()
        yield from self._tokenizer_fits()
        yield from self._sources_fit()
        yield from self._copies_are_elsewhere()
        yield from self._tokens_fit()
        yield from self._batch_fits()

    def _objective_fits(self) -> Iterator[str]:
        objective, family = self.train.objective, self.model.family
        # A user's objective or family is checked by its own class.
        fitting, others = {"causal": (DECODERS, ENCODERS), "masked": (ENCODERS, DECODERS)}.get(objective, ((), ()))
        if self.model.from_ is None and family in others:
            yield f"train.objective = {objective} cannot train model.family = {family}; take one of {', '.join(fitting)}"
        if objective == "classify":
            for source in self.corpus.sources:
                if source.label is None and source.label_key is None:
                    yield f"train.objective = classify needs labels; give source {source.name!r} label or label_key"
            if self.tokens.held_out_from == "passages":
                yield "tokens.held_out_from = passages has no meaning for a classifier: a text is scored as a whole"
        if self.train.start is not None and self.model.from_ is not None:
            yield "train.start and model.from both give the starting weights; remove one"

    def _tokenizer_fits(self) -> Iterator[str]:
        options = self.tokenizer
        if options.vocabulary is not None or (options.path is None and self.model.from_ is None):
            return
        for key in (key for key in TRAINED_ONLY if getattr(options, key) != type(options).model_fields[key].default):
            yield f"tokenizer.{key} is for a new tokenizer, but one is loaded; remove it, or give tokenizer.vocabulary"
        if options.special_tokens and not self.adds_tokens:
            own = 'of a run\'s own model by model.from = "hf:RUN/export"'
            yield f"tokenizer.special_tokens are added to the tokenizer of model.from alone ({own}); remove the key"

    def _sources_fit(self) -> Iterator[str]:
        names, tokens = list(self.source_weights), self.tokens
        weighted = [name for name, weight in self.source_weights.items() if weight is not None]
        if weighted and len(weighted) != len(names):
            missing = next(name for name in names if name not in weighted)
            yield f"source {missing!r} has no weight but {weighted[0]!r} has one; give a weight to all or to none"
        if tokens.temperature is not None and weighted:
            yield f"tokens.temperature sets the shares, but so does the weight of source {weighted[0]!r}; remove one"
        for phase in tokens.schedule:
            where = f"tokens.schedule (from = {phase.from_}): weights"
            for name in (name for name in phase.weights if name not in names):
                yield f"{where} names {name!r}, which is not a source; choose from: {', '.join(names)}"
            for name in (name for name in names if name not in phase.weights):
                yield f"{where} lacks source {name!r}; give it 0 if it is not to be read"
            schedule = self.train.schedule
            if phase.from_ == "decay" and schedule.is_built_in and not schedule.rule.has_decay_phase:
                kinds = " or ".join(name for name, one in built_in_classes("schedules").items() if one.has_decay_phase)
                yield f"{where} has no decay phase; set train.schedule.kind = {kinds}"

    def _copies_are_elsewhere(self) -> Iterator[str]:
        folder = self.run.folder.absolute()
        for key, url in (("checkpoint.mirror", self.checkpoint.mirror), ("corpus.storage", self.corpus.storage)):
            if url is not None and url.startswith(("/", "~")):
                mirror = Path(url).expanduser() / self.run.name
                if mirror == folder or folder in mirror.parents:
                    yield f"{key} = {url} is inside the run directory {folder}; set a folder on another disk"

    def _tokens_fit(self) -> Iterator[str]:
        predicts_all = self.train.objective != "classify" and not self.predicts_hidden
        if self.tokens.gate and not predicts_all:
            yield f"tokens.gate judges the text that is predicted; train.objective = {self.train.objective} has none"
        if self.tokens.chat_template is not None and not self.corpus.chats:
            yield "tokens.chat_template renders conversations, and no source has format = chat"
        needs = {
            "tokens.packing = best-fit, or document": self.tokens.packing != "concatenate",
            "tokens.document_mask = true": self.tokens.packing == "document" or self.tokens.document_mask,
            "train.objective = causal": predicts_all,
            "tokens.held_out_from = documents": self.tokens.held_out_from == "documents",
            "tokens.gate = false": not self.tokens.gate,
        }
        for key in (key for key, is_so in needs.items() if self.corpus.chats and not is_so):
            yield f"source {self.corpus.chats[0]!r} holds conversations (format = chat), which need {key}"
        packing = self.tokens.packing
        if packing != "concatenate" and self.train.objective == "classify":
            yield f"tokens.packing = {packing} has no meaning for a classifier: a text is a sequence there"
        if packing != "concatenate" and self.predicts_hidden and not self.tokens.document_mask:
            yield f"tokens.packing = {packing} pads, which an encoder must not see; set tokens.document_mask = true"

    def _batch_fits(self) -> Iterator[str]:
        batch, length = self.train.global_batch_tokens, self.tokens.sequence_length
        if batch is not None and batch % length:
            low = max(batch // length, 1) * length
            yield f"train.global_batch_tokens must be a multiple of tokens.sequence_length = {length}: {low} or {low + length}"
        ramp = self.train.batch_ramp
        if ramp is not None and (ramp.start_tokens % length or (batch is not None and ramp.start_tokens > batch)):
            yield "train.batch_ramp.start_tokens must be a multiple of tokens.sequence_length up to train.global_batch_tokens"
        micro = self.train.micro_batch
        if ramp is not None and micro is not None and (ramp.start_tokens // length) % micro:
            yield f"train.micro_batch does not divide the {ramp.start_tokens // length} sequences of the batch_ramp's first batch"
        if batch is not None and (complaint := self.parallel.batch_complaint(batch // length, micro)):
            yield complaint
        if self.train.optimizer.base_width is not None and self.model.tie_embeddings:
            yield "train.optimizer.base_width needs model.tie_embeddings = false: embedding and head have different rates"
