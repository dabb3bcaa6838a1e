"""The initial weights: a pure function of (config, seed), the same whatever the device or the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bessemer.model.config import ModelConfig
from bessemer.model.decoder import Decoder

EMBEDDING_STD = 1.0  # of an untied embedding: the residual stream starts at the scale the norms keep it at
TIED_STD = 0.02  # of a tied matrix, since the logits scale with it (GPT-2)


def build(config: ModelConfig, seed: int) -> Decoder:
    """A decoder with its initial weights, in fp32 on the CPU."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.to_empty(device="cpu")
    if config.tie_embeddings:  # to_empty gives the two names storage of their own
        decoder.head.weight = decoder.embedding.weight
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            _fill(name, parameter, config, seed)
    return decoder


def _fill(name: str, parameter: Tensor, config: ModelConfig, seed: int) -> None:
    """Each tensor draws from a generator seeded by its own name, so no tensor's values depend on another's presence.

    Norms are ones. Matrices are normal with the standard deviation 1/sqrt(fan-in), which keeps the scale of what
    passes through; those that write into the residual stream start at zero, so that every block starts as the
    identity (Zhang et al. 2019, Fixup; Yang et al. 2022, appendix D.2). The head is 1/sqrt(width) times smaller
    still: the first prediction is near uniform.
    """
    if parameter.dim() < 2:
        parameter.fill_(1.0)
    elif name.endswith(("attention.out.weight", "mlp.down.weight")):
        parameter.zero_()
    else:
        if name == "embedding.weight":
            std = TIED_STD if config.tie_embeddings else EMBEDDING_STD
        elif name == "head.weight":
            std = 1.0 / config.width
        else:
            std = 1.0 / math.sqrt(parameter.shape[-1])
        digest = hashlib.blake2b(f"{seed}\x1f{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        parameter.normal_(0.0, std, generator=generator)
