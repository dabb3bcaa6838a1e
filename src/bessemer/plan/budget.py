"""Plans within a budget of FLOPs, days or dollars: the number of devices, tokens or parameters that it pays for.

A bisection over plans finds the value that the request leaves open. A budget of FLOPs includes attention. A budget of
days or dollars applies to the expected figure, which about half of all runs exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bessemer.common.errors import InputError
from bessemer.plan import plan_request
from bessemer.plan.estimate.memory import HEADROOM
from bessemer.plan.goal import MOST_DEVICES
from bessemer.plan.plan_request import PlanRequest
from bessemer.plan.plan_result import PlanResult
from bessemer.plan.run_cost import DAY
from bessemer.plan.scaling_laws import FLOPS_PER_PARAMETER_TOKEN, RULE
from bessemer.plan.search import NoLayoutError

BUDGETS = ("flops", "days", "money")
PRECISION = 0.01  # relative precision of the bisection
SPREAD = 1.3  # ratio of the bisection's first bounds to the first estimate
WIDEN = 30  # attempts to widen the bounds before giving up

Make = Callable[[Mapping[str, str]], PlanRequest]
Plan = Callable[[PlanRequest], PlanResult]


@dataclass(frozen=True)
class PlanBudget:
    """A budget of FLOPs, days or dollars.

    Attributes:
        kind: `flops`, `days` or `money`.
        text: The amount as the user wrote it.
    """

    kind: str
    text: str

    @property
    def amount(self) -> float:
        """The amount in FLOPs, days or dollars. Raises InputError if it is not a positive number."""
        return plan_request.dollars(self.text, f"--{self.kind}")

    def spent(self, result: PlanResult) -> float:
        """Return the amount that a plan uses. Raises InputError for dollars without a price."""
        if self.kind == "flops":
            return result.step.model_flops / result.job.tokens * result.goal.tokens
        if self.kind == "days":
            return result.expected.seconds.expected / DAY
        if result.bill.cost is None:
            device = result.job.cluster.device.name
            raise InputError(f"--money: the catalogue has no price for {device}; add --price P, dollars a device-hour")
        return result.bill.cost

    def share(self, result: PlanResult) -> float:
        """Return the share of the budget that a plan uses. Raises InputError for dollars without a price."""
        return self.spent(result) / self.amount

    def to_dict(self, result: PlanResult) -> dict[str, Any]:
        """Return the budget and what a plan uses of it, in FLOPs, days or dollars, as plain values."""
        spent = self.spent(result)
        return {"kind": self.kind, "amount": self.amount, "spent": spent, "is_kept": spent <= self.amount}


def bisect(good: float, bad: float, is_kept: Callable[[float], bool]) -> float | None:
    """Return the value of `good` nearest to `bad` for which `is_kept` holds, within PRECISION; None if none was found.

    Both start values must be above 0; `bad` may be the larger or the smaller one. If `is_kept` does not hold for
    `good`, or holds for `bad`, both are moved by factors until it holds for `good` alone.
    """
    ratio = bad / good
    for _ in range(WIDEN):
        if is_kept(good):
            break
        good, bad = good / ratio, good
    else:
        return None
    for _ in range(WIDEN):
        if not is_kept(bad):
            break
        good, bad = bad, bad * ratio
    while abs(math.log(bad / good)) > PRECISION:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if is_kept(middle) else (good, middle)
    return good


def devices_within(budget: PlanBudget, options: Mapping[str, str], make: Make, plan: Plan) -> PlanRequest:
    """Return a request with the fewest whole nodes that finish the run within the budget, a number of days.

    Raises InputError if no number of nodes is enough.

    Args:
        budget: The budget.
        options: Values of the request by short name (plan_request.py), such as `gpus`, here without a number of
            devices.
        make: Builds the request with some short names changed.
        plan: Plans a request.
    """
    if budget.kind != "days":
        raise InputError(f"--gpus {options['gpus']}: only --days finds their number; write it as 64x{options['gpus']}")
    node = plan_or_none(plan, make({"gpus": f"8x{options['gpus']}"}))
    per_node = 8 if node is None else node.job.cluster.device.per_node
    first = 1.0 if node is None else max(budget.share(node) * node.job.cluster.devices / per_node, 1.0)

    def request(nodes: float) -> PlanRequest:
        return make({"gpus": f"{max(round(nodes), 1) * per_node}x{options['gpus']}"})

    def is_kept(nodes: float) -> bool:
        if nodes * per_node > MOST_DEVICES:
            return False
        result = plan_or_none(plan, request(nodes))
        return result is not None and result.fits and budget.share(result) <= 1

    factor = 1.0 if is_kept(1.0) else bisect(first * SPREAD, first / SPREAD, is_kept)
    if factor is None:
        raise InputError(f"--days {budget.text}: no number of these devices ends the run in time; give more days")
    return request(factor)


def plan_or_none(plan: Plan, request: PlanRequest) -> PlanResult | None:
    """Return the plan, or None if no layout fits."""
    try:
        return plan(request)
    except NoLayoutError:
        return None


def tokens_within(budget: PlanBudget, request: PlanRequest, plan: Plan) -> PlanRequest:
    """Return the request with as many training tokens as a budget pays for, in whole steps.

    `plan` plans a request. Raises InputError if the budget does not pay for one step.
    """
    first = plan(request)
    batch = first.job.tokens

    def on(tokens: float) -> PlanRequest:
        return plan_request.with_changes(request, {"tokens": str(max(int(tokens / batch), 1) * batch)})

    def is_kept(tokens: float) -> bool:
        return tokens >= batch and budget.share(plan(on(tokens))) <= 1

    tokens = first.goal.tokens / budget.share(first)
    count = bisect(tokens / SPREAD, tokens * SPREAD, is_kept)
    if count is None:
        raise InputError(f"--{budget.kind} {budget.text}: it does not pay for one step of this model; give more")
    return on(count)


def model_within(budget: PlanBudget, options: Mapping[str, str], make: Make, plan: Plan) -> PlanRequest:
    """Return a request with the model and tokens that a budget pays for, at 20 tokens per parameter.

    If the model does not fit on the devices, the largest that fits is trained for longer. Raises InputError if the
    budget pays for no model.

    Args:
        budget: The budget.
        options: Values of the request by short name (plan_request.py). If they have `tokens`, the model uses the rest
            of the budget.
        make: Builds the request with some short names changed.
        plan: Plans a request.
    """
    if "gpus" not in options:
        raise InputError(
            "plan: a budget needs devices; add --gpus 1024xH100, or give --flops alone for the scaling laws"
        )
    fixed = plan_request.count(options["tokens"], "tokens") if "tokens" in options else None

    def request(flops: float) -> PlanRequest:
        best = RULE.optimum(flops)
        tokens = fixed or int(best.tokens)
        parameters = best.parameters if fixed is None else flops / (FLOPS_PER_PARAMETER_TOKEN * fixed)
        return make({"params": repr(float(parameters)), "tokens": str(tokens)})

    def is_kept(flops: float) -> bool:
        try:
            result = plan(request(flops))
        except InputError:  # too large for the devices, or too small for a step
            return False
        leaves = result.memory.total <= (1 - HEADROOM) * result.job.cluster.device.memory
        return leaves and budget.share(result) <= 1

    flops = 1e18 if budget.kind != "flops" else budget.amount
    for _ in range(3):  # converges quickly, because the speed hardly depends on the budget
        if budget.kind == "flops" or (result := plan_or_none(plan, request(flops))) is None:
            break
        flops /= budget.share(result)
    limit = bisect(flops / SPREAD, flops * SPREAD, is_kept)
    if limit is None:
        plan(request(flops))  # raises the specific error for a model of this size
        raise InputError(f"--{budget.kind} {budget.text}: it pays for no model that fits on these devices; give more")
    chosen = request(limit)
    return chosen if fixed is not None else tokens_within(budget, chosen, plan)
