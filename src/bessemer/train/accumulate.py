"""Gradients of several micro-batches, added up: one after the other, or two at a time on a CPU.

Two micro-batches that each have half of the threads finish sooner than one after the other with all of them: the operations
between the large products are too short to be split well, and every split waits for the slower thread. With one thread each
on two cores a step was 8 to 13% faster, more beside a busy neighbour (docs/notes/cpu-step.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from bessemer.recipe import Recipe
from bessemer.train.task import Outcome

Loss = Callable[[], Outcome]  # of one micro-batch

WORKERS = 2


def concurrent(micro_batches: int, place: torch.device, compiled: bool) -> bool:
    """Whether micro-batches run two at a time: eagerly on a CPU, with the threads and the micro-batches for it."""
    return place.type == "cpu" and not compiled and micro_batches >= WORKERS and torch.get_num_threads() >= WORKERS


def micro_batches_together(recipe: Recipe, place: torch.device, compiled: bool) -> int:
    """How many micro-batches of a resolved recipe are computed at a time."""
    batch, micro = recipe.train.global_batch_tokens, recipe.train.micro_batch
    assert batch is not None and micro is not None, "the recipe is resolved"
    return WORKERS if concurrent(batch // recipe.tokens.sequence_length // micro, place, compiled) else 1


def accumulate(
    losses: Sequence[Loss], parameters: Sequence[Tensor], divisor: int, factor: float = 1.0, *, two_at_a_time: bool
) -> list[Outcome]:
    """Put the gradient of sum(losses) / divisor * factor into the parameters' `.grad`, which must be None before.

    Returns the outcome of each loss, detached, in order. The gradients are added in the order of the losses either way,
    so the same threads give the same bits. Losses that run two at a time must not draw from torch's random numbers.
    """
    if not two_at_a_time:
        return _one_by_one(losses, divisor, factor)
    threads = max(torch.get_num_threads() // WORKERS, 1)
    if torch.autograd._profiler_enabled():  # it sees one thread, and its times are to add up: the same bits, in turns
        with _threads(threads):
            return _one_by_one(losses, divisor, factor)
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def gradients(loss: Loss) -> tuple[tuple[Tensor | None, ...], Outcome]:
        found = loss()
        return torch.autograd.grad(found.total / divisor * factor, trained, allow_unused=True), _detached(found)

    # No more than WORKERS sets of gradients wait at a time, besides the sum.
    pool = _pool(threads)
    ahead: list[Future[tuple[tuple[Tensor | None, ...], Outcome]]] = []
    rest, known = list(losses), []
    while rest or ahead:
        while rest and len(ahead) < WORKERS:
            ahead.append(pool.submit(gradients, rest.pop(0)))
        found, outcome = ahead.pop(0).result()
        if rest:
            ahead.append(pool.submit(gradients, rest.pop(0)))
        _add(trained, found)
        del found
        known.append(outcome)
    return known


def _one_by_one(losses: Sequence[Loss], divisor: int, factor: float) -> list[Outcome]:
    known = []
    for loss in losses:
        found = loss()
        torch.autograd.backward(found.total / divisor * factor)
        known.append(_detached(found))
    return known


def _detached(found: Outcome) -> Outcome:
    return replace(found, total=found.total.detach())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _add(parameters: list[Tensor], gradients: tuple[Tensor | None, ...]) -> None:
    sums, parts = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            parts.append(gradient)
    if sums:
        torch._foreach_add_(sums, parts)


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Workers whose operations use so many threads each; torch keeps that number by thread."""
    return ThreadPoolExecutor(WORKERS, "micro-batch", initializer=torch.set_num_threads, initargs=(threads,))
