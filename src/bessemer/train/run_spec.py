"""The specification of a run: the decisions of `workflow/prepare.py`, which are all the inputs of a training.

It is stored in the run directory as recipe.toml, the resolved recipe, and in plan.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel, ResolvedRecipe, load_resolved
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json_or_none


@dataclass(frozen=True)
class Fresh:
    """A training that starts from initial weights."""


@dataclass(frozen=True)
class Import:
    """A training that starts from imported weights.

    Attributes:
        source: A model in the Hugging Face layout (`model.from`), or a run directory (`train.start`).
        is_run: True for a run directory.
        step: The step of the run's checkpoint, or "best"; None means the newest.
    """

    source: str
    is_run: bool = False
    step: int | str | None = None


@dataclass(frozen=True)
class Resume:
    """A training that continues from its newest checkpoint.

    Attributes:
        step: The step of the checkpoint.
        origin: Where the run started, and starts again if none of its checkpoints verifies.
    """

    step: int
    origin: Fresh | Import = field(default_factory=Fresh)


Start = Fresh | Resume | Import
# The attributes of a specification that plan.json stores in addition to the model.
PLANNED = ("device", "precision", "tokens_digest", "memory_bytes", "recomputed", "peak_flops")


@dataclass(frozen=True)
class RunSpec:
    """A run that is ready to train.

    Attributes:
        recipe: The resolved recipe.
        config: The model.
        device: The name of the device that the run was planned on.
        precision: The name of the precision on that device.
        tokens_digest: The digest of the token shards.
        memory_bytes: The planned memory of one process by part, with the total.
        recomputed: The number of blocks that each process recomputes in the backward pass.
        peak_flops: The peak FLOP/s of one device.
        start: Where the training starts: from new weights, from imported weights, or from a checkpoint.
    """

    recipe: ResolvedRecipe
    config: ModelConfig
    device: str
    precision: str
    tokens_digest: str
    memory_bytes: dict[str, int]
    recomputed: int
    peak_flops: float
    start: Start

    @property
    def steps(self) -> int:
        """The number of steps of the whole run."""
        return self.recipe.train.steps

    @property
    def origin(self) -> Fresh | Import:
        """The start of the run without a checkpoint."""
        return self.start.origin if isinstance(self.start, Resume) else self.start

    def with_layout(self, layout: Parallel, recomputed: int) -> RunSpec:
        """Return the same run on another layout, whose processes recompute another number of blocks."""
        return replace(self, recipe=self.recipe.changed(parallel=layout), recomputed=recomputed)

    def with_base(self, before_model: int) -> RunSpec:
        """Return the same run with the planned memory of a process that holds `before_model` bytes before its model."""
        parts = {**self.memory_bytes, "before_model": before_model}
        return replace(self, memory_bytes={**parts, "total": sum(parts.values()) - parts["total"]})

    def to_dict(self) -> dict[str, Any]:
        """Return the values for plan.json; the recipe has a separate file."""
        return {**{key: getattr(self, key) for key in PLANNED}, "model_config": self.config.to_dict()}

    @staticmethod
    def is_complete(plan: dict[str, Any]) -> bool:
        """Return True if plan.json has every value of a specification."""
        return plan.keys() >= {*PLANNED, "model_config"}

    @classmethod
    def build(cls, recipe: ResolvedRecipe, plan: dict[str, Any], run: RunDirectory) -> Self:
        """Return the specification of a resolved recipe and its plan. Raises KeyError if the plan lacks a value."""
        planned = {key: plan[key] for key in PLANNED}
        return cls(recipe, ModelConfig.from_dict(plan["model_config"]), start=start_of(recipe, run), **planned)

    @classmethod
    def read(cls, run: RunDirectory) -> Self:
        """Read the specification of a prepared run. Raises InputError if its plan is missing or damaged."""
        try:
            return cls.build(load_resolved(run.recipe), read_json_or_none(run.plan) or {}, run)
        except KeyError as error:
            raise InputError(f"{run.plan}: {error} is missing; run `bessemer train {run.path}` again") from None


def start_of(recipe: ResolvedRecipe, run: RunDirectory) -> Start:
    """Return where a training of this run starts: from its newest checkpoint, else from imported or new weights."""
    origin: Fresh | Import = Fresh()
    if recipe.model.from_ is not None:
        origin = Import(recipe.model.from_)
    elif recipe.train.start is not None:
        origin = Import(recipe.train.start, True, recipe.train.start_step)
    done = checkpoint_steps(run.checkpoints)
    return Resume(done[-1], origin) if done else origin
