"""Which layout a run takes on fewer, or more, processes than its recipe names."""

from __future__ import annotations

from bessemer.errors import InputError
from bessemer.parallel.pipeline import require_micro_batches
from bessemer.recipe import Batches, Parallel, Recipe


def fitted(recipe: Recipe, processes: int) -> Parallel | None:
    """The largest layout for at most so many processes under which a resolved recipe's batch is the same: None if there is none.

    `replicate` follows the number, and `shard` where not even one copy is left of it. What cuts the model (tensor, pipeline,
    context) stays. Each process takes equally many micro-batches, so the parts of the batch have to divide it.
    """
    layout = recipe.parallel
    model = layout.tensor * layout.pipeline * layout.context
    copies = [(n, layout.shard) for n in range(processes // (layout.shard * model), 0, -1)]
    shards = [(1, n) for n in range(min(layout.shard, processes // model), 0, -1)]
    for replicate, shard in copies + shards:
        if _divides(recipe, replicate * shard):
            return layout.model_copy(update={"replicate": replicate, "shard": shard})
    return None


def _divides(recipe: Recipe, parts: int) -> bool:
    micro, batches = recipe.train.micro_batch, Batches.of(recipe)
    assert micro is not None, "the recipe is resolved"
    sizes = {batches.sequences(step) for step in range(batches.ramp_steps + 1)}
    if any(size % (parts * micro) for size in sizes):
        return False
    if recipe.parallel.pipeline > 1:
        try:
            for size in sizes:
                require_micro_batches(recipe.parallel, size // (parts * micro))
        except InputError:
            return False
    return True
