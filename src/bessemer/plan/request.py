"""A request for a plan, and its layout: left open for the planner, or made to fill the devices that the command line sets."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan.batch import require_batch_of_tokens
from bessemer.recipe import Parallel, Recipe, parse
from bessemer.recipe.parallel import AXES
from bessemer.terminal import counted


@dataclass(frozen=True)
class PlanRequest:
    """What is to be planned. model: a published shape with options that a recipe has no keys for; None: the recipe's; notes: how
    it was understood, where a reader of the plan must know it; is_open: there is no recipe yet; own: the recipe as its file
    has it; given: keys of the recipe that the command line sets; written: the recipe before its layout was opened or made to fill
    the devices (None: it was not); own_notes: of that and of a budget, which a request with changes does not take over."""

    recipe: Recipe
    model: ModelConfig | None = None
    notes: tuple[str, ...] = ()
    is_open: bool = False
    own: Recipe | None = None
    given: frozenset[str] = frozenset()
    written: Recipe | None = None
    own_notes: tuple[str, ...] = ()


FILLED = ("replicate", "shard")  # which are made to fill the devices


def with_layout(request: PlanRequest) -> PlanRequest:
    """With `auto` where the recipe leaves its layout open, or the layout made to fill the devices where the command line sets
    those, or some of the layout. Raises InputError where it cannot be."""
    recipe, layout = request.recipe, request.recipe.parallel
    if request.own is not None and _leaves_layout_open(recipe, request.own.parallel):
        return replace(request, recipe=recipe.changed(parallel={"auto": True}), written=recipe)
    given = {axis for axis in AXES if f"parallel.{axis}" in request.given}
    if (not given and "cluster.devices" not in request.given) or not (changes := _filling(recipe, given)):
        return _with_other_world(request, given)
    named = [
        f"{axis} {size}" + (f" in place of the recipe's {getattr(layout, axis)}" if axis in layout.given_layout else "")
        for axis, size in changes.items()
    ]
    note = f"{' and '.join(named)}, so that the layout fills {counted(recipe.cluster.devices or 1, 'device')}"
    return replace(request, recipe=recipe.changed(parallel=changes), written=recipe, own_notes=(note,))


def _with_other_world(request: PlanRequest, given: set[str]) -> PlanRequest:
    """With a note where ways of the command line change the number of devices, which the recipe says by its layout alone."""
    own = None if request.own is None else request.own.parallel
    layout = request.recipe.parallel
    if own is None or not given or layout.auto or request.recipe.cluster.devices or own.world in (1, layout.world):
        return request
    note = f"{layout.world:,} devices, as many as the layout's ways multiply to; by the recipe's they are {own.world:,}"
    return replace(request, own_notes=(note,))


def _leaves_layout_open(recipe: Recipe, own: Parallel) -> bool:
    """Whether a recipe without `auto` has devices but its own [parallel] says not how they are filled, so that the planner
    chooses what is not given; one that fills them, or that divides the batch, is a layout as a run has it."""
    given, cluster = own.given_layout & set(AXES), recipe.cluster
    if "auto" in recipe.parallel.model_fields_set or given & {"replicate", "shard"}:
        return False
    if cluster.devices is None:
        return "nodes" in cluster.model_fields_set and not given
    return not given or own.world != cluster.devices


def to_be_filled(text: str, changes: Sequence[str], typed: Mapping[str, str]) -> Recipe | None:
    """A recipe that is refused for its own `shard` and `replicate` alone, which will be made to fill other
    devices. Raises InputError for a batch of more than all tokens."""
    try:
        recipe = parse(text, "plan", [*changes, *(f"parallel.{axis}=1" for axis in FILLED)])
    except InputError:
        return None
    require_batch_of_tokens(recipe)  # before how such a batch divides
    own, layout = tomllib.loads(text).get("parallel", {}), recipe.parallel
    sizes = {axis: int(typed.get(f"parallel.{axis}", own.get(axis, 1))) for axis in FILLED}
    layout = layout.model_copy(update=sizes)
    layout.__pydantic_fields_set__.difference_update(
        axis for axis in FILLED if axis not in own and f"parallel.{axis}" not in typed
    )
    recipe = recipe.model_copy(update={"parallel": layout})
    return recipe if _filling(recipe, {axis for axis in AXES if f"parallel.{axis}" in typed}) else None


def _near_parts(recipe: Recipe, parts: int) -> list[int]:
    """The nearest numbers of parts of the batch, up to `parts` and above, that divide it where it is given."""
    batch, length = recipe.train.global_batch_tokens, recipe.tokens.sequence_length
    sequences = batch // length if batch and length else 0
    fewer = (size for size in range(parts, 0, -1) if sequences % size == 0)
    more = (size for size in range(parts + 1, max(sequences, parts + 1) + 1) if sequences % size == 0)
    return [size for size in (next(fewer, 0), next(more, 0)) if size]


def _filling(recipe: Recipe, given: set[str]) -> dict[str, int]:
    """New sizes of `shard` and `replicate`, but for those that are given, with which a recipe's layout fills its devices; those
    that change. Raises InputError where none do."""
    layout, num_devices = recipe.parallel, recipe.cluster.devices
    free = [axis for axis in FILLED if axis not in given]
    if layout.auto or num_devices is None or layout.world == num_devices or not free:
        return {}
    kept = {axis: size for axis in AXES if axis not in free and (size := getattr(layout, axis)) > 1}
    ranks = math.prod(kept.values())
    rest, over = divmod(num_devices, ranks)
    if over:
        product = " x ".join(f"{axis} {size}" for axis, size in kept.items()) + f" = {ranks}" * (len(kept) > 1)
        near = " or ".join(f"{ranks * parts:,}" for parts in _near_parts(recipe, rest))
        raise InputError(
            f"parallel: {product} does not divide {counted(num_devices, 'device')}; take {near}, or ways whose product is a "
            "divisor, or auto = true alone in [parallel], and the planner chooses"
        )
    if len(free) == 1 or (layout.shard == 1 and layout.replicate > 1):
        sizes = {free[0]: rest}
    else:
        copies = layout.replicate if rest % layout.replicate == 0 and layout.shard > 1 else 1
        sizes = {"shard": rest // copies, "replicate": copies}
    return {axis: size for axis, size in sizes.items() if getattr(layout, axis) != size}
