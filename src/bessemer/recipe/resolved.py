"""The resolved recipe: tables with all values filled in, as types without optional fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from bessemer.common.errors import InputError
from bessemer.recipe.batches import Batches
from bessemer.recipe.load import SomeSection, load
from bessemer.recipe.model import Model
from bessemer.recipe.schema import Checkpoint, Evaluate, Recipe
from bessemer.recipe.section import Positive, Section
from bessemer.recipe.train import Optimizer, Schedule, Train


class ResolvedModel(Model):
    """The recipe's [model] after its dimensions have been derived, so that they are never None.

    Only `mlp_width` is None, in a model with experts in every layer.
    """

    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive


class ResolvedOptimizer(Optimizer):
    """The recipe's [train.optimizer] after its learning rate and betas have been derived."""

    learning_rate: float
    betas: tuple[float, float]


class ResolvedSchedule(Schedule):
    """The recipe's [train.schedule] after the number of warmup steps has been derived."""

    warmup_steps: int

    def decay_start(self, steps: int) -> int | None:
        """Return the first step (0-based) of the decay phase of a run of `steps` steps; None without such a phase."""
        if not self.rule.has_decay_phase:
            return None
        return max(min(self.warmup_steps, steps), steps - max(round(steps * self.decay_share), 1))


class ResolvedTrain(Train):
    """The recipe's [train] after the number of steps and the batch sizes have been derived."""

    steps: Positive
    global_batch_tokens: Positive
    micro_batch: Positive
    optimizer: ResolvedOptimizer
    schedule: ResolvedSchedule
    validate_every: Positive

    def batches(self, sequence_length: int) -> Batches:
        """Return the batches of the run for sequences of this length."""
        return Batches.of(self.global_batch_tokens, self.micro_batch, self.batch_ramp, sequence_length)


class ResolvedCheckpoint(Checkpoint):
    """The recipe's [checkpoint] after its interval in steps has been derived."""

    every: Positive


class ResolvedEvaluate(Evaluate):
    """The recipe's [evaluate] after the number of tokens per validation has been derived."""

    max_tokens: Positive


class ResolvedRecipe(Recipe):
    """A recipe after all unset values have been derived, as it is stored in the run directory."""

    model: ResolvedModel
    train: ResolvedTrain
    checkpoint: ResolvedCheckpoint
    evaluate: ResolvedEvaluate

    @property
    def batches(self) -> Batches:
        """The samples in the global batch of each step of the run."""
        return self.train.batches(self.tokens.sequence_length)


def as_resolved(section: Section, kind: type[SomeSection], name: str = "") -> SomeSection:
    """Convert a table with all values set to its resolved class, such as Train to `ResolvedTrain`, with its inner tables.

    `kind` is the resolved class, and `name` the prefix of keys in errors. Raises InputError if a required value is not set.
    """
    values: dict[str, Any] = {}
    for key, info in kind.model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section) and isinstance(info.annotation, type):
            value = as_resolved(value, info.annotation, f"{name}{key}.")
        elif value is None and info.is_required():
            raise InputError(f"{name}{key}: missing in a resolved recipe")
        values[key] = value
    return cast("SomeSection", kind.model_construct(section.model_fields_set, **values))


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Load the recipe in a run directory, with overrides. Raises InputError like `load`, and if a value is missing."""
    return as_resolved(load(path, overrides), ResolvedRecipe, f"{path}: ")
