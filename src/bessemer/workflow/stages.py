"""The stages of a run, in order; each is skipped if its inputs have not changed.

A stage is a function of the recipe and the run directory, and passes its results to the next one through the run directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from bessemer.common.console import amount, counted, progress, say, size, warn
from bessemer.common.errors import BessemerError, DamagedFile, InputError, Stopped, TooFewIds
from bessemer.common.hashing import digest
from bessemer.recipe import Recipe, ResolvedRecipe, load_resolved
from bessemer.run.directory import NEWEST, RunDirectory, Weights, checkpoint_name, checkpoint_steps
from bessemer.run.files import read_json, read_json_or_none, read_steps, stage_facts, verify_stage, write_json
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.summary import num_tokens
from bessemer.train.run_spec import RunSpec
from bessemer.workflow import derive, estimate, reuse
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session

if TYPE_CHECKING:
    from bessemer.train.callback import Callback
    from bessemer.train.loop import TrainSummary

EXPORT_FORMAT = 3  # version of an export's content; an export of another version is written again


def run_all(session: Session, callbacks: Sequence[Callback] = (), *, has_tokens: bool = False) -> None:
    """Run every stage of a recipe.

    Args:
        session: The recipe and the run.
        callbacks: Callbacks in addition to those of the recipe.
        has_tokens: True to train on the tokens already in the run directory.
    """
    if not has_tokens:
        build_data(session)
    spec = prepare(session)
    try:
        train(session, spec, callbacks=callbacks)
    except BessemerError as error:
        if not isinstance(error, Stopped | InputError) and session.run.metrics.exists():
            with contextlib.suppress(OSError, BessemerError):  # on a full disk the first error is the more helpful one
                report(session)
        raise
    evaluate(session, spec.recipe)
    if session.recipe.export.hf:
        export(session, spec.recipe, session.run.export)
    report(session)


def build_data(session: Session) -> None:
    """Build the corpus and the tokens."""
    corpus(session)
    try:
        tokens(session)
    except DamagedFile:  # a damaged corpus file is noticed only when its documents are read
        corpus(session, reads=True)
        tokens(session)


def planned_recipe(session: Session) -> ResolvedRecipe:
    """Build the data of a run and return its resolved recipe, with `train.minutes` turned into steps.

    A run that already has a plan for these minutes keeps its steps.
    """
    from bessemer.workflow import extend

    build_data(session)
    recipe, run = derive.filled(session.recipe, session.run), session.run
    stored = load_resolved(run.recipe) if run.recipe.exists() else None
    is_other = stored is None or stored.train.minutes != recipe.train.minutes
    if recipe.train.minutes is not None and recipe.train.steps is None and is_other:
        return estimate.plan_only(recipe, run)[1]
    return extend.resolve(recipe, stored, run, TokenStore.open(run.tokens).vocabulary, 0, num_tokens(run.tokens))


def corpus(session: Session, reads: bool = False) -> None:
    """Build clean documents from raw sources, unless they exist and are undamaged.

    `reads` makes the check for damage read all files.
    """
    from bessemer.corpus.statistics import funnel_lines, loss_warnings, result_line
    from bessemer.run_tasks.stage_storage import close_work
    from bessemer.tokens.tokenizer.choice import template_source

    if session.recipe.tokens.chat_template is not None:
        template_source(session.recipe)  # raises an error for an unreadable template before the corpus is built
    inputs, current = reuse.corpus_inputs(session.recipe, session.run)
    if current:
        close_work(session.run.corpus)  # a process killed after publishing the corpus leaves its work folder
        look = partial(verify_stage, session.run.corpus, "", lambda name: reads or "/" not in name)
        current = reuse.is_undamaged(look, "building the corpus again")
    statistics = session.run.corpus / "statistics.json"

    def work() -> str:
        with reuse.built_once(session.run.corpus, inputs) as other:
            if other is not None:
                close_work(session.run.corpus)
                return f"shared with {other}, which was made of the same sources: {result_line(read_json(statistics))}"
            from bessemer.corpus import pipeline  # imports the data libraries, which only a build needs

            pipeline.build(session.recipe, session.run)
        session.warnings += loss_warnings(read_json(statistics))
        return result_line(read_json(statistics))

    session.stage("corpus", work, current, result_line(read_json(statistics)) if current else "")
    reuse.say_where(session.run.corpus, session.recipe.corpus.storage)
    if not current:
        for line in funnel_lines(read_json(statistics)):
            say(f"            [dim]{escape(line)}[/]")


FILLED = partial(derive.filled, record=True)  # sets all values and records their reasons


def tokens(session: Session, fill: Callable[..., Recipe] = FILLED) -> None:
    """Train a tokenizer on the clean documents and write the token shards.

    `fill(recipe, run, ids=...)` returns the recipe with the values that follow from the corpus. If the text does not support
    the derived vocabulary, it is called again with `ids`, the largest one that it supports.
    """
    requested, run = session.recipe, session.run
    try:
        write_tokens(session, fill(requested, run))
    except TooFewIds as error:
        if requested.tokenizer.vocabulary is not None:
            raise
        write_tokens(session, fill(requested, run, ids=error.supported))


def write_tokens(session: Session, recipe: Recipe) -> None:
    """Write the tokens of a recipe whose values are all set, unless they exist.

    Raises:
        TooFewIds: The text supports only a smaller vocabulary.
    """
    from bessemer.run_tasks.stage_storage import close_work
    from bessemer.tokens import build

    run = session.run
    inputs, current = reuse.tokens_inputs(recipe, run)
    if current:
        close_work(run.tokens)  # a process killed after publishing the tokens leaves its work folder
        with progress("tokens"):
            current = reuse.is_undamaged(lambda: TokenStore.open(run.tokens).verify(), "writing the tokens again")
    wanted = None if current else reuse.trained_on(run)

    def work() -> str:
        with reuse.built_once(run.tokens, inputs) as other:
            if other is not None:
                close_work(run.tokens)
                return f"shared with {other}, which was made of the same corpus"
            done = build.build(recipe, run, wanted)
        facts = done.manifest["tokenizer"]
        return (
            f"{amount(done.num_tokens('train'))} tokens to train on, {amount(done.num_tokens('heldout'))} held out; vocabulary "
            f"{facts['vocabulary']:,}, {facts['bytes_per_token']:.2f} bytes a token"
        )

    session.stage("tokens", work, current)
    reuse.say_where(run.tokens, build.storage_of(recipe))


def train(
    session: Session, spec: RunSpec, profile: bool = False, work_as_rank: Callable[[], TrainSummary] | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:  # fmt: skip
    """Train to the last step, starting from the newest checkpoint.

    Args:
        session: The recipe and the run.
        spec: Specification of the run.
        profile: True to train only a few steps under the profiler, which writes to profile/.
        work_as_rank: The training of this process as one rank of several; replaces the default training.
        callbacks: Callbacks in addition to those of the recipe, for a training with one process.
    """
    from bessemer.checkpoint.protocol import has_all_files, repair_latest
    from bessemer.distributed.mesh import SINGLE_PROCESS
    from bessemer.evaluate.task_scorer import task_scorer
    from bessemer.guard.alerts import post_incidents, webhook_url
    from bessemer.guard.heartbeat import Heartbeat
    from bessemer.launch import local_start
    from bessemer.report import data, planned
    from bessemer.tokens import degenerate_text
    from bessemer.train import device as devices
    from bessemer.train.loop import TrainSummary, train_process

    recipe, run, steps = spec.recipe, session.run, spec.steps
    done = checkpoint_steps(run.checkpoints)
    if not done and (lost := read_steps(run.metrics)):
        say(f"  the {lost[-1].get('step', 0):,} steps of the earlier training have no checkpoint: starting at step 1")

    def work() -> str | None:
        with post_incidents(run, webhook_url(recipe.report.webhook), session.began):
            if work_as_rank is not None:
                summary = work_as_rank()
            elif recipe.parallel.world > 1:
                options = ["--profile"] if profile else []
                program = ["-m", "bessemer.launch.worker", str(run.path), *options]
                summary = TrainSummary(**local_start.train(recipe, run, program))
            else:
                device = devices.choose(recipe.train)
                stacks, scorer = run.path / "stacks.txt", task_scorer(recipe.evaluate)
                with Heartbeat(None, 0, stacks, recipe.guard.hang_seconds) as heartbeat:
                    parts = spec, run, device, SINGLE_PROCESS, heartbeat, profile
                    summary = train_process(*parts, score_tasks=scorer, callbacks=callbacks)
        if recipe.tokens.gate:
            say(f"  the gate (tokens.gate): {degenerate_text.describe(run.path) or 'nothing to mask'}")
        if summary.resumed_at == summary.step:
            return None
        return _result_line(summary, recipe, run)

    current = bool(done) and done[-1] == steps and run.mixture.exists() and has_all_files(run.checkpoints, done[-1])
    if current:
        current = work_as_rank is None  # a rank must not skip the training, because the other ranks wait for it
        repair_latest(run.checkpoints, done[-1], warn)
    finished = f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'} done"
    finished += f", train.minutes = {recipe.train.minutes:g}" if recipe.train.minutes is not None else ""
    session.stage("train", work, current, finished)
    planned.write(run, data.read(run))


def _result_line(made: TrainSummary, recipe: ResolvedRecipe, run: RunDirectory) -> str:
    share = recipe.evaluate.max_tokens / max(num_tokens(run.tokens)["held_out_tokens"], 1)
    text = "held-out text" if share >= 1 else f"{share:.0%} of the held-out text"
    parts = [
        f"{counted(made.step, 'step')}{f', from step {made.resumed_at:,} on' if made.resumed_at else ''}",
        f"{made.bits_per_byte:.3f} bits per byte on {text}" if made.bits_per_byte else "",
        f"{made.accuracy:.1%} right on {text}" if made.accuracy is not None else "",
        f"{counted(made.skipped, 'update')} skipped" if made.skipped else "",
        f"{counted(made.rescaled, 'step')} given up to lower the loss scale" if made.rescaled else "",
        f"{size(made.peak_memory)} at the peak ({size(made.planned_memory)} predicted)",
        f"{counted(made.recomputed, 'block')} recomputed" if made.recomputed else "",
    ]
    return ", ".join(filter(None, parts))


def evaluate(session: Session, recipe: ResolvedRecipe, weights: Weights = NEWEST) -> dict[str, Any]:
    """Score a run's weights on all held-out text and on tasks, and return the scores.

    Args:
        session: The recipe and the run.
        recipe: Resolved recipe of the run.
        weights: Weights to score. Others than the newest get their own evaluation file.
    """
    from bessemer.evaluate.task_files import main_score, open_tasks

    run = session.run
    tasks = {task.name: task.content for task in open_tasks(recipe.evaluate.tasks)}
    tokens = stage_facts(run.tokens).get("inputs")
    inputs = digest(recipe.evaluate, weights.steps(run), tokens, tasks, recipe.train.precision)
    path = run.evaluation_of(weights)
    before = read_json_or_none(path) or {}

    def work() -> str:
        from bessemer.evaluate.final import evaluate as score
        from bessemer.evaluate.final import score_line
        from bessemer.train.state import load_model

        result = score(recipe, run, *load_model(recipe, run, weights), f"tasks{weights.suffix}")
        write_json(path, {**result, "averaged_checkpoints": weights.average, "inputs": inputs})
        return "; ".join([*filter(None, [weights.name]), score_line(result), *map(main_score, result.get("tasks", ()))])

    session.stage("evaluate", work, before.get("inputs") == inputs)
    return dict(read_json(path))


def export(
    session: Session, recipe: ResolvedRecipe, folder: Path, weights: Weights = NEWEST, to: str = "hf",
    dtype: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Export a run's weights in the Hugging Face layout, after verifying them with transformers, or as a GGUF file.

    Args:
        session: The recipe and the run.
        recipe: Resolved recipe of the run.
        folder: Folder to write.
        weights: Weights to export.
        to: `hf` or `gguf`.
        dtype: Data type of the weights; None: `export.dtype`.

    Returns:
        The record of the export, bessemer.json.
    """
    from bessemer.checkpoint.format import MANIFEST
    from bessemer.export.export_run import export_gguf, export_trained, record_export, verify_export

    if dtype == "q8_0" and to == "hf":
        raise InputError("--dtype q8_0: only GGUF files have it; add --to gguf, or choose bfloat16 or float16")
    run = session.run
    if dtype is not None and to == "hf":
        recipe = recipe.changed(export={"dtype": dtype})
    manifests = [run.checkpoints / checkpoint_name(step) / MANIFEST for step in weights.steps(run)]
    hashes = [path.read_text() if path.exists() else "" for path in manifests]  # hold the hashes of all tensor files
    scored = (read_json_or_none(run.evaluation_of(weights)) or {}).get("inputs")
    options = [to, dtype, recipe.export.model_dump(exclude={"hf"})]
    inputs = digest(EXPORT_FORMAT, recipe.run.name, hashes, scored, options)
    record = folder / "bessemer.json"
    stored = read_json_or_none(record) or {}
    current = stored.get("inputs") == inputs and reuse.is_undamaged(
        partial(verify_export, record), "writing the export again"
    )

    def work() -> str:
        if folder != run.export and folder.exists() and any(folder.iterdir()) and stored.get("run") != recipe.run.name:
            what = f"the export of {stored['run']}" if "run" in stored else "other files"
            raise InputError(f"{folder}: it holds {what}; choose a folder that is empty or does not exist")
        if to == "gguf":
            line = export_gguf(recipe, run, folder, weights, dtype)
        else:
            line = export_trained(recipe, run, folder, weights)
        record_export(record, run=recipe.run.name, inputs=inputs)
        return line

    session.stage("export", work, current)
    return dict(read_json(record))


def report(session: Session) -> None:
    """Write report.html from the files in the run directory."""
    from bessemer.report import page

    session.stage("report", lambda: str(page.write(session.run)))
