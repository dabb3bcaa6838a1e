"""The adapter of a model to lm-evaluation-harness, and the scoring of tasks.

Import this module only to score a task, because importing the harness takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from scipy.stats import binomtest
from torch.nn.utils.rnn import pad_sequence

from bessemer.common.errors import InputError
from bessemer.evaluate.task_files import FEWSHOT_SEED, EvaluationTask
from bessemer.model.kernels import upcast
from bessemer.tokens.tokenizer.text_stream import stream_text
from bessemer.train.generation import Sampling, generate
from bessemer.train.setup import ScoredModel

BATCH_TOKENS = 4096  # tokens per forward pass, including padding
NORMAL = 1.959964  # standard errors on each side of a mean in a 95% interval
MAX_NEW_TOKENS = 256  # default limit of an answer, as in the harness

EncodedPair = tuple[tuple[str, str], list[int], list[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A causal model with its tokenizer as lm-evaluation-harness expects it.

    The base class encodes context and continuation together, as for exported models.

    Attributes:
        num_truncated: Number of texts in the last requests whose context lost its beginning.
    """

    def __init__(self, subject: ScoredModel, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._subject, self._advance = subject, advance
        self._limit = subject.model.config.positions_length
        self.num_truncated = 0

    @property
    def eot_token_id(self) -> int:
        return self._subject.before[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text after the ids that begin a document; special tokens in it are ordinary text."""
        before = [] if add_special_tokens is False else self._subject.before
        return [*before, *self._subject.tokenizer.encode(string)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each whole text, in non-overlapping windows of the context length."""
        windows: list[EncodedPair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            text = str(request.args[0])
            ids = self.tok_encode(text, add_special_tokens=False)
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self._limit, context_len=1)
            windows += [((text, ""), *make_disjoint_window(window)) for window in rolling]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (log_likelihood, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_likelihood
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list[EncodedPair], **unused: Any) -> list[tuple[float, bool]]:
        """Return (log-likelihood of the continuation, True if greedy decoding writes it) for each request, in their order."""
        model, autocast = self._subject.model, self._subject.autocast
        device = next(model.parameters()).device
        rows = [(context + text)[-(self._limit + 1) :] for _, context, text in requests]
        for (context, answer), _, text in requests:
            if not 0 < len(text) <= self._limit:
                raise InputError(
                    f"evaluate.tasks: the answer {answer[:40]!r} to {context[-40:]!r} has {len(text)} tokens, and the model "
                    f"reads 1 to {self._limit}; change or remove this item"
                )
        self.num_truncated = sum(
            len(pair[1]) + len(pair[2]) > len(row) for pair, row in zip(requests, rows, strict=True)
        )
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
        results = [(0.0, False)] * len(rows)
        while order:
            width = len(rows[order[0]]) - 1
            size = max(BATCH_TOKENS // width, 1)
            part, order = order[:size], order[size:]
            inputs_BT = pad_sequence([torch.tensor(rows[number][:-1]) for number in part], batch_first=True)
            with autocast():
                hidden_BTD = model(inputs_BT.to(device))
            for index, number in enumerate(part):
                targets_S = torch.tensor(requests[number][2], device=device)
                end = len(rows[number]) - 1
                with autocast():
                    logits_SV = upcast(model.head.logits(hidden_BTD[index, end - len(targets_S) : end]))
                picked_S = logits_SV.log_softmax(-1).gather(1, targets_S[:, None])
                results[number] = float(picked_S.double().sum()), bool((logits_SV.argmax(-1) == targets_S).all())
            self._advance(len(part))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the greedy continuation of each context, up to one of the task's stop strings."""
        written = []
        for request in requests:
            context, options = request.args
            if options.get("do_sample"):
                raise InputError(
                    f"evaluate.tasks: {request.task_name}: only greedy answers are supported; set do_sample: false"
                )
            until = options.get("until") or []
            stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            count = options.get("max_gen_toks", MAX_NEW_TOKENS)
            length = max(self._limit - count, self._limit // 2)  # the answer needs positions too
            prompt = self.tok_encode(context)[-length:]
            tokens = generate(
                self._subject.model, prompt, max_tokens=count, sampling=Sampling(), ends=self._subject.ends
            )
            written.append("".join(stream_text(tokens, self._subject.tokenizer, stops)))
            self._advance(1)
        return written


def score_task(
    task: EvaluationTask,
    subject: ScoredModel,
    limit: int | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Score a causal model on a task.

    Args:
        task: The task.
        subject: The model with its tokenizer.
        limit: Number of first items to score; None: all.
        advance: Function called with the number of texts scored.

    Returns:
        The task's entry in evaluation.json, and one row for each item.
    """
    begun, model = perf_counter(), HarnessModel(subject, advance)
    task.task.set_fewshot_seed(FEWSHOT_SEED)  # every scoring draws the same examples
    output = evaluate(model, {"tasks": {task.name: task.task}}, limit=limit, bootstrap_iters=0)
    samples = output["samples"][task.name]
    scores = {}
    for key, value in output["results"][task.name].items():
        metric, comma, chosen = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            values = [row[metric] for row in samples if row["filter"] == chosen and metric in row]
            scores[metric if chosen == "none" else key] = {"value": value, **_interval(value, values)}
    kept = ("doc_id", "doc", "target", "resps", "filtered_resps", "filter")
    rows = [{key: row[key] for key in (*kept, *row["metrics"])} for row in samples]
    return {
        "name": task.name, "kind": task.task.OUTPUT_TYPE, "items": output["n-samples"][task.name]["effective"],
        "few_shot": task.task.config.num_fewshot or 0, "scores": scores, "cut": model.num_truncated,
        "seconds": perf_counter() - begun, "data": ", ".join(task.files), "reference": task.reference, "content": task.content,
    }, rows  # fmt: skip


def _interval(value: float, values: list[Any]) -> dict[str, float | None]:
    """Return the ends, `low` and `high`, of the 95% interval of `value`, the mean over the `values` of items.

    Its ends are None for scores that are not means, for a single item, and for equal values that are not shares.
    """
    is_mean = len(values) > 1 and all(isinstance(one, (int, float)) for one in values) and mean(values) == value
    is_share = is_mean and {*values} <= {0, 1}
    if not is_mean or (not is_share and len({*values}) == 1):
        return {"low": None, "high": None}
    if is_share:
        ends = binomtest(sum(map(int, values)), len(values)).proportion_ci(method="wilson")
        return {"low": float(ends.low), "high": float(ends.high)}
    error = NORMAL * mean_stderr(values)
    return {"low": value - error, "high": value + error}
