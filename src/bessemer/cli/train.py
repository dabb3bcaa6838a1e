"""`bessemer train` and `bessemer launch`.

`train` starts one process or several on this machine, one node of several, or one process started by a launcher. `launch`
writes the files that start a run on a cluster.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bessemer.cli import runs
from bessemer.cli.run import print_verdict
from bessemer.common.console import say, warn
from bessemer.common.errors import InputError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bessemer.train.loop import TrainSummary
    from bessemer.workflow.session import Session


def train(args: argparse.Namespace) -> Any:
    if args.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler's log; read when torch is loaded
    from bessemer.workflow import preflight, stages
    from bessemer.workflow.prepare import prepare

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _train_as_worker(args)
    session = runs.open_recipe(args, fill_derived=False)
    preflight.check(session.recipe, session.run, args.recipe, restarts=args.restart)
    runs.require_stage(args, session.run.tokens / "manifest.json", "tokens", "tokens")
    with session.run.lock():
        runs.restart(args, session)
        stages.train(session, prepare(session), args.profile)
    if not any(row["skipped"] for row in session.results[-1:]):
        print_verdict(session.run)
    if not args.profile:
        return runs.summary(session)
    return {**runs.summary(session), "profile": _profile(args, session)}


def _profile(args: argparse.Namespace, session: Session) -> Any:
    from bessemer.train.profile import TABLE, TRACE

    if session.results[-1]["skipped"]:
        raise InputError(
            f"{session.run.path}: it is trained to its last step, so there is no step to profile; "
            "add --restart, or train longer with --set train.steps=N"
        )
    table, trace = session.run.profile / TABLE, session.run.profile / TRACE
    if not args.json:
        print(table.read_text())
        print(f"trace: {trace} (chrome://tracing or ui.perfetto.dev)")
    return {"table": table, "trace": trace}


def _train_as_worker(args: argparse.Namespace) -> NoReturn:
    """Train as one of several processes that a launcher started."""
    from bessemer.launch.worker import Worker
    from bessemer.workflow import stages
    from bessemer.workflow.prepare import prepare

    @cache
    def session() -> Session:
        if args.restart:
            raise InputError("--restart: it works in one process only; choose another name with --set run.name=NAME")
        return runs.open_recipe(args)

    spec = cache(lambda: prepare(session()))

    def show(work: Callable[[], TrainSummary]) -> None:
        stages.train(session(), spec(), args.profile, work)
        print_verdict(session().run)
        say(f"  next: {session().run.command('evaluate')}")

    Worker(lambda: (session().recipe, session().run), spec, show, args.profile).work()


def launch(args: argparse.Namespace) -> Any:
    from bessemer.distributed.validity import require_devices
    from bessemer.launch import cluster_files
    from bessemer.plan.devices import of_cluster
    from bessemer.plan.goal import cluster_of
    from bessemer.workflow import preflight

    session = runs.open_recipe(args)
    folder = Path(args.out) if args.out else session.run.path / "launch"
    if session.recipe.corpus.sources and not session.run.tokens.exists() and not session.run.basis.exists():
        recipe = runs.recipe_as_given(args)
        warn(
            f"{session.run.path}: it has no tokens yet, so keys that the recipe leaves out get defaults, not values derived "
            f"from the text; build them first, with `bessemer corpus {recipe}` and `bessemer tokens {recipe}`"
        )
    base = Path(args.recipe).parent if Path(args.recipe).is_file() else None
    is_cpu = session.recipe.train.device == "cpu"
    if session.recipe.model.has_size:
        preflight.require_layout(session.recipe, session.run, "cpu" if is_cpu else "cuda")
    device = None if is_cpu else of_cluster(session.recipe.cluster)
    if device is not None:
        require_devices(session.recipe.parallel, cluster_of(session.recipe, device).devices)
    written = cluster_files.write_files(session.recipe, args.on, folder, base, device.per_node if device else None)
    if not args.json:
        print(*written, sep="\n")
        say(f"  start it: {cluster_files.submit_command(written[-1])}")
    return {"on": args.on, "files": written}
