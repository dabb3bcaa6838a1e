"""Which samples each step of a run reads."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from bessemer.recipe.train import BatchRamp

Range = tuple[int, int]  # of samples: the first, and the one after the last


@dataclass(frozen=True)
class Batches:
    """Sequences of each global batch. Steps are counted from 0.

    starts: samples before each step of the ramp, and before the first step after it; full: sequences of every later
    step; length: tokens in a sequence; omitted: samples that no step reads, disjoint and in order: a batch that would
    hold one starts behind the range, so that the few samples between it and the range are not read either; offset: of the
    place in the order, for a run whose batches were of another size before.
    """

    starts: tuple[int, ...]
    full: int
    length: int
    omitted: tuple[Range, ...] = ()
    offset: int = 0

    @classmethod
    def of(cls, tokens: int, micro_batch: int, ramp: BatchRamp | None, length: int) -> Batches:
        """The batches of a resolved recipe; tokens: of the global batch; length: tokens in a sequence.

        In a ramp the batch is the line from start_tokens to global_batch_tokens, over the ramp's steps or over the
        tokens consumed, taken down to whole micro-batches.
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
        """Steps before the first full batch."""
        return len(self.starts) - 1

    def sequences(self, step: int) -> int:
        return self.before(step + 1) - self.before(step)

    def tokens(self, step: int) -> int:
        return self.sequences(step) * self.length

    def before(self, step: int) -> int:
        """Number of samples that all steps before `step` have read."""
        if step < len(self.starts):
            return self.starts[step]
        return self.starts[-1] + (step - self.ramp_steps) * self.full

    def tokens_before(self, step: int) -> int:
        return self.before(step) * self.length

    def step_of(self, sample: int) -> int:
        """The step whose batch holds a sample, where none is omitted."""
        if sample < self.starts[-1]:
            return bisect_right(self.starts, sample) - 1
        return self.ramp_steps + (sample - self.starts[-1]) // self.full

    def steps_for(self, samples: int) -> int:
        """The fewest steps, at least one, that consume a number of samples."""
        return self.step_of(max(samples, 1) - 1) + 1

    def without(self, ranges: Iterable[Range]) -> Batches:
        """The same batches over an order without these samples."""
        merged: list[Range] = []
        for first, end in sorted([*self.omitted, *ranges]):
            if first == end:
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        return replace(self, omitted=tuple(merged))

    def going_on(self, step: int, samples: int) -> Batches:
        """The same batches for a run that is at place `samples` of the order after `step` steps."""
        return replace(self, offset=self.offset + samples - self.after(step))

    @cached_property
    def _jumps(self) -> tuple[tuple[int, int], ...]:
        """(step, shift): from `step` on, batches lie `shift` samples further on than `before` says."""
        jumps: list[tuple[int, int]] = []
        shift = self.offset
        for first, end in self.omitted:
            if end <= shift:  # before the place where the run went on
                continue
            step = self.step_of(max(first - shift, 0))
            shift = end - self.before(step)
            if jumps and jumps[-1][0] == step:
                jumps.pop()
            jumps.append((step, shift))
        return tuple(jumps)

    def first(self, step: int) -> int:
        """Number of the first sample of the batch of `step`, in the order of the run."""
        passed = bisect_right(self._jumps, step, key=lambda jump: jump[0])
        return self.before(step) + (self._jumps[passed - 1][1] if passed else self.offset)

    def after(self, step: int) -> int:
        """The place in the order after `step` steps: one more than their last sample; 0 at the start."""
        return self.first(step - 1) + self.sequences(step - 1) if step else 0

    def reader_of(self, sample: int) -> int | None:
        """The step that reads a sample of the order; None for one that is skipped."""
        shift = self.offset
        for step, further in self._jumps:
            if sample < self.before(step) + shift:
                break
            if sample < self.before(step) + further:
                return None
            shift = further
        return self.step_of(sample - shift)

    def gaps(self, step: int) -> list[Range]:
        """The samples that the steps before `step` have skipped."""
        gaps, shift = [], self.offset
        for jump, further in self._jumps:
            if jump < step:
                gaps.append((self.before(jump) + shift, self.before(jump) + further))
            shift = further
        return gaps
