"""Find out what was wrong with a step: replay it, in higher precision and from earlier weights, and compare its neighbours.

| kind | how it shows |
|---|---|
| transient | the step does not repeat: the machine was at fault, not the training |
| numerics | in higher precision the same step is healthy |
| data | the batch is an outlier among its neighbours, with earlier weights too or all but alone |
| state | neighbouring batches are as bad: the weights are at fault |

A step is compared with the guard's history of losses and gradient norms in the checkpoint, by the guard's own measure.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bessemer.checkpoint.format import load_manifest
from bessemer.errors import BessemerError, InputError
from bessemer.guard.detection import SPIKE_DEVIATIONS, SPIKE_MIN
from bessemer.guard.incidents import INCIDENT_KINDS, NONFINITE, RECIPE_CHANGED, SPIKE
from bessemer.guard.journal import Journal
from bessemer.recipe import Recipe, parse
from bessemer.run import RunFolder, checkpoint_name, read_steps
from bessemer.tokens.shards import TokenStore
from bessemer.train.replay import LossAndNorm, RankedSequence, Replayed, replay

SAME_RESULT = 0.01  # relative: two precisions that agree so well are not at fault
# Of the neighbours: where more are as bad, and earlier weights make nothing of it, the batch is no outlier.
ALONE_SHARE = 1 / 8
NOTHING_LEARNED, HAD_LEARNED = 0.97, 0.75  # of the loss of a uniform guess
MEANINGS = {
    "transient": "the step does not repeat: memory, a device or a link was wrong, not the training",
    "numerics": "in higher precision the same step is healthy: a number left the range, or the rounding, of its precision",
    "data": "the batch is an outlier among its neighbours",
    "state": "the neighbouring batches are as bad with these weights: the steps before it made them so",
    "unlike": "the replay is not what the run did: the recipe was changed, or earlier steps have other rates by now",
    "none": "nothing is wrong with this step",
}


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a step. kind: of MEANINGS; findings: a sentence for each test, in order; figures: of the step by test;
    replayed_from: step of the checkpoint; first_difference: the first replayed step that differs from what the run recorded;
    sequences: of its batch, the worst first; incident: that the run recorded about the step."""

    step: int
    kind: str
    findings: list[str]
    figures: dict[str, LossAndNorm]
    replayed_from: int
    first_difference: int | None
    sequences: list[RankedSequence]
    incident: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "meaning": MEANINGS[self.kind]}


def diagnose(recipe: Recipe, run: RunFolder, step: int) -> Diagnosis:
    """Replay step `step` (1-based) of a run in this process, and find out what was wrong with it.

    recipe: the run's, resolved. Of a step that was taken twice, because of a rollback, the time with the alarm is replayed. The
    run's folder is only read. Raises InputError for a step that the run has not taken, and BessemerError where tokens or journal
    are damaged.
    """
    TokenStore.open(run.tokens).verify()
    journal, incident = Journal.of_run(run), _incident(run, step)
    num_rollbacks = journal.num_rollbacks if incident is None else int(incident.pop("rollbacks_before"))
    recorded = _recorded(run, journal, num_rollbacks)
    if incident and "loss" in incident:
        recorded.setdefault(step, LossAndNorm(incident["loss"], incident["grad_norm"]))
    last = max([*recorded, *(row["step"] for row in _bad_steps(run))], default=0)
    if step < 1 or (incident is None and step > last):
        taken = f"it has taken steps 1 to {last}" if last else f"{run.metrics} has none"
        raise InputError(f"--step: {step} is not a step that this run has taken; {taken}")
    now, recipe = recipe, _recipe_of(recipe, run, step)
    replayed = replay(recipe, run, journal.after(num_rollbacks), step, incident is not None)
    tolerance = 0.0  # of one process; another layout sums in another order
    if recipe.parallel.world > 1:
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(replayed.dtype, 0.03)
    differing = (n for n, values in replayed.steps.items() if not values.equals(recorded.get(n, values), tolerance))
    first_difference = next((number for number in differing if number < step), None)
    tests = _Tests(replayed, recorded.get(step), incident, tolerance, first_difference is None)
    kind, findings = tests.verdict()
    if kind != "none" and (changes := _recipe_changes(run, replayed.start, incident, step, recipe is now)):
        kind, findings = "unlike", [findings[0], *changes]
    if kind == "state" and incident is not None and incident["what"] != SPIKE.name:  # it is not one bad batch
        findings.append(incident["advice"])
    steps = [replayed.current.step, *replayed.history]  # a batch alone may be bad where the model is not
    if min((one.loss for one in steps if one.loss is not None), default=0.0) > NOTHING_LEARNED * replayed.uniform_loss:
        guess = f"a uniform guess has {replayed.uniform_loss:.4f}"
        findings.append(f"{guess}: with these weights the model has learned next to nothing")
        had_learned = min(
            (one.loss for number, one in recorded.items() if number < step and one.loss), default=math.inf
        )
        if kind == "none" and (incident is not None or had_learned < HAD_LEARNED * replayed.uniform_loss):
            kind = "state"
    return Diagnosis(
        step, kind, findings, tests.figures(), replayed.start, first_difference, replayed.sequences, incident
    )


@dataclass(frozen=True)
class _Tests:
    """The replay against what the run recorded. is_exact: the replayed steps before it equal the recorded ones."""

    replayed: Replayed
    recorded: LossAndNorm | None
    incident: dict[str, Any] | None
    tolerance: float
    is_exact: bool

    def figures(self) -> dict[str, LossAndNorm]:
        """Of the step, by test."""
        replayed = self.replayed
        by_test = {
            "recorded": self.recorded, "again": replayed.current.step, "a second time": replayed.repeated,
            "in more precision": replayed.high_precision,
            "by earlier weights": None if replayed.earlier is None else replayed.earlier.step,
        }  # fmt: skip
        return {test: figures for test, figures in by_test.items() if figures is not None}

    def verdict(self) -> tuple[str, list[str]]:
        """The kind, and a sentence for each test up to the one that decides."""
        step, history = self.replayed.current.step, self.replayed.history
        deviations = step.deviations_above(history)
        was_bad = self.incident is not None or (self.recorded or step).deviations_above(history) >= SPIKE_DEVIATIONS
        repeats = self.recorded is None or step.equals(self.recorded, self.tolerance)
        if not step.equals(self.replayed.repeated, 0.0):
            return "transient", [
                f"replayed twice in this process, the step gave two results: {step}; {self.replayed.repeated}"
            ]
        if not repeats:
            findings = [f"the run recorded {self.recorded}; replayed, it is {step}"]
            if (was_bad or self.is_exact) and deviations < SPIKE_DEVIATIONS:
                return "transient", findings
        else:
            findings = [f"it repeats: {step}" + ("" if self.recorded else " (the run recorded no figures)")]
        if deviations < SPIKE_DEVIATIONS and (not was_bad or not repeats):
            finding = "there are too few steps before it to compare with"
            if len(history) >= SPIKE_MIN // 2:
                finding = f"that is {deviations:.1f} deviations above the steps before it"
            return "none" if repeats else "unlike", [*findings, finding]
        is_nonfinite = self.incident is not None and self.incident["what"] == NONFINITE.name
        if self.recorded is None and self.incident is not None and is_nonfinite and math.isfinite(deviations):
            return "transient", [*findings, f"the run stopped at it: {self.incident['cause']}"]
        return self._cause(deviations, findings)

    def _cause(self, deviations: float, findings: list[str]) -> tuple[str, list[str]]:
        """As `verdict`, of a bad step that repeats: numerics, state or data."""
        history, current, earlier = self.replayed.history, self.replayed.current, self.replayed.earlier
        limit = min(SPIKE_DEVIATIONS, deviations / 2) if math.isfinite(deviations) else SPIKE_DEVIATIONS
        if (precise := self.replayed.high_precision) is not None:
            findings.append(f"in higher precision: {precise}")
            if precise.deviations_above(history) < limit and not precise.equals(current.step, SAME_RESULT):
                return "numerics", [*findings, f"so {self.replayed.precision} is at fault"]
        num_bad = sum(neighbour.deviations_above(history) >= limit for neighbour in current.neighbours)
        findings.append(f"of {len(current.neighbours)} batches around it, {num_bad} are as bad with the same weights")
        if 2 * num_bad >= len(current.neighbours):
            return "state", findings
        if earlier is None:
            return "data", [*findings, "there are no earlier weights to test it with"]
        is_outlier = earlier.step.deviations_above(earlier.neighbours) >= SPIKE_DEVIATIONS
        how = "is an outlier too" if is_outlier else "is no outlier"
        findings.append(f"with earlier weights it {how}: {earlier.step}")
        is_alone = is_outlier or num_bad <= ALONE_SHARE * len(current.neighbours)
        return "data" if is_alone else "state", findings


def _bad_steps(run: RunFolder) -> list[dict[str, Any]]:
    """The incidents about losses or gradients of a step, each with the number of rollbacks before it."""
    kinds, before, found = {kind.name for kind in INCIDENT_KINDS.values() if kind.has_bad_step}, 0, []
    for row in read_steps(run.incidents):
        if row.get("what") in kinds:
            found.append({"onset": row["step"], **row, "rollbacks_before": before})
        before = max(before, int(row.get("rollback", 0)))
    return found


def _incident(run: RunFolder, step: int) -> dict[str, Any] | None:
    """The last incident at a step, or else one between whose onset and alarm the step is, about losses or gradients."""
    rows = _bad_steps(run)
    at = [row for row in rows if step in (row["step"], row["onset"])]
    at = at or [row for row in rows if row["onset"] < step < row["step"]]
    return at[-1] if at else None


def _recipe_of(recipe: Recipe, run: RunFolder, step: int) -> Recipe:
    """The recipe under which a step was trained: that of the checkpoint at which it was changed later, where that is kept."""
    rows = [row for row in read_steps(run.incidents) if row.get("what") == RECIPE_CHANGED.name]
    for row in rows:
        if row.get("is_accepted") and row["step"] >= step:
            with suppress(BessemerError):  # gone, or damaged
                text = load_manifest(run.checkpoints / checkpoint_name(row["step"])).facts.get("recipe_toml")
                return recipe if text is None else parse(text, "recipe of a checkpoint").changed(run=recipe.run)
            return recipe
    return recipe


def _recipe_changes(
    run: RunFolder, start: int, incident: dict[str, Any] | None, step: int, uses_newest: bool
) -> list[str]:
    """A sentence for each change of the recipe since a checkpoint or since the incident: the replay cannot repeat the steps.
    uses_newest: it is under the run's newest recipe, and not under that of before a change after the step."""
    rows = (row for row in read_steps(run.incidents) if row.get("what") == RECIPE_CHANGED.name)
    rows = (row for row in rows if uses_newest or row["step"] < step)
    return [
        f"the recipe was changed after step {row['step']} ({row['cause']}); the replay uses it as it is now"
        for row in rows
        if row["step"] > start or (incident is not None and row["time"] >= incident["time"])
    ]


def _recorded(run: RunFolder, journal: Journal, num_rollbacks: int) -> dict[int, LossAndNorm]:
    """Figures that the run recorded after its first `num_rollbacks` rollbacks, by step."""
    undone = [(rollback.number, rollback.to) for rollback in journal.rollbacks[num_rollbacks:]]
    rows = [(None, row) for row in read_steps(run.metrics)]
    rows += [(row.get("fork"), row) for row in read_steps(run.forks)]
    figures: dict[int, LossAndNorm] = {}
    for fork, row in rows:
        # The rows of a step went into the fork of the first rollback that undid it.
        undone_by = next((number for number, to in undone if row["step"] > to), None)
        if row.get("kind") == "train" and fork == undone_by and {"loss", "grad_norm"} <= row.keys():
            figures[row["step"]] = LossAndNorm(row["loss"], row["grad_norm"])
    return figures
