"""The parts of a training on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bessemer.guard.detection import GuardReference
from bessemer.guard.goodput import WallClock
from bessemer.guard.journal import Journal
from bessemer.guard.pulse import Pulse
from bessemer.parallel.replicas import Difference
from bessemer.recipe import Guard
from bessemer.run import RunFolder
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch, Reader
from bessemer.tokens.shards import TokenStore
from bessemer.train.metrics import MetricsLog, Rates
from bessemer.train.pace import Pace
from bessemer.train.state import Position, Saver
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class TrainSummary:
    """The result of a training. resumed_at: step of the checkpoint, 0 for a fresh start; skipped: by the guard; rescaled: steps
    dropped because fp16's loss scale was too large; peak_memory: bytes; recomputed: blocks."""

    step: int
    resumed_at: int
    bits_per_byte: float | None
    accuracy: float | None
    skipped: int
    seconds: float
    weights: str
    rescaled: int
    peak_memory: int
    recomputed: int


@dataclass
class Replicas:
    """What comparisons of replicas have found. equal_at: the last step at which all were equal; suspected: by the step of a
    difference, one that does not say which rank is wrong."""

    equal_at: int
    suspected: dict[int, Difference] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """The parts of a training on this process, built by `session.set_up`.

    journal: the guard's decisions so far; reference: what losses and gradients are compared with; position: where it starts;
    has_checkpoint: whether it was read from one; scores_first: validate before the first step; planned_memory: bytes; started:
    by perf_counter; observe: wraps the iterator of batches, for the profiler; pulse: for the watchdog; replicas: compared so far.
    """

    run: RunFolder
    store: TokenStore
    step: TrainStep
    loader: Reader
    held_out: list[HeldOut]
    guard: Guard
    journal: Journal
    reference: GuardReference
    pace: Pace
    rates: Rates
    saver: Saver
    position: Position
    has_checkpoint: bool
    scores_first: bool
    tensorboard: bool
    planned_memory: int
    started: float
    observe: Callable[[Iterator[Batch]], Iterator[Batch]]
    pulse: Pulse
    clock: WallClock
    replicas: Replicas

    def batches(self) -> Iterator[Batch]:
        """The batches of the run from its position on, timed; after a rollback those from there on."""
        return self.observe(self.rates.timed(self.pace.batches(self.loader, self.position.step)))

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around a "validation" or the "saving" of a checkpoint."""
        with self.pulse.during(what), self.clock.counting(what):
            yield

    def log(self) -> MetricsLog:
        """The log, which only rank 0 writes."""
        return MetricsLog(
            self.run, self.position.step, self.tensorboard, self.journal.num_rollbacks, writes=self.step.mesh.is_main
        )
