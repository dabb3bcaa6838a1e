"""A run's training in this process: the device, what is said about it, the loop, and the profile when asked for."""

from __future__ import annotations

import gc
from typing import Any

from bessemer.checkpoint.protocol import published
from bessemer.environment import describe
from bessemer.layout.flops import devices_of
from bessemer.parallel.team import ALONE, Team
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json, write_json
from bessemer.terminal import say
from bessemer.tokens.shards import TokenStore
from bessemer.train import device as devices
from bessemer.train import loop
from bessemer.train import profile as profiles
from bessemer.train.device import Device
from bessemer.train.loop import TrainSummary
from bessemer.train.precision import probe
from bessemer.train.recompute import base_bytes, blocks_recomputed, memory_of
from bessemer.train.task import config_of


def train_here(
    recipe: Recipe, run: RunFolder, plan: dict[str, Any], profile: bool, device: Device, team: Team = ALONE
) -> TrainSummary:
    """Train a resolved recipe; plan: what plan.json holds; profile: a few steps under the profiler, into profile/."""
    done = published(run.checkpoints)
    store = TokenStore.open(run.tokens)
    if team.is_first:
        store.verify()
    devices.make_deterministic()
    if team.is_first and not run.environment.exists():
        write_json(run.environment, describe(device.name, device.precision))
    say(f"  on {device.name}, {device.precision}{', compiled' if device.compile else ''}")
    say(f"  {probe(device.arithmetic, device.place)}")
    if not device.is_cuda:
        # What the plan's measured steps and earlier stages freed would count as this training's base.
        devices.release_unused(device)
        devices.keep_freed_memory()
        devices.reset_peak_resident()
    config = config_of(recipe, store.vocabulary, len(store.labels))
    # This process's own base and blocks: those of the process that planned differ, as after a resume.
    blocks = blocks_recomputed(recipe, config, device)
    plan = {**plan, "memory_bytes": memory_of(recipe, config, device, blocks, base_bytes(device)).to_dict()}
    if team.is_first:
        write_json(run.plan, {**read_json(run.plan), "memory_bytes": plan["memory_bytes"]})
    looks = profiles.of(recipe, run.profile, device, done[-1] if done else 0) if profile and team.is_first else None
    arguments = (
        recipe,
        run,
        store,
        device,
        plan["peak_flops"] * devices_of(recipe, device.is_cuda),
        plan["memory_bytes"]["total"],
    )
    gc.collect()
    gc.freeze()  # libraries' objects: going through them took 0.2 s of each collection around a validation
    try:
        made = loop.train(*arguments, observed=looks or (lambda batches: batches), team=team, recomputed=blocks)
    finally:
        gc.unfreeze()
    if looks and looks.found:
        profiles.write(looks, recipe, read_json(run.plan), config, made.recomputed)
    return made
