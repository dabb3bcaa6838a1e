"""What `bessemer plan` does: a training on this machine or on a cluster, a corpus, a pipeline."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError
from bessemer.screens import plan_rows, print_plan, print_simulated
from bessemer.terminal import amount, coloured

if TYPE_CHECKING:
    from bessemer.layout.devices import Device
    from bessemer.model.config import ModelConfig
    from bessemer.plan.ask import Asked
    from bessemer.plan.jobs import Goal
    from bessemer.plan.outcome import Outcome
    from bessemer.recipe import Recipe
    from bessemer.run import RunFolder
    from bessemer.stages import Session

# Of a pipeline that is drawn alone, without a training.
PIPELINE_OPTIONS = ("stages", "microbatches", "backward", "send", "svg")
# Short names of plan/ask.py that are flags too.
FLAGS = (
    "gpus", "per_node", "model", "params", "layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary", "tokens", "seq",
    "batch", "precision", "recompute", "micro_batch", "zero", "tp", "pp", "cp", "dp", "replicate", "virtual", "price", "stack",
    "catalogue",
)  # fmt: skip
BUDGETS = ("flops", "days", "money")
Opened = Callable[..., "Session"]


def plan(given: argparse.Namespace, session_of: Opened) -> Any:
    """The command: which of its kinds is asked for follows from the arguments."""
    if given.html is not None and (given.devices or given.corpus is not None):
        raise InputError("--html: a page is written of a plan of a training; leave it out with --devices and --corpus")
    if given.devices:
        return _devices(given)
    if given.corpus is not None:
        return _corpus(given)
    asked = _asked(given)
    if given.html is not None and (given.simulate or (given.schedule is not None and "gpus" not in asked)):
        raise InputError("--html: a page is written of a whole plan; leave it out here (--svg draws a schedule alone)")
    if given.measured is not None:
        return _scaled_by_run(given, session_of)
    if given.schedule is not None and "gpus" not in asked:
        return _pipeline(given, session_of)
    if (alone := [f"--{name}" for name in PIPELINE_OPTIONS if getattr(given, name) is not None]) != []:
        raise InputError(f"plan: {', '.join(alone)} without --schedule NAME; name one, for example --schedule 1f1b")
    if given.simulate:
        return _simulated(given, session_of(_named(given)))
    if (
        given.recipe is None
        and not asked
        and not given.overrides
        and all(getattr(given, name) is None for name in BUDGETS)
    ):
        raise InputError(
            "plan: name a recipe (`bessemer recipe` lists the shipped ones), or say a model and devices, as --params 70B "
            "--tokens 2T --gpus 2048xH100; or --corpus SIZE, or --schedule NAME"
        )
    if given.recipe is None or asked or given.what_if or given.search or _is_for_a_cluster(given):
        return _on_a_cluster(given, asked)
    return _on_this_machine(given, session_of(given, False))  # what is left open is filled in and shown there


def _named(given: argparse.Namespace) -> argparse.Namespace:
    if given.recipe is None:
        raise InputError("plan: --simulate needs a recipe; `bessemer recipe` lists the shipped ones")
    return given


def _asked(given: argparse.Namespace) -> dict[str, str]:
    """The flags that were given, by their short names."""
    found = {name: getattr(given, name) for name in FLAGS if getattr(given, name) is not None}
    if given.schedule is not None and "gpus" in found:
        found["schedule"] = given.schedule
    return found


def _is_for_a_cluster(given: argparse.Namespace) -> bool:
    """Whether the recipe names a device of the catalogue, and not the machine at hand."""
    from bessemer.recipe import load

    return load(given.recipe, given.overrides, may_be_unnamed=True).cluster.device is not None


def _on_this_machine(given: argparse.Namespace, session: Session) -> Any:
    from bessemer import forecast

    page = None if given.html is None else _page(given.html)
    plan, recipe = forecast.plan_only(session.recipe, session.run)
    if not given.json:
        print_plan(plan, recipe)
    if page is not None:
        from bessemer.report import plan_page

        plan_page.write_here(page, plan, plan_rows(plan, recipe), name=recipe.run.name)
        if not given.json:
            print(f"{'drawn in':<14} {page}")
    return plan


def _scaled_by_run(given: argparse.Namespace, session_of: Opened) -> dict[str, Any]:
    """The plan of a recipe, scaled by a run's measured over planned step."""
    from bessemer import forecast
    from bessemer.plan.estimate import points
    from bessemer.recipe import load
    from bessemer.run import RunFolder

    if given.recipe is None:
        raise InputError("plan: --measured RUN scales the plan of a recipe; name the recipe as well")
    run = RunFolder(Path(given.measured))
    if not run.recipe.exists():
        raise InputError(f"{run.path}: no run lies here (recipe.toml is missing); --measured takes the folder of a run")
    measured = points.of_run(run)
    run_plan, run_recipe = forecast.plan_only(load(run.recipe), run, forecast.MEASURE_SECONDS / 2)
    session = session_of(given, False)
    plan, recipe = forecast.plan_only(session.recipe, session.run, forecast.MEASURE_SECONDS / 2)
    batches = [one.train.global_batch_tokens or 1 for one in (recipe, run_recipe)]
    scaled = points.scaled_by_run(plan, batches[0], run_plan, batches[1], measured)
    scaled["calibrated_on"] |= {"run": run.path}
    if not given.json:
        print_plan(scaled, recipe)
        basis = scaled["calibrated_on"]
        ratio = (
            f"{measured.steps:,} steps, {basis['step_ratio']:.3f} of their plan's time, spread {measured.spread:.0%}"
        )
        print(f"{'calibration':<14} {run.path}: {ratio}")
        if basis["memory_ratio"] is not None:
            print(f"{'':<14} memory {basis['memory_ratio']:.3f} of its plan's")
    return scaled


def _simulated(given: argparse.Namespace, session: Session) -> Any:
    from bessemer.tokens import outlook
    from bessemer.train import simulate

    found = simulate.beside_the_plan(session.recipe, outlook.vocabulary(session.recipe, session.run.tokens))
    if not given.json:
        print_simulated(found)
    return found


def _on_a_cluster(given: argparse.Namespace, asked: dict[str, str]) -> Any:
    from bessemer.plan import ask, outcome, search
    from bessemer.plan.tables import plan_table, search_table, what_if_table

    page = None if given.html is None else _page(given.html)
    whole = _everything_asked(given, asked)
    changed = [search.changed(whole, changes) for changes in given.what_if]
    unique = None if given.unique is None else ask.number(given.unique, "--unique")
    found = outcome.of(_goal(whole), searched=given.search, unique=unique)
    beside = [outcome.of(_goal(one)) for one in changed]
    curve = search.curve(found.goal) if given.search or page else ()
    if not given.json:
        print(what_if_table([found, *beside], ["as asked", *given.what_if]) if beside else plan_table(found))
        if given.search and found.found is not None:
            print("\n" + search_table(found.found, found.job.cluster.devices, curve))
    if page is not None:
        from bessemer.report import plan_page

        plan_page.write(page, found, name=_title(given, found), curve=curve, beside=beside, titles=given.what_if)
        if not given.json:
            print(f"\n{'drawn in':<10} {page}")
    told = outcome.to_dict(found, given.search)
    if curve and given.search:
        told["search"]["by_devices"] = [
            {"devices": point.devices, "best": point.best and outcome.candidate_dict(point.best)} for point in curve
        ]
    if beside:
        told["what_if"] = [
            {"changes": changes, **outcome.to_dict(one)} for changes, one in zip(given.what_if, beside, strict=True)
        ]
    return told


def _page(text: str) -> Path:
    """Where --html is to write, before anything is counted. Raises InputError."""
    from bessemer.report.plan_page import writable

    return writable(Path(text))


def _title(given: argparse.Namespace, of: Outcome) -> str:
    """Of the page: the recipe's name, or the model's."""
    named = of.goal.recipe.run.name if given.recipe is not None else given.model
    return named or f"{amount(of.job.model.parameters)} on {of.job.cluster.devices:,} {of.job.cluster.device.name}"


def _everything_asked(given: argparse.Namespace, asked: dict[str, str]) -> Asked:
    """A recipe with the flags' changes, or what the flags say alone."""
    from bessemer.plan import ask
    from bessemer.recipe import load
    from bessemer.tokens.pretrained import followed

    budget = {name: getattr(given, name) for name in BUDGETS if getattr(given, name) is not None}
    if given.recipe is None:
        return _proposed(asked, budget, tuple(given.overrides)) if budget else ask.alone(asked, tuple(given.overrides))
    if budget:
        raise InputError(f"plan: --{next(iter(budget))} proposes a model, and the recipe has one; give one of the two")
    recipe = followed(load(given.recipe, given.overrides, may_be_unnamed=True))
    counted = "gpus" in asked or {"devices", "nodes"} & recipe.cluster.model_fields_set
    split = {ask.ALIASES.get(name, name) for name in asked} & set(ask.WAYS)
    if "parallel" not in recipe.model_fields_set and counted and not split:
        asked = {**asked, "parallel.auto": "true"}  # devices and no layout: the planner's
    return ask.with_changes(ask.Asked(recipe), asked) if asked else ask.Asked(recipe)


def _proposed(asked: dict[str, str], budgets: dict[str, str], overrides: tuple[str, ...]) -> Asked:
    """A budget as a model and tokens: what the rule of 20 tokens a parameter makes of it, at the speed that the plan itself
    predicts, which is taken from one round to the next."""
    from bessemer.plan import ask, budget, outcome

    if len(budgets) > 1:
        raise InputError(f"plan: {' and '.join(f'--{name}' for name in budgets)} exclude each other; give one budget")
    if named := {"model", "params", "layers", "tokens"} & set(asked):
        raise InputError(f"plan: --{min(named)} and a budget exclude each other: a budget proposes model and tokens")
    (kind, text), mfu = next(iter(budgets.items())), budget.FIRST_MFU
    for _ in range(budget.ROUNDS):
        chosen = budget.proposed(kind, text, asked, mfu)
        whole = ask.alone(
            {**asked, "params": repr(float(chosen.parameters)), "tokens": str(int(chosen.tokens))}, overrides
        )
        mfu = outcome.of(_goal(whole)).step.mfu
    return whole


def _goal(asked: Asked) -> Goal:
    """Vocabulary and classes from the recipe alone: who plans a cluster may have none of its data."""
    from bessemer.plan.jobs import goal_of
    from bessemer.run import RunFolder
    from bessemer.tokens import outlook

    recipe = asked.recipe
    folder = RunFolder(recipe.run.folder).tokens
    vocabulary = outlook.vocabulary(recipe, folder)
    if recipe.model.vocabulary is not None and recipe.tokenizer.path is None:
        vocabulary = min(vocabulary, recipe.model.vocabulary)
    return goal_of(recipe, vocabulary, outlook.labels(recipe, folder), model=asked.model)


def _devices(given: argparse.Namespace) -> Any:
    """The catalogue."""
    from bessemer.layout import devices
    from bessemer.plan.tables import devices_table

    found = devices.catalogue(Path(given.catalogue) if given.catalogue else None)
    if not given.json:
        print(devices_table(list(found.values())))
    return list(found.values())


def _corpus(given: argparse.Namespace) -> Any:
    from bessemer.plan import corpus

    if given.recipe is not None:
        raise InputError("plan: a recipe and --corpus exclude each other; plan one after the other")
    planned = corpus.plan(
        corpus.parse_bytes(given.corpus),
        corpus.load_rates(Path(given.rates) if given.rates else None),
        machines=given.machines,
        cores=given.cores,
        memory_bytes=corpus.parse_bytes(given.memory),
        price=_core_price(given.price),
        storage_price=given.storage_price,
    )
    if not given.json:
        print(corpus.table(planned))
    return corpus.to_dict(planned)


def _core_price(text: str | None) -> float:
    try:
        return 0.05 if text is None else float(text)
    except ValueError:
        raise InputError(f"--price: {text!r} is not a price; write it like 0.05") from None


def _pipeline(given: argparse.Namespace, session_of: Opened) -> Any:
    from bessemer.plan import pipeline
    from bessemer.run import write_atomic

    if given.stages is None or given.microbatches is None:
        raise InputError(
            "plan: --schedule needs --stages N and --microbatches M, for example --stages 4 --microbatches 8"
        )
    if given.svg is not None and not Path(given.svg).parent.is_dir():
        raise InputError(f"--svg: {Path(given.svg).parent}: no such folder to draw in; make it first")
    planned = pipeline.plan(
        given.schedule,
        given.stages,
        given.microbatches,
        None if given.virtual is None else int(given.virtual),
        backward=2.0 if given.backward is None else given.backward,
        send=given.send or 0.0,
        model=None if given.recipe is None else _model_of(session_of(given)),
    )
    if given.svg is not None:
        write_atomic(Path(given.svg), pipeline.svg(planned.timetable))
    if not given.json:
        columns, colour = shutil.get_terminal_size((100, 24)).columns, coloured()
        print(pipeline.table(planned, columns, colour))
        if given.svg is not None:
            print(f"{'drawn in':<12} {given.svg}")
    return pipeline.to_dict(planned)


def _model_of(session: Session) -> tuple[Recipe, ModelConfig]:
    """The resolved recipe and the dimensions of its model, from the recipe alone: nothing is measured."""
    from bessemer.layout import dial
    from bessemer.model.huggingface.config import model_config
    from bessemer.tokens import outlook

    vocabulary = outlook.vocabulary(session.recipe, session.run.tokens)
    labels = outlook.labels(session.recipe, session.run.tokens)
    resolved = dial.resolve(session.recipe, vocabulary, labels=labels)
    classes = labels if resolved.train.objective == "classify" else 0
    return resolved, model_config(resolved, vocabulary, labels=classes)


def with_chosen_layout(recipe: Recipe, run: RunFolder) -> Recipe:
    """A recipe whose `parallel.auto` has become the layout that the planner predicts to be the fastest; others as they are.

    The same recipe gives the same layout on every process. On the CPU each node is one process, since the processes of a node
    would share its cores. What the recipe leaves open (micro-batch, recompute) is chosen with it, but for the micro-batch of a
    run that has begun. Raises InputError where nothing fits.
    """
    if not recipe.parallel.auto:
        return recipe
    from bessemer.plan import outcome
    from bessemer.plan.ask import Asked
    from bessemer.recipe import Parallel, load
    from bessemer.train.split import require_fit

    here, count = _devices_here(recipe)
    if here is None and recipe.cluster.device is None:
        return recipe.model_copy(update={"parallel": Parallel(shard=recipe.cluster.nodes)})
    if run.recipe.exists() and recipe.train.micro_batch is None:
        recipe = _with_train(recipe, micro_batch=load(run.recipe).train.micro_batch)
    if recipe.cluster.device is None:
        per_node = {"devices_per_node": count, "device": here.name if here else None}
        recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=per_node)})
    goal = _goal(Asked(recipe))
    refusal: InputError | None = None
    for candidate in outcome.of(goal).found_layouts:
        layout = candidate.job.layout
        chosen = recipe.model_copy(
            update={
                "parallel": recipe.parallel.model_copy(
                    update={
                        "auto": False, "replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor,
                        "pipeline": layout.pipeline, "context": layout.context, "zero": max(layout.zero, 1),
                        "schedule": layout.schedule, "virtual": layout.virtual if layout.virtual > 1 else None,
                    }
                )
            }
        )  # fmt: skip
        chosen = _with_train(chosen, micro_batch=layout.micro_batch)
        if "recompute" in goal.free:
            chosen = _with_train(chosen, recompute=layout.recompute)
        try:
            _require_fit(chosen, goal, require_fit)
        except InputError as error:
            refusal = refusal or error
            continue
        return chosen
    raise refusal or InputError("parallel.auto: no layout fits; `bessemer plan RECIPE --search` says why")


def _require_fit(recipe: Recipe, goal: Goal, require: Callable[..., None]) -> None:
    import torch

    from bessemer.layout import dial

    require(dial.resolve(recipe, goal.job.model.vocabulary), goal.job.model, torch.device("cuda"))


def _with_train(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _devices_here(recipe: Recipe) -> tuple[Device | None, int]:
    """This machine's accelerators, as the catalogue has them, and their number; None: it computes on its CPU."""
    import torch

    from bessemer.layout import devices

    if recipe.train.device == "cpu" or not torch.cuda.is_available():
        return None, 0
    name = torch.cuda.get_device_name()
    found = devices.match(name, devices.catalogue(Path(recipe.cluster.catalogue) if recipe.cluster.catalogue else None))
    if found is None and recipe.cluster.device is None:
        raise InputError(
            f"parallel.auto: {name!r} is not in the catalogue of devices; name one with cluster.device, or add it "
            "in a file of your own (cluster.catalogue)"
        )
    return found, torch.cuda.device_count()
