"""The optimizer: parameter groups updated by rules, their state in checkpoints, and the moving average of the weights.

- rules.py: updates by rules, and the rule, weight decay and learning rate of each parameter.
- muon.py: Muon for whole and sharded matrices.
- moments.py: moments in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.checkpoint import SavedCheckpoint
from bessemer.common.errors import BessemerError, InputError
from bessemer.distributed.sharded_tensors import as_shard_of, local
from bessemer.distributed.tied_embedding import owned_parameters, whole_name
from bessemer.model.transformer import Transformer
from bessemer.recipe.resolved import ResolvedOptimizer
from bessemer.train.optimizer.moments import State, UpdatedParameter, format_of, put_unless, zero_moment
from bessemer.train.optimizer.muon import update_matrices
from bessemer.train.optimizer.rules import parameter_groups, update_group
from bessemer.train.update_rule import Muon


def build(model: Transformer, config: ResolvedOptimizer, dtype: torch.dtype = torch.float32) -> GroupOptimizer:
    """Return the optimizer of a model whose parameters are on their training device.

    `dtype` is that of Muon's matmuls.
    """
    return GroupOptimizer([group | {"dtype": dtype} for group in parameter_groups(model, config)])


def try_rule(config: ResolvedOptimizer) -> None:
    """Update small tensors twice by a user's rule, so that a faulty rule fails before the training."""
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((2, 3, 2, 4), (6, 4), (4,))]
    weights = weights[: 2 if config.rule.is_for_matrices else 3]
    names = [f"a trial with shape {list(weight.shape)}" for weight in weights]
    facts = {"params": weights, "names": names, "rule": config.rule, "lr": config.learning_rate}
    optimizer = GroupOptimizer([config.model_dump() | facts])
    for number in range(2):
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step(number=number)
    if not all(bool(weight.isfinite().all()) for weight in weights):
        raise InputError(
            f"train.optimizer.kind: {type(config.rule).__name__}.direction returns non-finite values for gradients of 1"
        )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set each group's learning rate to the run's `learning_rate` times the group's "rate"."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


class GroupOptimizer(torch.optim.Optimizer):
    """The optimizer that updates every parameter group by its rule."""

    # torch's wrappers are removed because they load the compiler, which takes half a second and is not needed here.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        """Take the groups of `parameter_groups`. Raises InputError for 8-bit states of a rule that needs whole tensors."""
        for group in groups:
            if group["rule"].needs_whole and group["state"] == "8bit":
                raise InputError(
                    f"train.optimizer.state: {group['kind']} needs whole tensors, which 8bit does not support; use fp32"
                )
        self.group_of = {weight: group for group in groups for weight in group["params"]}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, skip: Tensor | None = None, number: int = 0) -> None:  # type: ignore[override]
        """Update every weight that has a gradient, as step `number` (0-based).

        `skip` is a float32 scalar on the device. If it is 1, all weights and states keep their bits.
        """
        for group in self.param_groups:
            parameters = [
                UpdatedParameter(name, weight, local(weight.grad), self._state_of(weight))
                for name, weight in zip(group["names"], group["params"], strict=True)
                if weight.grad is not None
            ]
            if not parameters:
                continue
            device = parameters[0].weight.device  # the CPU for weights that parallel.offload keeps there
            flag = torch.zeros((), device=device) if skip is None else skip.to(device)
            update = update_matrices if isinstance(group["rule"], Muon) else update_group
            update(parameters, group | {"skip": flag, "step": number})

    def _state_of(self, weight: Tensor) -> State:
        state: State = self.state[weight] or self.initial_state(weight)
        self.state[weight] = state
        return state

    def initial_state(self, weight: Tensor) -> State:
        """Return the state of a parameter before its first update: zeros."""
        group, state = self.group_of[weight], State()
        for name in group["rule"].moments:
            state |= zero_moment(weight, name, format_of(weight, group["state"]))
        for name, shape_for in group["rule"].others.items():
            shape = shape_for(weight.shape)
            dtype = torch.promote_types(weight.dtype, torch.float32) if shape else torch.float32
            state[name] = torch.zeros(shape, dtype=dtype, device=weight.device)
        return state

    def sharded_state(self, weight: Tensor, state: State) -> State:
        """Return the state of a parameter with its moments as DTensors that share their memory."""
        rule, sharded = self.group_of[weight]["rule"], dict(state)
        for name in rule.moments:
            sharded[name] = as_shard_of(weight, state[name])
        return sharded


def state_tensors(model: Transformer, optimizer: GroupOptimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by parameter name, such as "NAME/exp_avg". Moments are sharded like their parameters."""
    return {
        f"{name}/{key}": value
        for name, parameter in owned_parameters(model)
        if parameter in optimizer.state
        for key, value in optimizer.sharded_state(parameter, optimizer.state[parameter]).items()
    }


@torch.no_grad()
def load_state(model: Transformer, optimizer: GroupOptimizer, checkpoint: SavedCheckpoint) -> None:
    """Load the tensors of `state_tensors` from a checkpoint of any layout.

    load_state_dict is not used because it casts the state to the parameter's dtype. Raises BessemerError if the state belongs
    to another rule or format.
    """
    stored, targets = checkpoint.contents["optimizer"], list[tuple[str, Tensor]]()
    for own, parameter in model.named_parameters():
        if parameter in optimizer.group_of:
            name, state = whole_name(model, own), optimizer.initial_state(parameter)
            targets += [(f"{name}/{key}", value) for key, value in optimizer.sharded_state(parameter, state).items()]
            optimizer.state[parameter] = state
    for name, value in targets:
        if name not in stored or stored[name].dtype != str(value.dtype):
            has, keeps = stored[name].dtype if name in stored else "missing", value.dtype
            raise BessemerError(
                f"checkpoint: the optimizer state {name} is {has}, but train.optimizer needs {keeps}; restore the recipe of the "
                "run, or start over with --restart"
            )
    checkpoint.fill("optimizer", targets)


class WeightAverage:
    """An exponential moving average of the weights in fp32: average <- d average + (1 - d) weights after every update.

    d is `decay`, but at most (1 + n) / (10 + n) at update n (0-based), so that the average forgets the initial weights early
    (the rule of TensorFlow's ExponentialMovingAverage with num_updates).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(model.named_parameters())
        self.tensors = {name: weight.detach().float().clone() for name, weight in self._weights.items()}

    @property
    def _weights(self) -> dict[str, Tensor]:
        """This rank's shards, looked up on each access because FSDP2 moves an uneven one into padded memory at the first step."""
        return {name: local(weight) for name, weight in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update the average after update `step` (0-based). `skip` is as for `GroupOptimizer.step`."""
        decay, weights = min(self.decay, (1 + step) / (10 + step)), self._weights
        for name, average in self.tensors.items():
            put_unless(skip, average, average.lerp(weights[name].float(), 1.0 - decay))

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give the model the averaged weights within the block, and restore the trained ones unchanged."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap values, not storage, because compiled code and optimizers refer to the storage."""
        for name, weight in self._weights.items():
            before = weight.clone()
            weight.copy_(self.tensors[name])
            self.tensors[name].copy_(before)
