"""A budget of FLOPs, days or dollars on given devices, as a model and its tokens: 20 tokens a parameter, of 6 N D FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.model.config import ModelConfig
from bessemer.plan import ask, shapes
from bessemer.plan.batch import optimal_batches
from bessemer.plan.laws import FLOPS_PER_PARAMETER_TOKEN, RULE

FIRST_MFU = 0.4  # before the plan has said better
ROUNDS = 3  # the predicted MFU changes by less than 2% from the second to the third


@dataclass(frozen=True)
class Proposal:
    """tokens: what is left of the budget for a model whose size is within 2% of the best one; batch: tokens of a step."""

    config: ModelConfig
    tokens: float
    batch: int

    @property
    def parameters(self) -> int:
        return self.config.parameters


def proposal_for_budget(kind: str, text: str, asked: Mapping[str, str], mfu: float) -> Proposal:
    """What a budget buys. kind: flops, days or money; asked: short names of plan/ask.py, with the devices; mfu: share of their
    bf16 peak at which they are taken to work. Raises InputError where it does not pay for a step."""
    amount = ask.number(text, kind)
    count, device = _devices(asked)
    price = ask.number(asked["price"], "price") if "price" in asked else device.price
    rate = 3600 * mfu * (device.flops.get("bf16") or max(device.flops.values()))
    if kind == "money" and price is None:
        raise InputError(f"--money: the catalogue has no price for {device.name}; add --price P, dollars a device-hour")
    flops = {"flops": amount, "days": 24 * amount * count * rate, "money": amount / (price or 1.0) * rate}[kind]
    sizes = {name: ask.count(asked[name], name) if name in asked else None for name in ("vocabulary", "seq", "batch")}
    try:
        found = proposal_for_flops(flops, sizes["vocabulary"], sizes["seq"] or ask.DEFAULT_SEQUENCE, sizes["batch"])
        shapes.model(float(found.parameters), found.config.vocabulary)  # for which the plan asks by its size
    except InputError as error:
        raise InputError(f"--{kind} {text}: too little to train a model on: {error}") from None
    return found


def proposal_for_flops(
    flops: float, vocabulary: int | None, sequence_length: int, batch: int | None = None
) -> Proposal:
    """The shape nearest to the compute-optimal size for a FLOP budget, and the tokens that the rest of the budget trains.

    vocabulary: ids of the tokenizer (None: by size); batch: tokens of a step (None: the DeepSeek law's, as the dial has it).
    Raises InputError where the FLOPs do not pay for one step of the smallest model there is.
    """
    one_step = f"{flops:.3g} FLOPs do not pay for one step"
    best = RULE.optimum(flops)
    if best.tokens < (batch or sequence_length):
        raise InputError(
            f"{one_step}: the best model for them has {best.parameters:,.0f} parameters and reads {best.tokens:,.0f} tokens, "
            f"and a step reads {batch or sequence_length:,}; give a larger budget, or a smaller batch or sequence"
        )
    ids = vocabulary or shapes.default_vocabulary(best.parameters)
    config = shapes.by_parameters(best.parameters, ids, sequence_length)
    tokens = flops / (FLOPS_PER_PARAMETER_TOKEN * config.parameters)
    if batch is None:
        advised = optimal_batches(config.parameters, tokens)["deepseek"].value
        batch = sequence_length * max(round(min(advised, tokens) / sequence_length), 1)
    if tokens < batch:
        raise InputError(
            f"{one_step} of {batch:,} tokens of a model of {config.parameters:,} parameters; give a larger budget"
        )
    return Proposal(config, tokens, batch)


def _devices(asked: Mapping[str, str]) -> tuple[int, devices.DeviceSpec]:
    if "gpus" not in asked:
        raise InputError("plan: a budget on what? add --gpus 1024xH100")
    number, name = ask.devices_of(asked["gpus"])
    if name is None:
        raise InputError(f"--gpus {asked['gpus']}: of which kind? write it like {number}xH100")
    return number, devices.find(name, Path(asked["catalogue"]) if "catalogue" in asked else None)
