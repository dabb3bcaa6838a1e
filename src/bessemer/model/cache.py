"""Keys and values of the tokens a generation has seen, so that each new token is computed alone."""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.model.config import ModelConfig


class LayerCache:
    """Keys and values of one layer, in memory that is taken once. Shapes: B sequences, G key/value heads, T tokens, K
    width of a head."""

    def __init__(self, batch: int, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        shape = (batch, config.kv_heads, config.positions_length, config.head_dim)
        self._keys, self._values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self._length = 0

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns all of them, old and new."""
        end = self._length + k_BGTK.shape[2]
        self._keys[:, :, self._length : end] = k_BGTK
        self._values[:, :, self._length : end] = v_BGTK
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Cache:
    """The cache of a causal model over a batch of sequences of equal length. length: tokens held."""

    def __init__(self, config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        assert config.causal, "an encoder's hidden states change with every token that follows: nothing can be kept"
        self.layers = [LayerCache(batch, config, device, dtype) for _ in range(config.layers)]
        self.length = 0
