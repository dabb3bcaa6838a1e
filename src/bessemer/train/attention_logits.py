"""The largest attention scores of a batch, which grow before some divergences.

Shapes: B sequences, G key/value heads, R query heads for each, H = G R, L queries, C of a chunk, T keys, N of a chunk, K width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bessemer.model.attention_scope import AttentionScope
from bessemer.model.kernels import upcast

MAX_LOGITS = 1 << 25  # scores computed at once in `largest_logits`, 128 MiB, but at least those of 16 queries
LOGIT_CHUNK = 64  # queries on a CPU, so that their scores fit the cache: twice as fast as 256


@torch.no_grad()
def largest_logits(q_BHLK: Tensor, k_BGTK: Tensor, scope: AttentionScope) -> Tensor:
    """Return the largest attention score of each head over a batch, (H,), scaled and before a soft cap.

    As in `attention`, the L queries may be some of the T tokens. Scores are computed in fp32 (fp64 for fp64) for one chunk
    of queries at a time, which bounds memory.
    """
    spec, documents, length = scope.spec, scope.documents, k_BGTK.shape[2]
    batch, heads = q_BHLK.shape[:2]
    chunk = min(max(MAX_LOGITS // (batch * heads * length), 16), length if q_BHLK.is_cuda else LOGIT_CHUNK)
    parts = []
    with torch.autocast(q_BHLK.device.type, enabled=False):
        q_BGRLK, keys_BGKT = q_BHLK.unflatten(1, (k_BGTK.shape[1], -1)), upcast(k_BGTK).transpose(2, 3)  # type: ignore[no-untyped-call]
        for queries, start, keys in scope.chunks(length, chunk):
            q_BGRCK = upcast(q_BGRLK[:, :, :, queries])
            # Queries that share a key are rows of one matmul, which avoids copies of the keys.
            flat = q_BGRCK.flatten(2, 3) @ keys_BGKT[..., keys]
            scores_BGRCN = flat.unflatten(2, q_BGRCK.shape[2:4])  # type: ignore[no-untyped-call]
            first, last, end = keys.start, keys.stop, start + q_BGRCK.shape[3]
            if documents is None and not spec.window:  # every query sees all keys before the chunk, or all keys
                first = start if spec.causal else last
            if first < last:
                allowed = scope.allows(slice(start, end), slice(first, last), q_BHLK.device).unsqueeze(-3)
                scores_BGRCN[..., first - last :].masked_fill_(~allowed, -torch.inf)
            parts.append(scores_BGRCN.amax(dim=(0, 3, 4)).flatten())
    return torch.stack(parts).amax(dim=0) * spec.scale_of(q_BHLK)
