"""[train] of the recipe: objective, optimizer, schedule, batch ramp, precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.section import Positive, Section, Share


class Masking(Section):
    """Which tokens are hidden, and behind what (objective masked)."""

    share: float = Field(0.15, gt=0, lt=1)
    """Share of a sequence's tokens that are hidden and predicted; rounded, at least one."""
    mode: Literal["bert", "all"] = "bert"
    """bert: of the hidden tokens 80% become the mask token, 10% a random token, 10% stay as they are; all: every one
    becomes the mask token (as ModernBERT does, with a share of 0.3)."""
    whole_words: bool = False
    """Hide all tokens of a word or none. A word is a run of letters, digits and non-ASCII bytes, with the space or sign
    before it when that stands in the same token."""


class Classify(Section):
    """How a classifier is trained (objective classify); the labels are those of the corpus."""

    frozen: bool = Field(False, description="Train only the classifier's head; the rest keeps its starting weights.")
    pooling: Literal["first", "last", "mean"] | None = None
    """What the head reads: first token, last, or the mean; left out: first in an encoder, last in a decoder."""


class Dropout(Section):
    """How much is dropped in training (Srivastava et al. 2014), and nowhere else; each a share of 1. All 0: no dropout."""

    hidden: float = Field(0.0, ge=0, lt=1)
    """Share dropped of the embeddings and of what attention and MLP add to the residual stream, where BERT and GPT-2
    drop; in modernbert of the embeddings and of the MLP's hidden units. BERT's and GPT-2's papers: 0.1."""
    attention: float = Field(0.0, ge=0, lt=1)
    """Share of the attention weights dropped, after the softmax; in modernbert also of what attention adds to the
    residual stream. Attention is then computed without a fused kernel, which takes longer."""
    classifier: float = Field(0.0, ge=0, lt=1)
    """Share dropped of what a classifier's output matrix reads (objective classify)."""

    @property
    def is_on(self) -> bool:
        """Whether anything is dropped."""
        return bool(self.hidden or self.attention or self.classifier)


@dataclass(frozen=True)
class UpdateRule:
    """Facts of an optimizer's update. moments: state kept for each element, and whether it can be negative; betas: defaults;
    is_for_matrices: it updates only hidden matrices, and AdamW the rest."""

    moments: dict[str, bool]
    betas: tuple[float, float]
    is_for_matrices: bool = False


# AdamW's betas as in GPT-3 (Brown et al. 2020, appendix B); Lion's as in its paper (Chen et al. 2023, section 4).
UPDATE_RULES = {
    "adamw": UpdateRule({"exp_avg": True, "exp_avg_sq": False}, (0.9, 0.95)),
    "muon": UpdateRule({"momentum": True}, (0.9, 0.95), is_for_matrices=True),
    "lion": UpdateRule({"exp_avg": True}, (0.9, 0.99)),
}


class Optimizer(Section):
    """How gradients become updates."""

    kind: Literal["adamw", "muon", "lion"] = "adamw"
    """adamw: AdamW for everything. muon: orthogonalised momentum for the hidden matrices, AdamW for the rest. lion: the
    sign of the momentum for everything."""
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate; left out: by the depth dial.")
    betas: tuple[float, float] | None = Field(None, strict=False)
    """AdamW: decay of the first and second moments, left out: 0.9 and 0.95. Lion: the momentum's weight in the update
    and its decay, left out: 0.9 and 0.99."""
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices; not of norms and biases.")
    decay_embeddings: bool = Field(False, description="Apply weight decay to the embedding and the head as well.")
    embedding_rate: float = Field(1.0, gt=0, description="Learning rate of the input embedding / learning_rate.")
    clip_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Decay of Muon's Nesterov momentum.")
    muon_rate: float = Field(1.0, gt=0, description="Learning rate of the matrices under Muon / learning_rate.")
    muon_scale: Literal["match_rms", "spectral"] = "match_rms"
    """match_rms: updates times 0.2 sqrt(max(rows, columns)), AdamW's size, for AdamW's learning rate and weight decay.
    spectral: times sqrt(max(1, rows / columns)), for a rate of its own in muon_rate."""
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """How the moments are kept between steps: fp32, bf16 (rounded stochastically) or 8bit (blocks of 256 with a scale
    each); tensors below 4096 elements stay fp32."""
    offload: bool = Field(False, description="Keep the moments in CPU memory when training on CUDA.")
    batch_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply the learning rate by (batch tokens / reference_batch_tokens), or by its square root; the batch is that
    of the step, so the rate follows a batch ramp."""
    reference_batch_tokens: int | None = Field(None, gt=0)
    """The global batch at which learning_rate was found; needed by batch_scaling."""
    base_width: int | None = Field(None, gt=0)
    """The width at which learning_rate was found: hidden matrices and the head then get base_width / width of it, so
    that it holds at this width (muP)."""

    @property
    def rest_kind(self) -> str:
        """The update rule of everything that is not a hidden matrix."""
        return "adamw" if UPDATE_RULES[self.kind].is_for_matrices else self.kind

    @field_validator("betas")
    @classmethod
    def _betas_are_decays(cls, betas: tuple[float, float] | None) -> tuple[float, float] | None:
        if betas is not None and not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"each beta lies in [0, 1), got {list(betas)}")
        return betas

    @model_validator(mode="after")
    def _scaling_has_its_reference(self) -> Self:
        if self.batch_scaling != "none" and self.reference_batch_tokens is None:
            raise ValueError(
                f"batch_scaling = {self.batch_scaling!r} needs reference_batch_tokens, the global batch at which "
                "learning_rate was found"
            )
        return self


class Schedule(Section):
    """Learning rate over the steps."""

    kind: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    """After the warmup. cosine: half a cosine to the final share. linear: a line to it. inverse_sqrt: falls with the
    root of the step, not below it. wsd: stable, then a line to it. constant: stays."""
    warmup_steps: int | None = Field(None, ge=0, description="Steps of linear warmup; left out: 2%, at most 2000.")
    decay_share: Share = Field(0.2, description="Share of all steps in the decay phase (wsd).")
    decay_at: int | None = Field(None, ge=0)
    """Written by a run that is given minutes: the step at which its decay began (wsd), which then stays."""
    final_share: Share = Field(0.1, description="The learning rate at the last step, as a share of the peak.")
    rewarm_at: int | None = Field(None, ge=1)
    """Step at which the learning rate falls to rewarm_from and is warmed up once more; left out: never."""
    rewarm_steps: Positive = Field(100, description="Steps over which it comes back to the schedule.")
    rewarm_from: Share = Field(0.1, description="Share of the schedule's rate with which it begins.")

    def is_rewarming(self, step: int) -> bool:
        """Whether update `step` (0-based) belongs to the second warm-up, in which the loss may rise."""
        return self.rewarm_at is not None and self.rewarm_at <= step + 1 < self.rewarm_at + self.rewarm_steps

    def decay_start(self, steps: int, step: int | None = None) -> int:
        """The first step (0-based) of the decay phase of a run of so many steps (wsd), as update `step` (None: the last) sees
        it: before decay_at that was not decided."""
        if self.decay_at is not None and self.decay_at < steps and (step is None or step >= self.decay_at):
            return self.decay_at
        warmup = min(self.warmup_steps or 0, steps)
        return max(warmup, steps - max(round(steps * self.decay_share), 1))


class Revision(Section):
    """A decision, in a run that is given minutes, on how many steps there are."""

    at: Positive = Field(description="Steps that were done when it was taken.")
    planned: Positive = Field(description="Steps that the run had until then.")


class BatchRamp(Section):
    """A global batch that grows to global_batch_tokens."""

    start_tokens: Positive = Field(description="Tokens of the first global batch; a multiple of sequence_length.")
    steps: int | None = Field(None, gt=0, description="Steps over which the batch grows, linearly.")
    tokens: int | None = Field(None, gt=0, description="Tokens over which the batch grows, linearly, instead of steps.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give steps or tokens, one of them: how long the batch grows")
        return self


class Train(Section):
    """The step and the loop."""

    objective: Literal["causal", "masked", "classify"] = "causal"
    """Predict the next token (causal), hidden tokens (masked; needs an encoder) or a document's label (classify)."""
    masking: Masking = Field(Masking(), description="Which tokens are hidden (objective masked).")
    classify: Classify = Field(Classify(), description="How a classifier is trained (objective classify).")
    start: str | None = Field(None, min_length=1)
    """A run folder whose newest checkpoint gives the starting weights; what is left out of model, tokenizer and
    sequence_length follows from it, and the learning rate is a tenth of its own."""
    steps: int | None = Field(None, gt=0, description="Optimizer steps; wins over minutes.")
    tokens: int | None = Field(None, gt=0, description="Tokens to train on, instead of steps.")
    minutes: float | None = Field(None, gt=0)
    """Wall time of the training, its validations and checkpoints included, instead of steps: the step is measured once
    on this machine and the number of steps written into the run folder's recipe."""
    revised: tuple[Revision, ...] = Field((), strict=False)
    """Written by a run that is given minutes: when its number of steps was decided again by the measured rate."""
    max_epochs: float | None = Field(None, gt=0)
    """How often the training text is read at the most, however many minutes there are; steps and tokens win over it.
    Left out: as often as the minutes allow."""
    global_batch_tokens: int | None = Field(None, gt=0, description="Tokens of a step; a multiple of sequence_length.")
    batch_ramp: BatchRamp | None = None
    """A global batch that grows to global_batch_tokens, by whole micro-batches; left out: it is fixed."""
    micro_batch: int | None = Field(None, gt=0, description="Sequences of a forward/backward pass; left out: to fit.")
    optimizer: Optimizer = Field(Optimizer(), description="The optimizer.")
    schedule: Schedule = Field(Schedule(), description="The learning rate over the steps.")
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights, which validation, samples and export then use; at update n
    (from 0) at most (1 + n) / (10 + n), so that it leaves the initial weights behind; 0: none."""
    z_loss: float = Field(0.0, ge=0, description="Weight of the squared log partition function (PaLM); 0: off.")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target's probability spread over the vocabulary (Szegedy et al. 2016); not in reported losses."""
    dropout: Dropout = Field(Dropout(), description="What is dropped at random in training; by default nothing.")
    loss_chunk: Positive = 4096
    """Tokens whose logits are held at one time, at the most; a CPU holds what fits its cache."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-rowwise", "fp64"] = "auto"
    """Arithmetic of the matmuls; auto: bf16 where a GPU has it, else fp32; fp16 scales the loss dynamically; fp8: the
    blocks' matmuls, with one scale a tensor or a row. Master weights, gradients and optimizer are fp32."""
    recompute: Literal["none", "selective", "full", "budget"] = "none"
    """Activation checkpointing, recomputed in the backward pass: none; selective: all but matmuls and attention; full:
    all; budget: full in the fewest blocks for which the predicted peak fits."""
    memory_budget: float | None = Field(None, gt=0)
    """Memory for recompute = budget: bytes, or up to 1 a share of what is free on the device; left out: all of it."""
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train; auto: cuda when there is one.")
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on CUDA, where it pays, and not on a CPU, where it gains nothing after a long start."""
    log_every: Positive = Field(1, description="Steps between lines of metrics.jsonl.")
    watch_every: int = Field(50, ge=0)
    """Steps between looks inside the model: activations, attention logits, gradients and updates by block; 0: none."""
    validate_every: int | None = Field(None, gt=0)
    """Steps between validations; left out: 4 to 10 in all, which take about 8% of the time where 4 of them do."""

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
