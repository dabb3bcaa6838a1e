"""What a step costs the host: timed on models so small that they compute next to nothing, at two depths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bessemer.layout.dial import resolve
from bessemer.measure.rounds import Item, timed, timer_of
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model
from bessemer.plan.estimate import cpu
from bessemer.plan.machine import PAIRS, WHOLE, Host, Machine
from bessemer.recipe import Recipe, parse
from bessemer.train import device as devices
from bessemer.train.step import TrainStep

DEPTHS = (1, 5)
VOCABULARY, LENGTH = 64, 16
MICRO_BATCHES = {WHOLE: 1, PAIRS: 8}


def tiny(depth: int, micro_batches: int) -> Recipe:
    """A recipe of a model whose products are nothing beside what starts them."""
    asked = parse(
        f"""
        run.name = "host"
        tokens.sequence_length = {LENGTH}
        [model]
        layers = {depth}
        width = 32
        heads = 1
        mlp_width = 64
        [train]
        steps = 1000
        device = "cpu"
        micro_batch = 1
        global_batch_tokens = {micro_batches * LENGTH}
        """,
        "calibration",
    )
    return resolve(asked, VOCABULARY)


def steps(way: str, threads: int) -> list[Item]:
    """Gradients and updates of both depths. Keys: (way, depth, "gradients" or "update")."""
    made: list[Item] = []
    timer = timer_of(threads)
    for depth in DEPTHS:
        recipe = tiny(depth, MICRO_BATCHES[way])
        chosen = devices.choose(recipe.train)
        config = model_config(recipe, VOCABULARY)
        step = TrainStep(recipe, build_model(config, 0), chosen, 0, 1)
        batch = step.task.made_up(np.random.default_rng(0), MICRO_BATCHES[way], config)
        step.gradients(batch)

        def repeated(call: Callable[[], object]) -> Callable[[int], float]:
            def run(repeats: int) -> None:
                for _ in range(repeats):
                    call()

            return timed(run, timer)

        def gradients(step: TrainStep = step, batch: object = batch) -> object:
            return step.gradients(batch)  # type: ignore[arg-type]

        def update(step: TrainStep = step) -> object:
            return step.update(0, 1.0)

        made.append(Item((way, depth, "update"), repeated(update)))
        made.append(Item((way, depth, "gradients"), repeated(gradients)))
    return made


def host_of(seconds: dict[tuple[str, int, str], float], way: str, machine: Machine) -> Host:
    """What of the timed steps no product, attention or pass of the machine accounts for; seconds: by the items' keys."""
    rest: dict[tuple[int, str], float] = {}
    for depth in DEPTHS:
        config = model_config(tiny(depth, MICRO_BATCHES[way]), VOCABULARY)
        turns = MICRO_BATCHES[way] / (2 if way == PAIRS else 1)
        whole = cpu.micro_batch(config, LENGTH, LENGTH, machine, way)
        once = seconds[way, depth, "gradients"] / turns - (whole.total - whole.host)
        moved = cpu.update(config, machine)
        rest[depth, "gradients"] = once
        rest[depth, "update"] = seconds[way, depth, "update"] - (moved.total - moved.host)
    few, many = DEPTHS
    found = {}
    for what in ("gradients", "update"):
        each = max((rest[many, what] - rest[few, what]) / (many - few), 0.0)
        found[what] = each, max(rest[few, what] - few * each, 0.0)
    return Host(found["gradients"][0], found["gradients"][1], found["update"][0], found["update"][1])
