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
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from bessemer.errors import InputError
from bessemer.guard.detection import MIN_LOG_SPREAD, MIN_SPREAD, SPIKE_DEVIATIONS, SPIKE_MIN, deviations
from bessemer.guard.journal import Journal
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json_lines
from bessemer.terminal import Advance, progress
from bessemer.train.rewind import batch_of, checkpoint_before, in_one_process, replayed, training_at
from bessemer.train.state import Position
from bessemer.train.step import Gradients, TrainStep
from bessemer.train.training import Training

NEIGHBOURS = 16  # batches around the step
EARLIER_STEPS = 8  # the earlier weights are at least so many steps older
KINDS = {
    "transient": "the step does not repeat: memory, a device or a link was wrong, not the training",
    "numerics": "with more precision the same step is fine: a number left the range, or the rounding, of its precision",
    "data": "the batch stands out among its neighbours",
    "state": "the neighbouring batches are as bad by these weights: the steps before it made them so",
    "none": "nothing is wrong with this step",
}


@dataclass(frozen=True)
class Figures:
    """Loss (nats a target) and gradient norm of a step; None: not finite."""

    loss: float | None
    grad_norm: float | None

    @classmethod
    def of(cls, found: Gradients) -> Figures:
        """Of a step taken again."""
        return cls(*(value if math.isfinite(value) else None for value in (found.loss, found.grad_norm)))

    @property
    def is_finite(self) -> bool:
        """Whether both are."""
        return self.loss is not None and self.grad_norm is not None

    def agrees(self, other: Figures, tolerance: float) -> bool:
        """Whether both are the same to a relative tolerance."""
        pairs = (self.loss, other.loss), (self.grad_norm, other.grad_norm)
        return all(a == b if a is None or b is None else math.isclose(a, b, rel_tol=tolerance) for a, b in pairs)

    def badness(self, beside: list[Figures]) -> float:
        """Robust standard deviations by which loss or log gradient norm is above those of other steps, the larger of the two;
        infinite where one is not finite, or where no gradient is left and the others have one; 0 beside too few."""
        if self.loss is None or self.grad_norm is None:
            return math.inf
        losses = tuple(one.loss for one in beside if one.loss is not None)
        norms = tuple(math.log(one.grad_norm) for one in beside if one.grad_norm)
        if len(losses) < SPIKE_MIN // 2 or len(norms) < SPIKE_MIN // 2:
            return 0.0
        if self.grad_norm == 0:
            return math.inf
        of_loss = deviations(self.loss, losses, MIN_SPREAD * abs(median(losses)))
        return max(of_loss, deviations(math.log(self.grad_norm), norms, MIN_LOG_SPREAD))

    def __str__(self) -> str:
        loss = "not finite" if self.loss is None else f"{self.loss:.4f}"
        return f"loss {loss}, gradient norm {'not finite' if self.grad_norm is None else f'{self.grad_norm:.4g}'}"


@dataclass(frozen=True)
class RankedSequence:
    """One sequence of the batch: the number of its sample, its figures alone, and the documents that it holds."""

    sample: int
    figures: Figures
    documents: list[str]


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a step. kind: of KINDS; findings: a sentence for each test, in order; figures: of the step by test;
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
        return {**asdict(self), "meaning": KINDS[self.kind]}


def diagnose(recipe: Recipe, run: RunFolder, step: int) -> Diagnosis:
    """Take step `step` (1-based) of a run again, in this process, and find out what was wrong with it.

    recipe: the run's, resolved. Of a step that the run took twice, the time with an alarm is looked at. The run's folder is only
    read. Raises InputError for a step that the run has not come to.
    """
    journal, incident = Journal.read(run.journal), _incident(run, step)
    branch = journal.after(_rollbacks_before(journal, incident))
    recorded = _recorded(run, journal, branch.num_rollbacks)
    if step < 1 or (incident is None and step > max(recorded, default=0)):
        reached = max(recorded, default=0)
        raise InputError(f"--step: {step} is not a step that this run has taken; it has taken steps 1 to {reached}")
    one = in_one_process(recipe)
    checkpoint = checkpoint_before(run, step - 1, branch)
    older = checkpoint_before(run, step - 1 - EARLIER_STEPS, branch)
    start = 0 if checkpoint is None else checkpoint.step
    with progress("taking steps again", step - 1 - start + 2 * NEIGHBOURS + 3, "step") as advance:
        earlier: _State | None = None
        if older is not None and older.step != start:
            with training_at(one, run, older, branch) as training:
                earlier = _Repeat(training, advance).at(training.position, step)
        with training_at(one, run, checkpoint, branch) as training:
            repeat, now = _Repeat(training, advance), training.position
            if earlier is None and start < step - 1:
                now = repeat.until(now, start or max(step - 1 - EARLIER_STEPS, 0))
                earlier = repeat.at(now, step)
            now = repeat.until(now, step - 1)
            current, again = repeat.at(now, step), repeat.figures(now, step)
            sequences = _ranked(training, now, step)
            weights = {name: value.detach().cpu().clone() for name, value in training.step.model.state_dict().items()}
            history, device = [Figures(*both) for both in _calm(now)], training.step.device
    wide = None
    if not current.step.badness(history) < SPIKE_DEVIATIONS or incident is not None:
        wider = in_one_process(recipe, "fp64" if device.precision in ("fp32", "fp64") else "fp32")
        with training_at(wider, run, None, branch) as training:
            _load(training.step, weights)
            wide = Figures.of(training.step.gradients(batch_of(training, step)))
    tolerance = 0.0  # of one process; another layout adds up in another order
    if recipe.parallel.world > 1:
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(device.dtype, 0.03)
    tested = _Tested(recorded.get(step), current, again, wide, earlier, history, tolerance, device.precision)
    kind, findings = tested.verdict(incident)
    figures = {
        "recorded": recorded.get(step),
        "again": current.step,
        "a second time": again,
        "in more precision": wide,
        "by earlier weights": None if earlier is None else earlier.step,
    }
    known = {what: found for what, found in figures.items() if found is not None}
    differ = (
        number for number, found in repeat.repeated.items() if not found.agrees(recorded.get(number, found), tolerance)
    )
    return Diagnosis(step, kind, findings, known, start, next(differ, None), sequences, incident)


@dataclass(frozen=True)
class _State:
    """Figures of the step and of the batches around it, by one state of the weights. steps: of those."""

    step: Figures
    neighbours: list[Figures]


class _Repeat:
    """Steps of a run, taken again."""

    def __init__(self, training: Training, advance: Advance) -> None:
        self.training, self.advance = training, advance
        self.repeated: dict[int, Figures] = {}

    def until(self, position: Position, step: int) -> Position:
        """Go on from where the training stands to the state after `step` steps."""

        def note(step: int, gradients: Gradients) -> None:
            self.advance(1)
            self.repeated[step] = Figures.of(gradients)

        return replayed(self.training, position, step, note)

    def at(self, position: Position, step: int) -> _State:
        """A step and its neighbours by the weights that the training stands at: the batches before it, which the run has
        learned from, and at its beginning those after it."""
        end = max(step, NEIGHBOURS + 2)
        around = [n for n in range(max(end - NEIGHBOURS, 1), end) if n != step and n <= self.training.pace.steps]
        return _State(self.figures(position, step), [self.figures(position, number) for number in around])

    def figures(self, position: Position, step: int) -> Figures:
        """Of a step's batch by the weights that the training stands at; they are not changed."""
        found = Figures.of(self.training.step.gradients(batch_of(self.training, step), position.scale))
        self.advance(1)
        return found


@dataclass(frozen=True)
class _Tested:
    """What the tests gave. history: figures of the steps before it; precision: name of the run's."""

    recorded: Figures | None
    current: _State
    again: Figures
    wide: Figures | None
    earlier: _State | None
    history: list[Figures]
    tolerance: float
    precision: str

    def verdict(self, incident: dict[str, Any] | None) -> tuple[str, list[str]]:
        """The kind, and a sentence for each test up to the one that decides."""
        step, found = self.current.step, list[str]()
        bad = step.badness(self.history)
        was_bad = incident is not None or (self.recorded or step).badness(self.history) >= SPIKE_DEVIATIONS
        repeats = self.recorded is None or step.agrees(self.recorded, self.tolerance)
        if not step.agrees(self.again, 0.0):
            return "transient", [f"taken twice in this process, the step gave two results: {step}; {self.again}"]
        if not repeats:
            found.append(f"the run recorded {self.recorded}; taken again, it is {step}")
            if was_bad and bad < SPIKE_DEVIATIONS:
                return "transient", found
        else:
            found.append(f"it repeats: {step}" + ("" if self.recorded else " (the run recorded no figures)"))
        if bad < SPIKE_DEVIATIONS and (not was_bad or not repeats):
            return "none", [*found, f"that is {max(bad, 0):.1f} deviations from the steps before it"]
        if self.recorded is None and incident is not None and incident["what"] == "nonfinite" and math.isfinite(bad):
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


def _ranked(training: Training, position: Position, step: int) -> list[RankedSequence]:
    """The sequences of a step's batch, each alone, the largest gradient norm times loss first; those not finite before all."""
    batch = batch_of(training, step)
    held = training.loader.documents(batch.first, len(batch.tokens))
    found = []
    for number, row in enumerate(held):
        figures = Figures.of(training.step.gradients(batch.row(number), position.scale))
        names = row["documents"]
        assert isinstance(names, list)
        found.append(RankedSequence(batch.first + number, figures, names))

    def weight(one: RankedSequence) -> float:
        loss, norm = one.figures.loss, one.figures.grad_norm
        return math.inf if loss is None or norm is None else loss * norm

    return sorted(found, key=weight, reverse=True)


def _load(step: TrainStep, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in step.model.state_dict().items():
            value.copy_(weights[name])


def _calm(position: Position) -> list[tuple[float, float]]:
    """Losses and gradient norms of the last steps without an alarm, from the guard's history."""
    history = position.guard.history
    return [(loss, math.exp(norm)) for loss, norm in zip(history.calm_losses, history.calm_norms, strict=True)]


def _incident(run: RunFolder, step: int) -> dict[str, Any] | None:
    """The last incident of a step, or of a trouble that began with it, that is about the numbers."""
    rows = [row for row in read_json_lines(run.incidents) if "onset" in row and row["what"] != "corruption"]
    at = [row for row in rows if step in (row["step"], row["onset"])]
    return at[-1] if at else None


def _rollbacks_before(journal: Journal, incident: dict[str, Any] | None) -> int:
    """How many rollbacks the run had had when it came to the incident; without one, by now."""
    if incident is None:
        return journal.num_rollbacks
    if "rollback" in incident:
        return int(incident["rollback"]) - 1
    return journal.num_rollbacks


def _recorded(run: RunFolder, journal: Journal, num_rollbacks: int) -> dict[int, Figures]:
    """What the run recorded on its path after so many rollbacks, by step."""
    found: dict[int, Figures] = {}
    undone = [(rollback.number, rollback.to) for rollback in journal.rollbacks[num_rollbacks:]]
    forks = [row for row in read_json_lines(run.forks) if row.get("kind") == "train"]
    for row in read_json_lines(run.metrics):
        if row.get("kind") == "train" and all(row["step"] <= to for _, to in undone):
            found[row["step"]] = Figures(row["loss"], row["grad_norm"])
    for row in forks:
        # The rows of a step went into the fork of the first rollback that undid it.
        first = next((number for number, to in undone if row["step"] > to), None)
        if row["fork"] == first:
            found[row["step"]] = Figures(row["loss"], row["grad_norm"])
    return found
