"""Scores of a causal model on evaluation tasks: log-likelihoods of continuations, what is made of them, and intervals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bessemer.errors import InputError
from bessemer.model.generation import Sampling, complete
from bessemer.model.transformer import Transformer
from bessemer.tasks.files import SCORE_NAMES, EvaluationTask, Item
from bessemer.tokens.pieces import Framing
from bessemer.tokens.tokenizer import Tokenizer

BATCH_TOKENS = 4096  # of a forward pass, padding included, at the most
DRAWS, WITHIN, NORMAL = 1000, 0.95, 1.959964  # of the bootstrap; a normal distribution has so much within NORMAL
SHARES = ("accuracy", "accuracy_norm", "exact_match")  # of the items


@dataclass(frozen=True)
class ScoredModel:
    """A causal model that is examined. framing: what stands before a text; ends: ids that end what is written; autocast: context
    in which matmuls run in the recipe's precision."""

    model: Transformer
    tokenizer: Tokenizer
    framing: Framing
    ends: Sequence[int]
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def before(self) -> list[int]:
        """The ids before a text; end-of-text where a document begins with none, since something has to be conditioned on."""
        return list(self.framing.before) or [self.tokenizer.end_of_text]


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation after its context. nats: -log-likelihood; tokens: of it; is_greedy: each is the likeliest; left_out:
    tokens of context and continuation, from their beginning, for which the model has no position."""

    nats: float
    tokens: int
    is_greedy: bool
    left_out: int = 0


@dataclass(frozen=True)
class TaskScore:
    """scores: by SCORE_NAMES, each with `low` and `high`, the ends of a 95% bootstrap interval over the items; cut: items whose
    prompt lost its beginning, since the model has too few positions; rows: one for each item."""

    name: str
    kind: str
    items: int
    few_shot: int
    scores: dict[str, dict[str, float | None]]
    seconds: float
    cut: int
    rows: list[dict[str, Any]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the rows."""
        return {name: value for name, value in vars(self).items() if name != "rows"}


def main_score(task: dict[str, Any]) -> str:
    """The first score of a task (`TaskScore.to_dict`), for one line."""
    name, score = next(iter(task["scores"].items()))
    return f"{task['name']}: {SCORE_NAMES[name]} {score['value']:.3f}"


def score_task(
    task: EvaluationTask, subject: ScoredModel, advance: Callable[[float], None] = lambda count: None
) -> TaskScore:
    """Score a causal model on a task. Raises InputError for an answer without a token of its own, or with more than the model has
    positions."""
    begun, file, cut = perf_counter(), task.file, 0
    if file.kind == "exact":
        values, rows = _exact(task, subject, advance)
    elif file.kind == "text":
        values, rows = _text(task, subject, advance)
    else:
        pairs = [(item.context, text) for item in task.items for text in item.continuations]
        found = iter(likelihoods(subject, pairs, advance))
        each = [[next(found) for _ in item.continuations] for item in task.items]
        for number, (item, ones) in enumerate(zip(task.items, each, strict=True), 1):
            _require_scored(task, subject, number, item, ones)
        cut = sum(any(one.left_out for one in ones) for ones in each)
        values, rows = _choice(task.items, each, file.joiner) if file.kind == "choice" else _cloze(task.items, each)
    scores = {name: _interval(name, *pair) for name, pair in values.items()}
    return TaskScore(file.name, file.kind, len(task.items), file.few_shot, scores, perf_counter() - begun, cut, rows)


def _require_scored(
    task: EvaluationTask, subject: ScoredModel, number: int, item: Item, found: Sequence[Likelihood]
) -> None:
    limit = subject.model.config.positions_length
    for text, one in zip(item.continuations, found, strict=True):
        where = f"task {task.file.name}: {task.place}, row {number}: the answer {text[:40]!r}"
        if not one.tokens:
            raise InputError(
                f"{where} adds no token to the prompt's end {item.context[-20:]!r}, as the tokenizer joins them; end the prompt "
                "where a word ends, or change joiner"
            )
        if one.tokens == limit and one.left_out > len(subject.tokenizer.encode(item.context)):
            raise InputError(f'{where} has more than the model\'s {limit} tokens; score long texts by kind = "text"')


Values = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
"""By score: numerator and denominator of each item. The score is the ratio of their sums."""


def _choice(
    items: Sequence[Item], each: Sequence[Sequence[Likelihood]], joiner: str
) -> tuple[Values, list[dict[str, Any]]]:
    """accuracy_norm divides by the characters of a choice without what joins it to the prompt."""
    right, right_norm, nats, sizes, rows = [], [], [], [], []
    for item, found in zip(items, each, strict=True):
        scores = [-one.nats for one in found]
        lengths = [len(text.removeprefix(joiner)) for text in item.continuations]
        by_length = [score / max(length, 1) for score, length in zip(scores, lengths, strict=True)]
        best, best_norm = int(np.argmax(scores)), int(np.argmax(by_length))
        right.append(best == item.right)
        right_norm.append(best_norm == item.right)
        nats.append(found[item.right].nats)
        sizes.append(len(item.continuations[item.right].encode()))
        rows.append({"right": item.right, "best": best, "best_norm": best_norm, "log_likelihoods": scores})
    ones = np.ones(len(items))
    return {
        "accuracy": (np.array(right, float), ones), "accuracy_norm": (np.array(right_norm, float), ones),
        "bits_per_byte": (np.array(nats) / math.log(2), np.array(sizes, float)),
    }, rows  # fmt: skip


def _cloze(items: Sequence[Item], each: Sequence[Sequence[Likelihood]]) -> tuple[Values, list[dict[str, Any]]]:
    found = [one for (one,) in each]
    nats, ones = np.array([one.nats for one in found]), np.ones(len(found))
    sizes = np.array([len(item.continuations[0].encode()) for item in items], float)
    rows = [{"greedy": one.is_greedy, "log_likelihood": -one.nats, "tokens": one.tokens} for one in found]
    return {
        "accuracy": (np.array([one.is_greedy for one in found], float), ones), "perplexity": (nats, ones),
        "bits_per_byte": (nats / math.log(2), sizes),
    }, rows  # fmt: skip


def _exact(
    task: EvaluationTask, subject: ScoredModel, advance: Callable[[float], None]
) -> tuple[Values, list[dict[str, Any]]]:
    right, rows = [], []
    for item in task.items:
        text = complete(
            subject.model, subject.tokenizer, item.context, task.file.max_tokens, Sampling(), subject.framing, subject.ends,
            cut=task.file.stop, is_marked=False,
        )  # fmt: skip
        stops = [place for stop in task.file.stop if (place := text.find(stop)) >= 0]
        written = text[: min(stops)] if stops else text
        accepted = {_normal(answer, task.file.ignore_case) for answer in item.answers}
        right.append(_normal(written, task.file.ignore_case) in accepted)
        rows.append({"written": written, "answers": item.answers, "right": right[-1]})
        advance(1)
    return {"exact_match": (np.array(right, float), np.ones(len(right)))}, rows


def _normal(text: str, ignore_case: bool) -> str:
    """White space as single spaces, without a full stop at the end."""
    plain = re.sub(r"\s+", " ", text).strip().removesuffix(".")
    return plain.lower() if ignore_case else plain


def _text(
    task: EvaluationTask, subject: ScoredModel, advance: Callable[[float], None]
) -> tuple[Values, list[dict[str, Any]]]:
    """Each text in windows of the model's length, that do not overlap."""
    length = subject.model.config.sequence_length
    windows: list[tuple[list[int], list[int]]] = []
    owners, sizes = [], []
    for number, item in enumerate(task.items):
        ids = subject.tokenizer.encode(item.continuations[0])
        for start in range(0, len(ids), length):
            context = subject.before if start == 0 else [ids[start - 1]]
            windows.append((context, ids[start : start + length]))
            owners.append(number)
        sizes.append(len(item.continuations[0].encode()))
    nats = np.zeros(len(task.items))
    each = len(task.items) / max(len(windows), 1)
    scored = _score_ids(subject, windows, lambda count: advance(each * count))
    for owner, one in zip(owners, scored, strict=True):
        nats[owner] += one.nats
    rows = [{"bits_per_byte": bits / max(size, 1)} for bits, size in zip(nats / math.log(2), sizes, strict=True)]
    return {"bits_per_byte": (nats / math.log(2), np.array(sizes, float))}, rows


def _interval(name: str, numerators: NDArray[np.float64], denominators: NDArray[np.float64]) -> dict[str, float | None]:
    """The score and its bootstrap interval (percentiles; Efron 1979), with a fixed seed. Where draws of the items cannot differ:
    of shares the interval of Wilson 1927 (equation 3), of one item's other scores none."""
    shown: Callable[[Any], Any] = np.exp if name == "perplexity" else lambda value: value
    generator = np.random.default_rng(0)
    index = generator.integers(0, len(numerators), (DRAWS, len(numerators)))
    draws = numerators[index].sum(1) / np.maximum(denominators[index].sum(1), 1e-12)
    low, high = np.quantile(draws, [(1 - WITHIN) / 2, (1 + WITHIN) / 2])
    value = numerators.sum() / max(denominators.sum(), 1e-12)
    if low == high and name in SHARES:
        edge = NORMAL**2 / (len(numerators) + NORMAL**2)
        low, high = (0.0, edge) if value == 0.0 else (1.0 - edge, 1.0)
    elif len(numerators) == 1:
        return {"value": float(shown(value)), "low": None, "high": None}
    return {"value": float(shown(value)), "low": float(shown(low)), "high": float(shown(high))}


def likelihoods(
    subject: ScoredModel, pairs: Sequence[tuple[str, str]], advance: Callable[[float], None] = lambda count: None
) -> list[Likelihood]:
    """Of each continuation after its context. Both are encoded together, and the continuation's tokens are those that the context
    alone does not have, with white space at the context's end counted to it (as lm-evaluation-harness does); a context that is
    too long loses its beginning."""
    encoded = []
    for context, text in pairs:
        bare = context.rstrip()
        whole = subject.tokenizer.encode(context + text)
        start = len(subject.tokenizer.encode(bare)) if bare else 0
        encoded.append(([*subject.before, *whole[:start]], whole[start:]))
    return _score_ids(subject, encoded, advance)


@torch.no_grad()
def _score_ids(
    subject: ScoredModel, pairs: Sequence[tuple[list[int], list[int]]], advance: Callable[[float], None]
) -> list[Likelihood]:
    """Of each continuation (ids) after its context (ids), in batches of sequences of like length."""
    limit, device = subject.model.config.positions_length, next(subject.model.parameters()).device
    rows = [((context + text)[-(limit + 1) :], min(len(text), limit)) for context, text in pairs]
    left_out = [max(len(context) + len(text) - limit - 1, 0) for context, text in pairs]
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number][0]))
    found: list[Likelihood | None] = [None] * len(rows)
    start = 0
    while start < len(order):
        width = max(len(rows[order[start]][0]) - 1, 1)
        part = order[start : start + max(BATCH_TOKENS // width, 1)]
        inputs_BT = torch.zeros((len(part), width), dtype=torch.int64)
        for place, number in enumerate(part):
            ids = rows[number][0][:-1]
            inputs_BT[place, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        with subject.autocast():
            hidden_BTD = subject.model(inputs_BT.to(device))
        for place, number in enumerate(part):
            ids, count = rows[number]
            if not count:
                found[number] = Likelihood(0.0, 0, True, left_out[number])
                continue
            with subject.autocast():
                logits_SV = subject.model.head.logits(hidden_BTD[place, len(ids) - 1 - count : len(ids) - 1])
            logits_SV = logits_SV if logits_SV.dtype == torch.float64 else logits_SV.float()
            targets_S = torch.tensor(ids[-count:], device=device)
            picked_S = logits_SV.log_softmax(-1).gather(1, targets_S[:, None])
            is_greedy = bool((logits_SV.argmax(-1) == targets_S).all())
            found[number] = Likelihood(-float(picked_S.double().sum()), count, is_greedy, left_out[number])
        advance(len(part))
        start += len(part)
    return [one for one in found if one is not None]
