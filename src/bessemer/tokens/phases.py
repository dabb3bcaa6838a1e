"""Phases of a recipe's mixture: weights, temperature, schedule and caps, computed over the whole run.

All phases are fixed before the first batch, from the number of samples of the run. So the order stays a pure function
of the mixture and the slot, and a capped source is spread over the run instead of running out in the middle.

Temperature T gives shares in proportion to tokens^(1/T) (Devlin 2018, the multilingual BERT README, with exponent 0.7;
Xue et al. 2021, mT5, section 3.1, with 0.3). Caps follow UniMax (Chung et al. 2023, section 3), generalised from
uniform shares: a source over its cap gets as many sequences as the cap allows, in each phase in proportion to the
shares of the recipe. The others divide the rest in proportion to their shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from operator import mul

from bessemer.common.errors import InputError
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.tokens.mixture import FINEST_BLOCK, Mixture, Phase, PhaseShares, Weight, block_slots, count_slots

REPEATS_WORTH_A_WARNING = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)

Shares = tuple[Fraction, ...]


@dataclass(frozen=True)
class SourceSizes:
    """Sizes of the sources of a token store.

    Attributes:
        names: Names of the sources, in the store's order.
        sequences: Number of samples of each source per epoch.
        tokens: Number of tokens in these samples, without padding.
    """

    names: tuple[str, ...]
    sequences: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class RecipePhase:
    """A phase of the recipe's mixture, before sources are capped at max_epochs.

    Attributes:
        first: Its first sample in the run's order.
        samples: Its number of samples.
        shares: Each source's share of the tokens of the phase; the sum is 1.
        slots: Each source's share of the samples of the phase; the sum is 1.
    """

    first: int
    samples: int
    shares: Shares
    slots: Shares


def mixture_of(recipe: Recipe, sizes: SourceSizes) -> Mixture:
    """Build the mixture of a run. Raises InputError if max_epochs leaves too little text for the run.

    With tokens.temperature, tokens.schedule or max_epochs, `recipe` must be a resolved one, which has a number of steps.
    """
    if not _needs_phases(recipe, sizes):
        weights = recipe.source_weights
        counts = zip(sizes.names, sizes.sequences, strict=True)
        own = tuple(float(weights.get(name) or count) for name, count in counts)
        return Mixture.from_weights(sizes.names, sizes.sequences, own, recipe.run.seed)
    phases = recipe_phases(recipe, sizes)
    caps = _caps(recipe, sizes)
    amounts = within_caps(phases, caps, sizes.names)
    spans = [(phase.first, row) for phase, row in zip(phases, amounts, strict=True)]
    end = phases[-1].first + phases[-1].samples
    mixture = Mixture.from_phases(sizes.names, sizes.sequences, spans, recipe.run.seed, end)
    shares = tuple(
        PhaseShares(tuple(map(float, phase.shares)), tuple(map(float, _convert(row, sizes.tokens, sizes.sequences))))
        for phase, row in zip(phases, amounts, strict=True)
    )
    return replace(mixture, phases=_stopped_at_caps(mixture.phases, caps, end), shares=shares)


def recipe_phases(recipe: Recipe, sizes: SourceSizes) -> list[RecipePhase]:
    """Return the phases of the recipe's tokens.schedule in order, before caps (max_epochs); one phase without a schedule.

    The part of the run before the first scheduled phase is a phase too. Raises InputError if the recipe is not resolved.
    """
    if not isinstance(recipe, ResolvedRecipe):
        raise InputError(
            "tokens.schedule, temperature and max_epochs need the length of the run, which this recipe does not state; use the "
            "resolved recipe in the run directory"
        )
    samples = recipe.batches.before(recipe.train.steps)
    spans = [(0, _base_shares(recipe, sizes))]
    for phase in recipe.tokens.schedule:
        decay = recipe.train.schedule.decay_start(recipe.train.steps) if phase.from_ == "decay" else None
        if decay is None and phase.from_ == "decay":  # for built-in schedules the recipe's validation rejects this
            raise InputError(
                f"tokens.schedule: {recipe.train.schedule.kind} has no decay phase; set train.schedule.kind"
            )
        first = floor(Fraction(str(phase.from_)) * samples) if decay is None else recipe.batches.before(decay)
        if first < spans[-1][0] or first >= samples:
            raise InputError(
                f"tokens.schedule: the phase from = {phase.from_} begins at sample {first} of {samples}, "
                f"{'before the preceding phase' if first < samples else 'after the end'}; change its from, or train.steps"
            )
        if first == spans[-1][0]:  # the run is too short for the phase above, or the first one begins at 0
            spans.pop()
        spans.append((first, _among_parts(recipe, sizes, phase.weights)))
    ends = [*(first for first, _ in spans[1:]), samples]
    return [
        RecipePhase(first, end - first, shares, _convert(shares, sizes.sequences, sizes.tokens))
        for (first, shares), end in zip(spans, ends, strict=True)
    ]


def average_shares(recipe: Recipe, num_bytes: Mapping[str, int]) -> dict[str, float]:
    """Return each source's average share of the tokens over the run, from weights, temperature and schedule.

    The shares add up to 1. They are computed before tokens exist, from `num_bytes`, the bytes of text by source, instead of
    token counts. max_epochs is ignored. A phase from "decay" takes the last train.schedule.decay_share of the run.
    """
    if not any(num_bytes.values()):
        return dict.fromkeys(num_bytes, 0.0)
    sizes = SourceSizes(tuple(num_bytes), tuple(num_bytes.values()), tuple(num_bytes.values()))
    decay = 1 - Fraction(str(recipe.train.schedule.decay_share))
    begins = (decay if phase.from_ == "decay" else Fraction(str(phase.from_)) for phase in recipe.tokens.schedule)
    firsts = [*accumulate((Fraction(0), *begins), max), Fraction(1)]
    lengths = [end - first for first, end in pairwise(firsts)]
    rows = [
        _base_shares(recipe, sizes),
        *(_among_parts(recipe, sizes, phase.weights) for phase in recipe.tokens.schedule),
    ]
    columns = zip(*rows, strict=True)
    return {name: float(sum(map(mul, lengths, column))) for name, column in zip(num_bytes, columns, strict=True)}


def _needs_phases(recipe: Recipe, sizes: SourceSizes) -> bool:
    """Return True if the recipe's mixture must be built by `Mixture.from_phases`, else False (`Mixture.from_weights`).

    Phases need the length of the run. They are needed for temperature, schedule and max_epochs, for sources stored in
    parts by language, and for weights of packed documents.
    """
    tokens = recipe.tokens
    if tokens.temperature is not None or tokens.schedule or tokens.max_epochs is not None:
        return True
    if any(_source(recipe, name) != name for name in sizes.names):
        return True
    is_weighted = any(weight is not None for weight in recipe.source_weights.values())
    is_capped = any(source.max_epochs is not None for source in recipe.corpus.sources)
    return is_capped or (tokens.packing != "concatenate" and is_weighted)


def _base_shares(recipe: Recipe, sizes: SourceSizes) -> Shares:
    """Return each source's share of the tokens before the first phase of the schedule, by weights and temperature."""
    temperature, own = recipe.tokens.temperature or 1.0, recipe.source_weights
    weights: dict[str, Weight] = {}
    for source, count in _by_source(recipe, sizes.names, map(Fraction, sizes.tokens)).items():
        weight = own.get(source)
        if weight is not None:
            weights[source] = weight
        elif temperature == 1.0:
            weights[source] = count
        else:  # seven digits, since the last bit of a power differs between machines, and the order must not
            weights[source] = Fraction(f"{int(count) ** (1.0 / temperature):.6e}")
    return _among_parts(recipe, sizes, weights)


def _among_parts(recipe: Recipe, sizes: SourceSizes, weights: Mapping[str, Weight]) -> Shares:
    """Return the share of each stored name (`sizes.names`), in proportion to the weights of the recipe's sources.

    A source may be stored in parts by language. Its share is divided among them in proportion to their tokens.
    """
    inner, sources = [Fraction(count) for count in sizes.tokens], [_source(recipe, name) for name in sizes.names]
    sums = _by_source(recipe, sizes.names, inner)
    parts = zip(sources, inner, strict=True)
    return _normalised(Fraction(str(weights[name])) * value / (sums[name] or 1) for name, value in parts)


def _by_source(recipe: Recipe, names: Iterable[str], values: Iterable[Fraction]) -> dict[str, Fraction]:
    """Sum the values of stored names by source of the recipe, which may be stored in several parts by language."""
    sums: dict[str, Fraction] = {}
    for name, value in zip(names, values, strict=True):
        sums[_source(recipe, name)] = sums.get(_source(recipe, name), Fraction(0)) + value
    return sums


def _source(recipe: Recipe, name: str) -> str:
    """Return the source of the recipe that a stored name, a source or its part in one language, belongs to."""
    return recipe.parts.get(name, name)


def _convert(shares: Shares, counts: Sequence[int], divisors: Sequence[int]) -> Shares:
    """Convert each source's share of the tokens to its share of the samples, in proportion to share * count / divisor.

    `counts` are the samples of each source and `divisors` its tokens; exchange the two to convert back. A source whose
    sequences are half padding needs twice as many samples for the same tokens.
    """
    return _normalised(share * count / max(by, 1) for share, count, by in zip(shares, counts, divisors, strict=True))


def _normalised(weights: Iterable[Fraction]) -> Shares:
    values = tuple(weights)
    total = sum(values, Fraction(0)) or 1
    return tuple(value / total for value in values)


def _caps(recipe: Recipe, sizes: SourceSizes) -> tuple[int | None, ...]:
    """Return for each source the largest number of samples that the run may read, by max_epochs; None for no limit."""
    own = {source.name: source.max_epochs for source in recipe.corpus.sources}
    caps: list[int | None] = []
    for name, count in zip(sizes.names, sizes.sequences, strict=True):
        epochs = own.get(_source(recipe, name)) or recipe.tokens.max_epochs
        caps.append(None if epochs is None else floor(Fraction(str(epochs)) * count))
    return tuple(caps)


def within_caps(phases: list[RecipePhase], caps: tuple[int | None, ...], names: tuple[str, ...]) -> list[Shares]:
    """Return the number of samples of each source in each phase, such that no source exceeds its cap over all phases.

    `caps` has the largest number of samples of each source, None for no limit.
    """
    fixed: dict[int, list[Fraction]] = {}  # samples by phase of each source that reaches its cap
    while True:
        amounts = [_phase_amounts(phase, number, fixed, names) for number, phase in enumerate(phases)]
        sums = [sum(column, Fraction(0)) for column in zip(*amounts, strict=True)]
        over = [n for n, cap in enumerate(caps) if n not in fixed and cap is not None and sums[n] > cap]
        if not over:
            return amounts
        for source in over:
            cap = caps[source]
            assert cap is not None
            fixed[source] = [row[source] * cap / sums[source] for row in amounts]


def _phase_amounts(phase: RecipePhase, number: int, fixed: dict[int, list[Fraction]], names: tuple[str, ...]) -> Shares:
    """Return the number of samples of each source in `phase`, whose index is `number`.

    `fixed` maps the index of each capped source to its samples in every phase. The other sources divide the remaining
    samples in proportion to their shares. Raises InputError if there is no such source.
    """
    left = phase.samples - sum((rows[number] for rows in fixed.values()), Fraction(0))
    uncapped = sum((share for source, share in enumerate(phase.slots) if source not in fixed), Fraction(0))
    if left and not uncapped:
        capped = ", ".join(names[source] for source in fixed if phase.slots[source])
        raise InputError(
            f"max_epochs: the phase at sample {phase.first} lacks {int(left)} of its {phase.samples} samples, because all of "
            f"its sources reach their limits ({capped}); raise max_epochs, add text or a source, or train for fewer steps"
        )
    return tuple(
        fixed[source][number] if source in fixed else left * share / uncapped if uncapped else Fraction(0)
        for source, share in enumerate(phase.slots)
    )


def _stopped_at_caps(phases: Sequence[Phase], caps: tuple[int | None, ...], samples: int) -> tuple[Phase, ...]:
    """Return the phases of a run of `samples` samples, adjusted so that rounding lets no source exceed its cap.

    `caps` has the largest number of samples of each source. At the sample where a source would exceed it, a phase without
    that source begins. This affects only the last few samples of a run.
    """
    done: list[Phase] = []
    waiting = list(phases)
    while waiting:
        phase = waiting.pop(0)
        if done:
            phase = replace(phase, before=count_slots(done, phase.first))
        end = waiting[0].first if waiting else samples
        stops = [
            phase.first + int(phase.slots_of(source, max(cap - phase.before[source], 0)))
            for source, cap in enumerate(caps)
            if cap is not None and phase.slots[source] and count_slots([phase], end)[source] > cap
        ]
        if not stops:
            done.append(phase)
            continue
        at = min(stops)
        before = count_slots([phase], at)
        room = [None if cap is None else cap - count for cap, count in zip(caps, before, strict=True)]
        slots = [0 if left == 0 else count for left, count in zip(room, phase.slots, strict=True)]
        if not any(slots):  # only sources outside the phase have text left
            slots = [1 if left is None else left for left in room]
        if at > phase.first:
            done.append(phase)
        waiting.insert(0, Phase(at, block_slots(slots, FINEST_BLOCK), before, recipe_phase=phase.recipe_phase))
    return tuple(done)
