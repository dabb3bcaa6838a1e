"""A budget of FLOPs, days or dollars on given devices, as a model and its tokens: 20 tokens a parameter, of 6 N D FLOPs; where so
many tokens do not differ, the size and the repetitions of the lowest predicted loss. Days and dollars hold with given odds: by
the figure that this share of runs does not exceed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer import terminal
from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.model.config import ModelConfig
from bessemer.plan import ask, money, shapes
from bessemer.plan.batch import optimal_batches
from bessemer.plan.intervals import UPPER_END
from bessemer.plan.laws import FLOPS_PER_PARAMETER_TOKEN, RULE, Allocation, data_limited, training_flops
from bessemer.plan.outcome import PlanResult
from bessemer.plan.request import PlanRequest
from bessemer.plan.search import NoLayoutError, NoSplitError
from bessemer.recipe.load import HORIZON

FIRST_MFU = 0.4  # before a plan has said better
ROUNDS = 2  # the predicted speed changes by less than 2% from the second to a third
TRIES, SPENT = 6, 0.99  # plans until one keeps to the budget and spends so much of it
SMALLER = 0.8  # the next size, where the compute-optimal one fits no layout


@dataclass(frozen=True)
class PlanBudget:
    """kind: flops, days or money; text: how much, as it was written; odds: share of runs that are to stay within it, from one
    half to UPPER_END, beyond which no interval was fitted."""

    kind: str
    text: str
    odds: float = 0.5

    def __post_init__(self) -> None:
        _amount(self.kind, self.text)
        if not 0.5 <= self.odds <= UPPER_END:
            meant = f" (write {self.odds:.4g}%)" if 50 <= self.odds <= 100 * UPPER_END else ""
            raise InputError(
                f"--odds {self.odds:.4g}: give 50% to {UPPER_END:.0%}{meant}: the ranges of a plan, fitted to published runs, "
                "end there"
            )
        if self.kind == "flops" and self.odds != 0.5:
            raise InputError("plan: --odds is of --days and --money; FLOPs are certain, so that --flops needs none")

    @property
    def amount(self) -> float:
        return _amount(self.kind, self.text)

    def spent(self, result: PlanResult) -> float:
        """What a plan takes of it, as it is printed: FLOPs with attention, days and dollars with the odds."""
        if self.kind == "flops":
            return result.step.model_flops / result.job.tokens * result.goal.tokens
        figure = result.intervals.get("days" if self.kind == "days" else "cost")
        return figure.at(self.odds) if figure is not None else 0.0

    def _is_known(self, result: PlanResult) -> bool:
        return self.kind != "money" or "cost" in result.intervals

    def share(self, result: PlanResult) -> float:
        return self.spent(result) / self.amount

    def noted(self, result: PlanResult) -> PlanResult:
        """A plan with a note of whether it keeps to the budget, and with what odds."""
        if (note := self._note(result)) is None:
            return result
        return replace(result, goal=replace(result.goal, notes=(note, *result.goal.notes)))

    def _note(self, result: PlanResult) -> str | None:
        share, name = self.share(result), f"--{self.kind} {self.text}"
        if not self._is_known(result):
            device = result.job.cluster.device.name
            return f"whether {name} is kept is not known: the catalogue has no price for {device} (price=P gives one)"
        is_even = self.odds == 0.5
        if share > 1:
            which = (
                "the expected figure" if is_even else f"the figure that {self.odds:.0%} of runs do not exceed (--odds)"
            )
            return f"{name} is NOT kept: {which} is {share:.0%} of it"
        if self.kind == "flops":
            return None
        if is_even:
            return f"{name} is kept by the expected figure, which one run in two exceeds (--odds 90% for 9 in 10 that keep it)"
        spent = self.spent(result)
        figure = money.dollars(spent) if self.kind == "money" else terminal.duration(spent * money.DAY)
        return f"{name} is kept by {self.odds:.0%} of runs (--odds), which take at most {figure}"

    def to_dict(self, result: PlanResult) -> dict[str, Any]:
        """amount, spent: FLOPs, days or dollars."""
        spent = self.spent(result) if self._is_known(result) else None
        return {
            "kind": self.kind, "amount": self.amount, "odds": None if self.kind == "flops" else self.odds, "spent": spent,
            "is_kept": None if spent is None else spent <= self.amount,
        }  # fmt: skip


def _amount(kind: str, text: str) -> float:
    """FLOPs, days or dollars. Raises InputError."""
    return ask.days(text, "--days") if kind == "days" else ask.dollars(text, f"--{kind}")


def names_model(asked: Mapping[str, str], overrides: Sequence[str]) -> bool:
    """Whether short names or `key=value` overrides say a model's size."""
    sizes = {f"model.{name}" for name in ("layers", "width", "heads", "depth", "from")}
    return bool({"model", "params"} & asked.keys() or sizes & {one.partition("=")[0].strip() for one in overrides})


def odds_of(text: str) -> float:
    """A share, as 0.9 or 90%. Raises InputError."""
    plain = text.strip()
    try:
        return float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        raise InputError(f"--odds: {text!r} is no share of runs; write it as 90% or 0.9") from None


@dataclass(frozen=True)
class Proposal:
    """tokens: what is left of the budget for a model whose size is within 2% of the best one; batch: tokens of a step."""

    config: ModelConfig
    tokens: float
    batch: int

    @property
    def parameters(self) -> int:
        return self.config.parameters


def fitted(
    budget: PlanBudget, asked: Mapping[str, str], request: Callable[[Mapping[str, str]], PlanRequest],
    plan: Callable[[PlanRequest], PlanResult], unique: float | None = None,
) -> PlanRequest:  # fmt: skip
    """A model and tokens whose plan keeps to a budget: 20 tokens a parameter at the speed that the plan of the round before
    predicts, or the largest model that fits with the headroom where that one does not, trained for longer; then as many steps as
    are paid for. Where `asked` has the tokens, the model that spends the budget on them.

    asked, unique: of `proposal_for_budget`; request: from short names with sizes to what is asked; plan: works it
    out.
    """
    kind, text, rate, largest = budget.kind, budget.text, None, math.inf
    notes: tuple[str, ...] = ()
    fixed, rounds = "tokens" in asked, 0
    while rounds < ROUNDS:
        chosen = proposal_for_budget(kind, text, asked, rate, largest, unique)
        tokens = int(chosen.tokens)
        one = _sized(request, asked, chosen.parameters, tokens, notes)
        try:
            result = plan(one)
            if not (fits := _leaves_headroom(result)) and (chosen.parameters < SMALLEST or _is_hopeless(result)):
                raise InputError(
                    f"--headroom: no model leaves {result.goal.headroom:.0%} of these devices' memory free"
                )
        except NoSplitError:
            raise
        except NoLayoutError:
            if chosen.parameters < SMALLEST:
                raise
            fits = False
        if not fits:
            if largest == math.inf:
                what, instead = (
                    ("the size that it pays for", "proposed")
                    if fixed
                    else ("the best size for it", "trained for longer")
                )
                notes += (
                    f"{what}, {terminal.amount(chosen.parameters)}, does not fit on these devices with the headroom: "
                    f"a smaller model is {instead}",
                )
            largest = SMALLER * chosen.parameters
            continue
        rounds += 1
        device_hours = result.intervals["device_hours"].at(budget.odds)
        rate = training_flops(chosen.parameters, result.goal.tokens) / (device_hours * 3600)
    if fixed:
        return _kept_on_tokens(
            budget, plan, lambda size: _sized(request, asked, size, tokens, notes), result, chosen.parameters, largest
        )
    if unique is not None and unique < result.goal.tokens:
        notes += (
            f"with {terminal.amount(unique)} tokens that differ, size and repetitions are those of the lowest predicted loss for "
            "this budget (Muennighoff et al. 2023)",
        )
        one = replace(one, notes=notes)
    kept: PlanRequest | None = None
    for _ in range(TRIES):
        share = budget.share(result)
        kept = one if share <= 1 and _leaves_headroom(result) else kept
        if SPENT <= share <= 1:
            break
        batch = result.job.tokens
        if (tokens := int(result.goal.tokens / batch / share) * batch) < batch:
            break
        one = _sized(request, asked, chosen.parameters, tokens, notes)
        result = plan(one)
    if kept is None:
        raise InputError(f"--{kind} {text}: too little to train a model on: it does not pay for one step; give more")
    return kept


def _kept_on_tokens(
    budget: PlanBudget, plan: Callable[[PlanRequest], PlanResult], sized: Callable[[float], PlanRequest], result: PlanResult,
    parameters: float, largest: float,
) -> PlanRequest:  # fmt: skip
    """The model that spends most of a budget on given tokens and keeps to it. result: the plan of one with so many parameters;
    sized: asks for one; largest: parameters at the most. Raises InputError where none keeps to it."""
    best, most = None, 0.0
    for _ in range(TRIES):
        share = budget.share(result)
        if most < share <= 1 and _leaves_headroom(result):
            best, most = sized(parameters), share
        parameters *= (1 + SPENT) / 2 / share
        if SPENT <= share <= 1 or parameters > largest:
            break
        result = plan(sized(parameters))
    if best is None:
        raise InputError(
            f"--{budget.kind} {budget.text}: no model keeps to it on so many tokens; give more, or fewer --tokens"
        )
    return best


def on_paid_tokens(budget: PlanBudget, request: PlanRequest, plan: Callable[[PlanRequest], PlanResult]) -> PlanRequest:
    """A request of a model on the tokens that a budget pays for, in whole steps. Raises InputError where it pays for none."""
    train, name = request.recipe.train, f"--{budget.kind} {budget.text}"
    one, result, tokens = request, plan(request), 0
    best, most = None, 0.0
    for _ in range(TRIES):
        if budget.kind == "money" and result.bill.cost is None:
            raise InputError(_no_price(result.job.cluster.device.name))
        share, batch = budget.share(result), result.job.tokens
        if tokens and most < share <= 1:
            best, most = one, share
        paid = max(math.floor(result.goal.tokens / batch / share), 1) * batch
        if paid == tokens:
            break
        tokens = paid
        one = ask.with_changes(request, {"tokens": str(tokens)})
        result = plan(one)
    if best is None:
        raise InputError(f"{name}: too little to train this model on: it does not pay for one step; give more")
    if replaced := [f"train.{key} = {value:,}" for key in HORIZON if (value := getattr(train, key)) is not None]:
        note = f"the tokens are those that {name} pays for, in place of the recipe's {' and '.join(replaced)}"
        return replace(best, own_notes=(note, *best.own_notes))
    return best


def _no_price(device: str) -> str:
    return f"--money: the catalogue has no price for {device}; add --price P, dollars a device-hour"


SMALLEST = 1e6  # parameters; what does not fit so small does not fit at all


def _sized(
    request: Callable[[Mapping[str, str]], PlanRequest], asked: Mapping[str, str], parameters: float, tokens: int,
    notes: tuple[str, ...],
) -> PlanRequest:  # fmt: skip
    sizes = {"params": repr(float(parameters)), "tokens": str(tokens)}
    return replace(request({**asked, **sizes}), notes=notes)


def _leaves_headroom(result: PlanResult) -> bool:
    """Whether a plan leaves the share of the memory free that it is to leave."""
    return result.memory.total <= (1 - result.goal.headroom) * result.job.cluster.device.memory


def _is_hopeless(result: PlanResult) -> bool:
    """True where libraries and communicators alone take the memory that a plan is to leave free."""
    return result.memory.before_model > (1 - result.goal.headroom) * result.job.cluster.device.memory


def proposal_for_budget(
    kind: str, text: str, asked: Mapping[str, str], rate: float | None = None, largest: float = math.inf,
    unique: float | None = None,
) -> Proposal:  # fmt: skip
    """What a budget buys. kind: flops, days or money; asked: short names of plan/ask.py, with the devices; rate: FLOP/s of a
    device, of 6 N D (None: FIRST_MFU of its bf16 peak); largest: parameters at the most; unique: tokens that differ (None: all).
    Raises InputError where it does not pay for a step."""
    amount = _amount(kind, text)
    count, device = _devices(asked)
    price = ask.price(asked["price"], "price") if "price" in asked else device.price
    hourly = 3600 * (rate or FIRST_MFU * (device.flops.get("bf16") or max(device.flops.values())))
    if kind == "money" and price is None:
        raise InputError(_no_price(device.name))
    flops = {"flops": amount, "days": 24 * amount * count * hourly, "money": amount / (price or 1.0) * hourly}[kind]
    sizes = {name: ask.count(asked[name], name) if name in asked else None for name in ("vocabulary", "seq", "batch")}
    length = sizes["seq"] or ask.DEFAULT_SEQUENCE
    tokens = ask.count(asked["tokens"], "tokens") if "tokens" in asked else None
    free = RULE.optimum(flops).parameters if tokens is None else flops / (FLOPS_PER_PARAMETER_TOKEN * tokens)
    if (best := min(free, largest)) > shapes.LARGEST:
        raise InputError(
            f"--{kind} {text}: too much: the best model for it has {best:.3g} parameters, and shapes by rule end at about "
            f"{terminal.amount(shapes.LARGEST)}; give less"
        )
    try:
        found = proposal_for_flops(flops, sizes["vocabulary"], length, sizes["batch"], largest, unique, tokens)
        shapes.model(float(found.parameters), found.config.vocabulary)  # for which the plan asks by its size
    except InputError as error:
        raise InputError(f"--{kind} {text}: too little to train a model on: {error}") from None
    return found


def proposal_for_flops(
    flops: float, vocabulary: int | None, sequence_length: int, batch: int | None = None, largest: float = math.inf,
    unique: float | None = None, tokens: float | None = None,
) -> Proposal:  # fmt: skip
    """The shape nearest to the compute-optimal size for a FLOP budget, and the tokens that the rest of the budget trains; where
    the tokens are given, the one nearest to the size that they leave.

    vocabulary: ids of the tokenizer (None: by size); batch: tokens of a step (None: the DeepSeek law's, as the dial has it);
    largest: parameters at the most; unique: tokens that differ (None: all of them).
    Raises InputError where the FLOPs do not pay for one step of the smallest model there is.
    """
    one_step = f"{flops:.3g} FLOPs do not pay for one step"
    best = RULE.optimum(flops) if unique is None else data_limited(flops, unique)
    if tokens is not None:
        best = Allocation(flops / (FLOPS_PER_PARAMETER_TOKEN * tokens), tokens)
    if best.tokens < (batch or sequence_length):
        raise InputError(
            f"{one_step}: the best model for them has {best.parameters:,.0f} parameters and reads {best.tokens:,.0f} tokens, "
            f"and a step reads {batch or sequence_length:,}; give a larger budget, or a smaller batch or sequence"
        )
    parameters = min(best.parameters, largest)
    config = shapes.by_parameters(parameters, vocabulary or shapes.default_vocabulary(parameters), sequence_length)
    tokens = tokens or flops / (FLOPS_PER_PARAMETER_TOKEN * config.parameters)
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
        raise InputError(
            "plan: a budget on what? add --gpus 1024xH100; --flops alone gives the best size and tokens by the laws"
        )
    number, name = ask.devices_of(asked["gpus"])
    if name is None:
        raise InputError(f"--gpus {asked['gpus']}: of which kind? write it like {number}xH100")
    return number, devices.find(name, Path(asked["catalogue"]) if "catalogue" in asked else None)
