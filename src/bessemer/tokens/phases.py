"""From the recipe to the phases of its mixture: weights, temperature, schedule and caps, by arithmetic over the whole run.

Everything is decided before the first batch, from the number of samples of the run: so the order stays a pure function of
the mixture and the slot, and a capped source is spread over the run in place of running out in its middle.

Temperature T gives shares in proportion to tokens^(1/T) (Devlin 2018, the multilingual BERT README, with exponent 0.7; Xue
et al. 2021, mT5, section 3.1, with 0.3). Caps: as UniMax (Chung et al. 2023, section 3) does for uniform shares: a source
that would come to more than its cap has as many sequences as the cap allows, over all phases in the proportions asked for,
and the others share what it leaves in theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from bessemer.errors import InputError
from bessemer.recipe import Batches, Recipe
from bessemer.tokens.mixture import FINEST_BLOCK, Aim, Mixture, Phase, counts_at, whole_slots

REPEATS_WORTH_A_WARNING = 4  # epochs after which repeated data loses its value (Muennighoff et al. 2023, section 5)


@dataclass(frozen=True)
class Holding:
    """What a store has of each source. names: in order; sequences: how many samples each gives an epoch; tokens: how many
    tokens those hold, padding not counted."""

    names: tuple[str, ...]
    sequences: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """A phase as the recipe asks for it. first, samples: where it lies; shares: of the tokens, by source, 1 in all;
    slots: of the samples, before caps."""

    first: int
    samples: int
    shares: tuple[Fraction, ...]
    slots: tuple[Fraction, ...]


def mixture_of(recipe: Recipe, holding: Holding) -> Mixture:
    """The mixture of a run. Raises InputError when the caps leave too little to read.

    A recipe without temperature, schedule and caps needs no resolved number of steps.
    """
    if not _is_planned(recipe, holding):
        given = recipe.source_weights
        weights = tuple(
            float(given.get(name) or count) for name, count in zip(holding.names, holding.sequences, strict=True)
        )
        return Mixture.of(holding.names, holding.sequences, weights, recipe.run.seed)
    phases = asked_phases(recipe, holding)
    caps = _caps(recipe, holding)
    amounts = _within_caps(phases, caps, holding.names)
    spans = [(phase.first, row) for phase, row in zip(phases, amounts, strict=True)]
    end = phases[-1].first + phases[-1].samples
    mixture = Mixture.over(holding.names, holding.sequences, spans, recipe.run.seed, end)
    aims = tuple(
        Aim(_floats(phase.shares), _floats(_in_tokens(row, holding)))
        for phase, row in zip(phases, amounts, strict=True)
    )
    return replace(_stopped_at_caps(mixture, caps, end), aims=aims)


def asked_phases(recipe: Recipe, holding: Holding) -> list[Asked]:
    """The phases that the recipe asks for, in order; one where it has no schedule."""
    samples = _samples(recipe)
    spans = [(0, _base_shares(recipe, holding))]
    for phase in recipe.tokens.schedule:
        if phase.from_ == "decay":
            assert recipe.train.steps is not None, "the recipe is resolved"
            first = Batches.of(recipe).before(recipe.train.schedule.decay_start(recipe.train.steps))
        else:
            first = floor(Fraction(str(phase.from_)) * samples)
        if first < spans[-1][0] or first >= samples:
            raise InputError(
                f"tokens.schedule: the phase from = {phase.from_} begins at sample {first} of {samples}, which is "
                f"{'before the phase above it' if first < samples else 'past the end'}; change its from, or train.steps"
            )
        weights = _among_parts(recipe, holding, {name: Fraction(str(weight)) for name, weight in phase.weights.items()})
        if first == spans[-1][0]:  # the run is too short for the phase above, or the first one begins at 0
            spans.pop()
        spans.append((first, _normal(weights)))
    ends = [*(first for first, _ in spans[1:]), samples]
    return [
        Asked(first, end - first, shares, _in_sequences(shares, holding))
        for (first, shares), end in zip(spans, ends, strict=True)
    ]


def average_shares(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, float]:
    """Each source's share of the tokens, on average over the training, 1 in all: weights, temperature and schedule.

    For what is done before there are tokens: sizes are bytes of text by source, in place of tokens, and neither the number of
    steps nor caps on repetition, which need it, are looked at. A decay phase is train.schedule.decay_share of the run.
    """
    holding = Holding(tuple(sizes), tuple(sizes.values()), tuple(sizes.values()))
    if not any(sizes.values()):
        return dict.fromkeys(sizes, 0.0)
    spans = [(Fraction(0), _base_shares(recipe, holding))]
    for phase in recipe.tokens.schedule:
        decay = Fraction(str(recipe.train.schedule.decay_share))
        first = 1 - decay if phase.from_ == "decay" else Fraction(str(phase.from_))
        weights = _among_parts(recipe, holding, {name: Fraction(str(weight)) for name, weight in phase.weights.items()})
        spans.append((max(first, spans[-1][0]), _normal(weights) if any(weights) else weights))
    ends = [*(first for first, _ in spans[1:]), Fraction(1)]
    return {
        name: float(
            sum(((end - first) * shares[number] for (first, shares), end in zip(spans, ends, strict=True)), Fraction(0))
        )
        for number, name in enumerate(sizes)
    }


def repeated(mixture: Mixture, samples: int) -> dict[str, float]:
    """The sources that a run of so many samples reads more than four times, and how often."""
    epochs = {
        name: count / available
        for name, count, available in zip(mixture.names, mixture.drawn(samples), mixture.sequences, strict=True)
    }
    return {name: turns for name, turns in epochs.items() if turns > REPEATS_WORTH_A_WARNING}


def _samples(recipe: Recipe) -> int:
    steps = recipe.train.steps
    if steps is None or recipe.train.global_batch_tokens is None or recipe.train.micro_batch is None:
        raise InputError(
            "tokens.schedule, temperature and max_epochs are worked out over the whole run, whose length is not known yet; "
            "give train.steps, train.global_batch_tokens and train.micro_batch"
        )
    return Batches.of(recipe).before(steps)


def _is_planned(recipe: Recipe, holding: Holding) -> bool:
    """Whether the mixture needs the length of the run, or shares finer than those of old recipes."""
    tokens, sources = recipe.tokens, recipe.corpus.sources
    if tokens.temperature is not None or tokens.schedule or tokens.max_epochs is not None:
        return True
    weighted = any(weight is not None for weight in recipe.source_weights.values())
    if any(_source(recipe, name) != name for name in holding.names):
        return True
    padded = tokens.packing != "concatenate" and weighted
    return padded or any(source.max_epochs is not None for source in sources)


def _base_shares(recipe: Recipe, holding: Holding) -> tuple[Fraction, ...]:
    """Shares of the tokens where no phase says otherwise."""
    temperature = recipe.tokens.temperature or 1.0
    tokens: dict[str, int] = {}
    for name, count in zip(holding.names, holding.tokens, strict=True):
        tokens[_source(recipe, name)] = tokens.get(_source(recipe, name), 0) + count
    # Cut to seven digits: what a power comes to in the last bit differs between machines, and the order must not.
    powers = {
        source: Fraction(count) if temperature == 1.0 else Fraction(f"{count ** (1.0 / temperature):.6e}")
        for source, count in tokens.items()
    }
    given = recipe.source_weights
    weights = {
        source: power if given.get(source) is None else Fraction(str(given[source])) for source, power in powers.items()
    }
    return _normal(_among_parts(recipe, holding, weights))


def _among_parts(recipe: Recipe, holding: Holding, weights: Mapping[str, Fraction]) -> tuple[Fraction, ...]:
    """The weights of sources as those of their parts: by tokens, times how often a token of each part is drawn."""
    inner = [
        count * Fraction(str(recipe.parts[name].factor if name in recipe.parts else 1))
        for name, count in zip(holding.names, holding.tokens, strict=True)
    ]
    sums: dict[str, Fraction] = {}
    for name, value in zip(holding.names, inner, strict=True):
        sums[_source(recipe, name)] = sums.get(_source(recipe, name), Fraction(0)) + value
    return tuple(
        weights[_source(recipe, name)] * value / (sums[_source(recipe, name)] or 1)
        for name, value in zip(holding.names, inner, strict=True)
    )


def _source(recipe: Recipe, name: str) -> str:
    """The source that a stored one is, or is a part of."""
    part = recipe.parts.get(name)
    return part.source if part is not None else name


def _in_sequences(shares: tuple[Fraction, ...], holding: Holding) -> tuple[Fraction, ...]:
    """Shares of the tokens as shares of the samples: a source whose sequences are half padding needs twice as many."""
    parts = zip(shares, holding.sequences, holding.tokens, strict=True)
    return _normal(tuple(share * count / max(tokens, 1) for share, count, tokens in parts))


def _in_tokens(slots: tuple[Fraction, ...], holding: Holding) -> tuple[Fraction, ...]:
    """The other way."""
    parts = zip(slots, holding.sequences, holding.tokens, strict=True)
    return _normal(tuple(slot * tokens / max(count, 1) for slot, count, tokens in parts))


def _floats(shares: tuple[Fraction, ...]) -> tuple[float, ...]:
    return tuple(float(share) for share in shares)


def _normal(weights: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
    total = sum(weights, Fraction(0))
    return tuple(weight / total for weight in weights)


def _caps(recipe: Recipe, holding: Holding) -> tuple[int | None, ...]:
    """How many samples of each source the run may read; None: any number."""
    own = {source.name: source.max_epochs for source in recipe.corpus.sources}
    caps: list[int | None] = []
    for name, count in zip(holding.names, holding.sequences, strict=True):
        epochs = own.get(_source(recipe, name)) or recipe.tokens.max_epochs
        caps.append(None if epochs is None else floor(Fraction(str(epochs)) * count))
    return tuple(caps)


def _within_caps(
    phases: list[Asked], caps: tuple[int | None, ...], names: tuple[str, ...]
) -> list[tuple[Fraction, ...]]:
    """Samples of each source in each phase, so that no source comes to more than its cap over all of them."""
    fixed: dict[int, list[Fraction]] = {}  # samples by phase, of the sources that reach their cap
    while True:
        amounts = [_filled(phase, number, fixed, names) for number, phase in enumerate(phases)]
        sums = [sum((row[source] for row in amounts), Fraction(0)) for source in range(len(names))]
        over = {
            source: cap
            for source, cap in enumerate(caps)
            if source not in fixed and cap is not None and sums[source] > cap
        }
        if not over:
            return amounts
        for source, cap in over.items():
            fixed[source] = [row[source] * cap / sums[source] for row in amounts]


def _filled(
    phase: Asked, number: int, fixed: dict[int, list[Fraction]], names: tuple[str, ...]
) -> tuple[Fraction, ...]:
    """Samples of each source in one phase: what is fixed, and the rest among the others in the proportions asked for."""
    left = phase.samples - sum((rows[number] for rows in fixed.values()), Fraction(0))
    open_ = sum((share for source, share in enumerate(phase.slots) if source not in fixed), Fraction(0))
    if left and not open_:
        capped = ", ".join(names[source] for source in fixed if phase.slots[source])
        raise InputError(
            f"max_epochs: with every source at its cap ({capped}) the phase from sample {phase.first} on lacks "
            f"{int(left)} of its {phase.samples} samples; raise max_epochs, add text or a source to the phase, or train "
            "for fewer steps"
        )
    return tuple(
        fixed[source][number] if source in fixed else left * share / open_ if open_ else Fraction(0)
        for source, share in enumerate(phase.slots)
    )


def _stopped_at_caps(mixture: Mixture, caps: tuple[int | None, ...], samples: int) -> Mixture:
    """The same mixture with no source over its cap: where whole slots of a block would take one past it, a phase begins
    in which it has none. Those are the last few samples of a run."""
    phases: list[Phase] = []
    waiting = list(mixture.phases)
    while waiting:
        phase = waiting.pop(0)
        if phases:
            phase = replace(phase, before=counts_at(phases, phase.first))
        end = waiting[0].first if waiting else samples
        stops = [
            (phase.first + phase.slot_of(source, max(cap - phase.before[source], 0)), source)
            for source, cap in enumerate(caps)
            if cap is not None and phase.slots[source] and counts_at([phase], end)[source] > cap
        ]
        if not stops:
            phases.append(phase)
            continue
        at, _ = min(stops)
        before = counts_at([phase], at)
        room = [None if cap is None else cap - count for cap, count in zip(caps, before, strict=True)]
        slots = [0 if left == 0 else count for left, count in zip(room, phase.slots, strict=True)]
        if not any(slots):  # the sources that still have text were not asked for here, but nothing else is left
            slots = [1 if left is None else left for left in room]
        if at > phase.first:
            phases.append(phase)
        waiting.insert(0, Phase(at, whole_slots(slots, FINEST_BLOCK), before, asked=phase.asked))
    return replace(mixture, phases=tuple(phases))
