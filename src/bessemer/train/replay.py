"""Replay steps of a run on one process: from a checkpoint, with earlier weights and in higher precision."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from bessemer.checkpoint import SavedCheckpoint
from bessemer.checkpoint.protocol import verified
from bessemer.errors import BessemerError
from bessemer.guard.detection import SPIKE_DEVIATIONS, SPIKE_MIN, centre
from bessemer.guard.heartbeat import Heartbeat
from bessemer.guard.incidents import NONFINITE
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState, Verdict
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.schema import Report
from bessemer.run import RunFolder, published
from bessemer.terminal import Advance, progress, warn
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train import device as devices
from bessemer.train.recompute import blocks_recomputed
from bessemer.train.session import Training, judge_step, set_up, state_after, update_weights
from bessemer.train.task import config_of
from bessemer.train.trainer import StepStats

NEIGHBOURS = 16  # batches around the step
EARLIER_STEPS = 8  # the earlier weights are at least so many steps older


@dataclass(frozen=True)
class LossAndNorm:
    """Loss (nats a target) and gradient norm of a step; None: not finite."""

    loss: float | None
    grad_norm: float | None

    @classmethod
    def of(cls, stats: StepStats) -> LossAndNorm:
        return cls(*(x if math.isfinite(x) else None for x in (stats.loss, stats.grad_norm)))

    @property
    def is_finite(self) -> bool:
        return self.loss is not None and self.grad_norm is not None

    def equals(self, other: LossAndNorm, tolerance: float) -> bool:
        """Whether both are equal within a relative tolerance."""
        pairs = (self.loss, other.loss), (self.grad_norm, other.grad_norm)
        return all(a == b if a is None or b is None else math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)

    def deviations_above(self, others: list[LossAndNorm]) -> float:
        """Robust standard deviations of loss or log gradient norm above those of other steps, the larger of the two; infinite
        where one is not finite or the gradient alone is zero; 0 for too few other steps."""
        if self.loss is None or self.grad_norm is None:
            return math.inf
        losses = tuple(other.loss for other in others if other.loss is not None)
        norms = tuple(math.log(other.grad_norm) for other in others if other.grad_norm)
        if len(losses) < SPIKE_MIN // 2 or len(norms) < SPIKE_MIN // 2:
            return 0.0
        if self.grad_norm == 0:
            return math.inf
        (middle, spread), (log_middle, log_spread) = centre(losses), centre(norms, is_log=True)
        return max((self.loss - middle) / spread, (math.log(self.grad_norm) - log_middle) / log_spread)

    def __str__(self) -> str:
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        return f"loss {loss}, gradient norm {'not finite' if self.grad_norm is None else f'{self.grad_norm:.4g}'}"


@dataclass(frozen=True)
class RankedSequence:
    """One sequence of the batch. sample: its number in the run's order; figures: of the sequence alone; documents: in it; text:
    its own."""

    sample: int
    figures: LossAndNorm
    documents: list[str]
    text: str


@dataclass(frozen=True)
class WithNeighbours:
    """Figures of the step, and of the batches around it, with the same weights."""

    step: LossAndNorm
    neighbours: list[LossAndNorm]


@dataclass(frozen=True)
class Replayed:
    """Results of a replay. start: step of the checkpoint; steps: figures of the steps from there on; current, repeated: of the
    step, and of a repetition in this process; high_precision: with the same weights in higher precision, None where the step is
    healthy; earlier: with earlier weights, None where there are none; history: of the steps before it."""

    start: int
    steps: dict[int, LossAndNorm]
    current: WithNeighbours
    repeated: LossAndNorm
    high_precision: LossAndNorm | None
    earlier: WithNeighbours | None
    history: list[LossAndNorm]
    sequences: list[RankedSequence]
    precision: str
    dtype: torch.dtype
    uniform_loss: float


def replay(recipe: Recipe, run: RunFolder, journal: Journal, step: int, has_incident: bool) -> Replayed:
    """Replay the run on the path of the journal up to the step, and run the tests that need the model."""
    single = _on_one_process(recipe)
    checkpoint, older = (_checkpoint_before(run, step - back, journal) for back in (1, 1 + EARLIER_STEPS))
    start = 0 if checkpoint is None else checkpoint.step
    with progress("replaying steps", step - 1 - start + 2 * NEIGHBOURS + 3, "step") as advance:
        earlier: WithNeighbours | None = None
        if older is not None and older.step != start:
            with _training_at(single, run, older, journal) as training:
                earlier = _Replay(training, advance).with_neighbours(step)
        with _training_at(single, run, checkpoint, journal) as training:
            replaying = _Replay(training, advance)
            if earlier is None and start < step - 1:
                replaying.until(start or max(step - 1 - EARLIER_STEPS, 0))
                earlier = replaying.with_neighbours(step)
            replaying.until(step - 1)
            current, repeated = replaying.with_neighbours(step), replaying.figures(step)
            sequences = replaying.ranked(step)
            named = training.trainer.model.state_dict().items()
            weights = {name: value.detach().cpu().clone() for name, value in named}
    window, device = replaying.state.guard.history, training.trainer.device
    norms = map(math.exp, window.log_norms)
    history = [LossAndNorm(*pair) for pair in zip(window.losses, norms, strict=True)]
    high_precision = None
    if has_incident or not current.step.deviations_above(history) < SPIKE_DEVIATIONS:
        higher = _on_one_process(recipe, "fp64" if device.precision.name in ("fp32", "fp64") else "fp32")
        with _training_at(higher, run, None, journal) as precise:
            precise.trainer.model.load_state_dict(weights)
            high_precision = LossAndNorm.of(precise.trainer.forward_backward(_batch_of(precise, step)))
    return Replayed(
        start, replaying.steps, current, repeated, high_precision, earlier, history, sequences,
        device.precision.name, device.dtype, training.reference.uniform_loss,
    )  # fmt: skip


class _Replay:
    """A training that replays steps of a run. steps: their figures."""

    def __init__(self, training: Training, advance: Advance) -> None:
        self.training, self.state, self.advance = training, training.start_state, advance
        self.steps: dict[int, LossAndNorm] = {}

    def until(self, step: int) -> None:
        """Go on to the state after `step` steps. Raises BessemerError where the run rolled back or stopped before that."""
        while self.state.step < step:
            number = self.state.step + 1
            batch = _batch_of(self.training, number)
            stats = self.training.trainer.forward_backward(batch, self.state.scale)
            judgement = judge_step(self.training, self.state, stats)
            self.advance(1)
            self.steps[number] = LossAndNorm.of(stats)
            alarm = judgement.alarm
            if judgement.verdict is Verdict.ROLL_BACK and alarm is not None and alarm.kind is NONFINITE:
                raise BessemerError(
                    f"step {number}: {alarm.cause}, and so it was in the steps before: the replay cannot reach step {step}; "
                    f"diagnose step {alarm.onset}"
                )
            if judgement.updates:
                update_weights(self.training, self.state.step, stats.grad_norm)
            self.state = state_after(self.training, self.state, batch, stats, judgement)

    def figures(self, step: int) -> LossAndNorm:
        """Of a step's batch with the current weights, which are not changed."""
        stats = self.training.trainer.forward_backward(_batch_of(self.training, step), self.state.scale)
        self.advance(1)
        return LossAndNorm.of(stats)

    def with_neighbours(self, step: int) -> WithNeighbours:
        """Of a step and its neighbours with the current weights: the batches before it, which the run has learned from, and at
        the beginning of the run those after it."""
        end = max(step, NEIGHBOURS + 2)
        around = [n for n in range(max(end - NEIGHBOURS, 1), end) if n != step and n <= self.training.horizon.steps]
        return WithNeighbours(self.figures(step), [self.figures(number) for number in around])

    def ranked(self, step: int) -> list[RankedSequence]:
        """The sequences of a step's batch, each alone: first those not finite, then by gradient norm times loss."""
        batch, sequences = _batch_of(self.training, step), []
        tokenizer = Tokenizer.load_any(self.training.store.folder / "tokenizer.json")
        for number, row in enumerate(self.training.loader.documents(batch.first, len(batch.inputs))):
            sequence, names = batch.row(number), row["documents"]
            assert isinstance(names, list)
            figures = LossAndNorm.of(self.training.trainer.forward_backward(sequence, self.state.scale))
            text = tokenizer.decode(sequence.inputs[0].tolist())
            sequences.append(RankedSequence(sequence.first, figures, names, text))

        def weight(sequence: RankedSequence) -> float:
            loss, norm = sequence.figures.loss, sequence.figures.grad_norm
            return math.inf if loss is None or norm is None else loss * norm

        return sorted(sequences, key=weight, reverse=True)


def _on_one_process(recipe: Recipe, precision: str | None = None) -> Recipe:
    """A resolved recipe for one process, in another precision where one is given."""
    train = recipe.train if precision is None else recipe.train.model_copy(update={"precision": precision})
    checkpoint = recipe.checkpoint.model_copy(update={"asynchronous": False, "mirror": None})
    return recipe.model_copy(
        update={
            "train": train,
            "checkpoint": checkpoint,
            "parallel": Parallel(),
            "report": Report(tensorboard=False),
        }
    )


def _checkpoint_before(run: RunFolder, step: int, journal: Journal) -> SavedCheckpoint | None:
    """The newest checkpoint of at most `step` steps that verifies and that no rollback of the journal undid; None: the start."""
    steps = [number for number in reversed(published(run.checkpoints)) if 0 < number <= step]
    for checkpoint in verified(run.checkpoints, steps, warn, "using an earlier checkpoint"):
        num_rollbacks = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
        if num_rollbacks <= journal.num_rollbacks and journal.keeps(checkpoint.step, num_rollbacks):
            return checkpoint
    return None


@contextmanager
def _training_at(
    recipe: Recipe, run: RunFolder, checkpoint: SavedCheckpoint | None, journal: Journal
) -> Iterator[Training]:
    """A training of a resolved recipe in this process, at a checkpoint of the run or at its start, without watchdog. It writes to
    a temporary folder."""
    device, store = devices.choose(recipe.train), TokenStore.open(run.tokens)
    devices.make_deterministic()
    config = config_of(recipe, store.vocabulary, len(store.labels))
    recomputed = blocks_recomputed(recipe.train, recipe.parallel, config, device)
    with tempfile.TemporaryDirectory(prefix="bessemer-") as place:
        heartbeat = Heartbeat(None, 0, Path(place) / "stacks.txt", 0)
        yield set_up(
            recipe, config, RunFolder(Path(place)), store, device, SINGLE_PROCESS, heartbeat, journal, checkpoint, recomputed,
            perf_counter(),
        )  # fmt: skip


def _batch_of(training: Training, step: int) -> Batch:
    """The batch of a step (1-based)."""
    sizes = training.horizon.sizes
    return training.loader.batch(sizes.first(step - 1), sizes.sequences(step - 1))
