"""`bessemer plan`: layout, memory, time and cost of a training on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.console import amount, text_table
from bessemer.common.errors import InputError
from bessemer.run.files import require_output_path

if TYPE_CHECKING:
    import argparse

    from bessemer.plan.budget import PlanBudget
    from bessemer.plan.plan_request import PlanRequest

# Short names of training keys, which a plan of this machine has too.
OF_ANY_MACHINE = ("tokens", "seq", "batch", "precision", "recompute", "micro_batch")


def plan(args: argparse.Namespace) -> Any:
    """Plan for the cluster that the arguments name, else for this machine."""
    from bessemer.plan.plan_request import SHORT_NAMES

    requested = {name: getattr(args, name) for name in SHORT_NAMES if getattr(args, name) is not None}
    args.trust_code = args.trust_code or None  # a plan loads only the code of schedules and optimizers
    _require_used(args)
    if args.devices:
        return _devices(args)
    if args.model == "list":
        return _models(args)
    if args.recipe is None and not (_given(args) or args.overrides):
        raise InputError("plan: name a recipe, or a model and devices, as --params 70B --tokens 2T --gpus 2048xH100")
    if args.recipe is None and _given(args) == ["flops"] and not args.overrides:
        return _best_use(args)
    if args.recipe is None or args.gpus is not None or _is_for_a_cluster(args):
        return _cluster_plan(args, requested)
    return _local_plan(args, requested)


def _given(args: argparse.Namespace) -> list[str]:
    """Return the names of the planning options that are given."""
    from bessemer.plan.budget import BUDGETS
    from bessemer.plan.plan_request import SHORT_NAMES

    names = (*SHORT_NAMES, *BUDGETS, "search", "html", "devices")
    return [name for name in names if getattr(args, name) not in (None, False, [])]


def _require_used(args: argparse.Namespace) -> None:
    """Raise InputError for an option that has no effect with the other options."""
    lists: dict[str, tuple[str, ...]] = {"--devices": ("devices", "catalogue")} if args.devices else {}
    lists |= {"--model list": ("model",)} if args.model == "list" else {}
    for mode, used in lists.items():
        if unused := [name for name in _given(args) if name not in used]:
            raise InputError(f"{mode} prints a list and plans nothing: remove --{unused[0].replace('_', '-')}")


def _best_use(args: argparse.Namespace) -> dict[str, Any]:
    """Print, for a compute budget in FLOPs, the model size and number of tokens with the lowest loss under each scaling law.

    Returns these values as `--json` prints them. It is used if no devices are given.
    """
    from bessemer.plan import plan_request, run_cost, scaling_laws

    flops = plan_request.number(args.flops, "flops")
    best = {name: law.optimum(flops) for name, law in scaling_laws.FRONTIERS.items()}
    if not args.json:
        rows = [
            (law.name, amount(one.parameters), amount(one.tokens), f"{one.tokens_per_parameter:.1f}")
            for law, one in zip(scaling_laws.FRONTIERS.values(), best.values(), strict=True)
        ]
        print("\n".join(text_table(("law", "parameters", "tokens", "tokens a parameter"), rows, "lrrr")))
        print(
            f"\n{flops:.3g} FLOP = 6 N D, {amount(run_cost.petaflop_days(flops))} petaflop-days; add devices for a layout, time "
            "and money: --gpus 1024xH100"
        )
    return {"flops": flops, "optimal": {name: asdict(one) for name, one in best.items()}}


def _is_for_a_cluster(args: argparse.Namespace) -> bool:
    """Return True if the recipe sets `cluster.device`; otherwise the plan is for this machine."""
    from bessemer.recipe import load

    # Short names may fix conflicts between keys, such as --batch for --set parallel.shard, so the recipe is read as a draft.
    recipe = load(args.recipe, args.overrides, may_be_unnamed=True, is_draft=True)
    return recipe.cluster.device is not None


def _devices(args: argparse.Namespace) -> Any:
    from bessemer.plan.devices import catalogue, devices_table

    entries = list(catalogue(Path(args.catalogue) if args.catalogue else None).values())
    if not args.json:
        print(devices_table(entries))
    return [asdict(device) for device in entries]


def _models(args: argparse.Namespace) -> Any:
    from bessemer.plan.shapes import shapes
    from bessemer.plan.tables import models_table

    if not args.json:
        print(models_table())
    known = shapes().items()
    return [{"name": name, "parameters": shape.config.parameters, "source": shape.source} for name, shape in known]


def _page_writer(args: argparse.Namespace) -> Callable[[str], None] | None:
    """Return a function that writes the page of --html; None without --html.

    The output path is checked before anything is computed. Raises InputError if it cannot be used.
    """
    if args.html is None:
        return None
    from bessemer.report.template import PAGE_MARK, write_page

    path = require_output_path(Path(args.html), "--html", PAGE_MARK)

    def write(html: str) -> None:
        write_page(path, html)
        if not args.json:
            print(f"\n{'drawn in':<14} {path}")

    return write


# --- On this machine --------------------------------------------------------------------------------------------------


def _local_plan(args: argparse.Namespace, requested: dict[str, str]) -> dict[str, Any]:
    from bessemer.plan import unplanned
    from bessemer.plan.tables import local_plan_rows, named_rows
    from bessemer.workflow import estimate, preflight

    args.overrides = [*args.overrides, *_local_overrides(args, requested)]
    session, write = runs.open_recipe(args, False), _page_writer(args)
    preflight.require_one_horizon(session.recipe, session.run, args.recipe)
    plan, recipe = estimate.plan_only(session.recipe, session.run)  # also derives and prints unset values
    plan["not_in_the_plan"] = list(unplanned.on_this_machine(session.recipe))
    rows = local_plan_rows(plan, recipe)
    if not args.json:
        print(named_rows(rows))
    if write is not None:
        from bessemer.report.plan_page import render_local

        write(render_local(plan, rows, name=recipe.run.name))
    return plan


def _local_overrides(args: argparse.Namespace, requested: dict[str, str]) -> list[str]:
    """Return the planning options (`requested`: value by short name) as `key=value` overrides of the recipe.

    It is used for a plan of this machine. Raises InputError for options that only a cluster plan has, and for a recipe
    without [run].
    """
    from bessemer.plan import plan_request
    from bessemer.recipe import load

    if of_clusters := [name for name in _given(args) if name not in (*OF_ANY_MACHINE, "html")]:
        name = of_clusters[0].replace("_", "-")
        raise InputError(f"plan: --{name} needs devices to plan for; add --gpus 8xH100, or set cluster.device")
    if not requested:
        return []
    request = plan_request.from_recipe(
        lambda overrides, is_draft: load(args.recipe, overrides, is_draft=is_draft), requested, args.overrides
    )
    keys = [plan_request.KEYS[name][0].split(".") for name in requested]
    return [f"{table}.{key}={getattr(getattr(request.recipe, table), key)}" for table, key in keys]


# --- On a cluster -----------------------------------------------------------------------------------------------------


def _cluster_plan(args: argparse.Namespace, requested: dict[str, str]) -> dict[str, Any]:
    from bessemer.plan import plan_result
    from bessemer.plan.tables import plan_table, search_table
    from bessemer.workflow.choose_layout import planned as plan_of

    write, job = _page_writer(args), _requested_job(args, requested)
    planned, limit = plan_of(job, searched=args.search), _budget_of(args)
    if not args.json:
        print(plan_table(planned))
        if args.search and planned.found is not None:
            print("\n" + search_table(planned.found, planned.job.cluster.devices))
    if write is not None:
        from bessemer.report.plan_page import render

        name = (planned.goal.recipe.run.name if args.recipe is not None else args.model) or (
            f"{planned.job.model.size} on {planned.job.cluster.devices:,} {planned.job.cluster.device.name}"
        )
        write(render(planned, name=name))
    args.exit_code = int(not planned.fits)
    return plan_result.to_dict(planned, args.search) | ({} if limit is None else {"budget": limit.to_dict(planned)})


def _budget_of(args: argparse.Namespace) -> PlanBudget | None:
    """Return the budget that the options set; None without one. Raises InputError for several or an invalid one."""
    from bessemer.plan.budget import BUDGETS, PlanBudget

    budgets = [PlanBudget(kind, text) for kind in BUDGETS if (text := getattr(args, kind)) is not None]
    if len(budgets) > 1:
        names = " and ".join(f"--{budget.kind}" for budget in budgets)
        raise InputError(f"plan: {names} exclude each other; give one budget")
    return budgets[0] if budgets and budgets[0].amount else None


def _requested_job(args: argparse.Namespace, requested: dict[str, str]) -> PlanRequest:
    """Return the request to plan, from the recipe and the options or, without a recipe, from the options alone.

    `requested` maps the short names of options to their values. If a budget is given, it determines the number of devices,
    of tokens or the model size, whichever is left open.
    """
    from bessemer.plan import budget, plan_request
    from bessemer.workflow.choose_layout import plan_request_of, planned

    limit, overrides = _budget_of(args), tuple(args.overrides)
    finds_devices = limit is not None and plan_request.is_device(requested.get("gpus", "1"))
    names = {name: text for name, text in requested.items() if not (finds_devices and name == "gpus")}

    of_recipe = None if args.recipe is None else plan_request_of(args.recipe, names, overrides)

    def make(more: Mapping[str, str]) -> PlanRequest:
        if of_recipe is None:
            return plan_request_of(None, {**names, **more}, overrides)
        return plan_request.with_changes(of_recipe, more) if more else of_recipe

    if limit is None:
        return make({})
    if finds_devices:
        return budget.devices_within(limit, requested, make, planned)
    named = {override.partition("=")[0].strip() for override in overrides}
    keeps_model = args.recipe is not None or plan_request.names_model(named | requested.keys())
    lengths = sorted({f"train.{name}" for name in ("tokens", "steps", "minutes")} & named)
    if lengths or (keeps_model and args.tokens is not None):
        option = lengths[0] if lengths else "--tokens"
        raise InputError(f"plan: {option} and --{limit.kind} exclude each other; leave out the tokens or the model")
    if keeps_model:
        return budget.tokens_within(limit, make({}), planned)
    return budget.model_within(limit, names, make, planned)
