"""Implementation of `bessemer ladder --mixture`: train proxies on different shares and propose the best shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common.console import amount, say
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.ladder import runs, shares
from bessemer.ladder.design import (
    FEWEST_STEPS,
    LARGEST_SHARE,
    Budget,
    Planned,
    Rung,
    Size,
    batch_tokens,
    learning_rate,
    parse_budget,
)
from bessemer.ladder.fit import Array
from bessemer.ladder.law import Interval
from bessemer.ladder.runs import Ground, Resolve, Train
from bessemer.recipe import MixturePhase, Recipe
from bessemer.run.directory import RunDirectory
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING, average_shares

MEAN = "mean"
FEWEST_RUNS = 5
DRAWS = 400
FEWEST_PER_PARAMETER = 5.0  # least tokens per parameter of a proxy; with fewer it does not distinguish sources


def mixture(
    recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, *, target: str = MEAN, rungs: int | None = None,
    budget: str | None = None, verify: bool = False, folder: Path | None = None, restart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train proxies, fit their loss as a function of the shares, and propose a mixture.

    Writes mixture.json and the report of the run. A stopped search continues. `recipe`, `run`, `resolve` and `train`
    are those of `command.ladder`.

    Args:
        target: Source whose held-out loss is minimized, or "mean".
        rungs: Number of proxies; None: 4 per source and at least 8.
        budget: Time or FLOPs of all proxies, as in `parse_budget`.
        verify: True to train a proxy on the proposed mixture.
        folder: Folder of the proxies; None: mixture/ in the run directory.
        restart: True to move an earlier search aside and start again.

    Raises:
        InputError: The recipe has one source, the target is unknown, or there are too few runs.
    """
    allowed, names = parse_budget(budget), list(recipe.source_weights)
    if len(names) < 2:
        raise InputError(
            f"ladder --mixture: the recipe has {f'one source ({names[0]})' if names else 'no source'}; "
            "shares need two or more in [[corpus.sources]]"
        )
    count, fewest = rungs or max(8, 4 * len(names)), max(FEWEST_RUNS, len(names) + 2)
    if count < fewest:
        raise InputError(f"--rungs {count}: {len(names)} sources need {fewest} proxies or more")
    _require_target(target, [*recipe.parts])
    folder = folder or run.path / "mixture"
    with runs.open_ladder(recipe, run, resolve, train, folder, restart) as ground:
        targets = _targets(target, ground)
        proxy, points = _design(ground, names, count, allowed)
        say(
            f"{len(points)} proxies of {amount(proxy.size.parameters)} parameters on {amount(proxy.tokens)} tokens each, "
            f"on {len(names)} sources: {len(points) * proxy.flops / ground.planned.flops:.0%} of the planned compute"
        )
        made = [(replace(proxy, name=f"{number:02d}-{proxy.name}"), point) for number, point in enumerate(points)]
        recipes = [(rung, proxy_recipe(ground, rung, names, point)) for rung, point in made]
        scores = runs.train_all(recipes, ground)
        found = result(ground, names, targets, proxy, points, [scores[rung.name] for rung, _ in made])
        if verify:
            found["verify"] = _verified(ground, names, targets, proxy, found, scores[made[0][0].name])
        return runs.publish(found, folder / "mixture.json", run)


def largest_shares(ground: Ground, names: list[str], tokens: int) -> Array:
    """Return the (m,) largest shares of this many tokens that read no source more than four times.

    Four is where repeated text begins to lose its value (Muennighoff et al. 2023).
    """
    available = dict.fromkeys(names, 0)
    for name in ground.store.sources:
        available[ground.planned.recipe.parts[name]] += ground.store.split(name, "train").num_tokens
    most = np.minimum(REPEATS_WORTH_A_WARNING * np.array([available[name] for name in names]) / tokens, 1.0)
    return np.asarray(most / min(most.sum(), 1.0))  # sums to 1 if even the whole text is read more often


def _targets(name: str, ground: Ground) -> list[str]:
    """Return the stored sources whose held-out losses are averaged."""
    with_text = [name for name in ground.store.sources if ground.store.split(name, "heldout").num_tokens > 1]
    _require_target(name, with_text)
    return with_text if name == MEAN else [name]


def _require_target(name: str, sources: list[str]) -> None:
    """Raise InputError for a target that is not one of these sources.

    Before there are tokens, the sources are all that may be stored.
    """
    known = [*sources, MEAN]
    if name in known:
        return
    raise InputError(f"--target {name}: no source of that name with held-out text; there are {', '.join(known)}")


def _design(ground: Ground, names: list[str], count: int, budget: Budget) -> tuple[Rung, Array]:
    """Return the proxy and the shares of each run, from design.json or computed and saved there."""
    recipe, store = ground.planned.recipe, ground.store
    protocol = ground.protocol("mixture", names, count, str(budget))
    kept = runs.kept_design(ground.folder, protocol, protocol)
    if kept is None:
        seconds = None
        if budget.seconds is not None:
            seconds = runs.seconds_by(ground.planned, runs.timing(ground.planned, ground.sizes, store.vocabulary))
        proxy, given = _proxy(ground.planned, ground.sizes, count, budget, seconds), dict.fromkeys(names, 0.0)
        # The recipe's shares of the tokens, averaged over its run.
        available = {name: store.split(name, "train").num_tokens for name in store.sources}
        for name, share in average_shares(recipe, available).items():
            given[recipe.parts[name]] += share
        most = largest_shares(ground, names, proxy.tokens)
        points = shares.spread_out(np.array([given[name] for name in names]), count, most, recipe.run.seed)
        rows = points.round(6).tolist()
        kept = runs.keep_design(ground.folder, protocol, protocol, [proxy.to_dict()], points=rows)
    return Rung.of(kept["rungs"][0], recipe), np.array(kept["more"]["points"])


def _proxy(
    planned: Planned, sizes: list[Size], count: int, budget: Budget, seconds: Callable[[Rung], float] | None = None
) -> Rung:
    """Return the largest proxy of which `count` fit the budget.

    `seconds` predicts the time of a rung for a budget of time. Raises InputError if not even the smallest proxy fits.
    """
    each = (budget.flops or budget.seconds or 0.0) / count
    ratio = max(planned.ratio, FEWEST_PER_PARAMETER)
    best: Rung | None = None
    for size in sizes:
        flops = min(size.flops * size.parameters * ratio, LARGEST_SHARE * planned.flops)
        batch = batch_tokens(planned.recipe, flops, planned.flops)
        steps = round(flops / size.flops / batch)
        rung = Rung(size.name, 0, size, batch, steps, learning_rate(planned.recipe, flops, planned.flops))
        cost = seconds(rung) if seconds is not None else rung.flops
        if cost > each:
            if best is None:  # train the smallest model on fewer tokens
                fewer = replace(rung, steps=int(steps * each / cost))
                best = fewer if fewer.steps >= FEWEST_STEPS else None
            break
        if steps >= FEWEST_STEPS:
            best = rung
    if best is None:
        raise InputError(
            f"--budget {budget}: too small for {count} proxies of {FEWEST_STEPS} steps or more, or the planned run is; give more"
            + (", or ask for fewer with --rungs" if count > FEWEST_RUNS else "")
        )
    return best


def proxy_recipe(ground: Ground, proxy: Rung, names: list[str], point: Array) -> Recipe:
    """Return the recipe of a proxy with constant shares of the sources."""
    made = runs.recipe_of(ground.planned.recipe, proxy, ground.folder)
    weights = {source: round(float(share), 6) for source, share in zip(names, point, strict=True)}
    phase = MixturePhase.model_validate({"from": 0.0, "weights": weights})
    sources = tuple(source.changed(max_epochs=None) for source in made.corpus.sources)
    return made.changed(tokens={"schedule": (phase,), "max_epochs": None}, corpus={"sources": sources})


def result(
    ground: Ground, names: list[str], targets: list[str], proxy: Rung, points: Array, scores: list[runs.Score]
) -> dict[str, Any]:
    """Fit regressions to the proxies and return the content of mixture.json."""
    seed = ground.planned.recipe.run.seed
    losses = {name: np.array([score.by_source[name] for score in scores]) for name in scores[0].by_source}
    models = {name: shares.choose(points, losses[name]) for name in targets}
    chosen = list(models.values())
    measured = np.mean([losses[name] for name in targets], axis=0)
    unseen = np.mean([shares.left_out(models[name], points, losses[name]) for name in targets], axis=0)
    allowed = largest_shares(ground, names, ground.planned.tokens)
    least, most = points.min(axis=0), np.minimum(points.max(axis=0), allowed)
    most = allowed if most.sum() < 1.0 else most
    least = np.minimum(least, most)
    given = points[0]
    start = shares.within(given, least, most)
    rows = shares.candidates(least, most, start, seed)
    proposed = shares.lowest(chosen, rows, least, most)
    chance = np.random.default_rng([seed, 5])
    draws = [shares.drawn(one, points, DRAWS, chance) for one in chosen]
    both = np.array([given, proposed])
    said, said_draws = shares.mean_of(chosen, both), shares.mean_of(draws, both)
    won = shares.gain(chosen, draws, given, proposed, rows)
    gain = Interval.of(won.value, won.drawn)
    error = float(np.sqrt(np.mean((measured - unseen) ** 2)))
    noise = error * chance.standard_normal(DRAWS)

    def named(values: Array) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    proxies = [
        {"shares": named(point), "loss_by_source": score.by_source, "loss": score.loss, "target": target,
         "predicted_unseen": predicted, "seconds": score.seconds}
        for point, score, target, predicted in zip(points, scores, measured, unseen, strict=True)
    ]  # fmt: skip
    at_bound = np.minimum(proposed - least, most - proposed) < 1e-3
    found: dict[str, Any] = runs.plain({
        "kind": "mixture", "sources": names, "keys": {name: f"corpus.sources.{name}.weight" for name in names},
        "targets": targets, "given": named(given),
        "proxy": {key: value for key, value in proxy.to_dict().items() if key not in ("group", "name")},
        "proxies": proxies,
        "regressions": {
            name: {"form": one.form, "ridge": one.ridge, "floor": one.floor, "left_out_error": one.error}
            for name, one in models.items()
        },
        "left_out_error": error, "spread_of_targets": measured.std(),
        "proposed": {
            "shares": named(proposed), "target": asdict(Interval.of(said[1], said_draws[:, 1] + noise)),
            "given_target": asdict(Interval.of(said[0], said_draws[:, 0] + noise)),
            "at_bound": [name for name, is_at in zip(names, at_bound, strict=True) if is_at],
            "most": named(most), "least": named(least),
        },
        "gain": {**asdict(gain), "optimism": won.optimism, "inside_noise": gain.low <= 0.0}, "verify": None,
    })  # fmt: skip
    return found


def _verified(
    ground: Ground, names: list[str], targets: list[str], proxy: Rung, found: dict[str, Any], given: runs.Score
) -> dict[str, Any]:
    """Train one proxy on the proposed shares and compare its loss with the prediction."""
    point = np.array([found["proposed"]["shares"][name] for name in names])
    rung = replace(proxy, name=f"verify-{digest(point.round(6).tolist())[:8]}")
    recipe = proxy_recipe(ground, rung, names, point)
    score = runs.train_all([(rung, recipe)], ground)[rung.name]
    measured = float(np.mean([score.by_source[target] for target in targets]))
    base = float(np.mean([given.by_source[target] for target in targets]))
    said = Interval(**found["proposed"]["target"])
    return {"predicted": said.value, "measured": measured, "error": said.value / measured - 1,
            "covered": said.covers(measured), "measured_gain": base - measured,
            "loss_by_source": score.by_source}  # fmt: skip
