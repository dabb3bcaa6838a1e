"""A budget of FLOPs, days or dollars on given devices, as a model and its tokens."""

from __future__ import annotations

from collections.abc import Mapping

from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.plan import ask, budget, shapes
from bessemer.plan.budget import Proposal

FIRST_MFU = 0.4  # before the plan has said better
ROUNDS = 3  # the predicted MFU changes by less than 2% from the second to the third
LAW = "rule"  # 20 tokens a parameter


def proposed(kind: str, text: str, asked: Mapping[str, str], mfu: float) -> Proposal:
    """What a budget buys. kind: flops, days or money; asked: short names of plan/ask.py, with the devices; mfu: share of their
    bf16 peak at which they are taken to work. Raises InputError where it does not pay for a step."""
    amount = ask.number(text, kind)
    count, device = _devices(asked)
    price = ask.number(asked["price"], "price") if "price" in asked else device.price
    peak = device.best("bf16") / device.matmul if "bf16" in device.flops else max(device.flops.values())
    if kind == "flops":
        given = budget.from_flops(amount)
    elif kind == "days":
        given = budget.from_days(amount, count, peak, mfu, price)
    elif price is None:
        raise InputError(f"--money: the catalogue has no price for {device.name}; add --price P, dollars a device-hour")
    else:
        given = budget.from_money(amount, price, peak, mfu, count)
    sizes = {name: ask.count(asked[name], name) if name in asked else None for name in ("vocabulary", "seq", "batch")}
    length = sizes["seq"] or ask.DEFAULT_SEQUENCE
    try:
        found = budget.propose(given, vocabulary=sizes["vocabulary"], sequence_length=length, batch=sizes["batch"])[LAW]
        shapes.model(float(found.parameters), found.config.vocabulary)  # for which the plan asks by its size
    except InputError as error:
        raise InputError(f"--{kind} {text}: too little to train a model on: {error}") from None
    return found


def _devices(asked: Mapping[str, str]) -> tuple[int, devices.Device]:
    if "gpus" not in asked:
        raise InputError("plan: a budget on what? add --gpus 1024xH100")
    amount, _, name = asked["gpus"].partition("x")
    if not name.strip():
        raise InputError(f"--gpus {asked['gpus']}: of which kind? write it like {amount}xH100")
    return ask.count(amount, "gpus"), devices.find(name.strip())
