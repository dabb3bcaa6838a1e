"""Train a run longer than it was planned: which checkpoint it goes on from, and under which schedule.

constant, inverse_sqrt   from the newest checkpoint. The rate does not depend on the number of steps, so the run becomes what
                         it would be had it been planned longer from the start, bit for bit.
wsd                      the same, from the newest checkpoint at or before the start of the decay, which retention keeps (Hu
                         et al. 2024, MiniCPM: train on from the stable phase, decay anew). The old decay is redone.
cosine, linear           re-planned: their rate depends on the number of steps from the first one on, so what is trained
                         cannot become the longer run. The rate is warmed up from where it stands to the longer run's curve
                         and follows it (Gupta et al. 2023, Ibrahim et al. 2024: re-warm, then decay again).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from bessemer import changed_recipe
from bessemer.changed_recipe import GIVEN, HARMLESS, HORIZON, accepted_changes, given_keys
from bessemer.checkpoint.format import SavedCheckpoint, load_manifest
from bessemer.checkpoint.mirror import Mirror, refetch, restore_missing
from bessemer.checkpoint.protocol import Damage, verified
from bessemer.defaults.derived_keys import SAVING_SHARE, validation_share
from bessemer.errors import BessemerError, InputError
from bessemer.guard.goodput import was_saved
from bessemer.guard.incidents import RESTORED, record
from bessemer.guard.journal import Journal
from bessemer.recipe import Recipe, Train, differences, parse
from bessemer.report import data
from bessemer.run import RunFolder, checkpoint_name, published, read_json_again, read_steps
from bessemer.terminal import say, warn
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.shards import TokenStore
from bessemer.train.learning_rate import learning_rate_share
from bessemer.train.session import record_damage, require_journal
from bessemer.train.state import require_same_tokens

COMPARED_SAMPLES = 1 << 20
PACE_ROWS = 200  # steps of metrics.jsonl, from the end, whose median time is the run's pace


@dataclass(frozen=True)
class Extension:
    """How a run goes on under another number of steps. start: step of the checkpoint from which; newest: step of the newest one;
    planned, steps: number of steps before and now; rewarm: the schedule re-warms at step start + 1, from this share of its
    rate; None: the steps up to `start` equal those of the longer run; damages: checkpoints that do not verify."""

    start: int
    newest: int
    planned: int
    steps: int
    rewarm: float | None
    damages: tuple[Damage, ...] = ()

    def applied(self, recipe: Recipe) -> Recipe:
        """The resolved recipe with the re-warm-up, and without revisions in the steps that are repeated."""
        train, keys = recipe.train, dict[str, object](decay_at=None)
        if self.rewarm is not None:
            warmup = max(train.schedule.warmup_steps or 0, 1)
            keys |= {"rewarm_at": self.start + 1, "rewarm_steps": warmup, "rewarm_from": self.rewarm}
        revised = tuple(revision for revision in train.revised if revision.at < self.start)
        return recipe.changed(train={"schedule": keys, "revised": revised})

    def begin(self, run: RunFolder, kind: str, *, is_same: bool) -> None:
        """Report the extension, keep the earlier results in previous-N/, and remove the checkpoints after `start`. is_same: no
        other key is changed with the steps."""
        repeated = self.newest - self.start
        for damage in self.damages:
            record_damage(run, damage)
        say(
            f"  {self.planned:,} planned steps become {self.steps:,}, from the checkpoint of step {self.start:,}"
            + (f" on; the {repeated:,} steps after it are repeated without the decay" if repeated else " on")
        )
        if self.rewarm is None and is_same and not accepted_changes(run):
            say(
                f"  {kind}: the weights will be those of a run that was planned for as many steps from the start, with this "
                "run's warm-up, batch and peak learning rate"
            )
        elif self.rewarm is not None:
            say(
                f"  {kind}: the learning rate is warmed up to that of a run of {self.steps:,} steps, beginning at step "
                f"{self.start + 1:,} with {self.rewarm:.0%} of it; the weights will not be those of such a run"
            )
        if repeated or run.mixture.exists():
            say(f"  the earlier results are in {changed_recipe.copy_aside(run, self.newest)}")
            changed_recipe.drop_results(run, self.start)


def extension(stored: Recipe, requested: Recipe, run: RunFolder, done: list[int], accept: bool) -> Extension | None:
    """How a run of `stored`, which has the checkpoints `done`, goes on under the steps of `requested`; None: as planned.

    accept: changes that lose something are accepted. Raises InputError where the checkpoint before the decay is gone.
    """
    planned, steps = stored.train.steps, requested.train.steps
    assert planned is not None and steps is not None, "the recipes are resolved"
    if planned == steps:
        return None
    damages = list[Damage]()
    done = _up_to_newest_verified(stored, run, done, damages)
    start, rewarm = _exact_start(stored, run, done, planned, steps, damages), None
    if start is None:
        start, rewarm = done[-1], _rewarm_share(stored, requested, run, done, accept)
    return Extension(start, done[-1], planned, steps, rewarm, tuple(damages))


def _rewarm_share(stored: Recipe, requested: Recipe, run: RunFolder, done: list[int], accept: bool) -> float:
    """The learning rate after the newest checkpoint as a share of that of the longer schedule, from which it is warmed up.

    Raises InputError for wsd, unless accepted, and before a scheduled re-warm-up.
    """
    planned, steps, newest, schedule = stored.train.steps, requested.train.steps, done[-1], stored.train.schedule
    assert planned is not None and steps is not None, "the recipes are resolved"
    if schedule.kind == "wsd" and not accept:
        raise InputError(
            f"train.steps: {run.path} has no undamaged checkpoint left from before its decay, which began after step "
            f"{schedule.decay_start(planned):,} (there are those of steps {', '.join(map(str, done))}), so it cannot become "
            f"a run of {steps:,} steps. With --accept-changes it goes on from step {newest:,}, and the learning rate is warmed "
            "up again; with --restart it starts over"
        )
    if schedule.rewarm_at is not None and schedule.rewarm_at > newest + 1:
        raise InputError(
            f"train.schedule.rewarm_at: {schedule.rewarm_at} lies ahead of step {newest:,}, where a longer {schedule.kind} "
            "schedule has to be warmed up again; train past it first, or start over with --restart"
        )
    longer = requested.train.schedule.changed(rewarm_at=None, decay_at=None)
    rate = learning_rate_share(schedule, min(newest, planned - 1), planned)
    longer_rate = learning_rate_share(longer, newest, steps)
    return min(rate / longer_rate, 1.0) if longer_rate else 1.0


def require_own_checkpoints(stored: Recipe, run: RunFolder, done: list[int]) -> None:
    """Raise InputError where the newest checkpoint was saved by another run than that of the run's recipe: of another name, and
    trained by another recipe. A run that was renamed or copied has the recipe that it had."""
    facts = dict[str, Any]()
    with suppress(BessemerError):  # a damaged one is reported when it is read
        facts = load_manifest(run.checkpoints / checkpoint_name(done[-1])).facts
    theirs = facts.get("run", stored.run.name)
    if theirs != stored.run.name and not _is_trained_by(stored, facts.get("recipe_toml"), run):
        raise InputError(
            f"{run.checkpoints}: the checkpoint of step {done[-1]:,} was saved by run {theirs!r}, and {run.recipe} is of run "
            f"{stored.run.name!r}: put back what belongs together, or start over with --restart (what is here is set aside, not "
            "removed)"
        )


def _is_trained_by(stored: Recipe, trained: str | None, run: RunFolder) -> bool:
    """Whether a checkpoint's recipe is the run's, but for what may change and for changes that were accepted."""
    if trained is None:
        return False
    lines = differences(parse(trained, "recipe of the checkpoint"), stored)
    return bool(accepted_changes(run)) or all(line.startswith((*HARMLESS, *HORIZON)) for line in lines)


def restore_checkpoint(recipe: Recipe, run: RunFolder) -> None:
    """Restore the newest checkpoint from the mirror where the run has none, and record it."""
    if (restored := restore_missing(recipe, run)) is not None:
        step, place = restored
        cause = f"no checkpoint in {run.checkpoints}"
        record(run.incidents, RESTORED, step=step, cause=cause, action=f"restored that of step {step} from {place}")


def report_missing_lines(run: RunFolder, done: list[int]) -> None:
    """Warn of steps before the newest checkpoint that have no line in metrics.jsonl."""
    if lost := data.missing_lines(data.trained_steps(read_steps(run.metrics)), done[-1]):
        warn(f"{run.metrics}: {lost}; the training goes on, the report lacks them")


def require_continuable(run: RunFolder, store: TokenStore, newest: int | None) -> None:
    """Raise BessemerError, before anything is changed, where the training would refuse its tokens or its journal. newest: step
    of the newest checkpoint that verifies, None: not known yet."""
    store.verify()
    journal = Journal.of_run(run)
    if newest is not None:
        manifest = load_manifest(run.checkpoints / checkpoint_name(newest))
        checkpoint = SavedCheckpoint(run.checkpoints, newest, manifest.facts, manifest.contents)
        require_same_tokens(checkpoint, store)
        require_journal(journal, checkpoint)


def _up_to_newest_verified(stored: Recipe, run: RunFolder, done: list[int], damages: list[Damage]) -> list[int]:
    """The checkpoints of `done` up to the newest that verifies, here or in the mirror. Raises InputError where none does."""
    newest = _first_verified(stored, run, reversed(done), damages)
    if newest is None:
        raise InputError(
            f"{run.checkpoints}: all of the checkpoints (of steps {', '.join(map(str, done))}) are damaged, so there is nothing "
            "to go on from; put undamaged ones back, or start over with --restart"
        )
    return [step for step in done if step <= newest]


def _first_verified(stored: Recipe, run: RunFolder, steps: Iterable[int], damages: list[Damage]) -> int | None:
    def on_damage(damage: Damage) -> None:
        warn(damage)
        damages.append(damage)

    fetch = partial(refetch, stored, run)
    in_order = verified(run.checkpoints, steps, on_damage, "trying the next older checkpoint", refetch=fetch)
    return next((checkpoint.step for checkpoint in in_order), None)


def _exact_start(
    stored: Recipe, run: RunFolder, done: list[int], planned: int, steps: int, damages: list[Damage]
) -> int | None:
    """The newest checkpoint that verifies and belongs to a run of `steps` steps too. The last of `done` is known to verify."""
    schedule = stored.train.schedule
    if schedule.kind in ("constant", "inverse_sqrt"):
        return done[-1]
    if schedule.kind == "wsd":
        last = min(schedule.decay_start(planned), schedule.changed(decay_at=None).decay_start(steps))
    else:  # the rates agree up to the peak; a run that is past it would lose more than it would gain
        last = min(schedule.warmup_steps or 0, planned, steps)
        done = done[-1:]
    found = _first_verified(stored, run, (step for step in reversed(done) if step <= last), damages)
    return _fetched_before(stored, run, last) if found is None and schedule.kind == "wsd" else found


def _fetched_before(stored: Recipe, run: RunFolder, last: int) -> int | None:
    """The newest checkpoint up to step `last` that the mirror has, fetched: after a loss only the newest was."""
    if stored.checkpoint.mirror is None:
        return None
    there = Mirror(stored.checkpoint.mirror, stored.run.name, run).steps()
    return next((step for step in reversed(there) if step <= last and refetch(stored, run, step)), None)


def require_same_order(old: Mixture, new: Mixture, samples: int, run: RunFolder, accept: bool) -> None:
    """Refuse to go on where the first `samples` samples of the longer run differ from those that were read.

    The phases are compared; where they differ, up to COMPARED_SAMPLES samples themselves, whose order may still be the same.
    """
    begun = [
        (mixture.names, mixture.sequences, mixture.seed, [phase for phase in mixture.phases if phase.first < samples])
        for mixture in (old, new)
    ]
    if accept or begun[0] == begun[1]:
        return
    if samples <= COMPARED_SAMPLES and all(map(np.array_equal, old.draw(0, samples), new.draw(0, samples))):
        return
    raise InputError(
        f"{run.path}: the shares of its sources (max_epochs, tokens.schedule) are planned over the whole run, so with another "
        "number of steps other samples would have been read until now: some may repeat early. --accept-changes goes on "
        "nevertheless; --restart starts over"
    )


def report_kept_batch(fresh: Train, kept: Train) -> None:
    """Report where a fresh run of this length would have another batch size. fresh, kept: both resolved."""
    would, has = fresh.global_batch_tokens or 0, kept.global_batch_tokens or 1
    if not 0.5 < would / has < 2.0:
        say(
            f"  its batches of {has:,} tokens and the other values derived for the earlier length stay; a run of this length "
            f"would begin with {would:,}: for one, give it a name of its own (--set run.name=NAME), or --restart"
        )


def keep_derived(requested: Recipe, stored: Recipe, done: int, taken_out: Collection[str] = ()) -> Recipe:
    """The requested recipe with the run's values for the keys that it leaves open. done: step of the newest checkpoint;
    taken_out: keys that the run's recipe gave and this one does not, which are derived anew.

    For another number of steps, another device or a later version, other values would be derived.
    """
    train, old = requested.train, stored.train
    optimizer, schedule = train.optimizer, train.schedule
    changed: dict[str, object] = {"revised": old.revised, "validate_every": train.validate_every or old.validate_every}

    def kept_of(key: str) -> Any:
        return GIVEN[key](train) if GIVEN[key](train) is not None or key in taken_out else GIVEN[key](old)

    if requested.tokens.sequence_length == stored.tokens.sequence_length:
        changed["global_batch_tokens"] = kept_of("train.global_batch_tokens")
        changed["micro_batch"] = train.micro_batch or kept_micro_batch(requested, stored)
    if not train.has_horizon:
        changed |= {"steps": old.steps, "minutes": old.minutes}
    if optimizer.kind == old.optimizer.kind:
        changed["optimizer"] = {
            "learning_rate": kept_of("train.optimizer.learning_rate"),
            "betas": kept_of("train.optimizer.betas"),
        }
    kept = {"warmup_steps": kept_of("train.schedule.warmup_steps"), "decay_at": old.schedule.decay_at}
    is_over = schedule.rewarm_at is None or schedule.rewarm_at + schedule.rewarm_steps <= done + 1
    if old.schedule.rewarm_at is not None and old.schedule.rewarm_at <= done + 1 and is_over:  # perhaps by an extension
        kept |= old.schedule.model_dump(include={"rewarm_at", "rewarm_steps", "rewarm_from"})
    return requested.changed(
        train={**changed, "schedule": kept},
        checkpoint={"every": requested.checkpoint.every or stored.checkpoint.every},
        evaluate={"max_tokens": requested.evaluate.max_tokens or stored.evaluate.max_tokens},
    )


def kept_micro_batch(requested: Recipe, stored: Recipe) -> int | None:
    """The run's micro-batch, since another one rounds otherwise; None where the requested layout needs another."""
    micro, batch, layout = stored.train.micro_batch, stored.train.global_batch_tokens, requested.parallel
    assert micro is not None and batch is not None, "the recipe is resolved"
    each, rest = divmod(batch // stored.tokens.sequence_length, layout.data * micro)
    return micro if not rest and layout.fits_micro_batches(each) else None


def checkpoints_of(run: RunFolder) -> list[int]:
    """Steps of the run's checkpoints. Raises InputError when a trained run has none: it would start at step 0."""
    done = published(run.checkpoints)
    if not done and was_saved(run):
        raise InputError(
            f"{run.checkpoints}: this run was trained, but no checkpoint is there; put them back, or start over with --restart "
            "(what is left of the training is set aside, not removed)"
        )
    return done


def resolved_for(
    recipe: Recipe,
    stored: Recipe | None,
    run: RunFolder,
    done: list[int],
    held_out_tokens: int,
    has_horizon: bool,
    resolve: Callable[[Recipe, int | None], Recipe],
) -> tuple[Recipe, Recipe]:
    """A recipe with the values that its run keeps from its plan `stored` and checkpoints `done`, and the same resolved.

    has_horizon: whether the recipe itself sets the length of the run; a derived length never ends a run sooner. resolve: derives
    the other keys, given the steps that train.minutes amount to, or None.
    """
    if stored is None:
        return recipe, resolve(recipe, None)
    if recipe.train.precision == "auto":  # another moment, or device, would choose another
        recipe = recipe.changed(train={"precision": stored.train.precision})
    if done:
        taken_out = set((read_json_again(run.given) or {}).get("keys", ())) - set(given_keys(recipe))
        recipe = keep_derived(recipe, stored, done[-1], taken_out & GIVEN.keys())
    elif recipe.train.micro_batch is None:  # another device would choose another
        recipe = recipe.changed(train={"micro_batch": kept_micro_batch(recipe, stored)})
    resolved, planned = resolve(recipe, steps_of_minutes(recipe, stored, run, held_out_tokens)), stored.train
    if done and not has_horizon and (resolved.train.steps or 0) < (planned.steps or 0):
        recipe = recipe.changed(train=planned.model_dump(include={"steps", "minutes", "max_epochs"}))
        resolved = resolve(recipe, None)
    return recipe, resolved


def steps_of_minutes(requested: Recipe, stored: Recipe | None, run: RunFolder, held_out_tokens: int) -> int | None:
    """Steps that train.minutes amount to for a run that was planned before: those planned where the minutes are the same, else by
    the median step time of the training so far and its validations. None: they have to be measured."""
    minutes = requested.train.minutes
    if stored is None or minutes is None or requested.train.steps is not None:
        return None
    if stored.train.minutes == minutes:
        return stored.train.steps
    times = [
        row["step_seconds"] for row in read_steps(run.metrics) if row.get("kind") == "train" and "step_seconds" in row
    ]
    if not times:
        return None
    batches, share = stored.batches, 1.0 + validation_share(stored, held_out_tokens)
    steps = 60 * minutes * (1.0 - SAVING_SHARE) / (median(times[-PACE_ROWS:]) * share)
    return max(batches.step_of(int(steps * batches.full)), 1)
