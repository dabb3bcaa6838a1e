"""The recipe's tables about updates: the optimizer, the learning rate over the steps, the growing batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.section import Positive, Section, Share


class Dropout(Section):
    """How much is dropped in training (Srivastava et al. 2014), and nowhere else; each a share of 1. All 0: no dropout."""

    hidden: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share dropped of the embeddings and of what attention and MLP add to the residual stream, where BERT "
        "and GPT-2 drop; in modernbert of the embeddings and of the MLP's hidden units. BERT's and GPT-2's papers: 0.1.",
    )
    attention: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of the attention weights dropped, after the softmax; in modernbert also of what attention adds "
        "to the residual stream. Attention is then computed without a fused kernel, which takes longer.",
    )
    classifier: float = Field(
        0.0, ge=0, lt=1, description="Share dropped of what a classifier's output matrix reads (objective classify)."
    )

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

    kind: Literal["adamw", "muon", "lion"] = Field(
        "adamw",
        description="adamw: AdamW for everything. muon: orthogonalised momentum for the hidden matrices, AdamW for the "
        "rest. lion: the sign of the momentum for everything.",
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate; derived by the depth dial when left out."
    )
    betas: tuple[float, float] | None = Field(
        None,
        strict=False,
        description="AdamW: decay of the first and second moments, left out: 0.9 and 0.95. Lion: the momentum's weight in "
        "the update and its decay, left out: 0.9 and 0.99.",
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay of the matrices; norms and biases have none."
    )
    decay_embeddings: bool = Field(False, description="Apply weight decay to the embedding and the head as well.")
    embedding_rate: float = Field(
        1.0, gt=0, description="Learning rate of the input embedding, as a multiple of learning_rate."
    )
    clip_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this global norm.")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Decay of Muon's Nesterov momentum.")
    muon_rate: float = Field(
        1.0, gt=0, description="Learning rate of the matrices under Muon, as a multiple of learning_rate."
    )
    muon_scale: Literal["match_rms", "spectral"] = Field(
        "match_rms",
        description="Size of Muon's update. match_rms: times 0.2 sqrt(max(rows, columns)), the size of AdamW's, whose "
        "learning rate and weight decay then carry over. spectral: times sqrt(max(1, rows / columns)), with a rate of "
        "its own in muon_rate.",
    )
    state: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32",
        description="How the moments are kept between steps: fp32, bf16 (rounded stochastically) or 8bit (blocks of 256 "
        "with a scale each); tensors below 4096 elements stay fp32.",
    )
    offload: bool = Field(
        False, description="Keep the moments in the CPU's memory when training on CUDA; no effect on a CPU."
    )
    batch_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Multiply the learning rate by (batch tokens / reference_batch_tokens), or by its square root; the "
        "batch is that of the step, so the rate follows a batch ramp.",
    )
    reference_batch_tokens: int | None = Field(
        None, gt=0, description="The global batch at which learning_rate was found; needed by batch_scaling."
    )
    base_width: int | None = Field(
        None,
        gt=0,
        description="The width at which learning_rate was found: hidden matrices and the head then get base_width / "
        "width of it, so that it holds at this width (muP).",
    )

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

    kind: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = Field(
        "cosine",
        description="After the warmup. cosine: half a cosine to the final share. linear: a line to it. inverse_sqrt: "
        "falls with the root of the step, not below it. wsd: stable, then a line to it. constant: stays.",
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps of linear warmup; left out: 2% of the steps, at most 2000."
    )
    decay_share: Share = Field(0.2, description="Share of all steps in the decay phase (wsd).")
    decay_at: int | None = Field(
        None,
        ge=0,
        description="Written by a run that is given minutes: the step after which its decay began (wsd), which stays where "
        "the number of steps is decided again.",
    )
    final_share: Share = Field(0.1, description="The learning rate at the last step, as a share of the peak.")
    rewarm_at: int | None = Field(
        None,
        ge=1,
        description="Step, as metrics.jsonl counts them, at which the learning rate falls to rewarm_from and is warmed up once "
        "more; left out: not at all.",
    )
    rewarm_steps: Positive = Field(100, description="Steps over which it comes back to the schedule.")
    rewarm_from: Share = Field(0.1, description="Share of the schedule's rate with which it begins.")

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
