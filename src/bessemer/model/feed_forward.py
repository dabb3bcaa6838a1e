"""The feed-forward sublayer. Its parameters and costs are in `sublayers.feed_forward_facts`.

Shapes: B sequences, T tokens, D width, F hidden width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.kernels import linear, swiglu
from bessemer.model.layers import ACTIVATIONS, LinearFunction, joint_bias, linear_layer
from bessemer.model.sublayers import feed_forward_facts
from bessemer.recipe.model import Activation


class FeedForward(nn.Module):
    """The MLP: down(act(up(x))), or gated, down(act(gate(x)) * up(x)) (Shazeer 2020), with `gate_up` of shape (2, F, D)."""

    project: LinearFunction = staticmethod(linear)

    def __init__(self, config: ModelConfig, path: str = "mlp", units: int | None = None) -> None:
        super().__init__()
        self.facts = facts = feed_forward_facts(config, path, units)
        self.activation, self.gated = config.activation, config.gated
        if config.gated:
            self.gate_up = nn.Parameter(torch.empty(facts.shapes[f"{path}.gate_up"]))
            self.gate_up_bias = joint_bias(facts, f"{path}.gate_up")
        else:
            self.up = linear_layer(facts, f"{path}.up")
        self.down = linear_layer(facts, f"{path}.down")

    def forward(self, x_BTD: Tensor, masks: DropoutMasks | None = None) -> Tensor:
        """Apply the MLP. `masks` is set only if hidden units are dropped."""
        if self.gated:
            bias = None if self.gate_up_bias is None else self.gate_up_bias.flatten()
            hidden_BTF = apply_gate(self.project(x_BTD, self.gate_up.flatten(0, 1), bias), self.activation)
        else:
            hidden_BTF = ACTIVATIONS[self.activation](self.project(x_BTD, self.up.weight, self.up.bias))
        if masks is not None:
            hidden_BTF = masks.hidden_units(hidden_BTF)
        return self.project(hidden_BTF, self.down.weight, self.down.bias)


def apply_gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, (..., F), for (..., 2F) with the gate first."""
    if activation == "silu":
        return swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
