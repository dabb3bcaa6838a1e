"""Design of a ladder: the models, sizes, lengths, learning rates and batches of its runs within a budget.

There are two designs:

- `ratio`: increasing models with the same number of tokens per parameter, by default the planned run's. The planned run
  is on the line through them, and a law in C alone, with three numbers, predicts it.
- `isoflop`: several sizes at each of several amounts of compute (Hoffmann et al. 2022, section 3.2). It also gives the
  best size for an amount of compute, but the law has five numbers and needs more runs.

One number sets the shape of a model, as with `model.depth`: depth, MLP and heads follow the width in the recipe's own
proportions. Models have at least two layers, because models of one layer are off the line of the others (Kaplan et al.
2020, section 3.2, figure 6).

N counts the parameters of matmuls, in blocks and the output matrix, without the input embedding. Excluding the output
matrix too, as Kaplan et al. did, bends the curve at small sizes. This is the main reason why they found N_opt ~ C^0.73
where Hoffmann et al. found 0.50 (Pearce and Song 2024; Porian et al. 2024 count N as here). C is counted exactly, with
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, log, sqrt
from typing import Any, Literal

from bessemer.common.console import amount, duration
from bessemer.common.errors import InputError
from bessemer.distributed.step_flops import step_flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.model.scaling_rules import BATCH_EXPONENT, RATE_EXPONENT, TOKENS_PER_PARAMETER
from bessemer.recipe import Model, ResolvedRecipe
from bessemer.recipe.model import HIDDEN_WIDTHS

ASPECT_RANGE = 3.0  # largest factor by which a model may be deeper for its width than the recipe's
FEWEST_LAYERS = 2
# Least sequences of a batch. From one sequence to two, the loss of the demo's rungs falls by 1 to 3% at any learning rate, and
# this step would bend the law.
FEWEST_SEQUENCES = 2
WIDTH_STEP = 8


@dataclass(frozen=True)
class Size:
    """A model of the ladder.

    Attributes:
        model: Model settings.
        parameters: N, the parameters of matmuls.
        flops: FLOPs per token of a training step.
    """

    model: Model
    parameters: int
    flops: float

    @property
    def name(self) -> str:
        """Name from layers and width, as in `l2-w64`."""
        return f"l{self.model.layers}-w{self.model.width}"


def size_of(recipe: ResolvedRecipe, vocabulary: int) -> Size:
    """Return the size of a resolved recipe's model."""
    config = model_config(recipe, vocabulary)
    return Size(recipe.model, config.matrix_parameters, step_flops_per_token(recipe.train, config))


def smaller_sizes(recipe: ResolvedRecipe, vocabulary: int) -> list[Size]:
    """Return all models of a resolved recipe's shape that are smaller than its own, one per width, ascending in N.

    Widths increase in steps of a sixteenth of the power of two below them. The number of heads is that whose width is
    nearest to the recipe's. The depth is nearest to the recipe's proportion; of two equally near depths, the smaller
    one.
    """
    model = recipe.model
    layers, width, heads, kv_heads = model.layers, model.width, model.heads, model.kv_heads
    head_dim = model.head_dim
    planned = size_of(recipe, vocabulary).parameters
    sizes: list[Size] = []
    for wide in _widths(width):
        depth = max(ceil(layers * wide / width - 0.5), min(FEWEST_LAYERS, layers))
        if wide / depth < width / layers / ASPECT_RANGE:
            continue
        inner = round(wide / width * heads * head_dim / WIDTH_STEP) * WIDTH_STEP  # width of all heads together
        count = _heads(max(inner, WIDTH_STEP), head_dim)
        groups = max(round(count * kv_heads / heads), 1)
        while count % groups:
            groups -= 1
        shape = {
            "depth": None, "layers": depth, "width": wide, "heads": count, "kv_heads": groups,
            "head_dim": max(inner, WIDTH_STEP) // count,
            **{
                key: max(round(hidden * wide / width / WIDTH_STEP), 1) * WIDTH_STEP
                for key in HIDDEN_WIDTHS if (hidden := getattr(model, key))
            },
        }  # fmt: skip
        size = size_of(recipe.changed(model=shape), vocabulary)
        if size.parameters < planned:
            sizes.append(size)
    return sorted(sizes, key=lambda size: size.parameters)


def _widths(below: int) -> list[int]:
    """Return the widths 16, 24, 32, ... below a limit, in steps of at least 8."""
    widths, width = [], 2 * WIDTH_STEP
    while width < below:
        widths.append(width)
        width += max(WIDTH_STEP, 1 << max(width.bit_length() - 5, 0))
    return widths


def _heads(inner: int, head_dim: int) -> int:
    """Return how many heads, each of the same even width, divide `inner` such that their width is nearest to head_dim."""
    fitting = [count for count in range(1, inner // 2 + 1) if inner % count == 0 and inner // count % 2 == 0]
    return min(fitting, key=lambda count: abs(log(inner / count / head_dim)))


def learning_rate(recipe: ResolvedRecipe, flops: float, planned_flops: float) -> float:
    """Return the learning rate for a run of `flops` total FLOPs.

    It is the recipe's rate if train.optimizer.base_width is set (muP, Yang et al. 2022). Otherwise it is the recipe's
    rate x (flops / planned_flops)^RATE_EXPONENT, the power law that `model.depth` uses. A batch has whole sequences, so
    a small run's batch is slightly larger or smaller than its power law (`batch_tokens`) gives. In both cases, the rate
    is multiplied by the root of the ratio of the two (Malladi et al. 2022, the square-root scaling rule of Adam),
    because otherwise the loss would have a step where the batch has one.
    """
    peak = recipe.train.optimizer.learning_rate
    rounded = exp(0.5 * batch_excess(recipe, batch_tokens(recipe, flops, planned_flops), flops, planned_flops))
    rule = (flops / planned_flops) ** RATE_EXPONENT if recipe.train.optimizer.base_width is None else 1.0
    return float(f"{peak * rule * rounded:.4g}")


def batch_tokens(recipe: ResolvedRecipe, flops: float, planned_flops: float) -> int:
    """Return the tokens of the global batch of a run of `flops` total FLOPs.

    It is the recipe's batch x (flops / planned_flops)^BATCH_EXPONENT, the power law that `model.depth` uses, rounded,
    as a ratio, to the nearest number of whole sequences, at least 2 and at most the recipe's batch.
    """
    batch, length = recipe.train.global_batch_tokens, recipe.tokens.sequence_length
    sequences = batch // length * (flops / planned_flops) ** BATCH_EXPONENT
    below = max(int(sequences), FEWEST_SEQUENCES)
    nearest = below + (sequences > sqrt(below * (below + 1)))
    return int(min(nearest * length, batch))


def batch_excess(recipe: ResolvedRecipe, tokens: int, flops: float, planned_flops: float) -> float:
    """Return log(`tokens` / b), where b is the unrounded batch of the law in `batch_tokens`, at most the recipe's batch."""
    batch = recipe.train.global_batch_tokens
    return log(tokens / (batch * min((flops / planned_flops) ** BATCH_EXPONENT, 1.0)))


Design = Literal["ratio", "isoflop"]
NUM_PARAMETERS = {"ratio": 3, "isoflop": 5}  # of the law
MORE_RUNGS = 2  # least rungs in addition to the law's parameters: one to leave out, and one for the error
RUNGS = {"ratio": 6, "isoflop": 12}
SIZE_STEP = 2.0  # largest ratio between neighbouring sizes of a ratio ladder
BUDGET_STEP = 3.0  # ratio between amounts of compute
BUDGET_SPAN = 4.0  # ratio of the largest to the smallest size at one amount of compute
LARGEST_SHARE = 0.25  # largest rung's share of the planned compute; beyond it, the run itself is nearly as cheap
FEWEST_STEPS = 40
LEAST_SHARE = 1e-9
SEEDS = 3  # runs of each of the smallest rungs
SEEDED_RUNGS = 3  # number of the smallest rungs with several seeds: a few percent of a ladder's compute


@dataclass(frozen=True)
class Rung:
    """A run of the ladder.

    Attributes:
        name: Name of its run.
        group: Index of its amount of compute; runs of one isoflop level share it.
        size: Its model.
        batch: Tokens of a step.
        steps: Number of steps.
        learning_rate: Peak learning rate.
        seed: Number added to the recipe's seed.
    """

    name: str
    group: int
    size: Size
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0

    @property
    def tokens(self) -> int:
        """D, the training tokens."""
        return self.batch * self.steps

    @property
    def flops(self) -> float:
        """C, the FLOPs of the whole run."""
        return self.tokens * self.size.flops

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the rung for design.json and ladder.json."""
        model = self.size.model
        shape = {
            key: getattr(model, key) for key in ("layers", "width", "heads", "kv_heads", "head_dim", *HIDDEN_WIDTHS)
        }
        return {
            "name": self.name, "group": self.group, "parameters": self.size.parameters, "tokens": self.tokens,
            "flops": self.flops, "steps": self.steps, "batch_tokens": self.batch,
            "learning_rate": self.learning_rate, "seed": self.seed, "model": shape,
            "flops_per_token": self.size.flops,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, entry: dict[str, Any], recipe: ResolvedRecipe) -> Rung:
        """Restore a rung from its entry in design.json; `recipe` is the resolved recipe of the planned run."""
        model = recipe.model.changed(depth=None, **entry["model"])
        size = Size(model, entry["parameters"], entry["flops_per_token"])
        numbers = (entry["batch_tokens"], entry["steps"], entry["learning_rate"], entry["seed"])
        return cls(entry["name"], entry["group"], size, *numbers)


@dataclass(frozen=True)
class Planned:
    """The planned run, whose loss the ladder predicts.

    Attributes:
        recipe: Its resolved recipe.
        size: Its model.
        tokens: Training tokens.
    """

    recipe: ResolvedRecipe
    size: Size
    tokens: int

    @property
    def flops(self) -> float:
        return self.tokens * self.size.flops

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.size.parameters


@dataclass(frozen=True)
class Budget:
    """A limit for all rungs together: seconds on this machine, or FLOPs."""

    seconds: float | None = None
    flops: float | None = None

    def __str__(self) -> str:
        return duration(self.seconds) if self.seconds is not None else f"{self.flops:.3g} FLOPs"


UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def parse_budget(text: str) -> Budget:
    """Parse a budget: time as `5`, `5min` or `2h`, or FLOPs as `1e15` or `1e15flops`.

    A number without a unit is minutes, or FLOPs from a million. Raises InputError for anything else.
    """
    plain = text.strip().lower()
    number = plain.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = plain[len(number) :].strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not (0 < value < float("inf")) or (unit and unit not in UNITS and unit not in ("flop", "flops")):
        raise InputError(f"--budget {text}: not a time or a number of FLOPs; write for example 90s, 5min, 2h or 1e15")
    if unit in ("flop", "flops") or (not unit and value >= 1e6):
        return Budget(flops=value)
    return Budget(seconds=value * UNITS[unit or "min"])


def require_enough(design: Design, count: int) -> None:
    """Raise InputError for fewer rungs than the design's law needs."""
    least = NUM_PARAMETERS[design] + MORE_RUNGS
    if count < least:
        raise InputError(
            f"--rungs {count}: too few for the law of --design {design}, which has {NUM_PARAMETERS[design]} parameters; "
            f"give {least} or more"
        )


def with_seeds(rungs: list[Rung], seeds: int) -> list[Rung]:
    """Return the rungs, with repeats of the smallest ones with other seeds.

    The repeats show how much the loss of a single run varies by chance.
    """
    smallest = sorted(rungs, key=lambda rung: rung.flops)[:SEEDED_RUNGS]
    more = [replace(rung, name=f"{rung.name}-seed{seed}", seed=seed) for rung in smallest for seed in range(1, seeds)]
    return rungs + more


def design_rungs(
    design: Design, planned: Planned, sizes: list[Size], count: int, budget: Budget, ratio: float,
    seconds: Callable[[Rung], float], seeds: int = 1,
) -> list[Rung]:  # fmt: skip
    """Return the largest ladder within a budget.

    Args:
        design: Design of the ladder.
        planned: The planned run.
        sizes: Models smaller than the planned one, ascending.
        count: Number of rungs.
        budget: Limit for all rungs together.
        ratio: Tokens per parameter of a ratio ladder.
        seconds: Function that predicts the time of a rung.
        seeds: Runs of each of the smallest rungs.

    Raises:
        InputError: There are too few smaller sizes, or the budget is too small.
    """

    def cost(rungs: list[Rung]) -> float:
        return sum(rung.flops if budget.seconds is None else seconds(rung) for rung in with_seeds(rungs, seeds))

    def rungs_of(share: float) -> list[Rung]:
        top = planned.flops * share
        return _ratio(planned, sizes, count, top, ratio) if design == "ratio" else _isoflop(planned, sizes, count, top)

    allowed = budget.flops or budget.seconds or 0.0
    least = _smallest_whole(rungs_of, count)
    fewer = ", or fewer runs with --rungs" if count > NUM_PARAMETERS[design] + MORE_RUNGS else ""
    if least is None:
        raise InputError(
            f"--rungs {count}: the planned run of {amount(planned.size.parameters)} parameters and {amount(planned.tokens)} "
            f"tokens is too small for {count} smaller ones of at least {FEWEST_STEPS} steps; plan a larger run with model.depth "
            f"or train.steps{fewer}"
        )
    if (needed := cost(rungs_of(least))) > allowed:
        what = f"{needed:.2g} FLOPs" if budget.seconds is None else duration(needed)
        repeats = f", with {seeds} seeds for each of the smallest," if seeds > 1 else ""
        raise InputError(
            f"--budget {budget}: too small: {count} runs of at least {FEWEST_STEPS} steps{repeats} take about {what} with the "
            f"smallest models of this shape; give a larger budget{fewer}"
        )
    low, high = log(least), log(LARGEST_SHARE)
    if cost(rungs_of(LARGEST_SHARE)) <= allowed:
        return with_seeds(rungs_of(LARGEST_SHARE), seeds)
    for _ in range(30):
        middle = 0.5 * (low + high)
        rungs = rungs_of(exp(middle))
        if len(rungs) == count and cost(rungs) <= allowed:
            low = middle
        else:
            high = middle
    return with_seeds(rungs_of(exp(low)), seeds)


def _smallest_whole(rungs_of: Callable[[float], list[Rung]], count: int) -> float | None:
    """Return the smallest share of the planned compute at which the ladder has all its rungs, in steps of 1.25.

    `rungs_of` returns the rungs whose largest run has this share of the planned compute. None if no share has all.
    """
    share, smallest = LARGEST_SHARE, None
    while share > LEAST_SHARE and len(rungs_of(share)) == count:
        smallest, share = share, share / 1.25
    return smallest


def _rung(planned: Planned, size: Size, flops: float, group: int) -> Rung | None:
    """Return a rung of a size with about `flops` total FLOPs, or None if it would have too few steps."""
    batch = batch_tokens(planned.recipe, flops, planned.flops)
    steps = round(flops / size.flops / batch)
    if steps < FEWEST_STEPS:
        return None
    rate = learning_rate(planned.recipe, flops, planned.flops)
    return Rung(f"{size.name}-{steps * batch}", group, size, batch, steps, rate)


def _nearest(sizes: list[Size], wanted: list[float]) -> list[Size]:
    """Return the nearest size for each wanted N, without repeats and ascending in N."""
    free, nearest = list(sizes), []
    for parameters in wanted:
        if not free:
            break
        chosen = min(free, key=lambda size: abs(log(size.parameters / parameters)))
        free.remove(chosen)
        nearest.append(chosen)
    return sorted(nearest, key=lambda size: size.parameters)


def _spread(low: float, high: float, count: int) -> list[float]:
    """Return `count` numbers from low to high in a geometric sequence."""
    return [low * (high / low) ** (number / max(count - 1, 1)) for number in range(count)]


def _ratio(planned: Planned, sizes: list[Size], count: int, top: float, ratio: float) -> list[Rung]:
    fitting = [size for size in sizes if size.flops * size.parameters * ratio <= top * 1.0001]
    if not fitting:
        return []
    largest = fitting[-1].parameters
    low = max(float(fitting[0].parameters), largest / SIZE_STEP ** (count - 1))
    chosen = _nearest(fitting, _spread(low, float(largest), count))
    rungs = [_rung(planned, size, size.flops * size.parameters * ratio, number) for number, size in enumerate(chosen)]
    return [rung for rung in rungs if rung is not None]


def _isoflop(planned: Planned, sizes: list[Size], count: int, top: float) -> list[Rung]:
    levels = max(2, min(count // 3, 3 if count < 16 else 4))
    rungs = []
    for level in range(levels):  # largest first: the largest amounts get the remaining runs
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
        rungs += [_rung(planned, size, flops, levels - 1 - level) for size in chosen]
    return sorted((rung for rung in rungs if rung is not None), key=lambda rung: (rung.group, rung.size.parameters))
