"""How many sequences each step takes: the same at every step, or growing over a ramp; a pure function of the step.

Everything that asks "which samples did step N read" asks here: the loader, the ledger, the plan, the metrics.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from bessemer.recipe.schema import Recipe


@dataclass(frozen=True)
class Batches:
    """Sequences of each global batch. Steps are counted from 0.

    starts: samples before each step of the ramp, and before the first step after it; full: sequences of every later
    step; length: tokens in a sequence.
    """

    starts: tuple[int, ...]
    full: int
    length: int

    @classmethod
    def of(cls, recipe: Recipe) -> Batches:
        """The batches of a resolved recipe.

        In a ramp the batch is the line from start_tokens to global_batch_tokens, over the ramp's steps or over the
        tokens consumed, taken down to whole micro-batches.
        """
        train, length = recipe.train, recipe.tokens.sequence_length
        assert train.global_batch_tokens is not None and train.micro_batch is not None, "the recipe is resolved"
        full, ramp = train.global_batch_tokens // length, train.batch_ramp
        starts = [0]
        if ramp is not None:
            first = ramp.start_tokens // length
            while True:
                if ramp.steps is not None:
                    done, whole = len(starts) - 1, ramp.steps
                else:
                    done, whole = starts[-1] * length, ramp.tokens or 0
                if done >= whole or first == full:
                    break
                grown = (full - first) * done // whole // train.micro_batch * train.micro_batch
                starts.append(starts[-1] + first + grown)
        return cls(tuple(starts), full, length)

    @property
    def ramp_steps(self) -> int:
        """Steps before the first full batch."""
        return len(self.starts) - 1

    def sequences(self, step: int) -> int:
        """Sequences of the batch of `step`."""
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        """Tokens of the batch of `step`."""
        return self.sequences(step) * self.length

    def before(self, step: int) -> int:
        """Samples of all steps before `step`."""
        if step < len(self.starts):
            return self.starts[step]
        return self.starts[-1] + (step - self.ramp_steps) * self.full

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before `step`."""
        return self.before(step) * self.length

    def step_of(self, sample: int) -> int:
        """The step whose batch holds a sample."""
        if sample < self.starts[-1]:
            return bisect_right(self.starts, sample) - 1
        return self.ramp_steps + (sample - self.starts[-1]) // self.full

    def steps_for(self, samples: int) -> int:
        """The fewest steps, at least one, that consume so many samples."""
        return self.step_of(max(samples, 1) - 1) + 1
