"""One run, end to end: each stage in its order, skipped when what it was made from has not changed.

A stage is a function of the recipe and the run folder, through which it passes its results to the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape

from bessemer.common import interrupt
from bessemer.common.console import amount, counted, duration, say, size, warn, working
from bessemer.common.errors import BessemerError, DamagedFile, InputError, Stopped, TooFewIds, lack_of_memory
from bessemer.common.hashing import digest
from bessemer.recipe import Recipe, dump
from bessemer.run.directory import NEWEST, RunDirectory, Weights, checkpoint_name, published
from bessemer.run.files import (
    read_json,
    read_json_again,
    read_steps,
    stage_facts,
    verify_stage,
    write_atomic,
    write_json,
)
from bessemer.tokens.outlook import num_tokens, outlook
from bessemer.tokens.shards import TokenStore
from bessemer.workflow import derive, estimate, preflight, reuse

if TYPE_CHECKING:
    from bessemer.train.loop import TrainSummary

EXPORT_FORMAT = 3  # of what an export holds; another one is written anew


@dataclass
class Session:
    """One command's work on one run: the recipe as given, and the results of its stages."""

    recipe: Recipe
    run: RunDirectory
    results: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # on the stage that runs
    began: datetime = field(default_factory=lambda: datetime.now(UTC))

    def stage(self, name: str, work: Callable[[], str | None], current: bool = False, result: str = "") -> None:
        """Do a stage unless it is current, and report it. `work` returns a line or None; `result`: the line of a current one."""
        started = perf_counter()
        try:
            interrupt.check()
            with working(name):
                line = None if current else work()
        except KeyboardInterrupt:
            saved = "".join(f"training is saved up to step {step:,}; " for step in published(self.run.checkpoints)[-1:])
            raise Stopped(f"stopped in {name}; {saved}the same command goes on from here") from None
        except (MemoryError, RuntimeError) as error:
            raise lack_of_memory(error, name) or error from error
        seconds = perf_counter() - started
        self.results.append({"name": name, "seconds": round(seconds, 3), "skipped": line is None})
        if line is None:
            say(f"[dim]- {name:<9} unchanged, skipped{result and ': '}{escape(result)}[/]")
        else:
            mark = "[yellow]![/]" if self.warnings else "[green]✓[/]"
            say(f"{mark} [bold]{name:<9}[/] {line} [dim]{duration(seconds)}[/]")
            while self.warnings:
                warn(self.warnings.pop(0))
        if self.run.path.exists():
            write_json(self.run.path / "stages.json", {"stages": self._all_stages()})

    def _all_stages(self) -> list[dict[str, Any]]:
        """This command's stages over those of earlier ones: a skipped stage keeps the time it took when it ran."""
        path = self.run.path / "stages.json"
        rows = (read_json_again(path) or {}).get("stages")
        before = {row["name"]: row for row in rows if "name" in row} if isinstance(rows, list) else {}
        for row in self.results:
            before[row["name"]] = row if not row["skipped"] else {**row, **before.get(row["name"], {}), "skipped": True}
        return list(before.values())


def run_all(session: Session) -> None:
    """Every stage of a recipe."""
    if session.recipe.corpus.sources or not session.recipe.tokens.sources:
        corpus(session)
    try:
        tokens(session)
    except DamagedFile:  # of the corpus, whose documents are read only now
        corpus(session, reads=True)
        tokens(session)
    prepared = prepare(session)
    try:
        train(session, prepared)
    except BessemerError as error:
        if not isinstance(error, Stopped | InputError) and session.run.metrics.exists():
            with contextlib.suppress(OSError, BessemerError):  # a full disk, of which the first error tells more
                report(session)
        raise
    evaluate(session, prepared.recipe)
    if session.recipe.export.hf:
        export(session, prepared.recipe, session.run.export)
    report(session)


def corpus(session: Session, reads: bool = False) -> None:
    """Build clean documents from raw sources, again where those there are damaged; with `reads` they are all read for that."""
    from bessemer.corpus.statistics import funnel_lines, loss_warnings, result_line
    from bessemer.corpus.storage import close_work
    from bessemer.tokens.chat import template_source

    if session.recipe.tokens.chat_template is not None:
        template_source(session.recipe)  # one that cannot be read is refused before the corpus is built
    inputs, current = reuse.corpus_inputs(session.recipe, session.run)
    if current:
        close_work(session.run.corpus)  # left there by a kill after the corpus was published
        look = partial(verify_stage, session.run.corpus, "", lambda name: reads or "/" not in name)
        current = reuse.is_undamaged(look, "building the corpus again")
    statistics = session.run.corpus / "statistics.json"

    def work() -> str:
        with reuse.built_once(session.run.corpus, inputs) as other:
            if other is not None:
                close_work(session.run.corpus)
                return f"shared with {other}, which was made of the same sources: {result_line(read_json(statistics))}"
            from bessemer.corpus import pipeline  # with the data libraries, which only a build needs

            pipeline.build(session.recipe, session.run)
        session.warnings += loss_warnings(read_json(statistics))
        return result_line(read_json(statistics))

    session.stage("corpus", work, current, result_line(read_json(statistics)) if current else "")
    reuse.say_where(session.run.corpus, session.recipe.corpus.storage)
    if current:
        return
    for line in funnel_lines(read_json(statistics)):
        say(f"            [dim]{escape(line)}[/]")


def tokens(session: Session) -> None:
    """Clean documents to a tokenizer and token shards. A derived vocabulary that the text does not support is derived anew."""
    asked, run = session.recipe, session.run
    session.recipe = derive.filled(asked, run, record=True)
    try:
        _tokens(session, run)
    except TooFewIds as error:
        if asked.tokenizer.vocabulary is not None:
            raise
        session.recipe = derive.filled(asked, run, record=True, ids=error.supported)
        _tokens(session, run)


def _tokens(session: Session, run: RunDirectory) -> None:
    from bessemer.corpus.storage import close_work
    from bessemer.tokens import build

    inputs, current = reuse.tokens_inputs(session.recipe, run)
    if current:
        close_work(run.tokens)  # left there by a kill after the tokens were published
        with working("tokens"):
            current = reuse.is_undamaged(lambda: TokenStore.open(run.tokens).verify(), "writing the tokens again")
    wanted = None if current else reuse.trained_on(run)

    def work() -> str:
        with reuse.built_once(run.tokens, inputs) as other:
            if other is not None:
                close_work(run.tokens)
                return f"shared with {other}, which was made of the same corpus"
            done = build.build(session.recipe, run, wanted)
        facts = done.manifest["tokenizer"]
        return (
            f"{amount(done.train_tokens)} tokens to train on, {amount(done.held_out_tokens)} held out; vocabulary "
            f"{facts['vocabulary']:,}, {facts['bytes_per_token']:.2f} bytes a token"
        )

    session.stage("tokens", work, current)
    reuse.say_where(run.tokens, session.recipe.storage_of_tokens)


class Prepared(NamedTuple):
    """A run ready to train: the resolved recipe and what it was said to take."""

    recipe: Recipe
    plan: dict[str, Any]


def prepare(session: Session, measure_seconds: float = estimate.MEASURE_SECONDS) -> Prepared:
    """Resolve the recipe, compare it with the one the run folder was made with, and plan the run. measure_seconds: of training
    steps, to say how long it will take."""
    from bessemer.workflow import extend

    TokenStore.open(session.run.tokens)  # without tokens there is nothing to derive from
    with extend.restored_checkpoint(session.recipe, session.run):
        return _prepare(session, measure_seconds)


def _prepare(session: Session, measure_seconds: float) -> Prepared:
    from bessemer.workflow import extend, resume_policy

    run, store = session.run, TokenStore.open(session.run.tokens)
    recipe = session.recipe = derive.filled(session.recipe, run, record=True)
    done = extend.checkpoints_of(run)
    stored = resume_policy.stored_recipe(run)
    planned = read_json_again(run.plan) if stored is not None else None
    known = num_tokens(run.tokens)
    recipe, resolved = extend.resolved_for(recipe, stored, run, done, store.vocabulary, len(store.labels), known)
    torchrun_command, finished = None, bool(done) and done[-1] == resolved.train.steps
    if stored is not None and done:
        extend.report_missing_lines(run, done)
        resume_policy.require_same_recipe(stored, resolved, run, done[-1])
        torchrun_command = extend.extension_start(stored, resolved, run, store, done)
        recipe = recipe.changed(train={"steps": resolved.train.steps})
    same = stored is not None and digest(stored.train, stored.model) == digest(resolved.train, resolved.model)
    prepared = None if planned is None else Prepared(resolved, planned)

    def work() -> str:
        nonlocal prepared
        made = {row["name"] for row in session.results if not row["skipped"]} & {"corpus", "tokens"}
        told, final = estimate.planned_run(
            recipe, resolved, store.vocabulary, len(store.labels), known, measure_seconds, "made here" if made else ""
        )
        prepared = Prepared(final, told)
        memory, measured = told["memory_bytes"]["total"], told["step_seconds_from"]
        return (
            f"{amount(told['parameters'])} parameters, {told['steps']:,} steps over {amount(told['tokens'])} tokens: "
            f"about {duration(told['seconds'])} and {size(memory)} ({measured})"
        )

    current = planned is not None and (finished or (same and (recipe.train.minutes is None or stored is not None)))
    session.stage("plan", work, current)
    assert prepared is not None
    if not finished:
        preflight.require_memory(prepared.plan, prepared.recipe)
    if torchrun_command is not None and stored is not None:  # until here an error changes nothing
        extend.extend(run, stored.train.steps or 0, resolved.train.steps or 0, torchrun_command)
    write_atomic(run.recipe, dump(prepared.recipe, derive.reasons(run)))
    write_json(run.plan, {**prepared.plan, **outlook(prepared.recipe, run.tokens)})
    return prepared


def train(
    session: Session, prepared: Prepared, profile: bool = False, work_as_rank: Callable[[], TrainSummary] | None = None
) -> None:
    """Train to the last step, from where the run stands.

    profile: a few steps under the profiler, into profile/; work_as_rank: the training of this process as one of several, instead.
    """
    from bessemer.checkpoint.protocol import has_all_files, repair_latest
    from bessemer.distributed.mesh import SINGLE_PROCESS
    from bessemer.guard.alerts import posting, webhook_url
    from bessemer.guard.heartbeat import Heartbeat
    from bessemer.launch import torchrun_command
    from bessemer.report import planned
    from bessemer.train import device as devices
    from bessemer.train.loop import TrainSummary, train_here

    recipe, run = prepared.recipe, session.run
    steps = recipe.train.steps
    done = published(run.checkpoints)
    if not done and (lost := read_steps(run.metrics)):
        say(f"  the {lost[-1].get('step', 0):,} steps trained before ended without a checkpoint: beginning at step 1")

    def work() -> str | None:
        with posting(run, webhook_url(recipe.report.webhook), session.began):
            if work_as_rank is not None:
                made = work_as_rank()
            elif recipe.parallel.world > 1:
                made = TrainSummary(**torchrun_command.train(recipe, run, profile))
            else:
                device = devices.choose(recipe.train)
                stacks = run.path / "stacks.txt"
                with Heartbeat(None, 0, stacks, recipe.guard.hang_seconds) as heartbeat:
                    made = train_here(recipe, run, profile, device, SINGLE_PROCESS, heartbeat)
        for line in made.stragglers:
            warn(f"{line}; see incidents.jsonl")
        if recipe.tokens.gate:
            say(f"  the gate (tokens.gate): {made.gated or 'nothing to mask'}")
        predicted = read_json(run.plan)["memory_bytes"]["total"]  # with what the training process itself held
        if made.resumed_at == made.step:
            return None
        share = (recipe.evaluate.max_tokens or 1) / max(num_tokens(run.tokens)["held_out_tokens"], 1)
        text = "held-out text" if share >= 1 else f"{share:.0%} of the held-out text"
        parts = [
            f"{counted(made.step, 'step')}{f', from step {made.resumed_at:,} on' if made.resumed_at else ''}",
            f"{made.bits_per_byte:.3f} bits per byte on {text}" if made.bits_per_byte else "",
            f"{made.accuracy:.1%} right on {text}" if made.accuracy is not None else "",
            f"{counted(made.skipped, 'update')} skipped" if made.skipped else "",
            f"{counted(made.rescaled, 'step')} given up to lower the loss scale" if made.rescaled else "",
            f"{size(made.peak_memory)} at the peak ({size(predicted)} predicted)",
            f"{counted(made.recomputed, 'block')} recomputed" if made.recomputed else "",
        ]
        return ", ".join(filter(None, parts))

    current = bool(done) and done[-1] == steps and run.mixture.exists() and has_all_files(run.checkpoints, done[-1])
    if current:
        current = work_as_rank is None  # else the other processes wait for this one
        repair_latest(run.checkpoints, done[-1], warn)
    finished = f"{counted(steps or 0, 'step')} {'is' if steps == 1 else 'are'} done"
    finished += f", train.minutes = {recipe.train.minutes:g}" if recipe.train.minutes is not None else ""
    session.stage("train", work, current, finished)
    planned.write(run)


def evaluate(session: Session, recipe: Recipe, weights: Weights = NEWEST) -> dict[str, Any]:
    """Score a run's weights on all held-out text, and show what they do.

    weights: others than the newest are scored into a file of their own.
    """
    from bessemer.evaluate.task_files import main_score, open_tasks

    run = session.run
    asked = {task.name: task.content for task in open_tasks(recipe.evaluate.tasks)}
    tokens = stage_facts(run.tokens).get("inputs")
    inputs = digest(recipe.evaluate, weights.steps(run), tokens, asked, recipe.train.precision)
    place = run.evaluation_of(weights)
    before = read_json_again(place) or {}

    def work() -> str:
        from bessemer.evaluate.final import evaluate as score
        from bessemer.evaluate.final import score_line
        from bessemer.train.state import opened

        found = score(recipe, run, *opened(recipe, run, weights), f"tasks{weights.suffix}")
        write_json(place, {**found, "averaged_checkpoints": weights.average, "inputs": inputs})
        return "; ".join([*filter(None, [weights.name]), score_line(found), *map(main_score, found.get("tasks", ()))])

    session.stage("evaluate", work, before.get("inputs") == inputs)
    return dict(read_json(place))


def export(
    session: Session, recipe: Recipe, folder: Path, weights: Weights = NEWEST, to: str = "hf", dtype: str | None = None
) -> dict[str, Any]:
    """Write a run's weights in the Hugging Face layout, if they are the same there, or as a GGUF file.

    to: "hf" or "gguf"; dtype: of the weights, None: export.dtype.
    """
    from bessemer.checkpoint.format import MANIFEST
    from bessemer.export.export_run import export_gguf, export_trained, record_export, verify_export

    if dtype == "q8_0" and to == "hf":
        raise InputError("--dtype q8_0: only a GGUF file has it; add --to gguf, or take bfloat16 or float16")
    run = session.run
    if dtype is not None and to == "hf":
        recipe = recipe.changed(export={"dtype": dtype})
    manifests = [run.checkpoints / checkpoint_name(step) / MANIFEST for step in weights.steps(run)]
    hashes = [path.read_text() if path.exists() else "" for path in manifests]  # with the hashes of all tensors' files
    scored = (read_json_again(run.evaluation_of(weights)) or {}).get("inputs")
    options = [to, dtype, recipe.export.model_dump(exclude={"hf"})]
    inputs = digest(EXPORT_FORMAT, recipe.run.name, hashes, scored, options)
    record = folder / "bessemer.json"
    current = (read_json_again(record) or {}).get("inputs") == inputs
    current = current and reuse.is_undamaged(partial(verify_export, record), "writing the export again")

    def work() -> str:
        if folder.exists() and any(folder.iterdir()) and not record.exists() and folder != run.export:
            raise InputError(f"{folder}: holds other files; give a folder that is empty or does not exist")
        if to == "gguf":
            line = export_gguf(recipe, run, folder, weights, dtype)
        else:
            line = export_trained(recipe, run, folder, weights)
        record_export(record, inputs)
        return line

    session.stage("export", work, current)
    return dict(read_json(record))


def report(session: Session) -> None:
    """Write report.html from what lies in the run folder."""
    from bessemer.report import page

    session.stage("report", lambda: str(page.write(session.run)))
