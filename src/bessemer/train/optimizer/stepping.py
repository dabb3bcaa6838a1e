"""One optimizer out of groups, rules, a format for the moments and a home for them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bessemer.checkpoint import Checkpoint
from bessemer.errors import BessemerError
from bessemer.model.transformer import Transformer
from bessemer.parallel.local import as_part_of, local
from bessemer.parallel.tied import owned_parameters, whole_name
from bessemer.recipe import Optimizer as Settings
from bessemer.train.optimizer.elementwise import State, adamw, lion
from bessemer.train.optimizer.groups import Group
from bessemer.train.optimizer.low_precision_state import BLOCK, Storage, noise, read, write
from bessemer.train.optimizer.muon import muon, muon_of_divided, nesterov
from bessemer.train.optimizer.offload import Host, bunches

# The moments of each rule, and whether they can be negative.
MOMENTS: dict[str, dict[str, bool]] = {
    "adamw": {"exp_avg": True, "exp_avg_sq": False},
    "lion": {"exp_avg": True},
    "muon": {"momentum": True},
}
ELEMENTWISE = {"adamw": adamw, "lion": lion}
SLICE = BLOCK << 16  # elements of a low-precision moment that are fp32 at a time: 16.8M, 64 MiB each


class Optimizer(torch.optim.Optimizer):
    """Updates every group by its rule. storage: how moments are kept; host: where, when not beside the weights."""

    def __init__(self, groups: list[Group], settings: Settings, storage: Storage, host: Host | None) -> None:
        assert settings.learning_rate is not None and settings.betas is not None, "the recipe is resolved"
        self.storage, self.host = storage, host
        self._name_of = {parameter: name for group in groups for name, parameter in group.named}
        self._number_of = {parameter: number for number, parameter in enumerate(self._name_of)}
        super().__init__(
            [
                {
                    "params": [parameter for _, parameter in group.named],
                    "kind": group.kind,
                    "rule": group.rule,
                    "weight_decay": group.weight_decay,
                    "rate": group.rate,
                    "lr": settings.learning_rate * group.rate,
                    "betas": tuple(settings.betas),
                    "eps": settings.eps,
                    "momentum": settings.muon_momentum,
                    "scale": settings.muon_scale,
                }
                for group in groups
            ],
            {},
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                if not self.state[weight]:
                    self.state[weight] = self.fresh_state(weight, group)
            states = [self.state[weight] for weight in weights]
            if self.host is None:
                self._update(weights, states, group)
                continue
            for part in bunches(weights, states):
                device = weights[part][0].device
                there = self.host.fetch(states[part], device)
                self._update(weights[part], there, group)
                self.host.put_back(states[part], there, device)
        if self.host is not None:
            self.host.finish(next(iter(self._name_of)).device)

    def fresh_state(self, weight: Tensor, group: dict[str, Any]) -> State:
        """The state of a parameter before its first update.

        "step" counts the updates, for AdamW's bias correction and for the noise of the rounding; beside the weights
        where the fused kernel reads it, else on the CPU, which then need not wait for the device to know it.
        """
        state: State = {}
        for name in MOMENTS[group["rule"]]:
            state |= self.storage.empty(weight, name, weight.device)
        kept = self.storage.format_of(weight)
        if group["rule"] == "adamw" or kept == "bf16":
            place = weight.device if kept == "fp32" else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
        return state if self.host is None else self.host.settle(state)

    def _update(self, weights: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
        """One step of a rule. Whole lists where the moments are fp32; where they are not, tensor by tensor.

        Of a divided parameter the local part is updated; only Muon has to see the whole.
        """
        gradients: list[Tensor] = [local(weight.grad) for weight in weights if weight.grad is not None]
        held = [local(weight) for weight in weights]
        if group["rule"] == "muon":
            directed = zip(weights, map(partial(self._direction, group=group), weights, gradients, states), strict=True)
            if not any(isinstance(weight, DTensor) for weight in weights):
                muon(((self._name_of[weight], weight, direction) for weight, direction in directed), group)
                return
            for weight, direction in directed:
                assert isinstance(weight, DTensor)
                muon_of_divided(self._name_of[weight], weight, direction, group)
            return
        plain = [n for n, weight in enumerate(weights) if self.storage.format_of(weight) == "fp32" and held[n].numel()]
        coded = [n for n, weight in enumerate(weights) if self.storage.format_of(weight) != "fp32"]
        if plain:
            ELEMENTWISE[group["rule"]](
                [held[n] for n in plain], [gradients[n] for n in plain], [states[n] for n in plain], group
            )
        for n in coded:
            flat, gradient_N = held[n].view(-1), gradients[n].reshape(-1)
            for part, moments in self._decoded(weights[n], states[n], group["rule"]):
                ELEMENTWISE[group["rule"]]([flat[part]], [gradient_N[part]], [moments], group)

    def _direction(self, weight: Tensor, gradient: Tensor, state: State, group: dict[str, Any]) -> Tensor:
        """Muon's direction before it is orthogonalised."""
        if self.storage.format_of(weight) == "fp32":
            return nesterov(state["momentum"], gradient, group["momentum"])
        direction, gradient_N = torch.empty_like(gradient), gradient.reshape(-1)
        for part, moments in self._decoded(weight, state, "muon"):
            direction.view(-1)[part] = nesterov(moments["momentum"], gradient_N[part], group["momentum"])
        return direction

    def _decoded(self, weight: Tensor, state: State, rule: str) -> Iterator[tuple[slice, State]]:
        """Slices of a parameter with their moments in fp32; what the caller leaves in them is put back."""
        steps = int(state["step"]) if "step" in state else 0
        for start in range(0, local(weight).numel(), SLICE):
            part = slice(start, min(start + SLICE, local(weight).numel()))
            moments = {name: read(state, name, signed, part) for name, signed in MOMENTS[rule].items()}
            if rule == "adamw":
                moments["step"] = torch.full((), steps, dtype=torch.float32, device=weight.device)
            yield part, moments
            drawn = (local(weight).new_empty(0),) * 2
            if self.storage.format == "bf16":
                seed = (steps, self._number_of[weight], start)
                drawn = noise(part.stop - part.start, seed, weight.device)
            for (name, signed), noise_N in zip(MOMENTS[rule].items(), drawn, strict=False):
                write(state, name, signed, part, moments[name], noise_N)
        if "step" in state:
            state["step"] += 1


def state_tensors(model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under the parameters' names: "NAME/exp_avg", "NAME/exp_avg_sq", "NAME/step". What is kept
    for each element is divided as its parameter is."""
    if optimizer.host is not None:
        optimizer.host.wait()
    return {
        f"{name}/{key}": as_part_of(parameter, value)
        for name, parameter in owned_parameters(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


@torch.no_grad()
def load_state(model: Transformer, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Put back what state_tensors gave, whatever layout it was saved from. Not through load_state_dict, which casts the
    state to the parameter's type.

    Raises BessemerError when the state is that of another rule or format.
    """
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    stored: dict[str, dict[str, str]] = {}
    for key, what in checkpoint.contents["optimizer"].items():
        name, _, kind = key.rpartition("/")
        stored.setdefault(name, {})[kind] = what.dtype.removeprefix("torch.")
    targets: dict[str, Tensor] = {}
    copies: dict[str, Tensor] = {}
    for own, parameter in model.named_parameters():
        name = whole_name(model, own)
        if parameter not in group_of:
            continue
        if name not in stored:
            raise BessemerError(
                f"checkpoint: no optimizer state of {name}, which this recipe trains; go on with the recipe it was trained "
                "with, or start over with --restart"
            )
        state = optimizer.fresh_state(parameter, group_of[parameter])
        kept = {kind: str(value.dtype).removeprefix("torch.") for kind, value in state.items()}
        if kept != stored[name]:
            raise BessemerError(
                f"checkpoint: the optimizer state of {name} is {_described(stored[name])}, but this recipe's train.optimizer "
                f"keeps {_described(kept)}; go on with the kind and state it was trained with, or start over with --restart"
            )
        into = targets if name == own else copies
        into |= {f"{name}/{kind}": as_part_of(parameter, value) for kind, value in state.items()}
        optimizer.state[parameter] = state
    checkpoint.fill("optimizer", targets)
    if copies:
        checkpoint.fill("optimizer", copies)


def _described(state: dict[str, str]) -> str:
    return ", ".join(f"{kind} {state[kind]}" for kind in sorted(state))
