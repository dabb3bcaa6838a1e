"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bessemer.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    end_of_text: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Continue `prompt`; yields one token at a time, ends before `end_of_text`.

    temperature: 0 takes the most likely token; else logits are divided by it and a token is drawn. top_k: draw only
    among the so many most likely; 0: among all. The last `sequence_length` tokens are the context.
    """
    device = next(model.parameters()).device
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_tokens):
        window = torch.tensor([ids[-model.config.sequence_length :]], device=device)
        logits_V = model.head.logits(model(window)[0, -1]).float().cpu()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            if 0 < top_k < len(logits_V):
                logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -torch.inf
            token = int(torch.multinomial((logits_V / temperature).softmax(dim=0), 1, generator=generator))
        if token == end_of_text:
            return
        ids.append(token)
        yield token
