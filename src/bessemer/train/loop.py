"""The training loop. What a feature needs, it brings by composition; the loop itself reads like the textbook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from bessemer.checkpoint import latest
from bessemer.errors import BessemerError, Stopped
from bessemer.guard.incidents import record
from bessemer.guard.judge import GuardState, Verdict, cause, judge
from bessemer.layout.flops import recomputed_flops_per_token, step_flops_per_token
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import build_model, meta_model
from bessemer.parallel.team import ALONE, Team
from bessemer.recipe import Batches, Recipe
from bessemer.run import RunFolder, write_json
from bessemer.terminal import progress, say, warn
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch, Reader
from bessemer.tokens.shards import TokenStore
from bessemer.train.audit import Given, mixture_audit
from bessemer.train.device import Device, memory_in_use, release_unused
from bessemer.train.metrics import Log, MetricsLog, NoLog
from bessemer.train.pace import Pace
from bessemer.train.rates import Rates
from bessemer.train.saving import Saver
from bessemer.train.split import initial_weights
from bessemer.train.start import is_continued, no_dropout_line, start_from, starting_model
from bessemer.train.state import Position, restore, weights_digest
from bessemer.train.step import Gradients, TrainStep
from bessemer.train.stop import StopSignal
from bessemer.train.task import config_of
from bessemer.train.validation import Validation, validate
from bessemer.train.watch import Watch


@dataclass(frozen=True)
class TrainSummary:
    """How a training ended. resumed_at: the step it went on from, 0 for a fresh start; rescaled: steps given
    up because fp16's loss scale was too large for them; peak_memory: bytes; recomputed: blocks."""

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


def train(
    recipe: Recipe,
    run: RunFolder,
    store: TokenStore,
    device: Device,
    peak: float,
    planned_memory: int = 0,
    observed: Callable[[Iterator[Batch]], Iterator[Batch]] = lambda batches: batches,
    team: Team = ALONE,
    recomputed: int | None = None,
) -> TrainSummary:
    """Train a resolved recipe to its last step, from the newest checkpoint of the run when there is one.

    peak: FLOP/s that MFU is measured against, of all processes together; planned_memory: bytes the plan said it would take;
    observed: passes batches on and looks at what happens between them; team: the processes that train together, each of
    which calls this; recomputed: blocks, as planned (None: counted anew). Raises Stopped after a stop signal to any of them,
    with everything saved.
    """
    started = perf_counter()
    sizes = Batches.of(recipe)
    config = config_of(recipe, store.vocabulary, len(store.labels))
    checkpoint = latest(run.checkpoints, on_damage=warn, team=team)
    step = _step(recipe, config, device, store, team, checkpoint is not None, recomputed)
    loader = step.task.loader(recipe, store, team.data_rank, team.layout.data)
    if checkpoint is None and recipe.train.start is not None:
        say(f"  {start_from(step, Path(recipe.train.start), store)}")
    if checkpoint is None and (line := no_dropout_line(recipe)) is not None:
        say(f"  {line}")
    position = restore(step, checkpoint, store) if checkpoint else Position(given=Given.nothing(loader.mixture))
    if len(position.given.tokens) != len(loader.mixture.aims):  # an older checkpoint, or --accept-changes
        position = replace(position, given=Given.by_order(loader.mixture, position.samples, sizes.length).of_one(team))
    resumed_at, scored = position.step, None
    if resumed_at:
        say(f"  going on from step {resumed_at} of {recipe.train.steps}")
    validation = step.task.held_out(recipe, store, recipe.evaluate.max_tokens)
    model_flops = step_flops_per_token(recipe, config)
    again = recomputed_flops_per_token(recipe, config, step.recomputed)
    rates = Rates(model_flops, model_flops + again, peak, device, team, run.plan)
    scored_tokens = sum(part.inputs.size for part in validation)
    pace = Pace(recipe, run, team, resumed_at, store.train_tokens, scored_tokens, started)
    batches = pace.batches(loader, position.samples)
    with (
        Saver(recipe, run, step, store) as saver,
        StopSignal(team) as stop,
        MetricsLog(run, resumed_at, recipe.report.tensorboard) if team.is_first else NoLog() as log,
        progress("training", sizes.tokens_before(pace.steps), "tok", sizes.tokens_before(resumed_at)) as advance,
    ):
        if resumed_at:
            log.write("resumed", resumed_at)
        watch = Watch(step, log, recipe.train.watch_every)
        if position.step == 0 and is_continued(recipe):
            with pace.timing("validation"):  # what the training has to improve on
                scored = _validate(step, validation, log, position, sizes)
        for batch in observed(rates.timed(batches)):
            sequences = sizes.sequences(position.step)
            gradients = step.gradients(batch, position.scale)
            verdict, guard = judge(
                recipe.guard, position.guard, gradients.loss, gradients.grad_norm, gradients.overflow, team
            )
            rate = 0.0
            if verdict is Verdict.APPLY:
                with watch(position.step + 1, batch):
                    rate = step.update(position.step, gradients.grad_norm)
            else:
                _answer(run, loader, batch, sequences, position.step + 1, gradients, verdict, guard, team)
            given = position.given.plus(batch, loader)
            position = Position(position.step + 1, position.samples + sequences, guard, gradients.scale, given)
            if pace.revise(position.step):
                step.settings = pace.recipe.train
                saver.follow(pace.recipe)
                log.write("steps", position.step, steps=pace.steps)
            last = position.step == pace.steps
            if position.step % recipe.train.log_every == 0 or last:
                log.write("train", position.step, **_numbers(store, gradients, rate, position, rates, sizes, device))
            if position.step % (recipe.train.validate_every or pace.steps) == 0 or last:
                with pace.timing("validation"):
                    scored = _validate(step, validation, log, position, sizes)
            asked = stop.asked()
            if saver.is_due(position.step) and not last and asked is None:
                with pace.timing("saving"):
                    saver.save(position)
            note = f"loss {gradients.loss:.3f}" + (f"  {scored.short}" if scored else "")
            advance(sequences * sizes.length, note, sizes.tokens_before(pace.steps))
            if asked and not last:
                saver.save_now(position)
                raise Stopped(
                    f"stopped by {asked} after step {position.step} of {pace.steps}; everything is saved in {run.path}: "
                    "the same command goes on from there"
                )
        if position.step > resumed_at or checkpoint is None:
            with pace.timing("saving"):
                saver.save_now(position)
            log.write("time", position.step, resumed_at=resumed_at, **pace.taken())
        ranks = team.gather(memory_in_use(device))
        peak_memory = max(ranks)
        by_rank = {str(rank): taken for rank, taken in enumerate(ranks)}
        if position.step > resumed_at:
            log.write(
                "memory",
                position.step,
                planned=planned_memory,
                measured=peak_memory,
                recomputed=step.recomputed,
                by_rank=by_rank,
            )
    given = position.given.of_all(team)
    if team.is_first:
        write_json(run.path / "mixture.json", mixture_audit(loader.mixture, given, position.samples))
    seconds = perf_counter() - started
    bits, accuracy = (scored.bits_per_byte, scored.accuracy) if scored else (None, None)
    return TrainSummary(
        position.step, resumed_at, bits, accuracy, position.guard.skipped, seconds, weights_digest(step),
        position.scale.skipped, peak_memory, step.recomputed,
    )  # fmt: skip


def _step(
    recipe: Recipe, config: ModelConfig, device: Device, store: TokenStore, team: Team, resumed: bool, recomputed: int | None
) -> TrainStep:  # fmt: skip
    """The step with the weights of a fresh start, or with any that a checkpoint will take the place of."""
    if team.is_alone:
        model = build_model(config, recipe.run.seed) if resumed else starting_model(recipe, config)
        weights = None
    elif resumed:
        model, weights = meta_model(config), lambda name, shape: torch.zeros(shape)
    elif recipe.model.from_ is not None:
        model, weights = starting_model(recipe, config, team.is_first), None
    else:
        model, weights = meta_model(config), initial_weights(config, recipe.run.seed)
    return TrainStep(recipe, model, device, store.end_of_text, len(store.sources), team, weights, recomputed)


def _numbers(
    store: TokenStore,
    gradients: Gradients,
    rate: float,
    position: Position,
    rates: Rates,
    sizes: Batches,
    device: Device,
) -> dict[str, object]:
    by_source = {
        name: nats / count
        for name, nats, count in zip(store.sources, gradients.nats, gradients.targets, strict=True)
        if count
    }
    return {
        "tokens": sizes.tokens_before(position.step),
        "loss": gradients.loss,
        "loss_by_source": by_source,
        **({} if gradients.accuracy is None else {"accuracy": gradients.accuracy}),
        "grad_norm": gradients.grad_norm,
        "learning_rate": rate,
        **rates.now(sizes.tokens(position.step - 1)),
        "memory_bytes": memory_in_use(device),
        **rates.communicated(device.compile),
        **(
            {"loss_scale": gradients.scale.value, "scale_skips": gradients.scale.skipped}
            if device.arithmetic.scaled
            else {}
        ),
    }


def _validate(step: TrainStep, parts: list[HeldOut], log: Log, position: Position, sizes: Batches) -> Validation:
    started = perf_counter()
    release_unused(step.device)  # the heap's holes: a validation's tensors do not fit where those of a step were
    with step.averaged():
        found = validate(step, parts)
    release_unused(step.device)
    log.write(
        "validation",
        position.step,
        tokens=sizes.tokens_before(position.step),
        loss=found.loss,
        loss_by_source=found.loss_by_source,
        **found.scores(),
        seconds=perf_counter() - started,
    )
    return found


def _nothing(*given: object, **named: object) -> None:
    """What a process does that leaves the writing to another."""


def _answer(
    run: RunFolder, loader: Reader, batch: Batch, sequences: int, step: int, gradients: Gradients, verdict: Verdict,
    guard: GuardState, team: Team,
) -> None:  # fmt: skip
    """Record a step that is not applied; stop the run when the guard says so."""
    if verdict is Verdict.RESCALE:  # expected now and then in fp16, and counted in the metrics
        return
    reason = cause(gradients.loss, gradients.grad_norm)
    samples = loader.documents(batch.first, sequences)
    write = record if team.is_first else _nothing
    write(
        run.incidents, step=step, what="nonfinite_step", cause=reason,
        action="update skipped" if verdict is Verdict.SKIP else "run stopped", documents=samples,
    )  # fmt: skip
    if verdict is Verdict.STOP:
        names = list(dict.fromkeys(name for sample in samples for name in sample["documents"]))  # type: ignore[attr-defined]
        raise BessemerError(
            f"step {step}: {reason}; {guard.skips_in_a_row} such steps in a row, so the run stops. The last batch held "
            f"{len(names)} documents ({', '.join(names[:3])}, ...), all in {run.incidents}; lower "
            "train.optimizer.learning_rate, or look at them"
        )
    warn(f"step {step}: {reason}; the update is skipped (see {run.incidents.name})")
