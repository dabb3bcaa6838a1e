"""What follows from the recipe and the machine: batch, tokens, layout, schedule, memory, disk and data."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer import derived
from bessemer.check.rows import CheckRow, judged
from bessemer.check.trial import fits_here
from bessemer.checkpoint.retention import SPANS
from bessemer.errors import BessemerError
from bessemer.launch.start import described
from bessemer.layout.memory import optimizer_bytes
from bessemer.model.config import ModelConfig
from bessemer.preflight import HOPELESS_MEMORY, rate_concern
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json
from bessemer.terminal import amount, counted, size
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING
from bessemer.tokens.shards import TokenStore, token_dtype
from bessemer.train import device as devices
from bessemer.train.learning_rate import learning_rate_share

BUDGET, LAYOUT, MEMORY, DISK, DATA, ROLLBACK = "batch and budget", "layout", "memory", "disk", "data", "rollback"
FEW_TOKENS, OPTIMAL_TOKENS = 1.0, 20  # a parameter: below the first it is warned of
WARMUP_SHARE = 0.2  # of the run, above which a warm-up is warned of
MUCH_HELD_OUT = 0.2  # of the text, which is then too little for what it could teach
CORPUS_FACTOR = 2.0  # a corpus while it is built, against what it comes to
EXTRA_CHECKPOINTS = 2  # besides checkpoint.keep: the one being written, and the one before an alarm


def budget_rows(asked: Recipe, resolved: Recipe, plan: dict[str, Any]) -> Iterator[CheckRow]:
    """Batch, tokens, schedule. asked: the recipe as it was written."""
    train, batches = resolved.train, resolved.batches
    steps, batch = train.steps or 0, train.global_batch_tokens or 0
    ways = f"{counted(batches.full, 'sequence')} of {batches.length}: {resolved.parallel.data} x "
    micro = train.micro_batch or 1
    ways += f"{counted(micro, 'sequence')} a micro-batch x {batches.full // resolved.parallel.data // micro}"
    is_given = asked.train.global_batch_tokens is not None
    yield judged(BUDGET, "global batch", is_given, f"{amount(batch)} tokens{'' if is_given else ', derived'}; {ways}",
                 otherwise="warn")  # fmt: skip
    tokens, horizon = batches.tokens_before(steps), _horizon(asked)
    ratio = tokens / plan["parameters"] if plan.get("parameters") else None
    is_few = ratio is not None and ratio < FEW_TOKENS and not resolved.is_continued
    each = "" if ratio is None else f", {amount(ratio) if ratio >= 0.01 else 'less than 0.01'} a parameter"
    each += f", where about {OPTIMAL_TOKENS} are usual (Hoffmann et al. 2022)" if is_few else ""
    said = f"{counted(steps, 'step')}, {amount(tokens)} tokens{each}; {horizon or 'derived'}"
    yield judged(BUDGET, "token budget", bool(horizon) and not is_few, said, otherwise="warn")
    concern = rate_concern(resolved)
    said = concern or f"{train.optimizer.learning_rate:g} at its peak"
    yield judged(BUDGET, "learning rate", not concern, said, otherwise="warn")
    schedule = train.schedule
    share = learning_rate_share(schedule, steps - 1, steps)
    ends = schedule.kind not in ("constant", "inverse_sqrt")
    said = f"{schedule.kind}: {share:.3g} of the peak {train.optimizer.learning_rate:g} at the last step, {steps:,}"
    holds = not ends or math.isclose(share, schedule.final_share, abs_tol=1e-6)
    yield judged(BUDGET, "schedule ends with the tokens", holds,
                 said + ("" if ends else "; this schedule has no end"))  # fmt: skip
    warmup = schedule.warmup_steps or 0
    yield CheckRow(
        BUDGET, "warm-up is shorter than the run",
        "FAIL" if warmup >= steps > 1 else "ok" if warmup <= WARMUP_SHARE * steps or warmup <= 1 else "warn",
        f"{counted(warmup, 'step')} of {steps:,} ({warmup / max(steps, 1):.1%})",
    )  # fmt: skip


def _horizon(asked: Recipe) -> str:
    given = {key: getattr(asked.train, key) for key in ("steps", "tokens", "minutes")}
    return ", ".join(f"train.{key} = {value:,}" for key, value in given.items() if value is not None)


def layout_row(resolved: Recipe) -> CheckRow:
    """The parallel sizes, their product and the processes that there are."""
    layout, nodes, per_node = resolved.parallel, resolved.cluster.nodes, resolved.cluster.devices_per_node
    said = "1 process" if layout.world == 1 else f"{described(layout)} = {layout.world:,} processes"
    holds = False
    if layout.world % nodes:
        said += f", not a multiple of {nodes} nodes"
    elif per_node is not None and layout.world // nodes > per_node:
        said += f" on {counted(nodes, 'node')}, more than the {counted(per_node, 'device')} of each"
    else:
        holds, fits = True, fits_here(layout, devices.choose(resolved.train).is_cuda)
        said += f": {nodes} nodes x {layout.world // nodes}" if nodes > 1 else ""
        said += "" if fits else ", more than this machine runs"
    return judged(LAYOUT, "sizes multiply to the world", holds, said)


def memory_fit(resolved: Recipe, plan: dict[str, Any]) -> CheckRow:
    """The planned memory against what is free."""
    device = devices.choose(resolved.train)
    each, free = plan["memory_bytes"]["total"], devices.available_bytes(device)
    if not fits_here(resolved.parallel, device.is_cuda):
        said = f"{size(each)} a process are planned; its processes run on other machines (see `bessemer plan`)"
        return CheckRow(MEMORY, "planned memory fits", "not here", said)
    count = 1 if device.is_cuda else resolved.parallel.world
    said = f"{f'{count} x ' if count > 1 else ''}{size(each)} planned, {size(free)} free"
    needed = count * each
    return CheckRow(MEMORY, "planned memory fits",
                    "ok" if needed <= free else "warn" if needed <= HOPELESS_MEMORY * free else "FAIL", said)  # fmt: skip


def rollback_row(resolved: Recipe) -> CheckRow:
    """From which step on a rollback finds a checkpoint that is old enough. Of each of the last three spans of guard.distance one
    stays (checkpoint/retention.py), whatever checkpoint.keep is."""
    name, guard, steps = "a rollback is possible", resolved.guard, resolved.train.steps or 0
    if not guard.roll_back:
        return CheckRow(ROLLBACK, name, "ok", "guard.roll_back = false: what cannot be skipped stops the run")
    every, distance = resolved.checkpoint.every or steps, guard.distance(steps)
    first, said = every + distance + 1, f"{counted(distance, 'step')} back, with a checkpoint every {every:,}"
    if first > steps:
        said += f": none is old enough in the {counted(steps, 'step')} of the run, so a rollback goes to the oldest one from "
        said += "before the alarm, if there is one; lower guard.rollback_distance or checkpoint.every"
        return CheckRow(ROLLBACK, name, "warn", said)
    said += f": from step {first:,} of {steps:,} on; before, to the oldest one from before the alarm, if there is one"
    return CheckRow(ROLLBACK, name, "ok", said)


def checkpoint_bytes(resolved: Recipe, config: ModelConfig) -> int:
    """Planned bytes of one checkpoint: weights in fp32, the optimizer's state, the moving average."""
    train = resolved.train
    return (4 + 4 * bool(train.ema)) * config.parameters + optimizer_bytes(train, config)


def disk_row(resolved: Recipe, run: RunFolder, checkpoint: float, built: RunFolder) -> CheckRow:
    """Space for the whole run against what is free. checkpoint: bytes of one; built: where corpus and tokens of it, or of a
    sample of it, are built."""
    steps, rolls_back = resolved.train.steps or 0, resolved.guard.roll_back
    keep = resolved.checkpoint.keep + EXTRA_CHECKPOINTS + SPANS * rolls_back + (resolved.train.schedule.kind == "wsd")
    keep = min(keep, 1 + math.ceil(steps / (resolved.checkpoint.every or steps)))
    parts = {counted(keep, "checkpoint"): keep * checkpoint}
    if not run.tokens.exists():
        store, known = TokenStore.open(built.tokens), expected_tokens(resolved, run, built)
        tokens = sum(known.values())
        sample = max(store.train_tokens + store.held_out_tokens, 1)
        parts["tokens"] = float(tokens * token_dtype(store.vocabulary).itemsize)
        is_elsewhere = resolved.corpus.work is not None and resolved.corpus.publish is not None
        if not run.corpus.exists() and built.corpus.exists() and not is_elsewhere:
            stored = sum(path.stat().st_size for path in built.corpus.rglob("*") if path.is_file())
            parts["corpus"] = CORPUS_FACTOR * stored * tokens / sample
    free = shutil.disk_usage(existing(run.path)).free
    needed = sum(parts.values())
    said = " + ".join(f"{name} {size(value)}" for name, value in parts.items())
    said += f" = {size(needed)}" if len(parts) > 1 else ""
    return judged(DISK, "space for the whole run", needed < free, f"{said}, {size(free)} free")


def expected_tokens(resolved: Recipe, run: RunFolder, built: RunFolder) -> dict[str, int]:
    """Tokens to train on and held out, as derived.expected_tokens; before they are written, scaled up from those that a byte of a
    sample's raw text became: what its rules keep, and its tokenizer's tokens."""
    known = derived.expected_tokens(resolved, run)
    if run.tokens.exists() or not known or resolved.tokens.sources or not (built.corpus / "statistics.json").exists():
        return known
    counts = {one["source"]: one for one in read_json(built.corpus / "statistics.json")["sources"]}
    store, total = TokenStore.open(built.tokens), 0.0
    for source in resolved.corpus.sources:
        made = sum(store.split(source.name, split).num_tokens for split in ("train", "heldout"))
        raw = derived.raw_text(resolved.changed(corpus={"sources": (source,)}))[0]
        total += made * max(raw / max(counts[source.name]["bytes_in"], 1), 1.0)
    held_out = int(total * resolved.tokens.held_out)
    return {"unique_tokens": int(total) - held_out, "held_out_tokens": held_out}


def existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.is_dir())


def data_rows(resolved: Recipe, run: RunFolder, built: RunFolder, plan: dict[str, Any]) -> Iterator[CheckRow]:
    """Hashes, repetition and contamination of the data."""
    store, is_own = TokenStore.open(built.tokens), run.tokens.exists()
    try:
        store.verify()
        said = f"SHA-256 of {counted(len(store.manifest['files']), 'file')} equal the manifest's"
        said = said if is_own else f"the run has no tokens yet; of a sample of its text: {said}"
        yield CheckRow(DATA, "hashes of the token shards", "ok" if is_own else "not here", said)
    except BessemerError as error:
        yield CheckRow(DATA, "hashes of the token shards", "FAIL", str(error))
    steps, tokens = resolved.train.steps or 0, expected_tokens(resolved, run, built)
    epochs = dict(plan.get("epochs", {}))
    if not epochs:
        unique = tokens.get("unique_tokens")
        epochs = {"the text (estimated)": resolved.batches.tokens_before(steps) / unique} if unique else {}
    often = {name: turns for name, turns in epochs.items() if turns > REPEATS_WORTH_A_WARNING}
    turned = ", ".join(f"{name} {turns:.2g} times" for name, turns in epochs.items())
    said = turned or "the size of the text is not known"
    if often:
        said += f"; above {REPEATS_WORTH_A_WARNING} epochs repeated text helps less and less (Muennighoff et al. 2023)"
    yield CheckRow(DATA, "repetition", "warn" if often else "ok" if epochs else "not here", said)
    if total := sum(tokens.values()):
        share = tokens.get("held_out_tokens", 0) / total
        said = f"{share:.1%} of the text" + ("; it is never trained on" if share > MUCH_HELD_OUT else "")
        yield CheckRow(DATA, "held out for validation", "warn" if share > MUCH_HELD_OUT else "ok", said)
    sets = resolved.corpus.contamination.sets
    if resolved.tokens.sources and not resolved.corpus.sources:
        said = "these tokens were made elsewhere; whether evaluation sets were removed there is not known"
        yield CheckRow(DATA, "evaluation sets are removed", "warn", said)
    else:
        names = ", ".join(one.name for one in sets)
        said = f"{names} ({resolved.corpus.contamination.action})" if sets else (
            "corpus.contamination.sets names none: scores on benchmarks may be of text that it was trained on")  # fmt: skip
        removed = bool(sets) and resolved.corpus.contamination.action != "report"
        yield judged(DATA, "evaluation sets are removed", removed, said, otherwise="warn")
