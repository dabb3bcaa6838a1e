"""The chunks in which a step computes the loss, which bound its memory."""

from __future__ import annotations

# Maximum logits of a chunk on a CPU: 8 MiB of fp32 stay in the last-level cache, which makes every pass over them faster. With
# 8,192 ids that is 256 rows. Matmuls of fewer than 128 rows are slow (docs/background/cpu-step.md).
CACHED_LOGITS, MIN_ROWS = 1 << 21, 128


def loss_chunk(requested: int, vocabulary: int, is_cuda: bool) -> int:
    """Return the number of tokens whose logits are in memory at once: `requested`, or on a CPU at most what fits its cache."""
    return requested if is_cuda else min(requested, max(CACHED_LOGITS // vocabulary, MIN_ROWS))
