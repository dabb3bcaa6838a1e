"""Paired trainings of two recipes: what is compared, the interval of the differences, and the verdict.

A pair is one training of each recipe with the same seed. A difference is the score of B minus that of A, in bits per byte of
held-out text. The ledger records every look at such differences, because a baseline that is compared often wins or loses by
chance at some look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bessemer.common.console import amount, duration, text_table
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import digest
from bessemer.ladder import runs
from bessemer.recipe import Recipe
from bessemer.recipe.corpus import Work
from bessemer.report import data
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, write_atomic, write_json
from bessemer.tokens.held_out import held_out_samples
from bessemer.tokens.shards import TokenStore

Json = dict[str, Any]
ERROR = 0.05  # chance of a wrong verdict over all looks at one baseline
MOST_SEEDS = 1000  # largest number of seeds that is proposed
BYTES_TOLERANCE = 1e-3  # relative difference of the scored bytes above which bits per byte do not compare


def identity(recipe: Recipe) -> str:
    """Return the name of a recipe with a digest of every key that can change a score, except the seed.

    The digest covers which keys are set too, because a key that is not set may get a derived value other than its default.
    """
    corpus = recipe.corpus.model_dump(mode="json", exclude={*Work.model_fields})
    given = recipe.model_dump(mode="json", exclude={*runs.UNRELATED}, exclude_unset=True)
    return f"{recipe.run.name}-{digest(runs.settings(recipe), corpus, given)[:8]}"


def digest_of(name: str) -> str:
    """Return the digest in an `identity`, which is equal for recipes that differ only in their names."""
    return name.rpartition("-")[2]


def trial(recipe: Recipe, folder: Path, name: str, seed: int) -> Recipe:
    """Return the recipe of one training: run NAME-SEED in `folder`. Only seed 1 scores the recipe's n-gram baseline.

    With `train.minutes`, each training measures its own steps. Else one measurement would favour the same recipe at all seeds.
    """
    return recipe.changed(
        run={"name": f"{name}-{seed}", "dir": str(folder), "seed": seed}, checkpoint={"mirror": None},
        train={"steps": recipe.train.steps if recipe.train.minutes is None else None},
        evaluate={"ngram": recipe.evaluate.ngram and seed == 1}, export={"hf": False},
    )  # fmt: skip


def finished_pairs(folder: Path, names: Sequence[str]) -> int:
    """Return the number of seeds, from 1 on, with which all these recipes are trained and evaluated in `folder`."""
    seeds = (
        seed
        for seed in count(1)
        if not all(RunDirectory(folder / f"{name}-{seed}").evaluation.exists() for name in names)
    )
    return next(seeds) - 1


def require_comparable(sides: Sequence[tuple[Recipe, TokenStore]]) -> bool:
    """Return True if trainings of A and B with the same seed read the same samples in the same order.

    Args:
        sides: Recipe and tokens of A and B. The recipes have every value that follows from the text.

    Raises:
        InputError: A recipe has no bits per byte, or the two are not scored on the same text.
    """
    texts = []
    for recipe, store in sides:
        if recipe.predicts_hidden or recipe.train.objective == "classify" or not store.counts_bytes:
            why = "its tokens do not encode all text, or its model does not predict the next token"
            raise InputError(f"{store.folder}: it has no bits per byte ({why}); change tokenizer or train.objective")
        documents = sorted(document.identity for document in store.documents("heldout"))
        texts.append((sum(int(part.bytes.sum()) for part in held_out_samples(recipe, store)), documents))
    (a_bytes, a_documents), (b_bytes, b_documents) = texts
    if a_documents != b_documents or abs(a_bytes - b_bytes) > BYTES_TOLERANCE * a_bytes:
        what = f"A scores {a_bytes:,} bytes of {len(a_documents):,} documents and B {b_bytes:,} of {len(b_documents):,}"
        same = "give both the same [corpus], tokens.held_out, tokens.seed and tokens.packing"
        raise InputError(f"tokens.held_out: {what}, which is not the same text; {same}")
    orders = [(store.digest, recipe.tokens, recipe.source_weights, recipe.train.max_epochs) for recipe, store in sides]
    return orders[0] == orders[1]


def read_side(reference: str, done: Sequence[RunDirectory]) -> Json:
    """Return a dict about the trainings of one recipe, with `scores`, the held-out bits per byte of each seed.

    `done` has one finished run for each seed, and `reference` names the recipe. Other keys are name, recipe, minutes, and
    the means seconds, steps, tokens and parameters.
    """
    found = [data.read(run) for run in done]
    scores = [data.as_number(one.evaluation, "bits_per_byte") for one in found]
    if None in scores:
        raise BessemerError(f"{done[scores.index(None)].path}: its loss is not finite; lower the learning rate")
    seconds = [data.number_or_0(one.times, "total") - data.number_or_0(one.times, "stopped") for one in found]
    return {
        "name": done[0].path.name.rpartition("-")[0], "recipe": reference, "scores": scores,
        "seconds": float(np.mean(seconds)), "minutes": data.value_at(found[0].recipe, "train", "minutes"),
        **{
            key: round(float(np.mean([data.number_or_0(one.plan, key) for one in found])))
            for key in ("steps", "tokens", "parameters")
        },
        "model_size": found[0].model_size,
    }  # fmt: skip


def summarize(differences: Sequence[float]) -> Json:
    """Return the `mean` of paired differences, its 95% interval (`low`, `high`) and the p-value `p`, by Student's t-test.

    All but the mean are None for a single pair.
    """
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return {"mean": mean, "low": None, "high": None, "p": None}
    if np.ptp(differences) == 0:
        return {"mean": mean, "low": mean, "high": mean, "p": float(mean == 0)}
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - ERROR)
    return {"mean": mean, "low": float(low), "high": float(high), "p": float(test.pvalue)}


def level(look: int) -> float:
    """Return the p-value below which comparison number `look` (from 1) decides. The levels of all looks add up to ERROR."""
    return ERROR / (look * (look + 1))


def seeds_needed(differences: Sequence[float], error: float) -> int | None:
    """Return the fewest pairs whose p-value would be below `error` at the differences' mean and spread; None above MOST_SEEDS."""
    counts = np.arange(2, MOST_SEEDS + 1)
    halves = stats.t.isf(error / 2, counts - 1) * np.std(differences, ddof=1) / np.sqrt(counts)
    enough = counts[halves < abs(np.mean(differences))]
    return int(enough[0]) if enough.size else None


def record_look(ledger: Path, row: Json) -> int:
    """Record a look (one comparison with a baseline, `row["a"]`) in the ledger, and return its number.

    Looks at one baseline are numbered from 1. A look that is already recorded, also with swapped sides, keeps its number. One
    at a single pair has 0, because it decides nothing. Raises InputError for a damaged ledger.
    """
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    rows = read_json_lines(ledger)
    if len(rows) < len(lines):
        raise InputError(f"{ledger}: damaged; restore it, because verdicts are corrected for the looks that it records")
    sides, swapped = [digest_of(row[key]) for key in ("a", "b")], [-difference for difference in row["differences"]]
    earlier = [([digest_of(one["a"]), digest_of(one["b"])], one) for one in rows]
    for pair, one in earlier:
        if (pair, one["differences"]) in ((sides, row["differences"]), (sides[::-1], swapped)):
            return int(one["look"])
    look = 0 if row["p"] is None else 1 + sum(one["look"] > 0 and sides[0] in pair for pair, one in earlier)
    line = json.dumps({"time": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", **row, "look": look})
    write_atomic(ledger, "\n".join([*lines, line, ""]))
    return look


def judge(folder: Path, a: Json, b: Json, *, same_order: bool) -> Json:
    """Compare the trainings of A and B, as `read_side` returns them, and return the result, which is also saved in `folder`.

    It has the `differences` of scores with their summary, the `look` and its `level`, which is `better` (None if undecided), the
    `seeds_needed` to decide, and `answers` for the reader. `same_order` is the result of `require_comparable`.
    """
    differences = [second - first for first, second in zip(a["scores"], b["scores"], strict=True)]
    found = summarize(differences)
    row = {"a": a["name"], "b": b["name"], "differences": differences, **found}
    look = record_look(folder / "comparisons.jsonl", row)
    is_decided = look > 0 and found["p"] < level(look)
    result: Json = {
        "a": a, "b": b, "differences": differences, **found, "look": look, "level": level(look) if look else None,
        "better": ("A" if found["mean"] > 0 else "B") if is_decided else None, "same_order": same_order,
        "seeds_needed": seeds_needed(differences, level(look + 1)) if look and not is_decided else None,
    }  # fmt: skip
    result["answers"] = sentences(result)
    write_json(folder / f"{a['name']}-vs-{b['name']}.json", result)
    return result


def sentences(result: Json) -> dict[str, str]:
    """Return the verdict, the difference and the next steps, one sentence each, by topic."""
    a, b, look, needed = result["a"], result["b"], result["look"], result["seeds_needed"]
    verdict = f"{result['better']} is better" if result["better"] else "not decided"
    reason, interval = "one pair does not show how much chance changes a score; give --seeds 3 or more", ""
    if look:
        reason = f"p = {result['p']:.2g}, and look {look} at this baseline decides below {result['level']:.2g}"
        interval = f" (95%: {result['low']:+.4f} to {result['high']:+.4f})"
    answers = {
        "verdict": f"{verdict}: {reason}",
        "difference": f"{result['mean']:+.4f}{interval} bits per byte, the mean of B - A",
        "another seed": f"about {duration(a['seconds'] + b['seconds'])} for both recipes",
    }
    if look and not result["better"]:
        more = f"--seeds {needed:,} would decide it" if needed else f"even {MOST_SEEDS:,} would not decide it"
        answers["more seeds"] = f"{more} at this mean and spread"
    if budgets := [f"{key} ({a[key]} and {b[key]})" for key in ("minutes", "steps", "tokens") if a[key] != b[key]]:
        answers["budgets"] = f"A and B differ in {', '.join(budgets)}, and the verdict includes this difference"
    if not result["same_order"]:
        answers["order"] = "the recipes cut or mix the text differently, so pairs share the seed but not the order"
    return answers


def table(result: Json) -> str:
    """Format a result for the terminal."""
    a, b, differences = result["a"], result["b"], result["differences"]
    scores = enumerate(zip(a["scores"], b["scores"], differences, strict=True), 1)
    rows = [[f"seed {seed}", f"{x:.4f}", f"{y:.4f}", f"{d:+.4f}"] for seed, (x, y, d) in scores]
    rows.append(["model", a["model_size"], b["model_size"], ""])
    rows += [[key, amount(a[key]), amount(b[key]), ""] for key in ("steps", "tokens")]
    rows.append(["time of a seed", duration(a["seconds"]), duration(b["seconds"]), ""])
    names = (f"{name:<13} {side['recipe']} ({side['name']})" for name, side in (("A", a), ("B", b)))
    answers = (f"{name:<13} {sentence}" for name, sentence in result["answers"].items())
    return "\n".join([*names, "", *text_table(("", "A", "B", "B - A"), rows, "l"), "", *answers])
