"""What was wrong with a step: taken again in place, in more precision and from earlier weights, with other batches beside it.

| kind | how it shows |
|---|---|
| transient | the step does not repeat: the machine, not the training |
| numerics | in more precision the same step is fine |
| data | the batch stands out among its neighbours, by earlier weights too |
| state | the neighbours of the batch are as bad: the weights are at fault |

Figures are judged as the guard judged them, by the history of the losses in the checkpoint.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bessemer.checkpoint import SavedCheckpoint
from bessemer.checkpoint.protocol import verified
from bessemer.errors import BessemerError, InputError
from bessemer.guard.detection import SPIKE_DEVIATIONS, SPIKE_MIN, centre
from bessemer.guard.incidents import KINDS, NONFINITE, RECIPE_CHANGED
from bessemer.guard.journal import Journal
from bessemer.guard.policy import GuardState, Verdict
from bessemer.guard.pulse import Pulse
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.recipe import Parallel, Recipe
from bessemer.run import RunFolder, published, read_json_lines
from bessemer.terminal import Advance, progress, warn
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train import device as devices
from bessemer.train.recompute import blocks_recomputed
from bessemer.train.rollback import apply_step, judge_step
from bessemer.train.session import Training, set_up
from bessemer.train.task import config_of
from bessemer.train.trainer import StepStats

NEIGHBOURS = 16  # batches around the step
NOTHING_LEARNED = 0.97  # of the loss of a uniform guess
EARLIER_STEPS = 8  # the earlier weights are at least so many steps older
MEANINGS = {
    "transient": "the step does not repeat: memory, a device or a link was wrong, not the training",
    "numerics": "with more precision the same step is fine: a number left the range, or the rounding, of its precision",
    "data": "the batch stands out among its neighbours",
    "state": "the neighbouring batches are as bad by these weights: the steps before it made them so",
    "unlike": "taken again it is healthy, but not as the run took it: after longer training earlier steps have other rates",
    "none": "nothing is wrong with this step",
}


@dataclass(frozen=True)
class Figures:
    """Loss (nats a target) and gradient norm of a step; None: not finite."""

    loss: float | None
    grad_norm: float | None

    @classmethod
    def of(cls, stats: StepStats) -> Figures:
        """Of a step taken again."""
        return cls(*(x if math.isfinite(x) else None for x in (stats.loss, stats.grad_norm)))

    @property
    def is_finite(self) -> bool:
        """Whether both are."""
        return self.loss is not None and self.grad_norm is not None

    def agrees(self, other: Figures, tolerance: float) -> bool:
        """Whether both are the same to a relative tolerance."""
        pairs = (self.loss, other.loss), (self.grad_norm, other.grad_norm)
        return all(a == b if a is None or b is None else math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)

    def badness(self, others: list[Figures]) -> float:
        """Robust standard deviations by which loss or log gradient norm is above those of other steps, the larger of the two;
        infinite where one is not finite, or where no gradient is left and the others have one; 0 beside too few."""
        if self.loss is None or self.grad_norm is None:
            return math.inf
        losses = tuple(one.loss for one in others if one.loss is not None)
        norms = tuple(math.log(one.grad_norm) for one in others if one.grad_norm)
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
    """One sequence of the batch: the number of its sample, its figures alone, the documents that it holds, and its own text."""

    sample: int
    figures: Figures
    documents: list[str]
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a step. kind: of MEANINGS; findings: a sentence for each test, in order; figures: of the step by test;
    replayed_from: step of the checkpoint; first_difference: the first step that did not repeat what the run had recorded;
    sequences: of its batch, the worst first; incident: that the run recorded about the step."""

    step: int
    kind: str
    findings: list[str]
    figures: dict[str, Figures]
    replayed_from: int
    first_difference: int | None
    sequences: list[RankedSequence]
    incident: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "meaning": MEANINGS[self.kind]}


def diagnose(recipe: Recipe, run: RunFolder, step: int) -> Diagnosis:
    """Take step `step` (1-based) of a run again, in this process, and find out what was wrong with it.

    recipe: the run's, resolved. Of a step that the run took twice, the time with an alarm is looked at. The run's folder is only
    read. Raises InputError for a step that the run has not come to, and BessemerError where tokens or journal are damaged.
    """
    journal, incident = _whole_journal(run), _incident(run, step)
    branch = journal.after(
        int(incident["rollback"]) - 1 if incident and "rollback" in incident else journal.num_rollbacks
    )
    recorded = _recorded(run, journal, branch.num_rollbacks)
    reached = max(recorded, default=0)
    if step < 1 or (incident is None and step > reached):
        raise InputError(f"--step: {step} is not a step that this run has taken; it has taken steps 1 to {reached}")
    one = _in_one_process(recipe)
    checkpoint, older = (_checkpoint_before(run, step - back, branch) for back in (1, 1 + EARLIER_STEPS))
    start = 0 if checkpoint is None else checkpoint.step
    with progress("taking steps again", step - 1 - start + 2 * NEIGHBOURS + 3, "step") as advance:
        earlier: _WithNeighbours | None = None
        if older is not None and older.step != start:
            with _training_at(one, run, older, branch) as training:
                earlier = _Replay(training, advance).with_neighbours(step)
        with _training_at(one, run, checkpoint, branch) as training:
            replay = _Replay(training, advance)
            if earlier is None and start < step - 1:
                replay.until(start or max(step - 1 - EARLIER_STEPS, 0))
                earlier = replay.with_neighbours(step)
            replay.until(step - 1)
            current, again, sequences = replay.with_neighbours(step), replay.figures(step), replay.ranked(step)
            weights = {
                name: value.detach().cpu().clone() for name, value in training.trainer.model.state_dict().items()
            }
            calm, device = replay.state.guard.history, training.trainer.device
    history = [Figures(loss, math.exp(norm)) for loss, norm in zip(calm.spike_losses, calm.spike_norms, strict=True)]
    wide = None
    if not current.step.badness(history) < SPIKE_DEVIATIONS or incident is not None:
        wider = _in_one_process(recipe, "fp64" if device.precision in ("fp32", "fp64") else "fp32")
        with _training_at(wider, run, None, branch) as training:
            training.trainer.model.load_state_dict(weights)
            wide = Figures.of(training.trainer.forward_backward(_batch_of(training, step)))
    tolerance = 0.0  # of one process; another layout adds up in another order
    if recipe.parallel.world > 1:
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(device.dtype, 0.03)
    tested = _Tested(recorded.get(step), current, again, wide, earlier, history, tolerance, device.precision)
    repeated = replay.repeated.items()
    differ = (number for number, figures in repeated if not figures.agrees(recorded.get(number, figures), tolerance))
    first_difference = next((number for number in differ if number < step), None)
    kind, findings = tested.verdict(incident, first_difference is None)
    if kind == "unlike":
        findings += _changes(run, start, step)
    uniform = training.reference.uniform_loss
    if current.step.loss is not None and current.step.loss > NOTHING_LEARNED * uniform:
        findings.append(f"a uniform guess has {uniform:.4f}: by these weights the model has learned next to nothing")
        if kind == "none" and incident is not None:
            kind = "state"
    return Diagnosis(step, kind, findings, tested.figures(), start, first_difference, sequences, incident)


def _whole_journal(run: RunFolder) -> Journal:
    """The journal. Raises BessemerError where lines of it are missing, or the token shards are not those of the run."""
    TokenStore.open(run.tokens).verify()
    journal = Journal.read(run.journal)
    rows = (row for row in read_json_lines(run.metrics) if row.get("kind") == "rolled_back")
    if (taken := max((row["number"] for row in rows), default=0)) > journal.num_rollbacks:
        raise BessemerError(
            f"{run.journal}: the run rolled back {taken} times, the journal knows {journal.num_rollbacks}: lines are missing, "
            "and without them the steps cannot be taken again. Put the file back from a backup"
        )
    return journal


@dataclass(frozen=True)
class _WithNeighbours:
    """Figures of the step and of the batches around it, by one state of the weights."""

    step: Figures
    neighbours: list[Figures]


class _Replay:
    """Steps of a run, taken again. repeated: their figures, by step."""

    def __init__(self, training: Training, advance: Advance) -> None:
        self.training, self.state, self.advance = training, training.start_state, advance
        self.repeated: dict[int, Figures] = {}

    def until(self, step: int) -> None:
        """Go on to the state after `step` steps. Raises BessemerError where the run rolled back or stopped before that."""
        while self.state.step < step:
            number = self.state.step + 1
            batch = _batch_of(self.training, number)
            stats = self.training.trainer.forward_backward(batch, self.state.scale)
            judgement = judge_step(self.training, self.state, stats)
            self.advance(1)
            self.repeated[number] = Figures.of(stats)
            alarm = judgement.alarm
            if judgement.verdict is Verdict.ROLL_BACK and alarm is not None and alarm.kind is NONFINITE:
                raise BessemerError(
                    f"step {number}: {alarm.cause}, and so did the steps before it: the steps cannot be taken again as far as "
                    f"step {step}; look at step {alarm.onset}"
                )
            self.state, _ = apply_step(self.training, self.state, batch, stats, judgement)

    def figures(self, step: int) -> Figures:
        """Of a step's batch by the weights that the training stands at; they are not changed."""
        stats = self.training.trainer.forward_backward(_batch_of(self.training, step), self.state.scale)
        self.advance(1)
        return Figures.of(stats)

    def with_neighbours(self, step: int) -> _WithNeighbours:
        """A step and its neighbours by these weights: the batches before it, which the run has learned from, and at its
        beginning those after it."""
        end = max(step, NEIGHBOURS + 2)
        around = [n for n in range(max(end - NEIGHBOURS, 1), end) if n != step and n <= self.training.pace.steps]
        return _WithNeighbours(self.figures(step), [self.figures(number) for number in around])

    def ranked(self, step: int) -> list[RankedSequence]:
        """The sequences of a step's batch, each alone: first those not finite, then by gradient norm times loss."""
        batch, found = _batch_of(self.training, step), []
        tokenizer = Tokenizer.load_any(self.training.store.folder / "tokenizer.json")
        for number, row in enumerate(self.training.loader.documents(batch.first, len(batch.inputs))):
            figures = Figures.of(self.training.trainer.forward_backward(batch.row(number), self.state.scale))
            names = row["documents"]
            assert isinstance(names, list)
            text = tokenizer.decode(batch.row(number).inputs[0].tolist())
            found.append(RankedSequence(batch.first + number, figures, names, text))

        def weight(one: RankedSequence) -> float:
            loss, norm = one.figures.loss, one.figures.grad_norm
            return math.inf if loss is None or norm is None else loss * norm

        return sorted(found, key=weight, reverse=True)


@dataclass(frozen=True)
class _Tested:
    """What the tests gave. history: figures of the steps before it; precision: name of the run's."""

    recorded: Figures | None
    current: _WithNeighbours
    again: Figures
    wide: Figures | None
    earlier: _WithNeighbours | None
    history: list[Figures]
    tolerance: float
    precision: str

    def figures(self) -> dict[str, Figures]:
        """Of the step, by test."""
        earlier = None if self.earlier is None else self.earlier.step
        by_test = {
            "recorded": self.recorded, "again": self.current.step, "a second time": self.again,
            "in more precision": self.wide, "by earlier weights": earlier,
        }  # fmt: skip
        return {test: figures for test, figures in by_test.items() if figures is not None}

    def verdict(self, incident: dict[str, Any] | None, came_alike: bool) -> tuple[str, list[str]]:
        """The kind, and a sentence for each test up to the one that decides. came_alike: the steps before it repeated."""
        step, found = self.current.step, list[str]()
        bad = step.badness(self.history)
        was_bad = incident is not None or (self.recorded or step).badness(self.history) >= SPIKE_DEVIATIONS
        repeats = self.recorded is None or step.agrees(self.recorded, self.tolerance)
        if not step.agrees(self.again, 0.0):
            return "transient", [f"taken twice in this process, the step gave two results: {step}; {self.again}"]
        if not repeats:
            found.append(f"the run recorded {self.recorded}; taken again, it is {step}")
            if (was_bad or came_alike) and bad < SPIKE_DEVIATIONS:
                return "transient", found
        else:
            found.append(f"it repeats: {step}" + ("" if self.recorded else " (the run recorded no figures)"))
        if bad < SPIKE_DEVIATIONS and (not was_bad or not repeats):
            return "none" if repeats else "unlike", [
                *found,
                f"that is {bad:.1f} deviations above the steps before it"
                if len(self.history) >= SPIKE_MIN // 2
                else "there are too few steps before it to compare with",
            ]
        if self.recorded is None and incident is not None and incident["what"] == NONFINITE.name and math.isfinite(bad):
            return "transient", [*found, f"the run stopped at it: {incident['cause']}"]
        limit = min(SPIKE_DEVIATIONS, bad / 2) if math.isfinite(bad) else SPIKE_DEVIATIONS
        if self.wide is not None:
            of_wide = self.wide.badness(self.history)
            found.append(f"in more precision: {self.wide}")
            if of_wide < limit:
                return "numerics", [*found, f"so {self.precision} is at fault"]
        share = sum(one.badness(self.history) >= limit for one in self.current.neighbours)
        found.append(f"of {len(self.current.neighbours)} batches around it, {share} are as bad by the same weights")
        if 2 * share >= len(self.current.neighbours):
            return "state", found
        if self.earlier is None:
            return "data", [*found, "there are no earlier weights to try it by"]
        stands = self.earlier.step.badness(self.earlier.neighbours) >= SPIKE_DEVIATIONS
        how = "stands out among them too" if stands else "does not stand out"
        found.append(f"by earlier weights it {how}: {self.earlier.step}")
        return "data", found


def _in_one_process(recipe: Recipe, precision: str | None = None) -> Recipe:
    """A resolved recipe for one process, in another precision where one is given."""
    train = recipe.train if precision is None else recipe.train.model_copy(update={"precision": precision})
    checkpoint = recipe.checkpoint.model_copy(update={"asynchronous": False})
    return recipe.model_copy(update={"train": train, "checkpoint": checkpoint, "parallel": Parallel()})


def _checkpoint_before(run: RunFolder, step: int, journal: Journal) -> SavedCheckpoint | None:
    """The newest whole checkpoint of at most `step` steps on the path that the journal's rollbacks give; None: the start."""
    steps = [number for number in reversed(published(run.checkpoints)) if 0 < number <= step]
    for checkpoint in verified(run.checkpoints, steps, warn, "an earlier checkpoint is taken"):
        before = GuardState.from_dict(checkpoint.facts["guard"]).num_rollbacks
        if before <= journal.num_rollbacks and journal.keeps(checkpoint.step, before):
            return checkpoint
    return None


@contextmanager
def _training_at(
    recipe: Recipe, run: RunFolder, checkpoint: SavedCheckpoint | None, journal: Journal
) -> Iterator[Training]:
    """A training of a resolved recipe in this process, at a checkpoint of the run or at its start. What it writes goes into a
    scratch folder; its logs and its watchdog are off."""
    device, store = devices.choose(recipe.train), TokenStore.open(run.tokens)
    devices.make_deterministic()
    config = config_of(recipe, store.vocabulary, len(store.labels))
    recomputed = blocks_recomputed(recipe.train, recipe.parallel, config, device)
    with tempfile.TemporaryDirectory(prefix="bessemer-") as place:
        pulse = Pulse(None, 0, Path(place) / "stacks.txt", 0)
        yield set_up(
            recipe, config, RunFolder(Path(place)), store, device, SINGLE_PROCESS, pulse, journal, checkpoint, recomputed,
            perf_counter(),
        )  # fmt: skip


def _batch_of(training: Training, step: int) -> Batch:
    """The batch of a step (1-based)."""
    sizes = training.pace.sizes
    return training.loader.batch(sizes.first(step - 1), sizes.sequences(step - 1))


def _incident(run: RunFolder, step: int) -> dict[str, Any] | None:
    """The last incident of a step, or else of a trouble in the midst of which it lies, that is about the numbers."""
    about_steps = {kind.name for kind in KINDS.values() if kind.has_bad_step}
    rows = [row for row in read_json_lines(run.incidents) if row["what"] in about_steps]
    at = [row for row in rows if step in (row["step"], row["onset"])]
    at = at or [row for row in rows if row["onset"] < step < row["step"]]
    return at[-1] if at else None


def _changes(run: RunFolder, start: int, step: int) -> list[str]:
    """Where the recipe of the run was changed between a checkpoint and a step, a sentence for each."""
    rows = (row for row in read_json_lines(run.incidents) if row["what"] == RECIPE_CHANGED.name)
    return [
        f"the recipe was changed after step {row['step']} ({row['cause']}); the steps before it were taken again by today's"
        for row in rows
        if start < row["step"] < step
    ]


def _recorded(run: RunFolder, journal: Journal, num_rollbacks: int) -> dict[int, Figures]:
    """What the run recorded on its path after so many rollbacks, by step."""
    undone = [(rollback.number, rollback.to) for rollback in journal.rollbacks[num_rollbacks:]]
    rows = [(None, row) for row in read_json_lines(run.metrics)]
    rows += [(row["fork"], row) for row in read_json_lines(run.forks)]
    found: dict[int, Figures] = {}
    for fork, row in rows:
        # The rows of a step went into the fork of the first rollback that undid it.
        undone_by = next((number for number, to in undone if row["step"] > to), None)
        if row.get("kind") == "train" and fork == undone_by:
            found[row["step"]] = Figures(row["loss"], row["grad_norm"])
    return found
