"""The initial weights: a pure function of (config, seed), the same whatever the device or the layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer

EMBEDDING_STD = 1.0  # of an untied embedding: the residual stream starts at the scale the norms keep it at
TIED_STD = 0.02  # of a tied matrix, since the logits scale with it (GPT-2)


def build(config: ModelConfig, seed: int) -> Transformer:
    """A model with its initial weights, in fp32 on the CPU."""
    model = shell(config)
    model.to_empty(device="cpu")
    if config.tie_embeddings and not config.labels:  # to_empty gives the two names storage of their own
        model.head.tie(model.embedding)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, config, seed)
    return model


def shell(config: ModelConfig) -> Transformer:
    """A model without memory for its weights, on the meta device."""
    with torch.device("meta"):
        return Transformer(config)


@torch.no_grad()
def initial(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The initial value of one tensor of the model, whole, in fp32 on the CPU: the same as in `build`."""
    tensor = torch.empty(shape)
    _fill(name, tensor, config, seed)
    return tensor


def _fill(name: str, parameter: Tensor, config: ModelConfig, seed: int) -> None:
    """Each tensor draws from a generator seeded by its own name, so no tensor's values depend on another's presence.

    Norms are ones, or zeros where they are zero-centred, biases zero. Matrices are normal with the standard deviation
    1/sqrt(fan-in), which keeps the scale of what passes through; those that write into the residual stream start at
    zero, so that every block starts as the identity (Zhang et al. 2019, Fixup; Yang et al. 2022, appendix D.2),
    unless a norm follows them, which would blow their zeros up. The output matrix is 1/sqrt(width) times smaller
    still: the first prediction is near uniform.
    """
    output_norm = config.norm_position in ("output", "both")
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.dim() < 2:
        parameter.fill_(0.0 if config.zero_centred_norm else 1.0)
    elif name.endswith(("attention.out.weight", "mlp.down.weight")) and not output_norm:
        parameter.zero_()
    else:
        if name == "embedding.weight":
            std = TIED_STD if config.tie_embeddings else EMBEDDING_STD
            if config.scale_embedding and not config.tie_embeddings:
                std /= math.sqrt(config.width)
        elif name in ("position_embedding.weight", "type_embedding.weight"):
            std = TIED_STD
        elif name in ("head.weight", "classifier.weight"):
            std = 1.0 / config.width
        else:
            std = 1.0 / math.sqrt(parameter.shape[-1])
        digest = hashlib.blake2b(f"{seed}\x1f{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        parameter.normal_(0.0, std, generator=generator)
