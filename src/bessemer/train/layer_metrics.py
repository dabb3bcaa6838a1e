"""Statistics from inside the model every few steps: activations, attention logits, gradients, updates.

They do not change the step: losses and weights are bit-identical with and without them. They are of all processes of the mesh.

Shapes: B sequences (one), T tokens, D width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.distributed.sharded_tensors import local, sum_of_squares
from bessemer.guard.trends import Trends
from bessemer.model.attention import AttentionFunction, largest_logits
from bessemer.model.attention_scope import AttentionScope
from bessemer.tokens.loader import Batch
from bessemer.train.engine import MicroBatch
from bessemer.train.metrics import MetricsLog
from bessemer.train.trainer import Trainer

SAMPLE = 65_536  # elements of a tensor by which its update is estimated

Values = dict[str, float]  # by parameter group or block


class Watch:
    """Context around each update; logs statistics of every `every`-th step as "inside" (0: of none)."""

    def __init__(self, trainer: Trainer, log: MetricsLog, trends: Trends, every: int) -> None:
        self.trainer, self.log, self.trends, self.every = trainer, log, trends, every

    def is_due(self, number: int) -> bool:
        """Whether the update of step `number` (1-based) is measured."""
        return self.every > 0 and number % self.every == 0

    @contextmanager
    def __call__(self, number: int, batch: Batch, updates: bool = True) -> Iterator[None]:
        """Context of the update of step `number` (1-based), after its backward pass. updates: False where it is skipped."""
        if not updates or not self.is_due(number):
            yield
            return
        started, model, mesh = perf_counter(), self.trainer.model, self.trainer.mesh
        statistics = activations(self.trainer, batch)
        norms, before = gradient_norms(model, mesh), sample(model)
        seconds = perf_counter() - started
        yield
        started = perf_counter()
        ratios = update_ratios(before, sample(model), mesh)
        seconds += perf_counter() - started
        self.log.write("inside", number, **statistics, grad_norm=norms, update_ratio=ratios, seconds=seconds)
        self.trends.measured(number, statistics)


@torch.no_grad()
def activations(trainer: Trainer, batch: Batch) -> dict[str, Values]:
    """Return, by block, the RMS and the largest absolute value of its output, and its largest unmasked attention logit (q.k x
    scale, before a soft cap), in the step's precision. They are of the first sequence of each part of the batch. Collective.

    An extra forward pass, uncompiled: hooks in the step itself would not run in compiled blocks, and a pass without gradients
    costs a third of a sequence.
    """
    seen: dict[str, list[Tensor]] = {}  # by block: largest logit, then number, sum of squares and largest of outputs
    with ExitStack() as stack:
        for number, block in enumerate(trainer.model.blocks):
            if block is not None:  # another pipeline stage has it
                stack.enter_context(_recording(block, seen.setdefault(str(number), [])))
        stack.enter_context(trainer.eager())
        trainer.engine.score(MicroBatch.of(batch).split(1)[0])
    own = {name: torch.stack([x.double() for x in values]).tolist() for name, values in seen.items()}
    by_block: dict[str, list[list[float]]] = {}
    for of_rank in trainer.mesh.gather(own):
        for name, values in of_rank.items():
            by_block.setdefault(name, []).append(values)
    found: dict[str, Values] = {"activation_rms": {}, "activation_max": {}, "attention_logit_max": {}}
    for name in sorted(by_block, key=int):
        logits, counts, squares, largest = torch.tensor(by_block[name], dtype=torch.float64).unbind(1)
        found["activation_rms"][name] = math.sqrt(squares.sum() / counts.sum())
        found["activation_max"][name] = float(largest.max())
        found["attention_logit_max"][name] = float(logits.max())
    return found


@contextmanager
def _recording(block: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    """Append the largest logit of a block's attention, and the number, sum of squares and largest of its outputs, to `seen`."""
    attention: Any = block.attention

    def recording(attend: AttentionFunction) -> AttentionFunction:
        def record_logits(q: Tensor, k: Tensor, v: Tensor, scope: AttentionScope, masks: Any = None) -> Tensor:
            seen.append(largest_logits(q, k, scope).max())
            return attend(q, k, v, scope, masks)

        return record_logits

    def record_output(block: nn.Module, arguments: tuple[Any, ...], out_BTD: Tensor) -> None:
        wide = local(out_BTD).float()
        seen.extend([torch.tensor(wide.numel(), device=wide.device), wide.square().sum(), wide.abs().max()])

    before, own = attention.attend, vars(attention).get("attend")
    if isinstance(before, partial):  # context parallelism, which gathers the keys first
        attention.attend = partial(before.func, **{**before.keywords, "inner": recording(before.keywords["inner"])})
    else:
        attention.attend = recording(before)
    hook = block.register_forward_hook(record_output)
    try:
        yield
    finally:
        hook.remove()
        del attention.attend
        if own is not None:
            attention.attend = own


def group_of(name: str) -> str:
    """The group of a parameter: "N.attention" and "N.mlp" of block N, embedding, head, norms."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if parts[0] == "blocks":
        return f"{parts[1]}.{parts[2]}"
    return "head" if parts[0] in ("head", "classifier") else "embedding"


@torch.no_grad()
def gradient_norms(model: nn.Module, mesh: ProcessMesh = SINGLE_PROCESS) -> Values:
    """L2 norm of the gradient of each group, before clipping."""
    groups: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(group_of(name), []).append((parameter, parameter.grad))
    return _global_norms(_to_host({name: sum_of_squares(pairs, mesh) for name, pairs in groups.items()}), mesh)


@torch.no_grad()
def sample(model: nn.Module) -> dict[str, Tensor]:
    """Copies of at most SAMPLE elements of each parameter, evenly spread."""
    return {
        name: local(parameter).flatten()[:: max(-(-local(parameter).numel() // SAMPLE), 1)].clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def update_ratios(before: dict[str, Tensor], after: dict[str, Tensor], mesh: ProcessMesh = SINGLE_PROCESS) -> Values:
    """Norm of the update over the norm of the weights, of each group, over the samples of all processes; about 1e-3 in a healthy
    run with Adam."""
    updates: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    for name, old in before.items():
        updates.setdefault(group_of(name), []).append(after[name] - old)
        weights.setdefault(group_of(name), []).append(old)
    norm = nn.utils.get_total_norm
    norms = (_to_host({name: norm(tensors) for name, tensors in groups.items()}) for groups in (updates, weights))
    squares = ({name: value**2 for name, value in by_group.items()} for by_group in norms)
    update_norms, weight_norms = (_global_norms(by_group, mesh) for by_group in squares)
    return {name: value / max(weight_norms[name], 1e-12) for name, value in update_norms.items()}


def _global_norms(squares: Values, mesh: ProcessMesh) -> Values:
    """Roots of the sums of squares over all processes, which may have different groups."""
    total: Counter[str] = Counter()
    for of_rank in mesh.gather(squares):
        total.update(of_rank)
    return {name: math.sqrt(value) for name, value in total.items()}


def _to_host(values: dict[str, Tensor]) -> Values:
    """All values in one transfer, since each would synchronise the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}
