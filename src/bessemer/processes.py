"""`bessemer train` as one process of several, or as the keeper of a node's processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from bessemer import stages
from bessemer.errors import InputError
from bessemer.launch import node, start
from bessemer.launch.member import Part, take_part
from bessemer.recipe import Recipe
from bessemer.run import RunFolder

Sessions = Callable[[argparse.Namespace], stages.Session]


def train_as_member(given: argparse.Namespace, session_of: Sessions) -> NoReturn:
    """One process of several, which a launcher started."""

    def opened() -> tuple[Recipe, RunFolder]:
        if given.restart:
            raise InputError("train: --restart is for one process; give the run another name with --set run.name=NAME")
        session = session_of(given)
        return session.recipe, session.run

    def prepare() -> None:
        stages.prepare(session_of(given))

    take_part(Part(opened, prepare, given.profile, given.json))


def train_on_node(given: argparse.Namespace, session_of: Sessions) -> Any:
    """The processes of this node, one of several."""
    recipe, run = None, None
    try:
        session = session_of(given)
        recipe, run = session.recipe, session.run
    except InputError:
        pass  # the processes say it, once for all nodes
    flags = [f"--{name}" for name in ("accept-changes", "restart", "profile") if getattr(given, name.replace("-", "_"))]
    sets = [part for override in given.overrides for part in ("--set", override)]
    arguments = ("-m", "bessemer", "train", given.recipe, *sets, *flags)
    order = node.order(
        arguments, recipe, given.nnodes, given.nproc_per_node, given.rdzv_endpoint, given.rdzv_id or "bessemer"
    )
    return {"run": run and run.path, **start.train_on_node(order, run)}
