"""Preparation of a run: from recipe, run directory and machine to a run specification (train/run_spec.py)."""

from __future__ import annotations

from typing import Any

from bessemer.common.console import amount, counted, duration, size, warn
from bessemer.common.hashing import digest
from bessemer.recipe import dump
from bessemer.run.files import read_json_or_none, write_atomic, write_json
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.summary import num_tokens, packing_and_epochs
from bessemer.train.run_spec import Resume, RunSpec
from bessemer.workflow import derive, estimate, preflight
from bessemer.workflow.session import Session

FEW_STEPS = 10  # a training with fewer learns next to nothing


def prepare(session: Session, measure_seconds: float = estimate.MEASURE_SECONDS) -> RunSpec:
    """Resolve the recipe, decide if the run starts, resumes or is extended, plan it, and write its recipe.toml and plan.json.

    Args:
        session: Recipe and run; the tokens must be built.
        measure_seconds: Seconds of training steps to time, to predict the duration.

    Raises:
        InputError: The run cannot continue under this recipe, or its memory far exceeds that of the machine.
    """
    from bessemer.train import device as devices
    from bessemer.workflow import extend, resume_policy

    run, store = session.run, TokenStore.open(session.run.tokens)  # first, because values are derived from the tokens
    known = num_tokens(run.tokens)
    with extend.restored_checkpoint(session.recipe, run):
        recipe = derive.filled(session.recipe, run, record=True)
        done = extend.checkpoints_of(run)
        stored = resume_policy.stored_recipe(run)
        resolved = extend.resolve(recipe, stored if done else None, run, store.vocabulary, len(store.labels), known)
        decision = resume_policy.require_resumable(stored, resolved, run, done)
    plan: dict[str, Any] = (read_json_or_none(run.plan) if stored is not None else None) or {}
    is_finished = isinstance(decision, Resume) and decision.step == resolved.train.steps
    extended_from = None
    if stored is not None and done:
        if isinstance(decision, resume_policy.Extend):
            extended_from = extend.extension_start(stored, resolved, run, store, done, decision.latest)
        recipe = recipe.changed(train={"steps": resolved.train.steps})

    def work() -> str:
        nonlocal plan, resolved
        names = {row["name"] for row in session.results if not row["skipped"]} & {"corpus", "tokens"}
        plan, resolved = estimate.planned_run(
            recipe, resolved, store.vocabulary, len(store.labels), known, measure_seconds, "made here" if names else ""
        )
        if recipe.train.steps is None and plan["steps"] < FEW_STEPS:
            warn(f"train.global_batch_tokens: the training has only {counted(plan['steps'], 'step')}; set fewer")
        memory, measured = plan["memory_bytes"]["total"], plan["step_seconds_from"]
        return (
            f"{plan['model_size']}, {counted(plan['steps'], 'step')} over {amount(plan['tokens'])} tokens: "
            f"about {duration(plan['seconds'])} and {size(memory)} ({measured})"
        )

    is_current = RunSpec.is_complete(plan) and stored is not None and (is_finished or (
        digest(stored.train, stored.model) == digest(resolved.train, resolved.model)
        and plan["device"] == devices.choose(resolved.train).name
    ))  # fmt: skip
    session.stage("plan", work, is_current)
    if not is_finished:
        preflight.require_memory(plan, resolved)
    if extended_from is not None and stored is not None:  # an error before this line leaves the run unchanged
        extend.extend(run, stored.train.steps, resolved.train.steps, extended_from)
    write_atomic(run.recipe, dump(resolved, derive.reasons(session.recipe, run)))
    plan |= {"tokens_digest": store.digest, **packing_and_epochs(resolved, run.tokens)}
    write_json(run.plan, plan)
    return RunSpec.build(resolved, plan, run)
