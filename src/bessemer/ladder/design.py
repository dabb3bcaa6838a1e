"""Which small runs a ladder has: their models, of the recipe's own shape, with the learning rate and batch of each, and how many
of what size and length, so that all of them together take what they may.

ratio     one model after another, each with the same number of tokens a parameter (the planned run's, where none is given):
          the planned run then lies on the line through them, and a law in C alone, of three numbers, predicts it.
isoflop   several sizes at each of several amounts of compute (Hoffmann et al. 2022, section 3.2): also says which size is
          best for an amount, but the law has five numbers and needs more runs.

Shape: as on the depth dial, one number sets it: depth, MLP and heads follow the width in the recipe's own proportion. Two
layers at least: models of one fall off the line of the others (Kaplan et al. 2020, section 3.2, figure 6).

N counts the parameters of matmuls, blocks and output matrix, without the input embedding. Leaving out the output
matrix too, as Kaplan et al. did, bends the curve at small sizes and is most of why they found N_opt ~ C^0.73 where Hoffmann
et al. found 0.50 (Pearce and Song 2024; Porian et al. 2024 count as here). C is counted exactly, with attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt
from typing import Any, Literal

from bessemer.common.console import amount, duration
from bessemer.common.errors import InputError
from bessemer.model.flops import step_flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.model.scaling_rules import BATCH_EXPONENT, RATE_EXPONENT, TOKENS_PER_PARAMETER
from bessemer.recipe import Model, ResolvedRecipe

ASPECT_RANGE = 3.0  # no model is deeper for its width than by this factor
FEWEST_LAYERS = 2
# In a batch. From one sequence to two the demo's rungs get better by 1 to 3% of the loss at any rate, and a ladder with that
# step in it bends where the batch does.
FEWEST_SEQUENCES = 2
WIDTH_STEP = 8


@dataclass(frozen=True)
class Size:
    """A model of the ladder. parameters: N, those in matmuls; flops: of a training step, a token."""

    model: Model
    parameters: int
    flops: float

    @property
    def name(self) -> str:
        """Layers and width, as in l2-w64."""
        return f"l{self.model.layers}-w{self.model.width}"


def size_of(recipe: ResolvedRecipe, vocabulary: int) -> Size:
    """The size of a resolved recipe's model."""
    config = model_config(recipe, vocabulary)
    return Size(recipe.model, config.matrix_parameters, step_flops_per_token(recipe.train, config))


def smaller(recipe: ResolvedRecipe, vocabulary: int) -> list[Size]:
    """All models of a resolved recipe's shape that are smaller than its own, by N: one for each width.

    Widths in steps of a sixteenth of the power of two below them; the number of heads whose width is nearest to the recipe's;
    the depth nearest to the recipe's proportion (of two as near, the smaller one).
    """
    model = recipe.model
    layers, width, heads, kv_heads = model.layers, model.width, model.heads, model.kv_heads
    head_dim, mlp_width = model.head_dim, model.mlp_width
    planned = size_of(recipe, vocabulary).parameters
    found: list[Size] = []
    for wide in _widths(width):
        depth = max(ceil(layers * wide / width - 0.5), min(FEWEST_LAYERS, layers))
        if wide / depth < width / layers / ASPECT_RANGE:
            continue
        inner = round(wide / width * heads * head_dim / WIDTH_STEP) * WIDTH_STEP  # of all heads together
        count = _heads(max(inner, WIDTH_STEP), head_dim)
        groups = max(round(count * kv_heads / heads), 1)
        while count % groups:
            groups -= 1
        shape = {
            "depth": None, "layers": depth, "width": wide, "heads": count, "kv_heads": groups,
            "head_dim": max(inner, WIDTH_STEP) // count,
            "mlp_width": max(round(mlp_width * wide / width / WIDTH_STEP), 1) * WIDTH_STEP,
        }  # fmt: skip
        size = size_of(recipe.changed(model=shape), vocabulary)
        if size.parameters < planned:
            found.append(size)
    return sorted(found, key=lambda size: size.parameters)


def _widths(below: int) -> list[int]:
    """16, 24, 32, ... in steps of at least 8."""
    found, wide = [], 2 * WIDTH_STEP
    while wide < below:
        found.append(wide)
        wide += max(WIDTH_STEP, 1 << max(wide.bit_length() - 5, 0))
    return found


def _heads(inner: int, head_dim: int) -> int:
    """The number of heads of an even width whose width is nearest, as a factor, to head_dim."""
    fitting = [count for count in range(1, inner // 2 + 1) if inner % count == 0 and inner // count % 2 == 0]
    return min(fitting, key=lambda count: abs(log(inner / count / head_dim)))


def learning_rate(recipe: ResolvedRecipe, flops: float, planned_flops: float) -> float:
    """Return the learning rate of a run of `flops` FLOPs in all: with train.optimizer.base_width the recipe's (muP, Yang et al.
    2022), else by the depth dial's law through the recipe's own point. recipe: resolved.

    A batch is whole sequences, so a small run's is a little larger or smaller than the law's; the rate then goes with the
    square root of that (Malladi et al. 2022, the square-root scaling rule of Adam), or the loss has a step where the batch
    has one.
    """
    peak = recipe.train.optimizer.learning_rate
    rounded = exp(0.5 * batch_excess(recipe, batch_tokens(recipe, flops, planned_flops), flops, planned_flops))
    rule = (flops / planned_flops) ** RATE_EXPONENT if recipe.train.optimizer.base_width is None else 1.0
    return float(f"{peak * rule * rounded:.4g}")


def batch_tokens(recipe: ResolvedRecipe, flops: float, planned_flops: float) -> int:
    """Tokens of the global batch of a run: the depth dial's law through the recipe's own batch, the nearest number of whole
    sequences by its factor, at least 2 and not above the recipe's; recipe: resolved."""
    batch, length = recipe.train.global_batch_tokens, recipe.tokens.sequence_length
    sequences = batch // length * (flops / planned_flops) ** BATCH_EXPONENT
    below = max(int(sequences), FEWEST_SEQUENCES)
    nearest = below + (sequences > sqrt(below * (below + 1)))
    return int(min(nearest * length, batch))


def batch_excess(recipe: ResolvedRecipe, tokens: int, flops: float, planned_flops: float) -> float:
    """The logarithm of a batch over the law's, which is not whole sequences; recipe: resolved."""
    batch = recipe.train.global_batch_tokens
    return log(tokens / (batch * min((flops / planned_flops) ** BATCH_EXPONENT, 1.0)))


Design = Literal["ratio", "isoflop"]
FEWEST = {"ratio": 5, "isoflop": 7}  # the law's numbers, one rung to leave out, and one for the error
RUNGS = {"ratio": 6, "isoflop": 12}
SIZE_STEP = 2.0  # at most, between the sizes of a ratio ladder
BUDGET_STEP = 3.0  # between amounts of compute
BUDGET_SPAN = 4.0  # between the smallest and the largest size of an amount
LARGEST_SHARE = 0.25  # of the planned compute, for the largest rung: beyond, the run itself is nearly as cheap
FEWEST_STEPS = 40
LEAST_SHARE = 1e-9
SEEDS = 3  # of each of the smallest rungs
SEEDED_RUNGS = 3  # the smallest ones: together some percent of a ladder's compute


@dataclass(frozen=True)
class Rung:
    """A run of the ladder. group: number of its amount of compute; batch: tokens a step; seed: added to the recipe's."""

    name: str
    group: int
    size: Size
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0

    @property
    def tokens(self) -> int:
        """D."""
        return self.batch * self.steps

    @property
    def flops(self) -> float:
        """C, of the whole run."""
        return self.tokens * self.size.flops

    def to_dict(self) -> dict[str, Any]:
        """Its entry in design.json and in messages."""
        model = self.size.model
        shape = {key: getattr(model, key) for key in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width")}
        return {
            "name": self.name, "group": self.group, "parameters": self.size.parameters, "tokens": self.tokens,
            "flops": self.flops, "steps": self.steps, "batch_tokens": self.batch,
            "learning_rate": self.learning_rate, "seed": self.seed, "model": shape,
            "flops_per_token": self.size.flops,
        }  # fmt: skip

    @classmethod
    def of(cls, kept: dict[str, Any], recipe: ResolvedRecipe) -> Rung:
        """The rung that design.json keeps; recipe: resolved."""
        model = recipe.model.changed(depth=None, **kept["model"])
        size = Size(model, kept["parameters"], kept["flops_per_token"])
        numbers = (kept["batch_tokens"], kept["steps"], kept["learning_rate"], kept.get("seed", 0))
        return cls(kept["name"], kept["group"], size, *numbers)


@dataclass(frozen=True)
class Planned:
    """The run that is to be predicted. recipe: resolved; flops: of the whole run."""

    recipe: ResolvedRecipe
    size: Size
    tokens: int

    @property
    def flops(self) -> float:
        return self.tokens * self.size.flops

    @property
    def ratio(self) -> float:
        """Tokens a parameter."""
        return self.tokens / self.size.parameters


@dataclass(frozen=True)
class Budget:
    """What all rungs together may take: seconds on this machine, or FLOPs."""

    seconds: float | None = None
    flops: float | None = None

    def __str__(self) -> str:
        return duration(self.seconds) if self.seconds is not None else f"{self.flops:.3g} FLOPs"


UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hours": 3600.0, "minutes": 60.0}


def parse_budget(text: str | None) -> Budget:
    """`5`, `5min`, `2h`: time on this machine, in minutes where no unit stands; `1e15`, `1e15flops`: FLOPs; None: 5 minutes.

    A bare number from a million on is FLOPs. Raises InputError for what is neither, or not above 0.
    """
    if text is None:
        return Budget(seconds=300.0)
    plain = text.strip().lower()
    number = plain.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = plain[len(number) :].strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not (0 < value < float("inf")) or (unit and unit not in UNITS and unit not in ("flop", "flops")):
        raise InputError(f"--budget {text}: give a time as 5min or 2h, or FLOPs as 1e15")
    if unit in ("flop", "flops") or (not unit and value >= 1e6):
        return Budget(flops=value)
    return Budget(seconds=value * UNITS[unit or "min"])


def refuse_few(design: Design, count: int) -> None:
    """Raises InputError for fewer rungs than the design's law needs."""
    if count < FEWEST[design]:
        raise InputError(
            f"--rungs {count}: a {design} ladder needs {FEWEST[design]} rungs at least: its law has "
            f"{3 if design == 'ratio' else 5} numbers, one rung is left out to be predicted, and one shows the error"
        )


def with_seeds(rungs: list[Rung], seeds: int) -> list[Rung]:
    """The rungs, and the smallest of them again with other seeds: how far the loss of a single run lies off by chance."""
    smallest = sorted(rungs, key=lambda rung: rung.flops)[:SEEDED_RUNGS]
    more = [replace(rung, name=f"{rung.name}-seed{seed}", seed=seed) for rung in smallest for seed in range(1, seeds)]
    return rungs + more


def rungs_within(
    design: Design, planned: Planned, sizes: list[Size], count: int, budget: Budget, ratio: float,
    seconds: Callable[[Rung], float], seeds: int = 1,
) -> list[Rung]:  # fmt: skip
    """The largest ladder that keeps to the budget. ratio: tokens a parameter; seconds: what a rung is expected to take; seeds:
    of the smallest rungs.

    Raises InputError when there are too few sizes below the planned one, or when the budget is too small for them.
    """

    def cost(made: list[Rung]) -> float:
        return sum(rung.flops if budget.seconds is None else seconds(rung) for rung in with_seeds(made, seeds))

    def made_with(share: float) -> list[Rung]:
        top = planned.flops * share
        return _ratio(planned, sizes, count, top, ratio) if design == "ratio" else _isoflop(planned, sizes, count, top)

    allowed = budget.flops or budget.seconds or 0.0
    least = _smallest_whole(made_with, count)
    fewer = ", or ask for fewer with --rungs" if count > FEWEST[design] else ""
    if least is None:
        raise InputError(
            f"the planned model of {amount(planned.size.parameters)} parameters and {amount(planned.tokens)} tokens leaves no "
            f"room for {count} smaller rungs of {FEWEST_STEPS} steps or more; plan a larger run (model.depth, train.steps){fewer}"
        )
    if cost(made_with(least)) > allowed:
        needed = cost(made_with(least))
        what = f"{needed:.2g} FLOPs" if budget.seconds is None else duration(needed)
        repeats = f", the smallest with {seeds} seeds each (--seeds)," if seeds > 1 else ""
        raise InputError(
            f"--budget {budget}: too small; {count} rungs of {FEWEST_STEPS} steps or more{repeats} take about {what} on the "
            f"smallest models of this shape; give more{fewer}"
        )
    low, high = log(least), log(LARGEST_SHARE)
    if cost(made_with(LARGEST_SHARE)) <= allowed:
        return with_seeds(made_with(LARGEST_SHARE), seeds)
    for _ in range(30):
        middle = 0.5 * (low + high)
        made = made_with(exp(middle))
        if len(made) == count and cost(made) <= allowed:
            low = middle
        else:
            high = middle
    return with_seeds(made_with(exp(low)), seeds)


def _smallest_whole(made_with: Callable[[float], list[Rung]], count: int) -> float | None:
    """The smallest share of the planned compute, by factors of 1.25, whose ladder has all its rungs."""
    share, found = LARGEST_SHARE, None
    while share > LEAST_SHARE and len(made_with(share)) == count:
        found, share = share, share / 1.25
    return found


def _rung(planned: Planned, size: Size, flops: float, group: int) -> Rung | None:
    """A run of a size with about so many FLOPs; None where that is too few steps."""
    batch = batch_tokens(planned.recipe, flops, planned.flops)
    steps = round(flops / size.flops / batch)
    if steps < FEWEST_STEPS:
        return None
    rate = learning_rate(planned.recipe, flops, planned.flops)
    return Rung(f"{size.name}-{steps * batch}", group, size, batch, steps, rate)


def _nearest(sizes: list[Size], wanted: list[float]) -> list[Size]:
    """For each wanted N, ascending, the nearest size that is not taken."""
    free, found = list(sizes), []
    for parameters in wanted:
        if not free:
            break
        chosen = min(free, key=lambda size: abs(log(size.parameters / parameters)))
        free.remove(chosen)
        found.append(chosen)
    return sorted(found, key=lambda size: size.parameters)


def _spread(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from low to high, each the same factor from the one before."""
    return [low * (high / low) ** (number / max(count - 1, 1)) for number in range(count)]


def _ratio(planned: Planned, sizes: list[Size], count: int, top: float, ratio: float) -> list[Rung]:
    fitting = [size for size in sizes if size.flops * size.parameters * ratio <= top * 1.0001]
    if not fitting:
        return []
    largest = fitting[-1].parameters
    low = max(float(fitting[0].parameters), largest / SIZE_STEP ** (count - 1))
    chosen = _nearest(fitting, _spread(low, float(largest), count))
    made = [_rung(planned, size, size.flops * size.parameters * ratio, number) for number, size in enumerate(chosen)]
    return [rung for rung in made if rung is not None]


def _isoflop(planned: Planned, sizes: list[Size], count: int, top: float) -> list[Rung]:
    levels = max(2, min(count // 3, 3 if count < 16 else 4))
    made = []
    for level in range(levels):  # from the largest amount on, which gets the runs that do not divide evenly
        each = count // levels + (level < count % levels)
        flops = top / BUDGET_STEP**level
        middle = sqrt(flops / (6 * TOKENS_PER_PARAMETER))
        low, high = middle / sqrt(BUDGET_SPAN), middle * sqrt(BUDGET_SPAN)
        smallest, largest = float(sizes[0].parameters), float(sizes[-1].parameters)
        if low < smallest:
            low, high = smallest, min(smallest * BUDGET_SPAN, largest)
        elif high > largest:
            low, high = max(largest / BUDGET_SPAN, smallest), largest
        chosen = _nearest(sizes, _spread(low, high, each))
        made += [_rung(planned, size, flops, levels - 1 - level) for size in chosen]
    return sorted((rung for rung in made if rung is not None), key=lambda rung: (rung.group, rung.size.parameters))
