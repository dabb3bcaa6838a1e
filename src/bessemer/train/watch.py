"""Statistics from inside the model every few steps: activations, attention logits, gradients, updates.

They do not change the step: losses and weights are bit-identical with and without them.

Shapes: B sequences (one), T tokens, D width, G key/value heads, R queries a key/value head, C queries of a chunk, K
width of a head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.guard.trends import Trends
from bessemer.model.attention import largest_logits
from bessemer.model.transformer import Attention
from bessemer.parallel.dtensors import local, sum_of_squares
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.tokens.loader import Batch
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
        # The extra forward pass needs whole blocks.
        statistics = activations(self.trainer, batch) if mesh.is_single else {}
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
    """By block, over the batch's first sequence: RMS and maximum of the output, and the largest unmasked attention logit
    (q.k / sqrt(K), before a soft cap), in the step's precision.

    An extra forward pass over that one sequence, uncompiled: hooks in the step itself would not run in compiled blocks, and a
    pass without gradients costs a third of a sequence.
    """
    model, device = trainer.model, trainer.device.torch_device
    tokens_BT = torch.from_numpy(batch.inputs[:1]).to(device)
    starts_BT = None if batch.starts is None else torch.from_numpy(batch.starts[:1]).to(device)
    by_block: dict[str, list[Tensor]] = {"activation_rms": [], "activation_max": [], "attention_logit_max": []}

    def record_output(block: nn.Module, arguments: tuple[Any, ...], out_BTD: Tensor) -> None:
        wide = out_BTD.float()
        by_block["activation_rms"].append(wide.square().mean().sqrt())
        by_block["activation_max"].append(wide.abs().max())

    def record_logits(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(attention, Attention)
        x_BTD, rotation, scope = arguments[:3]
        q_BHTK, k_BGTK, _ = attention.queries_keys_values(x_BTD, rotation)
        by_block["attention_logit_max"].append(largest_logits(q_BHTK, k_BGTK, scope).max())

    hooks = [block.attention.register_forward_pre_hook(record_logits) for block in model.blocks]  # type: ignore[union-attr,operator]
    hooks += [block.register_forward_hook(record_output) for block in model.blocks]
    try:
        with trainer.autocast(), trainer.eager():
            model(tokens_BT, trainer.task.documents(tokens_BT, starts_BT))
    finally:
        for hook in hooks:
            hook.remove()
    return {kind: _to_host({str(n): value for n, value in enumerate(values)}) for kind, values in by_block.items()}


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
    if mesh.is_single:  # in one transfer
        return _to_host({name: nn.utils.get_total_norm([g for _, g in pairs]) for name, pairs in groups.items()})
    return _global_norms({name: float(sum_of_squares(pairs, mesh)) for name, pairs in groups.items()}, mesh)


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
