"""Statistics of layers every few steps: activations, attention logits, gradients, updates, over all processes of the mesh.

They do not change the step: losses and weights are bit-identical with and without them. To add one, add an entry to METRICS.

Shapes: B sequences (one), T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.sharded_tensors import local, num_replicas
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.trends import Trends
from bessemer.model.attention import AttentionFunction
from bessemer.model.attention_scope import AttentionScope
from bessemer.tokens.loader import Batch
from bessemer.train.attention_logits import largest_logits
from bessemer.train.engine import MicroBatch
from bessemer.train.metrics import MetricsLog
from bessemer.train.trainer import Trainer

SAMPLE = 65_536  # elements of a tensor from which its update is estimated


@dataclass(frozen=True)
class LayerMetric:
    """A statistic of each block or group of parameters.

    Attributes:
        source: The tensors that it is computed from. "output" is the output of a block (fp32), "attention" the queries, keys
            and AttentionScope (which keys a query sees) of a block, "gradient" the gradient of a parameter before clipping, and
            "update" a parameter and its change, of which at most SAMPLE elements are taken.
        measure: Returns terms from a process's tensors, such as a sum and a count: numbers, or scalars on the device.
        value: Returns the statistic from the terms, each combined over layers and processes.
        is_max: True to combine terms by their maximum, not their sum.
    """

    source: Literal["output", "attention", "gradient", "update"]
    measure: Callable[..., tuple[Tensor | int, ...]]
    value: Callable[..., float] = float
    is_max: bool = False


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.double().square()


METRICS = {
    "activation_rms": LayerMetric(
        "output", lambda out: (_square(out), out.numel()), lambda square, count: math.sqrt(square / count)
    ),
    "activation_max": LayerMetric("output", lambda out: (out.abs().max(),), is_max=True),
    # The largest unmasked logit, q.k x scale, before a soft cap.
    "attention_logit_max": LayerMetric("attention", lambda *qk: (largest_logits(*qk).max(),), is_max=True),
    "grad_norm": LayerMetric("gradient", lambda gradient: (_square(gradient),), math.sqrt),
    # It is about 1e-3 in a healthy run with Adam.
    "update_ratio": LayerMetric(
        "update", lambda old, change: (_square(change), _square(old)), lambda new, old: math.sqrt(new / max(old, 1e-24))
    ),
}


class Terms:
    """The terms of each `LayerMetric` and layer on this process, which `values` combines over all processes."""

    def __init__(self) -> None:
        self._terms: dict[tuple[str, str], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, source: str, layer: str, *tensors: Any, share: float = 1.0) -> None:
        """Add the terms of all metrics of a source (`LayerMetric.source`), computed from a layer's tensors.

        Terms that are summed are multiplied by `share`, such as 1 / replicas for tensors that several processes add.
        """
        for name, metric in METRICS.items():
            if metric.source == source and tensors[0].numel():
                device, weight = tensors[0].device, 1.0 if metric.is_max else share
                terms = [torch.as_tensor(term, device=device).double() for term in metric.measure(*tensors)]
                self._terms.setdefault((name, layer), []).append(weight * torch.stack(terms))

    def values(self, mesh: ProcessMesh) -> dict[str, dict[str, float]]:
        """Return the value of each metric by layer, in order: {metric: {layer: value}}. All ranks must call it."""
        own = {key: _reduced(key[0], torch.stack(terms)) for key, terms in self._terms.items()}
        if own:  # all in one transfer, since each transfer synchronises the device
            device, lengths = next(iter(own.values())).device, list(map(len, own.values()))
            host = torch.cat([terms.to(device) for terms in own.values()]).cpu()
            own = dict(zip(own, torch.split(host, lengths), strict=True))
        by_key: dict[tuple[str, str], list[Tensor]] = {}
        for of_rank in mesh.gather(own):
            for key, terms in of_rank.items():
                by_key.setdefault(key, []).append(terms)
        values: dict[str, dict[str, float]] = {name: {} for name in METRICS}
        for name, layer in sorted(by_key, key=lambda key: key[1].partition(".")[0].zfill(6)):
            values[name][layer] = METRICS[name].value(*_reduced(name, torch.stack(by_key[name, layer])).tolist())
        return values


def _reduced(name: str, terms: Tensor) -> Tensor:
    return terms.amax(0) if METRICS[name].is_max else terms.sum(0)


class LayerMonitor:
    """A context around each update that logs layer statistics of every `every`-th step; 0 logs none.

    The lines in metrics.jsonl have the kind "inside".
    """

    def __init__(self, trainer: Trainer, log: MetricsLog, trends: Trends, every: int, sample: int = SAMPLE) -> None:
        self.trainer, self.log, self.trends, self.every, self.sample = trainer, log, trends, every, sample

    def is_due(self, number: int) -> bool:
        """Return True if the update of step `number` (1-based) is measured."""
        return self.every > 0 and number % self.every == 0

    @contextmanager
    def __call__(self, number: int, batch: Batch, skip: Tensor) -> Iterator[None]:
        """Return a context in which the update of step `number` (1-based) runs, after its backward pass, and which measures it.

        `skip` is a scalar on the device; a skipped update (1) is not measured. The host reads it only if `is_due`.
        """
        if not self.is_due(number) or self.trainer.device.read(skip):
            yield
            return
        started, terms = perf_counter(), Terms()
        _add_blocks(terms, self.trainer, batch)
        parameters = {name: p for name, p in owned_parameters(self.trainer.model) if p.requires_grad}
        shares = {name: 1.0 / num_replicas(p, self.trainer.mesh) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                terms.add("gradient", group_of(name), local(parameter.grad), share=shares[name])
        before = {name: self._sampled(parameter).clone() for name, parameter in parameters.items()}
        seconds = perf_counter() - started
        yield
        started = perf_counter()
        for name, old in before.items():
            share = shares[name] * local(parameters[name]).numel() / max(len(old), 1)
            terms.add("update", group_of(name), old, self._sampled(parameters[name]) - old, share=share)
        statistics = terms.values(self.trainer.mesh)
        seconds += perf_counter() - started
        self.log.write("inside", number, **statistics, seconds=seconds)
        self.trends.add_statistics(number, statistics)

    def _sampled(self, parameter: Tensor) -> Tensor:
        """Return at most `sample` evenly spread elements of this process's shard of a parameter."""
        values = local(parameter).detach().flatten()
        return values[:: max(-(-len(values) // self.sample), 1)]


@torch.no_grad()
def _add_blocks(terms: Terms, trainer: Trainer, batch: Batch) -> None:
    """Add outputs and attention of each block, in the step's precision, for the first sequence of each process's batch.

    This is an extra, uncompiled forward pass: hooks in the step itself would not run in compiled blocks, and a pass without
    gradients costs a third of a sequence.
    """
    with ExitStack() as stack:
        for number, block in enumerate(trainer.model.blocks):
            if block is not None:  # None is a block of another pipeline stage
                stack.enter_context(_recording(block, str(number), terms))
        stack.enter_context(trainer.eager())
        trainer.engine.score(MicroBatch.from_batch(batch).split(1)[0])


@contextmanager
def _recording(block: nn.Module, layer: str, terms: Terms) -> Iterator[None]:
    """Add the outputs of a block and the queries and keys of its attention to `terms`, within the context."""
    attention: Any = block.attention

    def recording(attend: AttentionFunction) -> AttentionFunction:
        def record_logits(q: Tensor, k: Tensor, v: Tensor, scope: AttentionScope, masks: Any = None) -> Tensor:
            terms.add("attention", layer, q, k, scope)
            return attend(q, k, v, scope, masks)

        return record_logits

    before, own = attention.attend, vars(attention).get("attend")
    if isinstance(before, partial):  # context parallelism gathers the keys before its inner function
        attention.attend = partial(before.func, **{**before.keywords, "inner": recording(before.keywords["inner"])})
    else:
        attention.attend = recording(before)
    hook = block.register_forward_hook(lambda block, arguments, out: terms.add("output", layer, local(out).float()))
    try:
        yield
    finally:
        hook.remove()
        del attention.attend
        if own is not None:
            attention.attend = own


def group_of(name: str) -> str:
    """Return the group of a parameter: "N.attention" and "N.mlp" of block N, embedding, head, norms."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if parts[0] == "blocks":
        return f"{parts[1]}.{parts[2]}"
    return "head" if parts[0] in ("head", "classifier") else "embedding"
