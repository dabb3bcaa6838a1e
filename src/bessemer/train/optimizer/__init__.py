"""Gradients to updates: AdamW, Muon and Lion over parameter groups, with moments in the configured format; and the moving
average of the weights.

rules.py    the update rules, and which parameter is updated by which, with which decay and learning rate
moments.py  moments in 8 bits
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.checkpoint import SavedCheckpoint
from bessemer.common.errors import BessemerError
from bessemer.distributed.sharded_tensors import as_shard_of, is_dtensor, local
from bessemer.distributed.tied_embedding import owned_parameters, whole_name
from bessemer.model.transformer import Transformer
from bessemer.recipe import Optimizer as OptimizerConfig
from bessemer.recipe.train import UPDATE_RULES
from bessemer.train.optimizer.moments import BLOCK, Format, format_of, quantized, write, zero_moment
from bessemer.train.optimizer.rules import (
    ELEMENTWISE,
    State,
    cautiously,
    muon,
    muon_sharded,
    nesterov,
    parameter_groups,
    put_unless,
)

# Elements of an 8-bit moment that are fp32 at a time: 4.2M; quantizing takes several times their memory.
SLICE = BLOCK << 14


def build(model: Transformer, config: OptimizerConfig) -> GroupOptimizer:
    """Return the optimizer of a model whose parameters are on their training device."""
    return GroupOptimizer(parameter_groups(model, config), config.state)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set each group's learning rate, a multiple of the run's."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


class GroupOptimizer(torch.optim.Optimizer):
    """Updates every group by its rule."""

    # Without the wrappers around torch's own, which load its compiler for half a second: nothing here is compiled.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, groups: list[dict[str, Any]], format: Format) -> None:
        """groups: of `parameter_groups`; format: of the moments."""
        self.format = format
        self._name_of = {p: name for group in groups for name, p in zip(group["names"], group["params"], strict=True)}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient. skip: a float32 scalar on the device; where it is 1 all weights and states
        keep their bits."""
        for group in self.param_groups:
            weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            device = weights[0].device  # the CPU's, of weights that parallel.offload keeps there
            flag = torch.zeros((), device=device) if skip is None else skip.to(device)
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = self.initial_state(weight, group["rule"])
            self._update(weights, [self.state[weight] for weight in weights], group | {"skip": flag})

    def initial_state(self, weight: Tensor, rule: str) -> State:
        """The state of a parameter before its first update. "step" counts the updates, for AdamW's bias correction."""
        state: State = {}
        format = format_of(weight, self.format)
        for name in UPDATE_RULES[rule].moments:
            state |= zero_moment(weight, name, format)
        if rule == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        return state

    def _update(self, weights: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
        """One step of a rule on local shards: as lists where the moments are fp32, else tensor by tensor. Muon gathers whole
        matrices."""
        gradients: list[Tensor] = [local(weight.grad) for weight in weights if weight.grad is not None]
        if group["rule"] == "muon":
            names = [self._name_of[weight] for weight in weights]
            sharded, direct = (
                [weight for weight in weights if is_dtensor(weight)],
                partial(self._direction, group=group),
            )
            if sharded:
                assert len(sharded) == len(weights), "all matrices are sharded, or none"
                muon_sharded(names, sharded, lambda n: direct(weights[n], gradients[n], states[n]), group)
            else:
                muon(zip(names, weights, map(direct, weights, gradients, states), strict=True), group)
            return
        update, shards = ELEMENTWISE[group["rule"]], [local(weight) for weight in weights]
        if _is_cautious(group):
            update = partial(cautiously, update)
        coded = [n for n, weight in enumerate(weights) if format_of(weight, self.format) == "8bit"]
        plain = [n for n in range(len(weights)) if n not in coded]
        update([shards[n] for n in plain], [gradients[n] for n in plain], [states[n] for n in plain], group)
        for n in coded:
            flat, gradient_N = shards[n].view(-1), gradients[n].reshape(-1)
            for part, moments in self._decoded(weights[n], states[n], group):
                update([flat[part]], [gradient_N[part]], [moments], group)

    def _direction(self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Muon's direction before it is orthogonalised."""
        if format_of(weight, self.format) == "fp32":
            return nesterov(state["momentum"], gradient, group["momentum"], group["skip"])
        direction, gradient_N = torch.empty_like(gradient), gradient.reshape(-1)
        for part, moments in self._decoded(weight, state, group):
            momentum = moments["momentum"]
            direction.view(-1)[part] = nesterov(momentum, gradient_N[part], group["momentum"], group["skip"])
        return direction

    def _decoded(self, weight: Tensor, state: State, group: dict[str, Any]) -> Iterator[tuple[slice, State]]:
        """Slices of a parameter with their moments in fp32, which are stored again after the caller updated them."""
        moment_signs, numel = UPDATE_RULES[group["rule"]].moments, local(weight).numel()
        for start in range(0, numel, SLICE):
            part = slice(start, min(start + SLICE, numel))
            moments = {name: quantized(state, name, signed, part).dequantize() for name, signed in moment_signs.items()}
            if "step" in state:
                moments["step"] = state["step"].clone()
            yield part, moments
            for name, signed in moment_signs.items():
                write(state, name, signed, part, moments[name], group["skip"])
        if "step" in state:
            state["step"] += 1 - group["skip"]


def _is_cautious(group: dict[str, Any]) -> bool:
    return bool(group["cautious"] and group["weight_decay"])


def state_tensors(model: Transformer, optimizer: GroupOptimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name: "NAME/exp_avg", "NAME/exp_avg_sq", "NAME/step". Moments are sharded like
    their parameters."""
    return {
        f"{name}/{key}": as_shard_of(parameter, value)
        for name, parameter in owned_parameters(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


@torch.no_grad()
def load_state(model: Transformer, optimizer: GroupOptimizer, checkpoint: SavedCheckpoint) -> None:
    """Load what `state_tensors` returned, saved from any layout. Not by load_state_dict, which casts the state to the
    parameter's dtype.

    Raises BessemerError when the state is that of another rule or format.
    """
    rule_of = {parameter: group["rule"] for group in optimizer.param_groups for parameter in group["params"]}
    stored: dict[str, dict[str, str]] = {}
    for key, tensor in checkpoint.contents["optimizer"].items():
        name, _, kind = key.rpartition("/")
        stored.setdefault(name, {})[kind] = tensor.dtype.removeprefix("torch.")
    targets: list[tuple[str, Tensor]] = []
    for own, parameter in model.named_parameters():
        name = whole_name(model, own)
        if parameter not in rule_of:
            continue
        state = optimizer.initial_state(parameter, rule_of[parameter])
        expected = {kind: str(value.dtype).removeprefix("torch.") for kind, value in state.items()}
        if expected != (saved := stored.get(name, {})):
            raise BessemerError(
                f"checkpoint: the optimizer state of {name} is {_described(saved)}, but this recipe's train.optimizer "
                f"keeps {_described(expected)}; continue with the recipe it was trained with, or start over with --restart"
            )
        targets += [(f"{name}/{kind}", as_shard_of(parameter, value)) for kind, value in state.items()]
        optimizer.state[parameter] = state
    checkpoint.fill("optimizer", targets)


def _described(state: dict[str, str]) -> str:
    return ", ".join(f"{kind} {state[kind]}" for kind in sorted(state)) or "missing"


class WeightAverage:
    """An exponential moving average of the weights in fp32: average <- d average + (1 - d) weights after every update.

    d is `decay`, but at most (1 + n) / (10 + n) at update n (0-based), so that the average leaves the initial weights behind
    early on (the rule of TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.tensors: dict[str, Tensor] = {}
        self.restart()

    @property
    def _weights(self) -> dict[str, Tensor]:
        """This rank's shards, looked up each time: FSDP2 moves an uneven one into padded memory at the first step."""
        return {name: local(weight) for name, weight in self._parameters.items()}

    @torch.no_grad()
    def restart(self) -> None:
        self.tensors = {name: weight.float().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the average after the update number `step` (0-based). skip: as of `GroupOptimizer.step`."""
        decay, weights = min(self.decay, (1 + step) / (10 + step)), self._weights
        for name, average in self.tensors.items():
            put_unless(skip, average, average.lerp(weights[name].float(), 1.0 - decay))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; the trained ones are restored unchanged."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Values, not storage: compiled code and optimizers refer to the storage."""
        for name, weight in self._weights.items():
            before = weight.clone()
            weight.copy_(self.tensors[name])
            self.tensors[name].copy_(before)
