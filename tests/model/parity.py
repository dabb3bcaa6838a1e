"""Comparison of a model's logits, loss and gradients with those of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.weights import hub_tensors
from bessemer.model.transformer import Transformer

TOLERANCE = {"fp32": 1e-4, "fp64": 1e-9}
LENGTH = 24


def tokens_and_targets(wanted: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, wanted.vocabulary, (3, LENGTH), generator=generator)
    if wanted.labels:
        return tokens, torch.randint(0, wanted.labels, (3,), generator=generator)
    return tokens, torch.randint(0, wanted.vocabulary, tokens.shape, generator=generator)


def our_logits(model: Transformer, tokens: Tensor) -> Tensor:
    if model.config.labels:
        found: Tensor = model.classifier(model(tokens), torch.full((len(tokens),), LENGTH))
        return found
    return model.logits(tokens)


def worst_errors(ours: Transformer, theirs: Any) -> dict[str, float]:
    """Return the largest differences of logits, loss and gradients.

    Gradients are relative to the largest value of each tensor, or to a thousandth of the model's largest if the tensor's are near
    zero (the bias of keys has none, since the softmax cancels it).
    """
    from transformers.core_model_loading import revert_weight_conversion

    tokens, targets = tokens_and_targets(ours.config)
    if ours.config.experts:
        theirs.set_experts_implementation("eager")  # the default does not compute in float64
    for module in theirs.modules():  # otherwise the padding token's rows would have no gradients
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    found, wanted = our_logits(ours, tokens), theirs(tokens).logits
    losses = [torch.nn.functional.cross_entropy(x.flatten(0, -2), targets.flatten()) for x in (found, wanted)]
    for loss in losses:
        loss.backward()
    # Their modules have the experts of a layer in one tensor, their files one tensor for each.
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    gradients = revert_weight_conversion(theirs, present) if ours.config.experts else gradients
    worst, floor = 0.0, 1e-3 * max(float(g.abs().max()) for g in gradients.values() if g is not None)
    frozen = {name for name, parameter in ours.named_parameters() if not parameter.requires_grad}
    parts = hub_tensors(ours, value=lambda name, parameter: parameter if name in frozen else parameter.grad)
    trained = [part for part in parts if part.ours not in frozen]
    for part in trained:
        wanted_gradient = gradients[part.name]
        scale = max(float(wanted_gradient.abs().max()), floor)
        worst = max(worst, float((part.gather() - wanted_gradient).abs().max()) / scale)
    assert {part.name for part in trained} == {name for name, gradient in gradients.items() if gradient is not None}
    return {
        "logits": float((found - wanted).detach().abs().max()),
        "loss": float((losses[0] - losses[1]).detach().abs()),
        "gradients": worst,
    }
