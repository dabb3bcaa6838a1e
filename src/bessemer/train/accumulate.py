"""Gradients of several micro-batches, added up: one after the other, or two at a time on a CPU.

Two micro-batches that each have half of the threads finish sooner than one after the other with all of them: the operations
between the large products are too short to be split well, and every split waits for the slower thread. With one thread each
on two cores a step was 8 to 13% faster, more beside a busy neighbour (docs/notes/cpu-step.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

# Differentiable sum of a micro-batch's losses, and what else is to be known of it.
Loss = Callable[[], tuple[Tensor, Tensor]]

WORKERS = 2


def concurrent(micro_batches: int, place: torch.device, compiled: bool) -> bool:
    """Whether micro-batches run two at a time: eagerly on a CPU, with the threads and the micro-batches for it."""
    return place.type == "cpu" and not compiled and micro_batches >= WORKERS and torch.get_num_threads() >= WORKERS


def accumulate(
    losses: Sequence[Loss], parameters: Sequence[Tensor], divisor: int, *, two_at_a_time: bool
) -> list[Tensor]:
    """Put the gradient of sum(losses) / divisor into the parameters' `.grad`, which must be None before.

    Returns the second value of each loss, in order. The gradients are added in the order of the losses either way, so the
    same threads give the same bits. Losses that run two at a time must not draw from torch's random numbers.
    """
    if not two_at_a_time:
        known = []
        for loss in losses:
            total, more = loss()
            torch.autograd.backward(total / divisor)
            known.append(more)
        return known
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def gradients(loss: Loss) -> tuple[tuple[Tensor | None, ...], Tensor]:
        total, more = loss()
        return torch.autograd.grad(total / divisor, trained, allow_unused=True), more

    # No more than WORKERS sets of gradients wait at a time, besides the sum.
    pool = _pool(max(torch.get_num_threads() // WORKERS, 1))
    ahead: list[Future[tuple[tuple[Tensor | None, ...], Tensor]]] = []
    rest, known = list(losses), []
    while rest or ahead:
        while rest and len(ahead) < WORKERS:
            ahead.append(pool.submit(gradients, rest.pop(0)))
        found, more = ahead.pop(0).result()
        if rest:
            ahead.append(pool.submit(gradients, rest.pop(0)))
        _add(trained, found)
        del found
        known.append(more)
    return known


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
