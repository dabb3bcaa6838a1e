"""The batches of a run: the samples that each step reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from bessemer.recipe.train import BatchRamp

Range = tuple[int, int]  # first sample, and the one after the last


@dataclass(frozen=True)
class Batches:
    """The samples in the global batch of each step. Steps are counted from 0.

    A sample is one sequence. Samples are numbered by their position in the run's fixed order of samples. A batch that would
    contain an omitted sample starts after the omitted range instead, so the few samples between the previous batch and
    the range are not read either.

    Attributes:
        starts: Number of samples before each step of the batch ramp, and before the first step after it.
        full: Sequences per global batch after the ramp.
        length: Tokens in a sequence.
        omitted: Ranges (first, end) of samples that no step reads, disjoint and ascending.
        offset: Number added to the first sample of every batch, for a run that resumed with another batch size.
    """

    starts: tuple[int, ...]
    full: int
    length: int
    omitted: tuple[Range, ...] = ()
    offset: int = 0

    @classmethod
    def of(cls, tokens: int, micro_batch: int, ramp: BatchRamp | None, length: int) -> Batches:
        """Return the batches of a resolved recipe.

        In a ramp the batch grows linearly from ramp.start_tokens to `tokens`, during the first ramp.steps steps or the
        first ramp.tokens tokens; its growth is rounded down to whole micro-batches.

        Args:
            tokens: Tokens of a full global batch.
            micro_batch: Sequences of a micro-batch.
            ramp: The batch ramp, if any.
            length: Tokens in a sequence.
        """
        full, starts = tokens // length, [0]
        if ramp is not None:
            first, whole = ramp.start_tokens // length, ramp.steps or ramp.tokens or 0
            while first < full:
                done = len(starts) - 1 if ramp.steps is not None else starts[-1] * length
                if done >= whole:
                    break
                grown = (full - first) * done // whole // micro_batch * micro_batch
                starts.append(starts[-1] + first + grown)
        return cls(tuple(starts), full, length)

    @property
    def ramp_steps(self) -> int:
        """Number of steps before the first full batch."""
        return len(self.starts) - 1

    def sequences(self, step: int) -> int:
        """Return the number of sequences in the batch of `step`."""
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        """Return the number of tokens in the batch of `step`."""
        return self.sequences(step) * self.length

    def before(self, step: int) -> int:
        """Return the number of samples in the batches of all steps before `step`; omitted samples do not count."""
        if step < len(self.starts):
            return self.starts[step]
        return self.starts[-1] + (step - self.ramp_steps) * self.full

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in the batches of all steps before `step`."""
        return self.before(step) * self.length

    def step_of(self, sample: int) -> int:
        """Return the step whose batch contains a sample if nothing is omitted and the offset is 0 (else `reader_of`)."""
        if sample < self.starts[-1]:
            return bisect_right(self.starts, sample) - 1
        return self.ramp_steps + (sample - self.starts[-1]) // self.full

    def steps_for(self, samples: int) -> int:
        """Return the smallest number of steps, at least one, whose batches have at least `samples` samples."""
        return self.step_of(max(samples, 1) - 1) + 1

    def without(self, ranges: Iterable[Range]) -> Batches:
        """Return a copy that also omits these ranges of samples."""
        merged: list[Range] = []
        for first, end in sorted([*self.omitted, *ranges]):
            if first == end:
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        return replace(self, omitted=tuple(merged))

    def with_position(self, step: int, samples: int) -> Batches:
        """Return a copy with an offset such that step `step` begins at sample number `samples`."""
        return replace(self, offset=self.offset + samples - self.after(step))

    @cached_property
    def _jumps(self) -> tuple[tuple[int, int], ...]:
        """Pairs (step, shift), ascending: from that step on, the batch of step s begins at sample before(s) + shift.

        Each pair stands for an omitted range that the batch of `step` would have contained.
        """
        jumps: list[tuple[int, int]] = []
        shift = self.offset
        for first, end in self.omitted:
            if end <= shift:  # before the position at which the run resumed
                continue
            step = self.step_of(max(first - shift, 0))
            shift = end - self.before(step)
            if jumps and jumps[-1][0] == step:
                jumps.pop()
            jumps.append((step, shift))
        return tuple(jumps)

    def first(self, step: int) -> int:
        """Return the number of the first sample in the batch of `step`."""
        passed = bisect_right(self._jumps, step, key=lambda jump: jump[0])
        return self.before(step) + (self._jumps[passed - 1][1] if passed else self.offset)

    def after(self, step: int) -> int:
        """Return the number of the sample after the last one of the first `step` steps; 0 for no steps."""
        return self.first(step - 1) + self.sequences(step - 1) if step else 0

    def reader_of(self, sample: int) -> int | None:
        """Return the step that reads the sample with this number; None if the sample is omitted or skipped."""
        shift = self.offset
        for step, further in self._jumps:
            if sample < self.before(step) + shift:
                break
            if sample < self.before(step) + further:
                return None
            shift = further
        return self.step_of(sample - shift)

    def gaps(self, step: int) -> list[Range]:
        """Return the ranges (first, end) of samples that the steps before `step` have not read."""
        gaps, shift = [], self.offset
        for jump, further in self._jumps:
            if jump < step:
                gaps.append((self.before(jump) + shift, self.before(jump) + further))
            shift = further
        return gaps
