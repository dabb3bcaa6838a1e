"""The largest attention logit of each head, against the full matrix in float64."""

import numpy as np
import pytest
import torch

from bessemer.model.attention import largest_logits
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents

SPECS = [AttentionSpec(), AttentionSpec(causal=False), AttentionSpec(window=20), AttentionSpec(causal=False, window=30),
         AttentionSpec(scale=0.7)]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("packed", [False, True])
def test_largest_logits_are_those_of_the_full_matrix(spec: AttentionSpec, packed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 100, 8, generator=draw), torch.randn(2, 2, 100, 8, generator=draw)
    tokens = torch.randint(0, 9, (2, 100), generator=draw)
    documents = Documents.from_tokens(tokens, 0) if packed else None
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) * (spec.scale or 8**-0.5)
    wanted = np.full(4, -np.inf)
    for b in range(2):
        for i in range(100):
            for j in range(100):
                if spec.causal:
                    seen = j <= i and (not spec.window or i - j < spec.window)
                else:
                    seen = not spec.window or abs(i - j) <= spec.window // 2
                low, high = min(i, j), max(i, j)
                if seen and not (packed and bool((tokens[b, low:high] == 0).any())):
                    wanted = np.maximum(wanted, scores[b, :, i, j].numpy())
    found = largest_logits(q, k, AttentionScope.of(spec, documents, 100, torch.device("cpu")))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
