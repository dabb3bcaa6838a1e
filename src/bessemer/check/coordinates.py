"""Coordinate check: do updates change activations equally at other widths and depths (Yang et al. 2022, appendix D.1)?

Copies of the recipe's model take a few updates at the recipe's learning rate. If the activations of a layer change more in a
wider copy, a learning rate that was tuned at one width is wrong at another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from bessemer.check.masks import hidden_states
from bessemer.check.rows import CheckRow, Status, judge
from bessemer.check.trial import resized
from bessemer.model.transformer import build_model
from bessemer.recipe import Parallel, ResolvedRecipe
from bessemer.recipe.model import HIDDEN_WIDTHS
from bessemer.tokens.loader import Batch
from bessemer.tokens.shards import TokenStore
from bessemer.train.device import Device
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

TOPIC = "transfer of the learning rate"
LEAST_WIDTH = 64  # of the narrowest copy, which has whole heads; the rules assume wide models
TIMES, DEPTHS = (1, 2, 4), (2, 4)  # widths as multiples of the narrowest, and layers of the copies
STEPS, BATCH_TOKENS = 10, 256  # updates, and tokens of a batch, which has at least one sequence
# Largest slopes of log(change) over log(width) and log(depth). Layers whose changes are independent add up to 0.5 over depth.
WIDTH_LIMIT, DEPTH_LIMIT = 0.25, 0.5
LEAST = 1e-9  # a smaller change, such as that of a frozen embedding, counts as this


def coordinate_rows(recipe: ResolvedRecipe, store: TokenStore, device: Device) -> Iterator[CheckRow]:
    """Yield two rows: how much the size of activation changes in the first updates depends on width, and on depth.

    Yields none unless a language model starts from initial weights.
    """
    if not recipe.is_pretraining:
        return
    least = math.ceil(LEAST_WIDTH * recipe.model.heads / recipe.model.width)
    copies = [_copy(recipe, layers, least * times) for layers in DEPTHS for times in TIMES]
    changes = {(copy.model.layers, copy.model.width): _changes(copy, store, device) for copy in copies}
    widths = sorted({width for _, width in changes})
    by_width = {
        f"{name} of {layers} layers": torch.stack([changes[layers, width][name] for width in widths])
        for layers in DEPTHS
        for name in changes[layers, widths[0]]
    }
    by_depth = {
        f"{name} at width {width}": torch.stack([changes[layers, width][name] for layers in DEPTHS])
        for width in widths
        for name in ("embedding", "logits")
    }
    is_scaled = recipe.train.optimizer.base_width is not None
    remedy = (
        "a rate from another width needs that width as train.optimizer.base_width, and model.tie_embeddings = false"
    )
    remedy = "search the rate at the run's own width" if is_scaled else remedy
    yield _row("width", widths, by_width, WIDTH_LIMIT, remedy, "FAIL" if is_scaled else "warn")
    yield _row("depth", DEPTHS, by_depth, DEPTH_LIMIT, "search the rate at the run's own depth", "warn")


def _copy(recipe: ResolvedRecipe, layers: int, heads: int) -> ResolvedRecipe:
    """Return the recipe for a model with these layers and heads, and its widths in proportion to the heads.

    It trains in one process at a constant learning rate.
    """
    model = recipe.model
    widths = ("width", *(key for key in HIDDEN_WIDTHS if getattr(model, key)))
    sizes = {key: heads * getattr(model, key) // model.heads for key in widths}
    sizes["kv_heads"] = math.gcd(heads, max(heads * model.kv_heads // model.heads, 1))
    one = recipe.model_copy(update={"parallel": Parallel()})
    constant = {"kind": "constant", "settings": None, "warmup_steps": 0}
    return one.changed(model=resized(recipe, layers=layers, heads=heads, **sizes), train={"schedule": constant})


def _changes(recipe: ResolvedRecipe, store: TokenStore, device: Device) -> dict[str, Tensor]:
    """Train for STEPS updates, and return by layer the RMS change of its activations since the start, (STEPS,) each.

    The layers are "embedding", "block N" and "logits".
    """
    model = build_model(config_of(recipe, store.vocabulary, 0), recipe.run.seed)
    trainer = Trainer(recipe, model, device, store.end_of_text, len(store.sources), recomputed=0)
    loader, changes = trainer.task.loader(recipe, store), list[Tensor]()
    sequences = max(BATCH_TOKENS // recipe.tokens.sequence_length, 1)
    with trainer.eager():
        start = _activations(trainer, loader.batch(0, sequences))
        for number in range(STEPS):
            gradients = trainer.forward_backward(loader.batch(number * sequences, sequences))
            trainer.update(number, gradients.grad_norm)
            now = _activations(trainer, loader.batch(0, sequences))
            changes.append(torch.stack([(a - b).square().mean().sqrt() for a, b in zip(now, start, strict=True)]))
    names = ["embedding", *(f"block {number}" for number in range(len(start) - 2)), "logits"]
    return dict(zip(names, torch.stack(changes, 1).double().cpu(), strict=True))


@torch.no_grad()
def _activations(trainer: Trainer, batch: Batch) -> list[Tensor]:
    """Return the input of the first block, the output of each block, and the logits, in fp32."""
    activations, blocks = list[Tensor](), trainer.model.blocks
    with ExitStack() as hooks:
        before = blocks[0].register_forward_pre_hook(lambda block, arguments: activations.append(arguments[0].float()))
        hooks.callback(before.remove)
        for block in blocks:
            after = block.register_forward_hook(lambda block, arguments, out: activations.append(out.float()))
            hooks.callback(after.remove)
        hidden_BTD = hidden_states(trainer, batch.inputs, batch.starts)
    return [*activations, trainer.model.head.logits(hidden_BTD)]


def _row(
    axis: str, sizes: Sequence[int], changes: dict[str, Tensor], limit: float, remedy: str, otherwise: Status
) -> CheckRow:
    """Return a row about the layer whose RMS change depends most on the size of the model.

    Args:
        axis: What the sizes are: "width" or "depth".
        sizes: The sizes of the models.
        changes: The RMS change by layer, (sizes, updates).
        limit: The largest absolute exponent e for which the last change, fitted as size^e, counts as independent of the size.
        remedy: The advice if a layer exceeds it.
        otherwise: The status if a layer exceeds it.
    """
    logs = torch.tensor(sizes).double().log()
    logs -= logs.mean()
    slopes = {name: float(logs @ c[:, -1].clamp(min=LEAST).log() / (logs @ logs)) for name, c in changes.items()}
    worst = max(slopes, key=lambda name: abs(slopes[name]) if math.isfinite(slopes[name]) else math.inf)
    ratios = " ".join(f"{ratio:.2f}" for ratio in changes[worst][-1] / changes[worst][0])
    said = f"after {STEPS} updates at the recipe's rate, activations change as {axis}^{slopes[worst]:.2f} in the worst layer "
    said += f"({worst}); {axis} {sizes[-1]} to {sizes[0]} after each update: {ratios}"
    holds = abs(slopes[worst]) <= limit
    said += "" if holds else f"; the limit is {axis}^{limit}: {remedy}"
    return judge(TOPIC, f"holds at every {axis}", holds, said, otherwise=otherwise)
