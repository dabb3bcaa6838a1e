"""The mixture of experts: a router sends each token to some of many MLPs. `sublayers.mixture_facts` has its facts.

No token is dropped. The tokens are sorted by expert, so that each expert is one matmul of a group. Sums over the experts of a
token have a fixed order, so results are deterministic on every device.

Shapes: B sequences, T tokens, N = B x T, D width, E experts, K experts of a token, M = N x K, F hidden width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model import casts
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.feed_forward import FeedForward, apply_gate
from bessemer.model.kernels import is_eager_cpu, runs_fused, upcast
from bessemer.model.layers import linear_layer
from bessemer.model.sublayers import Sublayer, mixture_facts
from bessemer.recipe.model import Activation

ALIGNMENT = 16  # bytes that torch's grouped matmul needs rows to be a multiple of
DEAD, HOT = 0.1, 2.0  # multiples of the mean load below and above which an expert is dead or hot


class MixtureOfExperts(nn.Module):
    """Routed experts and shared experts (Shazeer et al. 2017; DeepSeek-AI 2024, DeepSeekMoE, section 3).

    `experts.gate_up` is (E, 2, F, D) and `experts.down` (E, D, F). The shared experts are one MLP with the hidden units of all.

    Attributes:
        mean_over_sequence: Averages over the processes that have tokens of the same sequences.
        loss_scale: Factor on the gradient of the auxiliary loss in the current step; None outside of training.
        step_load: Tokens of each expert in the step and last the sum of the auxiliary loss, (E + 1,); those of this process
            until the backward passes of the step end.
    """

    mean_over_sequence: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    loss_scale: Tensor | None = None
    step_load: Tensor | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.facts = config, mixture_facts(config)
        self.router = linear_layer(self.facts, "mlp.router")
        if config.has_balance_bias:
            self.router.bias.requires_grad_(False)  # `update_bias` changes it
        self.experts = Experts(self.facts, config.activation)
        units = config.shared_experts * config.expert_width
        self.shared = FeedForward(config, "mlp.shared", units) if units else None

    def forward(self, x_BTD: Tensor, masks: DropoutMasks | None = None) -> Tensor:
        assert masks is None, "no family with experts drops hidden units"
        x_ND = x_BTD.flatten(0, -2)
        logits_NE, scores_NE = self._scores(x_ND)
        chosen_NE = scores_NE + self.router.bias if self.config.has_balance_bias else scores_NE
        expert_NK = chosen_NE.detach().topk(self.config.experts_per_token, dim=1).indices
        weight_NK = scores_NE.gather(1, expert_NK)
        if self.config.router_normalised:
            weight_NK = weight_NK / weight_NK.sum(dim=1, keepdim=True)
        out_ND, counts_E = self._routed(x_ND, expert_NK, weight_NK * self.config.router_scale)
        if self.loss_scale is not None and out_ND.requires_grad:
            auxiliary = self._auxiliary_loss(logits_NE, scores_NE, expert_NK, x_BTD.shape[:2])
            out_ND = _Observe.apply(out_ND, auxiliary, counts_E, self)  # type: ignore[no-untyped-call]
        out_BTD = out_ND.view(x_BTD.shape)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def _scores(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's logits and scores, both (N, E), in fp32 (fp64 for fp64) for every input dtype."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = F.linear(upcast(x_ND), upcast(self.router.weight))
        return logits_NE, logits_NE.softmax(dim=1) if self.config.router == "softmax" else logits_NE.sigmoid()

    def _routed(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of each token's experts, (N, D), and the number of tokens of each expert, (E,)."""
        order_M = expert_NK.flatten().argsort(stable=True)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
        counts_E = F.one_hot(expert_NK, self.config.experts).sum(dim=(0, 1))
        out_MD = self.experts(_Dispatch.apply(x_ND, order_M, place_M), counts_E)  # type: ignore[no-untyped-call]
        return _Combine.apply(out_MD, order_M, place_M, weight_NK), counts_E  # type: ignore[no-untyped-call]

    def _auxiliary_loss(self, logits_NE: Tensor, scores_NE: Tensor, expert_NK: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Return the sum over tokens of the balance loss and the z-loss of the router, each averaged over the layers.

        The balance loss of a sequence is E sum_e f_e P_e (Fedus et al. 2021, equations 4 to 6), with the number of choices of
        an expert per token f and the mean share of the scores P; it is K if all experts have the same load. Each sequence has
        its own (DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20), so that the loss does not depend on micro-batches or
        ranks. The z-loss is the square of the log partition function (Zoph et al. 2022, equation 5).
        """
        config, loss = self.config, logits_NE.new_zeros(())
        if config.has_balance_loss:
            share_NE = scores_NE / scores_NE.sum(dim=1, keepdim=True)
            chosen_BTE = F.one_hot(expert_NK, config.experts).sum(dim=1).view(*rows, -1)
            frequency_BE = self.mean_over_sequence(chosen_BTE.sum(dim=1).to(share_NE.dtype) / rows[1])
            loss = config.balance_loss * config.experts * (share_NE.view(*rows, -1).sum(dim=1) * frequency_BE).sum()
        if config.router_z_loss:
            loss = loss + config.router_z_loss * logits_NE.logsumexp(dim=1).square().sum()
        return loss / config.mixture_layers

    def record(self, load: Tensor) -> None:
        """Add the load and the auxiliary loss of a micro-batch to those of the step."""
        self.step_load = load if self.step_load is None else self.step_load + load


class Experts(nn.Module):
    """The MLPs of routed experts, `gate_up` (E, 2, F, D) and `down` (E, D, F), each applied to its rows."""

    def __init__(self, facts: Sublayer, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up, self.down = (
            nn.Parameter(torch.empty(facts.shapes[f"mlp.experts.{name}"])) for name in ("gate_up", "down")
        )

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the output of its expert for each row. The first `counts_E[0]` rows are those of expert 0, and so on."""
        gate_up_MF = grouped_linear(x_MD, self.gate_up.flatten(1, 2), counts_E)
        return grouped_linear(apply_gate(gate_up_MF, self.activation), self.down, counts_E)


def mixtures(model: nn.Module) -> Iterator[tuple[int, MixtureOfExperts]]:
    """Yield the mixtures of experts that a process holds of a model, each with its number among those of the model."""
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        if block is not None and isinstance(block.mlp, MixtureOfExperts):
            yield layer - block.mlp.config.dense_layers, block.mlp


def start_step(model: nn.Module, loss_scale: Tensor) -> None:
    """Forget the load of the last step, and set the factor on the gradient of the auxiliary loss."""
    for _, mixture in mixtures(model):
        mixture.step_load, mixture.loss_scale = None, loss_scale


def read_load(model: nn.Module, device: torch.device) -> Tensor:
    """Return the `step_load` of each layer with experts, (layers, E + 1); zeros for layers of other processes."""
    config: Any = model.config
    load = torch.zeros(config.mixture_layers, config.experts + 1, dtype=torch.float64, device=device)
    for number, mixture in mixtures(model):
        if mixture.step_load is not None:
            load[number] = mixture.step_load
    return load


def set_load(model: nn.Module, load: Tensor) -> None:
    """Set each `step_load` to that of the global batch, given as `read_load` returns it."""
    for number, mixture in mixtures(model):
        mixture.step_load = load[number]


def load_metrics(load: Tensor, first_block: int) -> dict[str, dict[str, Any]]:
    """Return the load metrics of a step by their names in metrics.jsonl, each by the number of the block.

    Args:
        load: The load of the global batch on the host, as `read_load` returns it.
        first_block: The number of the first block with experts.

    Returns:
        `max_violation` is the largest load over the mean, minus 1 (Wang et al. 2024, section 4.1). `load_entropy` is the entropy
        of the load's distribution over that of an even load. `dead_experts` and `hot_experts` are numbers of experts below and
        above DEAD and HOT times the mean. `expert_load` has two hex digits per expert, its load in sixteenths of the mean.
    """
    share_LE = load[:, :-1] / load[:, :-1].sum(dim=1, keepdim=True).clamp(min=1)
    ratio_LE = share_LE * share_LE.shape[1]
    entropy_L = torch.special.entr(share_LE).sum(dim=1) / math.log(share_LE.shape[1])
    columns: dict[str, list[Any]] = {
        "max_violation": (ratio_LE.amax(dim=1) - 1).round(decimals=4).tolist(),
        "load_entropy": entropy_L.round(decimals=4).tolist(),
        "dead_experts": (ratio_LE < DEAD).sum(dim=1).tolist(),
        "hot_experts": (ratio_LE > HOT).sum(dim=1).tolist(),
        "expert_load": [bytes(row).hex() for row in (16 * ratio_LE).round().clamp(max=255).int().tolist()],
    }
    return {name: {str(first_block + n): value for n, value in enumerate(values)} for name, values in columns.items()}


@torch.no_grad()
def update_biases(model: nn.Module, skip: Tensor) -> None:
    """Raise the bias of experts below the mean load, and lower that of others (Wang et al. 2024, algorithm 1).

    If `skip` is 1, biases keep their bits. The load is that of the global batch.
    """
    for _, mixture in mixtures(model):
        if mixture.config.has_balance_bias and mixture.step_load is not None:
            load_E, bias_E = mixture.step_load[:-1], mixture.router.bias
            direction_E = (load_E.mean() - load_E).sign() * (1.0 - skip)
            bias_E.add_(direction_E.to(bias_E), alpha=mixture.config.balance_rate)


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group, (M, O). The first `counts_E[0]` rows are those of group 0, and so on."""
    is_aligned = all(size * x_MI.itemsize % ALIGNMENT == 0 for size in weight_EOI.shape[1:])
    # grouped_mm computes in bf16 and fp32, and torch.compile traces it in bf16 only.
    fits = x_MI.dtype == torch.bfloat16 or (x_MI.dtype == torch.float32 and not torch.compiler.is_compiling())
    if not fits or not is_aligned or is_eager_cpu(x_MI):
        return _GroupedLinear.apply(x_MI, weight_EOI, counts_E.tolist())  # type: ignore[no-any-return, no-untyped-call]
    return F.grouped_mm(x_MI, weight_EOI.to(x_MI.dtype).mT, offs=counts_E.cumsum(0, dtype=torch.int32))


class _GroupedLinear(torch.autograd.Function):
    """One matmul per group. The weight may be in fp32 and the rows in bf16, as in `kernels.linear`.

    On a CPU oneDNN compiles each bf16 matmul of a new shape, for 2 to 6 ms and 0.7 MB of machine code, and the numbers of
    rows change in every step. So a matmul may include a few rows of the next groups, to have one of few shapes
    (`_rounded`). The next matmul overwrites their results, and the gradient of the weight sees zeros in their place.
    """

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        cast_EOI = weight_EOI if x_MI.dtype == weight_EOI.dtype else casts.cast_weight(weight_EOI)
        ctx.save_for_backward(x_MI, cast_EOI)
        ctx.weight_EOI, ctx.counts = weight_EOI.detach(), counts
        return _multiply(x_MI, cast_EOI, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_MI, cast_EOI), gradient_MO = ctx.saved_tensors, gradients[0].contiguous()
        x_grad_MI = _multiply(gradient_MO, cast_EOI.mT, ctx.counts)
        product_EOI = torch.empty_like(cast_EOI)
        for expert, (first, last, window) in enumerate(_windows(ctx.counts, x_MI)):
            rows_WO = gradient_MO[window]
            if len(rows_WO) > last - first:
                rows_WO, first, last = rows_WO.clone(), first - window.start, last - window.start
                rows_WO[:first] = rows_WO[last:] = 0.0
            torch.mm(rows_WO.T, x_MI[window], out=product_EOI[expert])
        is_collected = casts.collect(ctx.weight_EOI, product_EOI)
        return x_grad_MI, None if is_collected else product_EOI.to(ctx.weight_EOI.dtype), None


def _multiply(x_MI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
    """Multiply each row by the transposed matrix of its group, (M, O)."""
    out_MO = x_MI.new_empty(len(x_MI), weight_EOI.shape[1])
    for weight_OI, (first, last, window) in zip(weight_EOI, _windows(counts, x_MI), strict=True):
        if window.start == first:
            torch.mm(x_MI[window], weight_OI.T, out=out_MO[window])
        elif first < last:  # the window begins in the previous group, whose results stay
            out_MO[first:last] = torch.mm(x_MI[window], weight_OI.T)[first - window.start :][: last - first]
    return out_MO


def _windows(counts: list[int], x_MI: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Yield the first and the last row (exclusive) of each group, and the rows that its matmul includes."""
    is_rounded, rows = x_MI.dtype == torch.bfloat16 and x_MI.device.type == "cpu", len(x_MI)
    for last, count in zip(accumulate(counts), counts, strict=True):
        first, size = last - count, min(_rounded(count), rows) if is_rounded else count
        start = min(first, rows - size)
        yield first, last, slice(start, start + size)


def _rounded(count: int) -> int:
    """Round up to a multiple of a power of two, at least 32, so that there are at most four results from 2^n to 2^(n + 1)."""
    step = max(32, 1 << max(count - 1, 0).bit_length() >> 3)
    return -(-count // step) * step


class _Dispatch(torch.autograd.Function):
    """Copy tokens (N, D) into the order of experts, (M, D): row i is choice `order_M[i]` of all, at `place_M` of the result.

    The gradient sums the copies of a token in the order of its choices. Indexing would sum them in any order on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.tokens, ctx.place_M = len(x_ND), place_M
        return x_ND.index_select(0, order_M // (len(order_M) // len(x_ND)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK = gradients[0].new_ones((), dtype=torch.float32).expand(ctx.tokens, len(ctx.place_M) // ctx.tokens)
        return _weighted_sums(gradients[0], ctx.place_M, weight_NK), None, None


class _Combine(torch.autograd.Function):
    """Sum the results of a token's experts with the token's weights, (N, D); the results are in the order of experts, (M, D)."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, order_M: Tensor, place_M: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MD, order_M, place_M, weight_NK)
        return _weighted_sums(x_MD, place_M, weight_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_MD, order_M, place_M, weight_NK), gradient_ND = ctx.saved_tensors, gradients[0].contiguous()
        if runs_fused(x_MD, gradient_ND):
            from bessemer.model import fused

            x_grad_MD, weight_grad_NK = fused.combine_backward(x_MD, place_M, weight_NK, gradient_ND)
            return x_grad_MD, None, None, weight_grad_NK
        gradient_MD = gradient_ND.index_select(0, order_M // weight_NK.shape[1])
        weight_grad_M = (upcast(gradient_MD) * upcast(x_MD)).sum(dim=1)[place_M]
        x_grad_MD = gradient_MD * weight_NK.flatten()[order_M, None].to(x_MD.dtype)
        return x_grad_MD, None, None, weight_grad_M.view_as(weight_NK).to(weight_NK.dtype)


def _weighted_sums(x_MD: Tensor, place_M: Tensor, weight_NK: Tensor) -> Tensor:
    """Return the sum of weight_NK[n, k] times row `place_M[n K + k]` over k, (N, D)."""
    if runs_fused(x_MD):
        from bessemer.model import fused

        return fused.combine(x_MD.contiguous(), place_M, weight_NK)
    x_NKD = x_MD.index_select(0, place_M).view(*weight_NK.shape, -1)
    return (x_NKD * weight_NK[..., None].to(x_MD.dtype)).sum(dim=1)


class _Observe(torch.autograd.Function):
    """Return the output of a mixture unchanged, and add the gradient of its auxiliary loss in the backward pass.

    So the loss needs no path through the blocks, a pipeline or recomputation. The load is recorded in the backward pass too,
    because recomputation repeats the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, auxiliary: Tensor, counts_E: Tensor, mixture: MixtureOfExperts) -> Tensor:
        ctx.mixture, ctx.scale = mixture, mixture.loss_scale
        ctx.dtype, ctx.load = auxiliary.dtype, torch.cat([counts_E.double(), auxiliary.detach().double()[None]])
        return out_ND.view_as(out_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        casts.defer(partial(ctx.mixture.record, ctx.load))
        return gradients[0], ctx.scale.to(ctx.dtype), None, None
