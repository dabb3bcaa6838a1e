"""What goes on inside the model, seen every few steps: activations, attention logits, gradients, updates.

Nothing that is watched touches the step: the losses and weights are bit for bit those of a run that is not watched.

Shapes: B sequences (one), T tokens, D width, G key/value heads, R queries a key/value head, C queries of a chunk, K
width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.model.attention import AttentionScope
from bessemer.model.transformer import Attention
from bessemer.parallel.local import local
from bessemer.parallel.numbers import squares
from bessemer.parallel.team import ALONE, Team
from bessemer.tokens.loader import Batch
from bessemer.train.metrics import Log
from bessemer.train.step import TrainStep

CHUNK = 128  # queries whose scores are held at one time
SAMPLE = 65_536  # elements of a tensor that its update is measured by

Named = dict[str, float]


class Watch:
    """Called around each update; looks at every `every`-th step (0: at none) and logs what it saw as "inside"."""

    def __init__(self, step: TrainStep, log: Log, every: int) -> None:
        self.step, self.log, self.every = step, log, every

    def __call__(self, number: int, batch: Batch) -> AbstractContextManager[None]:
        """Around the update of the step `number` (1-based), whose gradients are there."""
        watched = self.every > 0 and number % self.every == 0
        return self._watching(number, batch) if watched else nullcontext()

    @contextmanager
    def _watching(self, number: int, batch: Batch) -> Iterator[None]:
        started = perf_counter()
        # A pass of its own needs the blocks whole.
        seen = activations(self.step, batch) if self.step.team.is_alone else {}
        norms = gradient_norms(self.step.model, self.step.team)
        before = sample(self.step.model)
        seconds = perf_counter() - started
        yield
        started = perf_counter()
        ratios = update_ratios(before, sample(self.step.model), self.step.team)
        seconds += perf_counter() - started
        self.log.write("inside", number, **seen, grad_norm=norms, update_ratio=ratios, seconds=seconds)


@torch.no_grad()
def activations(step: TrainStep, batch: Batch) -> dict[str, Named]:
    """RMS and largest magnitude of what each block gives, and its largest attention logit (q.k / sqrt(K), over what
    attention sees, before a soft cap), over the batch's first sequence, in the step's precision.

    A forward pass of its own over that one sequence: hooks in the step itself would not be seen where blocks are
    compiled, and a pass without gradients costs a third of a sequence.
    """
    model, place = step.model, step.device.place
    tokens_BT = torch.from_numpy(batch.inputs[:1]).to(place)
    starts_BT = None if batch.starts is None else torch.from_numpy(batch.starts[:1]).to(place)
    rms: list[Tensor] = []
    largest: list[Tensor] = []
    logits: list[Tensor] = []

    def record(out_BTD: Tensor) -> None:
        wide = out_BTD.float()
        rms.append(wide.square().mean().sqrt())
        largest.append(wide.abs().max())

    def read(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(attention, Attention)
        x_BTD, rotation, scope = arguments[:3]
        q_BHTK, k_BGTK, _ = attention.queries_keys_values(x_BTD, rotation)
        logits.append(largest_logit(q_BHTK, k_BGTK, scope))

    hooks = [block.attention.register_forward_pre_hook(read) for block in model.blocks]  # type: ignore[union-attr,operator]
    blocks = model.blocks
    model.blocks = nn.ModuleList(_Observed(block, record) for block in blocks)
    try:
        with step.autocast():
            model(tokens_BT, step.documents(tokens_BT, starts_BT))
    finally:
        model.blocks = blocks
        for hook in hooks:
            hook.remove()
    return {
        "activation_rms": _numbered(rms),
        "activation_max": _numbered(largest),
        "attention_logit_max": _numbered(logits),
    }


class _Observed(nn.Module):
    """A block, uncompiled, whose output is shown to `record`."""

    def __init__(self, block: nn.Module, record: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.call, self.record = block.forward, record

    def forward(self, *arguments: Any) -> Tensor:
        out: Tensor = self.call(*arguments)
        self.record(out)
        return out


def largest_logit(q_BHTK: Tensor, k_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    """The largest score of one sequence that attention does not mask, in chunks of queries. Scores are in fp32."""
    length, groups, head_dim = q_BHTK.shape[2], k_BGTK.shape[1], q_BHTK.shape[3]
    with torch.autocast(q_BHTK.device.type, enabled=False):
        q_GRTK, k_GTK = q_BHTK[0].float().unflatten(0, (groups, -1)), k_BGTK[0].float()  # type: ignore[no-untyped-call]
        index_T = torch.arange(length, device=q_BHTK.device)
        found = []
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            last = end if scope.spec.causal else length
            allowed_CT = scope.spec.allows(index_T[start:end, None], index_T[:last])
            if scope.documents is not None:
                number_T = scope.documents.document_BT[0]
                allowed_CT = allowed_CT & (number_T[start:end, None] == number_T[:last])
            scores_GRCT = q_GRTK[:, :, start:end] @ k_GTK[:, None, :last].transpose(2, 3)
            found.append(scores_GRCT.masked_fill_(~allowed_CT, -torch.inf).max())
        largest: Tensor = torch.stack(found).max() * (scope.spec.scale or head_dim**-0.5)
    return largest


def group_of(name: str) -> str:
    """The group a parameter is watched in: "N.attention" and "N.mlp" of block N, embedding, head, norms."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if parts[0] == "blocks":
        return f"{parts[1]}.{parts[2]}"
    return "head" if parts[0] in ("head", "classifier") else "embedding"


@torch.no_grad()
def gradient_norms(model: nn.Module, team: Team = ALONE) -> Named:
    """L2 norm of the gradient of each group, before clipping."""
    groups: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            groups.setdefault(group_of(name), []).append((parameter, parameter.grad))
    if team.is_alone:
        return _named({name: nn.utils.get_total_norm([g for _, g in found]) for name, found in groups.items()})
    return _roots(_over_all({name: squares(found, team) for name, found in groups.items()}, team))


@torch.no_grad()
def sample(model: nn.Module) -> dict[str, Tensor]:
    """At most SAMPLE elements of each parameter, evenly spread, copied."""
    return {
        name: local(parameter).flatten()[:: max(-(-local(parameter).numel() // SAMPLE), 1)].clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def update_ratios(before: dict[str, Tensor], after: dict[str, Tensor], team: Team = ALONE) -> Named:
    """Norm of the update over the norm of the weights, of each group; about 1e-3 in a healthy run with Adam. Of a team:
    over the samples of all its processes."""
    moved: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    for name, old in before.items():
        moved.setdefault(group_of(name), []).append(after[name] - old)
        weights.setdefault(group_of(name), []).append(old)
    norm = nn.utils.get_total_norm
    if team.is_alone:
        return _named({name: norm(moved[name]) / norm(weights[name]).clamp(min=1e-12) for name in moved})
    squared = [{name: float(norm(found)) ** 2 for name, found in of.items()} for of in (moved, weights)]
    over = [_roots(_over_all(of, team)) for of in squared]
    return {name: value / max(over[1][name], 1e-12) for name, value in over[0].items()}


def _over_all(squared: Named, team: Team) -> Named:
    """Sums over the processes, each of which may know other groups."""
    total: Named = {}
    for of_one in team.gather(squared):
        for name, value in of_one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _roots(squared: Named) -> Named:
    return {name: math.sqrt(value) for name, value in squared.items()}


def _numbered(values: list[Tensor]) -> Named:
    return _named({str(number): value for number, value in enumerate(values)})


def _named(values: dict[str, Tensor]) -> Named:
    """Read from the device at once: a read of each would make it wait each time."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}
