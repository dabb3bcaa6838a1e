"""QK-clip: heads whose attention logits grow too large get smaller query and key weights after the update.

Kimi Team 2025, "Kimi K2: Open Agentic Intelligence", section 2.1 and algorithm 1 ("MuonClip"): with S the largest logit of a
head in the step's global batch and gamma = min(1, tau / S), its query and key weights are multiplied by sqrt(gamma) each, so that
its logits become gamma times as large. A key that several heads share stays as it is, and the queries of a head are multiplied by
gamma: the paper's rule for the rotary key that all heads of its latent attention share, so that a clip reaches no other head.

Nothing is kept between steps, so a resumed run needs no state.

Shapes: B sequences, L local tokens, T tokens of a whole sequence, H query heads, G key/value heads, R = H / G, K width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.attention import AttentionScope, largest_logits
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import AttentionFunction, Transformer
from bessemer.parallel.dtensors import local_shard
from bessemer.parallel.mesh import ProcessMesh


def require_clippable(config: ModelConfig) -> None:
    """Raise InputError for a model whose logits do not follow from its query and key weights, or are bounded already."""
    if config.qk_norm != "none":
        raise InputError(
            f'train.optimizer.qk_clip: with model.qk_norm = "{config.qk_norm}" queries and keys are normalised, so scaling their '
            'weights changes no logit, and the norm bounds the logits; leave qk_clip out, or take model.qk_norm = "none"'
        )
    if config.attention_soft_cap:
        raise InputError(
            f"train.optimizer.qk_clip: model.attention_soft_cap = {config.attention_soft_cap:g} bounds the logits already; leave "
            "one of them out"
        )


class QkClip:
    """Measures the largest logit of every head in a step's forward passes, and scales the weights of those above `tau`.

    largest_LH: of the last step by layer and head, the same on all processes; num_clipped: heads that its update scaled. Both are
    on the device, and nothing here waits for it.
    """

    def __init__(self, config: ModelConfig, tau: float, mesh: ProcessMesh, is_compiled: bool) -> None:
        """Raises InputError as `require_clippable`. is_compiled: whether blocks are, which must leave the measuring out."""
        require_clippable(config)
        self.config, self.tau, self.mesh, self.is_compiled = config, tau, mesh, is_compiled
        self.largest_LH, self.num_clipped = torch.empty(0), torch.zeros(())
        self._is_recording = False
        self._seen: dict[int, list[Tensor]] = {}  # by layer, (H,) of each micro-batch; two threads may append at a time

    def observe(self, model: Transformer) -> None:
        """Measure queries and keys wherever the blocks of this process attend; before context parallelism wraps that."""
        record = torch.compiler.disable(self._record) if self.is_compiled else self._record  # type: ignore[no-untyped-call]

        def observed(layer: int, attend: AttentionFunction) -> AttentionFunction:
            def recording(
                q_BHLK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scope: AttentionScope, masks: DropoutMasks | None = None
            ) -> Tensor:
                record(layer, q_BHLK, k_BGTK, scope)
                return attend(q_BHLK, k_BGTK, v_BGTK, scope, masks)

            return recording

        for layer, block in enumerate(model.blocks):
            if block is not None:
                self._seen[layer] = []
                block.attention.attend = observed(layer, block.attention.attend)  # type: ignore[union-attr,arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of a step's forward and backward passes; other passes, as of a validation, are not measured. Collective."""
        self._is_recording = True
        for seen in self._seen.values():
            seen.clear()
        try:
            yield
        finally:
            self._is_recording = False
        self.largest_LH = self._largest()
        self.num_clipped = self.largest_LH.new_zeros(())

    def _record(self, layer: int, q_BHLK: Tensor, k_BGTK: Tensor, scope: AttentionScope) -> None:
        # A recomputed forward pass, which runs inside of the backward pass, has the logits of the first.
        if self._is_recording and torch._C._current_graph_task_id() == -1:
            self._seen[layer].append(largest_logits(q_BHLK.detach(), k_BGTK.detach(), scope))

    def _largest(self) -> Tensor:
        """The largest logits over all micro-batches and processes, (layers, H), in float64; NaN as infinity."""
        heads = self.config.heads // self.mesh.size("tensor")
        first = self.mesh.coordinate("tensor") * heads
        assert all(self._seen.values()), "every block attended"
        by_layer = {layer: torch.stack(seen).amax(dim=0).double() for layer, seen in self._seen.items()}
        size, device = (self.config.layers, self.config.heads), next(iter(by_layer.values())).device
        largest_LH = torch.full(size, -torch.inf, dtype=torch.float64, device=device)
        for layer, local_H in by_layer.items():
            largest_LH[layer, first : first + heads] = local_H.masked_fill(local_H.isnan(), torch.inf)
        return self.mesh.max_on_device(largest_LH)

    @torch.no_grad()
    def clip(self, model: Transformer, skip: Tensor | None = None) -> None:
        """Scale the query and key weights and biases of the heads above tau, after the step's update. Every process scales what
        it holds, replicas by the same factors. skip: a scalar on the device; where it is 1 no weight changes."""
        is_clipped_LH = (self.largest_LH > self.tau) & self.largest_LH.isfinite()
        if skip is not None:
            is_clipped_LH &= skip == 0
        self.num_clipped = is_clipped_LH.sum()
        gamma_LGR = torch.where(is_clipped_LH, self.tau / self.largest_LH, 1.0).unflatten(1, (self.config.kv_heads, -1))  # type: ignore[no-untyped-call]
        queries = gamma_LGR.shape[2]
        factor_LGN = gamma_LGR.new_ones(*gamma_LGR.shape[:2], queries + 2)  # of queries, key and value
        if queries == 1:
            factor_LGN[:, :, :2] = gamma_LGR.sqrt()
        else:
            factor_LGN[:, :, :-2] = gamma_LGR
        for name, parameter in model.named_parameters():
            layer = int(name.split(".")[1]) if name.endswith(("attention.qkv", "attention.qkv_bias")) else None
            if layer is None:
                continue
            _, offset, shard = local_shard(parameter)
            rows, columns = (slice(at, at + size) for at, size in zip(offset[:2], shard.shape[:2], strict=True))
            factor = factor_LGN[layer, rows, columns].to(shard)  # 1 leaves every bit as it is
            shard.mul_(factor.view(*factor.shape, *[1] * (shard.dim() - 2)))

    def figures(self) -> Tensor:
        """Of the last step, on the device: the largest logit, and the number of heads that were clipped."""
        return torch.stack([self.largest_LH.max(), self.num_clipped.double()])
