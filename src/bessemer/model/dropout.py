"""Dropout (Srivastava et al. 2014) whose masks are a pure function of (seed, sample, position, layer, site, index).

There is no generator state: a hash of an element's coordinates decides whether it is dropped. So the masks are the same for
every micro-batch size, layout and device, when a block is recomputed, and when a run is resumed. The sample number is that
of the run's order and never repeats, so it also identifies the step.

A token has a 64-bit key, computed by SplitMix64 (Steele et al. 2014) from seed, sample, position, layer, site and head in
turn. An element's 32 bits are a hash of its token's key and its index: a 32-bit finaliser (constants by Wellons 2018,
"Prospecting for hash functions") that mixes in the other half of the key between the rounds. Integers wrap around in int32
and int64, which torch computes identically on every device.

Shapes: B sequences, T tokens, L of them in the residual stream on this rank, D width, F hidden units and H heads on this
rank, C queries, N any number of elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bessemer.recipe import Dropout

Site = Literal["embedding", "scores", "attention", "hidden units", "mlp", "classifier"]
_SITES: dict[Site, int] = {"embedding": 1, "scores": 2, "attention": 3, "hidden units": 4, "mlp": 5, "classifier": 6}


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GAMMA = _signed(0x9E3779B97F4A7C15, 64)
_M1, _M2 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
_GAMMA_32, _C1, _C2 = _signed(0x9E3779B9, 32), _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)


def splitmix64(keys: Tensor, number: Tensor | int = 0) -> Tensor:
    """Return output number `number`, from 0, of SplitMix64 generators with the states `keys` (int64)."""
    step = (number + 1) * _GAMMA
    return splitmix64_finaliser(keys + (step if isinstance(step, Tensor) else _signed(step % (1 << 64), 64)))


def splitmix64_finaliser(x: Tensor) -> Tensor:
    """Apply SplitMix64's output function to wrapping int64."""
    x = (x ^ _shift_right(x, 30, 64)) * _M1
    x = (x ^ _shift_right(x, 27, 64)) * _M2
    return x ^ _shift_right(x, 31, 64)


def is_dropped(keys: Tensor, index_N: Tensor, rate: float) -> Tensor:
    """Return a bool mask, (..., N), of the elements to drop: one decision for each key and each element index.

    `keys` are 64-bit random keys, one per token, and `index_N` the indices (int32) of the token's elements.
    """
    low, high = (((keys << 32) >> 32).to(torch.int32), (keys >> 32).to(torch.int32))
    x = low[..., None] + index_N * _GAMMA_32
    x ^= _shift_right(x, 16, 32)
    x *= _C1
    x ^= high[..., None]
    x ^= _shift_right(x, 15, 32)
    x *= _C2
    x ^= _shift_right(x, 16, 32)
    return x < round(rate * 2**32) - 2**31


def _shift_right(x: Tensor, num_places: int, num_bits: int) -> Tensor:
    """Shift integers of `num_bits` bits right by `num_places`, and fill with zeros instead of the sign."""
    return (x >> num_places) & ((1 << (num_bits - num_places)) - 1)


@dataclass(frozen=True)
class DropoutMasks:
    """The dropout masks of one forward pass, for the embeddings or for one block.

    A mask follows from a 64-bit random key per token, so it does not depend on the layout.

    Attributes:
        rates: The dropout rates of the recipe.
        token_BT: Keys of the tokens that this rank computes in attention and MLP.
        stream_BL: Keys of the tokens of the residual stream on this rank, fewer if tensor parallelism divides it.
        part: Index of the tensor-parallel shard of heads and hidden units on this rank.
    """

    rates: Dropout
    token_BT: Tensor
    stream_BL: Tensor
    part: int = 0

    @classmethod
    def from_sequences(cls, rates: Dropout, sequence_B: Tensor, length: int) -> DropoutMasks:
        """Build the masks of full sequences from the key of each sequence (`sequence_keys`)."""
        position_T = torch.arange(length, device=sequence_B.device)
        token_BT = splitmix64(sequence_B[:, None], position_T)
        return cls(rates, token_BT, token_BT)

    def for_layer(self, layer: int) -> DropoutMasks:
        """Return the masks of one block. Call it outside of compiled code, which would be recompiled for each layer number."""
        token_BT = splitmix64(self.token_BT, layer)
        stream_BL = token_BT if self.stream_BL is self.token_BT else splitmix64(self.stream_BL, layer)
        return replace(self, token_BT=token_BT, stream_BL=stream_BL)

    def stream(self, x_BLD: Tensor, site: Site, rate: float) -> Tensor:
        """Drop elements of an embedding's or sublayer's output before it is added to the residual stream.

        `site` tells which output it is; each has its own masks.
        """
        return _drop(x_BLD, splitmix64(self.stream_BL, _SITES[site]), 0, rate)

    def hidden_units(self, x_BTF: Tensor) -> Tensor:
        """Drop hidden units of the MLP."""
        keys_BT = splitmix64(self.token_BT, _SITES["hidden units"])
        return _drop(x_BTF, keys_BT, self.part * x_BTF.shape[-1], self.rates.hidden)

    def classifier(self, pooled_BD: Tensor) -> Tensor:
        """Drop elements of the input of a classifier's output matrix."""
        return _drop(pooled_BD, splitmix64(self.token_BT[:, 0], _SITES["classifier"]), 0, self.rates.classifier)

    def attention(self, p_BHCN: Tensor, queries: slice, first: int) -> Tensor:
        """Drop attention weights of some queries over the keys at positions first, first + 1, ... of the sequence.

        `queries` has the indices of the queries among this rank's tokens.
        """
        heads = p_BHCN.shape[1]
        number_H1 = torch.arange(self.part * heads, (self.part + 1) * heads, device=p_BHCN.device)[:, None]
        keys_BC = splitmix64(self.token_BT[:, queries], _SITES["scores"])
        return _drop(p_BHCN, splitmix64(keys_BC[:, None], number_H1), first, self.rates.attention)


def _drop(x: Tensor, keys: Tensor, first: int, rate: float) -> Tensor:
    """Zero the dropped elements of x (..., N) and divide the others by 1 - rate.

    `keys` (...) are the keys of `is_dropped`, and `first` is the index of the first of the N elements.
    """
    if not rate:
        return x
    index_N = torch.arange(first, first + x.shape[-1], dtype=torch.int32, device=x.device)
    return (x * (1.0 / (1.0 - rate))).masked_fill(is_dropped(keys, index_N, rate), 0.0)


def sequence_keys(seed_key: int, samples_B: Tensor) -> Tensor:
    """Return the key of each sequence's masks, (B,).

    `seed_key` has 64 bits that identify the run's seed, and `samples_B` the sample numbers in the run's order.
    """
    return splitmix64(samples_B + _signed(seed_key, 64))
