"""What the processes of a run tell each other in a step, in bytes."""

from __future__ import annotations

from bessemer.model.config import ModelConfig


def communicated_bytes(
    config: ModelConfig, tokens: int, ways: int, bytes_per_element: int, *, tensor: int = 1, recomputed: int = 0
) -> int:
    """Bytes that each process sends, and receives, to share the keys and values of `tokens` tokens `ways` ways (context
    parallelism), through all layers, forward and backward.

    tokens: of the whole sequences; bytes_per_element: of keys and values as attention reads them; tensor: processes
    that the key/value heads are divided among; recomputed: blocks whose forward pass, gather included, runs again on
    the way back.

    A layer's keys and values are 2 x kv_heads x head_dim elements a token, of which each process holds 1 / ways. An
    all-gather brings a process what the others hold, (ways - 1) / ways of all; a reduce-scatter of the gradients takes
    as much from it. That is what a ring moves and the least that any way can (Patarasuk and Yuan 2009, section 3).
    """
    elements = 2 * (config.kv_heads // tensor) * config.head_dim * tokens
    passes = 2 * config.layers + recomputed
    return passes * elements * bytes_per_element * (ways - 1) // ways
