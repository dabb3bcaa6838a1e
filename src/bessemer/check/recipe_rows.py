"""Checklist rows that follow from the recipe alone: batch, token budget and layout."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.check.rows import CheckRow, judge
from bessemer.common.console import amount, counted
from bessemer.distributed.validity import describe_axes
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.recipe.train import HORIZON

BUDGET, LAYOUT = "batch and budget", "layout"


def budget_rows(requested: Recipe, resolved: ResolvedRecipe) -> Iterator[CheckRow]:
    """Check that batch size and number of tokens are explicit in the recipe as written (`requested`)."""
    train, batches = resolved.train, resolved.batches
    steps, micro = train.steps, train.micro_batch
    ways = f"{counted(batches.full, 'sequence')} of {batches.length}: {resolved.parallel.data} x "
    ways += f"{counted(micro, 'sequence')} a micro-batch x {batches.full // resolved.parallel.data // micro}"
    is_given = requested.train.global_batch_tokens is not None
    text = f"{amount(train.global_batch_tokens)} tokens{'' if is_given else ', derived'}; {ways}"
    yield judge(BUDGET, "global batch", is_given, text, otherwise="warn")
    tokens = batches.tokens_before(steps)
    values = {key: getattr(requested.train, key) for key in HORIZON}
    horizon = ", ".join(f"train.{key} = {value:,}" for key, value in values.items() if value is not None)
    text = f"{counted(steps, 'step')}, {amount(tokens)} tokens; {horizon or 'derived'}"
    yield judge(BUDGET, "token budget", bool(horizon), text, otherwise="warn")


def layout_row(resolved: ResolvedRecipe) -> CheckRow:
    """Check that the parallel sizes multiply to the number of processes in the cluster."""
    layout, nodes, per_node = resolved.parallel, resolved.cluster.nodes, resolved.cluster.devices_per_node
    text = f"{describe_axes(layout)} = {counted(layout.world, 'process')} on {counted(nodes, 'node')}"
    holds = layout.world % nodes == 0 and layout.world // nodes <= (per_node or layout.world)
    text += "" if holds else f", which have {per_node or 'equally many'} devices each"
    return judge(LAYOUT, "sizes multiply to the world", holds, text)
