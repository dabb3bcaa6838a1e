"""From a budget (FLOPs, days on devices, or money) to what it could train: a size and tokens by each law, and a shape.

FLOPs are 6 N D and the MFU is of those, as the laws count: recomputed activations and attention over long sequences come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan.batch import learning_rates, optimal_batches
from bessemer.plan.cost import ASSUMED_MFU
from bessemer.plan.laws.chinchilla import FLOPS_PER_PARAMETER_TOKEN, FRONTIERS, REPLICATION, Allocation
from bessemer.plan.shapes import by_parameters, default_vocabulary

HOUR = 3_600.0


@dataclass(frozen=True)
class Budget:
    """flops: 6 N D that can be spent; the rest is None where it was not said."""

    flops: float
    device_hours: float | None = None
    days: float | None = None
    devices: int | None = None
    cost: float | None = None
    mfu: float | None = None


def from_flops(flops: float) -> Budget:
    """A budget as it is. Raises InputError unless it is positive."""
    if not flops > 0:
        raise InputError(f"a budget of {flops:g} FLOPs trains nothing; give one above zero")
    return Budget(flops)


def from_days(days: float, devices: int, peak: float, mfu: float = ASSUMED_MFU, price: float | None = None) -> Budget:
    """What `devices` do in `days` at `mfu` of a peak of `peak` FLOP/s each; price: dollars a device-hour."""
    if not days > 0 or devices < 1:
        raise InputError(f"a budget of {days:g} days on {devices} devices trains nothing; both must be above zero")
    hours = days * 24 * devices
    return Budget(_flops(hours, peak, mfu), hours, days, devices, None if price is None else hours * price, mfu)


def from_money(money: float, price: float, peak: float, mfu: float = ASSUMED_MFU, devices: int | None = None) -> Budget:
    """What `money` dollars buy at `price` dollars a device-hour; devices: to say in how many days."""
    if not money > 0 or not price > 0:
        raise InputError(f"a budget of {money:g} dollars at {price:g} an hour: both must be above zero")
    if devices is not None and devices < 1:
        raise InputError(f"{devices} devices: give one or more")
    hours = money / price
    return Budget(
        _flops(hours, peak, mfu), hours, None if devices is None else hours / 24 / devices, devices, money, mfu
    )


def _flops(device_hours: float, peak: float, mfu: float) -> float:
    if not peak > 0:
        raise InputError(f"a device of {peak:g} FLOP/s computes nothing; give its peak above zero")
    if not 0 < mfu <= 1:
        raise InputError(f"mfu: {mfu:g} is not a share of the peak above 0 and up to 1")
    return device_hours * HOUR * peak * mfu


@dataclass(frozen=True)
class Proposal:
    """One way to spend a budget. law: its name in FRONTIERS; parameters: of `config`, within 2% of what the law asks for; tokens:
    what is left of the budget for them; batch: tokens of a step, in whole sequences; loss: by the replication, nats a token."""

    law: str
    config: ModelConfig
    parameters: int
    tokens: float
    batch: int
    steps: int
    learning_rate: float
    loss: float

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.parameters


def propose(
    budget: Budget,
    *,
    vocabulary: int | None = None,
    sequence_length: int = 4096,
    batch: int | None = None,
    family: str = "llama",
) -> dict[str, Proposal]:
    """What the budget trains best by each law, under the names of FRONTIERS.

    vocabulary: ids of the tokenizer (None: by size); batch: tokens of a step (None: the DeepSeek law's, as the dial has it).
    Raises InputError where the budget does not pay for one step of the smallest model there is.
    """
    if sequence_length < 1 or (batch is not None and batch < 1):
        raise InputError(f"sequences of {sequence_length} tokens, a batch of {batch}: both must be above zero")
    return {
        key: spend(budget, law.optimum(budget.flops), key, vocabulary, sequence_length, batch, family)
        for key, law in FRONTIERS.items()
    }


def spend(
    budget: Budget,
    wanted: Allocation,
    law: str,
    vocabulary: int | None = None,
    sequence_length: int = 4096,
    batch: int | None = None,
    family: str = "llama",
) -> Proposal:
    """A budget on a size: the shape nearest to it, and as many tokens as it leaves."""
    one_step = f"{budget.flops:.3g} FLOPs do not pay for one step"
    if wanted.tokens < (batch or sequence_length):
        raise InputError(
            f"{one_step}: the best model for them has {wanted.parameters:,.0f} parameters and reads {wanted.tokens:,.0f} tokens, "
            f"and a step reads {batch or sequence_length:,}; give a larger budget, or a smaller batch or sequence"
        )
    ids = vocabulary or default_vocabulary(wanted.parameters)
    config = by_parameters(wanted.parameters, ids, sequence_length, family)
    tokens = budget.flops / (FLOPS_PER_PARAMETER_TOKEN * config.parameters)
    if batch is None:
        advised = optimal_batches(config.parameters, tokens)["deepseek"].value
        batch = sequence_length * max(round(min(advised, tokens) / sequence_length), 1)
    if tokens < batch:
        raise InputError(
            f"{one_step} of {batch:,} tokens of a model of {config.parameters:,} parameters; give a larger budget"
        )
    return Proposal(
        law=law,
        config=config,
        parameters=config.parameters,
        tokens=tokens,
        batch=batch,
        steps=int(tokens // batch),
        learning_rate=learning_rates(config.parameters, tokens)["deepseek"].value,
        loss=REPLICATION.loss(config.parameters, tokens),
    )
