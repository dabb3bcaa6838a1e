"""[train] of the recipe: objective, optimizer, schedule, batch ramp, precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from bessemer.recipe.section import Positive, Section, Share
from bessemer.recipe.uses import NamedRule, Use, names_extension, takes_settings


class Masking(Section):
    """Which tokens are hidden for the model to predict, and what replaces them (objective masked)."""

    share: float = Field(0.15, gt=0, lt=1)
    mode: Literal["bert", "all"] = "bert"
    whole_words: bool = False


class Classify(Section):
    """Settings of a classifier (objective classify), which is trained on the labels of the corpus."""

    frozen: bool = False
    pooling: Literal["first", "last", "mean"] | None = None


class Dropout(Section):
    """Dropout probabilities in training (Srivastava et al. 2014). With 0 everywhere there is no dropout."""

    hidden: float = Field(0.0, ge=0, lt=1)
    attention: float = Field(0.0, ge=0, lt=1)
    classifier: float = Field(0.0, ge=0, lt=1)

    @property
    def is_on(self) -> bool:
        """True if any dropout probability is positive."""
        return bool(self.hidden or self.attention or self.classifier)


DecayRate = Annotated[float, Field(ge=0, lt=1)]
Settings = Annotated[dict[str, Any] | None, Field(validate_default=True)]  # settings of a user's class


class Optimizer(NamedRule):
    """The optimizer: its update rule, rates, decay and clipping."""

    extension: ClassVar[str] = "optimizers"

    kind: Annotated[str, names_extension("optimizers")] = "adamw"
    settings: Annotated[Settings, takes_settings("optimizers", "kind", is_of_own=True)] = None
    learning_rate: float | None = Field(None, gt=0)
    betas: tuple[DecayRate, DecayRate] | None = Field(None, strict=False)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    decay_embeddings: bool = False
    embedding_rate: float = Field(1.0, gt=0)
    clip_norm: float = Field(1.0, gt=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_rate: float = Field(1.0, gt=0)
    state: Literal["fp32", "8bit"] = "fp32"
    base_width: int | None = Field(None, gt=0)

    @property
    def rest_rule(self) -> Any:
        """The update rule for embeddings, norms and other parameters that are no hidden weight matrices.

        It is AdamW if the chosen rule is only for matrices, as Muon is, else the chosen rule.
        """
        rule = self.rule
        return Optimizer().rule if rule.is_for_matrices else rule


class Schedule(NamedRule):
    """The learning-rate schedule."""

    extension: ClassVar[str] = "schedules"

    kind: Annotated[str, names_extension("schedules")] = "cosine"
    settings: Annotated[Settings, takes_settings("schedules", "kind", is_of_own=True)] = None
    warmup_steps: int | None = Field(None, ge=0)
    decay_share: Share = 0.2
    final_share: Share = 0.1


class ObjectiveRule(NamedRule):
    """The extension that train.objective names, with its settings."""

    extension: ClassVar[str] = "objectives"


class BatchRamp(Section):
    """A global batch that grows to global_batch_tokens."""

    start_tokens: Positive
    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)

    def _complaints(self) -> Iterator[str]:
        if (self.steps is None) == (self.tokens is None):
            yield "steps and tokens: exactly one must be set; it is the length of the ramp"


HORIZON = ("steps", "tokens", "minutes")  # keys of [train], one of which sets the length of a run


class Train(Section):
    """Settings of the training step and loop."""

    objective_code: str | None = None
    objective: Annotated[str, names_extension("objectives", code="objective_code")] = "causal"
    objective_settings: Annotated[Settings, takes_settings("objectives", "objective", is_of_own=True)] = None
    masking: Masking = Masking()
    classify: Classify = Classify()
    start: str | None = Field(None, min_length=1)
    start_step: NonNegativeInt | Literal["best"] | None = None
    steps: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)
    minutes: float | None = Field(None, gt=0)
    max_epochs: float | None = Field(None, gt=0)
    global_batch_tokens: int | None = Field(None, gt=0)
    batch_ramp: BatchRamp | None = None
    micro_batch: int | None = Field(None, gt=0)
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: float = Field(0.0, ge=0, lt=1)
    z_loss: float = Field(0.0, ge=0)
    dropout: Dropout = Dropout()
    loss_chunk: Positive = 4096
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp64"] = "auto"
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    memory_budget: float | None = Field(None, gt=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    deterministic: Literal["auto", "on", "off"] = "auto"
    log_every: Positive = 10
    watch_every: int = Field(50, ge=0)
    validate_every: int | None = Field(None, gt=0)
    callbacks: tuple[Annotated[Use, takes_settings("callbacks")], ...] = Field((), strict=False)

    @property
    def objective_rule(self) -> ObjectiveRule:
        """train.objective and its settings as a `NamedRule`."""
        return ObjectiveRule.model_construct(
            code=self.objective_code, kind=self.objective, settings=self.objective_settings
        )

    @property
    def is_frozen(self) -> bool:
        """True if only the classification head is trained and the rest of the model is frozen."""
        return self.objective == "classify" and self.classify.frozen

    @property
    def has_horizon(self) -> bool:
        """True if the recipe sets the length of the training: train.steps, train.tokens or train.minutes."""
        return any(getattr(self, key) is not None for key in HORIZON)

    def _complaints(self) -> Iterator[str]:
        if self.tokens is not None and (self.steps is not None or self.minutes is not None):
            other = "steps" if self.steps is not None else "minutes"
            yield f"tokens and {other} exclude each other; give one of them"
        if self.start_step is not None and self.start is None:
            yield "start_step has no effect without train.start; set train.start or remove start_step"
        if self.objective == "classify" and self.z_loss:
            yield "z_loss has no meaning for a classifier; leave it out, or choose another objective"
        if self.objective != "classify" and self.dropout.classifier:
            yield f"dropout.classifier needs objective = 'classify', and it is {self.objective!r}"
        if self.memory_budget is not None and 1 < self.memory_budget < 1e6:
            yield f"memory_budget = {self.memory_budget:g} is too small; set a share of free memory up to 1, or bytes"
        if self.memory_budget is not None and self.recompute != "budget":
            yield f"memory_budget has no effect with recompute = {self.recompute!r}; use recompute = 'budget'"
