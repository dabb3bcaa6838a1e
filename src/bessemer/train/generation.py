"""Text generation, one token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.model.attention import LayerKVCache
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.description import Framing


@dataclass(frozen=True)
class Sampling:
    """The settings for choosing a token. The cuts apply in the order `top_k`, `top_p`, after the temperature.

    Attributes:
        temperature: Divides the logits before a token is drawn; 0 takes the most likely token.
        top_k: Draws from this number of most likely tokens; 0 for all.
        top_p: Draws from the most likely tokens that together have this probability (Holtzman et al. 2020, section 3.1); 1
            for all.
        seed: Seed of the random generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"temperature: {self.temperature} is negative; use 0 for greedy decoding")
        if self.top_k < 0:
            raise InputError(f"top_k: {self.top_k} is negative; use 0 to sample from all tokens")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p} is not in (0, 1]; use 1 to sample from all tokens")


@torch.no_grad()
def generate(
    model: Transformer, prompt: list[int], *, max_tokens: int, sampling: Sampling, ends: Collection[int] = ()
) -> Iterator[int]:
    """Continue `prompt`, yielding one token at a time.

    Keys and values of earlier tokens are cached, so each token costs one token's computation. When the model's positions
    are used up, generation continues with the later half of the tokens as its context, which is computed again.

    Args:
        model: A causal language model.
        prompt: Token ids.
        max_tokens: Maximum number of new tokens.
        sampling: How to choose each token.
        ends: Token ids at which to stop; they are not yielded.

    Raises:
        InputError: The model does not predict the next token.
    """
    require_writer(model.config)
    device, limit = next(model.parameters()).device, model.config.positions_length
    generator = torch.Generator("cpu").manual_seed(sampling.seed)
    context = list(prompt[-limit:])
    cache, unread = _fresh(model, device), context
    for _ in range(max_tokens):
        length = cache[0].length + len(unread)
        if length > limit:
            context = context[-max(limit // 2, 1) :]
        # If the regimes differ, the cached keys were rotated for shorter sequences.
        if length > limit or model.config.rope_regime(length) != model.config.rope_regime(cache[0].length or length):
            cache, unread = _fresh(model, device), context
        hidden_1TD = model(torch.tensor([unread], device=device), cache=cache)
        token = choose(model.head.logits(hidden_1TD[0, -1]).float().cpu(), sampling, generator)
        if token in ends:
            return
        context.append(token)
        unread = [token]
        yield token


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose the next token from its logits, (V,)."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], -torch.inf)
    probability_V = logits_V.softmax(dim=0)
    if sampling.top_p < 1:
        sorted_V, index_V = probability_V.sort(descending=True, stable=True)
        before_V = sorted_V.cumsum(dim=0) - sorted_V  # without itself: the token that crosses the threshold stays
        probability_V[index_V[before_V >= sampling.top_p]] = 0.0
    return int(torch.multinomial(probability_V, 1, generator=generator))


def _fresh(model: Transformer, device: torch.device) -> list[LayerKVCache]:
    return [LayerKVCache(model.config, 1, device, model.embedding.weight.dtype) for _ in model.blocks]


def complete(
    model: Transformer, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling,
    framing: Framing | None = None, ends: Collection[int] = (),
) -> str:  # fmt: skip
    """Return the continuation of a prompt as text.

    Args:
        model: A causal language model.
        tokenizer: The tokenizer of the model.
        prompt: Text; special tokens in it are encoded as special tokens.
        max_tokens: Maximum number of new tokens.
        sampling: How to choose each token.
        framing: Ids to put before the prompt; by default end-of-text, after which a document begins.
        ends: Ids at which to stop; by default end-of-text.

    Raises:
        InputError: The prompt has ids that the model does not know, or the model does not write text.
    """
    ids = tokenizer.encode_marked(prompt)
    if any(token >= model.config.vocabulary for token in ids):
        raise InputError("the prompt has token ids beyond the model's vocabulary; use the tokenizer of the run")
    before = (tokenizer.end_of_text,) if framing is None else framing.before
    new = generate(
        model, [*before, *ids] or [tokenizer.end_of_text], max_tokens=max_tokens, sampling=sampling,
        ends=ends or (tokenizer.end_of_text,),
    )  # fmt: skip
    return tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]


def require_writer(config: ModelConfig) -> None:
    """Raise InputError for a model that does not generate text, with the command to use instead."""
    if config.labels or not config.causal:
        kind = "a classifier" if config.labels else "an encoder"
        raise InputError(f"the model is {kind}, which cannot generate text; score it with `bessemer evaluate RUN`")
