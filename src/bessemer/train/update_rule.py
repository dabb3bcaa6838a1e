"""Update rules of optimizers: the state that a rule keeps for a parameter, and the direction in which it moves it.

This module loads no torch. `train/optimizer/` applies the rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bessemer.recipe.uses import ExtensionBase

if TYPE_CHECKING:  # a recipe that names a rule is loaded without torch
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ParameterUpdate:
    """An update of one parameter.

    Attributes:
        name: The name of the parameter, such as "blocks.0.attention.qkv".
        step: The number of the update in the run, from 0; skipped updates count.
        learning_rate: The learning rate of this parameter in this update.
        betas: `train.optimizer.betas`.
        eps: `train.optimizer.eps`.
    """

    name: str
    step: int
    learning_rate: float
    betas: tuple[float, float]
    eps: float


class UpdateRule(ExtensionBase, ABC):
    """The base of optimizers' update rules. Fields of a subclass are its settings.

    Attributes:
        moments: The names of the state tensors with the shape of the parameter. They start as zeros.
        nonnegative: The moments that are never negative, for which `train.optimizer.state = "8bit"` has a finer code.
        others: The other state tensors: a function from the shape of the parameter to that of the tensor, by name.
        needs_whole: True if `direction` needs whole tensors, not shards, when several processes divide a parameter.
        is_for_matrices: True if the rule updates only hidden matrices, and AdamW the other parameters.
        betas: The default of `train.optimizer.betas`.
        rate: The default learning rate as a multiple of AdamW's.
        keys: The keys of [train.optimizer] that this rule reads; other rules reject them.
    """

    moments: ClassVar[tuple[str, ...]] = ()
    nonnegative: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[Mapping[str, Callable[[Shape], Shape]]] = {}
    needs_whole: ClassVar[bool] = False
    is_for_matrices: ClassVar[bool] = False
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)  # the betas of AdamW in GPT-3 (Brown et al. 2020, appendix B)
    rate: ClassVar[float] = 1.0
    keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if the names of a subclass's state tensors repeat or are not identifiers."""
        super().__pydantic_init_subclass__(**kwargs)
        names = (*cls.moments, *cls.others)
        if isinstance(cls.moments, str) or len({*names}) < len(names) or not all(map(str.isidentifier, names)):
            raise TypeError(f"{cls.__name__}: moments must be a tuple of names, which differ from those of others")

    @abstractmethod
    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], update: ParameterUpdate) -> Tensor:
        """Update the state, and return the direction; the weight decreases by the learning rate times the direction."""


class _Kernel(UpdateRule):
    """A rule that `train/optimizer/` implements with a function that updates many tensors at a time."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], update: ParameterUpdate) -> Tensor:
        raise NotImplementedError("a built-in rule cannot be extended; extend bessemer.UpdateRule")


class AdamW(_Kernel):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    name = "adamw"
    moments = ("exp_avg", "exp_avg_sq")
    nonnegative = ("exp_avg_sq",)
    others: ClassVar = {"step": lambda shape: ()}
    keys = ("betas", "eps")


class Lion(_Kernel):
    """The sign of the momentum (Chen et al. 2023)."""

    moments = ("exp_avg",)
    # The betas are from section 4 of the paper; its section 5 recommends a 3 to 10 times smaller rate. 150 steps on 110 kB of
    # Python's reference ended at 3.15 bits per byte with AdamW's rate, and at 3.01 with a third and with a fifth of it.
    betas = (0.9, 0.99)
    rate = 0.25
    keys = ("betas",)


class Muon(_Kernel):
    """Orthogonalised momentum (Jordan et al. 2024)."""

    # In the recipe `demo`, 0.016 is 2.5 times the rate that AdamW would get. After 400 steps, matrices that learn twice as fast
    # cost 0.04 bits per byte (benchmarks/results/ablations.json).
    rate = 2.5
    moments = ("momentum",)
    is_for_matrices = True
    keys = ("muon_momentum", "muon_rate")


BUILT_IN: Mapping[str, str] = {rule.name: f"{__name__}:{rule.__name__}" for rule in (AdamW, Muon, Lion)}
