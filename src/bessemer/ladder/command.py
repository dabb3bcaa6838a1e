"""Implementation of `bessemer ladder`: train the rungs of a recipe, fit a scaling law and predict the planned run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common.console import amount, duration, say, warn
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.ladder import law, runs
from bessemer.ladder.design import (
    RUNGS,
    SEEDS,
    Budget,
    Design,
    Planned,
    Rung,
    batch_excess,
    parse_budget,
    refuse_few,
    rungs_within,
)
from bessemer.ladder.law import FittedLaw, Interval, Point
from bessemer.ladder.runs import Ground, Resolve, Train
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING


def ladder(
    recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, *, design: Design | None = None,
    rungs: int | None = None, budget: str | None = None, ratio: float | None = None, seeds: int | None = None,
    folder: Path | None = None, restart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train the ladder of a recipe, fit its law and predict the loss of the recipe's run.

    Writes ladder.json and the report of the run. A stopped ladder continues: finished rungs are kept and the unfinished
    one resumes.

    Args:
        recipe: The recipe of the planned run.
        run: Its run directory.
        resolve: Builds the tokens of the run and returns its resolved recipe.
        train: Trains the recipe of a rung in its run directory.
        design: Design of the ladder; None: "ratio".
        rungs: Number of sizes; None: the default of the design.
        budget: Time or FLOPs of all rungs, as in `parse_budget`.
        ratio: Tokens per parameter of the rungs; None: that of the planned run.
        seeds: Runs of each of the smallest rungs; None: the default of the design.
        folder: Folder of the rungs; None: ladder/ in the run directory.
        restart: True to move an earlier ladder aside and start again.

    Raises:
        InputError: The options make no valid ladder.
        Stopped: A signal stopped the ladder.
    """
    design, allowed = design or "ratio", parse_budget(budget)
    count, seeds = RUNGS[design] if rungs is None else rungs, SEEDS if seeds is None else seeds
    refuse_few(design, count)
    if ratio is not None and (design != "ratio" or not ratio > 0):
        raise InputError(f"--ratio {ratio:g}: tokens a parameter, above 0, of a ladder of --design ratio")
    if seeds < 1:
        raise InputError(
            f"--seeds {seeds}: of each of the smallest rungs, 1 at least; 2 or more measure the noise of a run"
        )
    folder = folder or run.path / "ladder"
    with runs.open_ladder(recipe, run, resolve, train, folder, restart) as ground:
        ratio = ratio or ground.planned.ratio
        made, earlier, rates = _design(ground, design, count, allowed, ratio, seeds)
        seconds = sum(map(runs.seconds_by(ground.planned, rates), made))
        _announce(ground, design, made, seconds)
        recipes = {rung.name: runs.recipe_of(ground.planned.recipe, rung, folder) for rung in [*made, *earlier]}
        scores = runs.train_all([(rung, recipes[rung.name]) for rung in made], ground)
        before = {rung.name: runs.score(RunDirectory(recipes[rung.name].run.folder), rung.steps) for rung in earlier}
        scores |= {name: done for name, done in before.items() if done is not None}
        found = result(ground, design, ratio, [rung for rung in [*made, *earlier] if rung.name in scores], scores)
        return runs.publish({**found, "predicted_seconds": seconds}, folder / "ladder.json", run)


def _design(
    ground: Ground, design: Design, count: int, budget: Budget, ratio: float, seeds: int
) -> tuple[list[Rung], list[Rung], list[tuple[int, float]]]:
    """Return the rungs, finished rungs of earlier designs of the folder, and the measured training rates.

    They come from design.json if it has these options. Otherwise they are computed and saved there.
    """
    protocol = ground.protocol(design, ratio if design == "ratio" else None)
    key = digest(protocol, count, str(budget), seeds)
    kept = runs.kept_design(ground.folder, key, protocol)
    if kept is None:
        rates = runs.timing(ground.planned, ground.sizes, ground.store.vocabulary)
        seconds = runs.seconds_by(ground.planned, rates)
        made = rungs_within(design, ground.planned, ground.sizes, count, budget, ratio, seconds, seeds)
        kept = runs.keep_design(ground.folder, key, protocol, [rung.to_dict() for rung in made], rates=rates)
    recipe = ground.planned.recipe
    rungs, earlier = ([Rung.of(row, recipe) for row in kept[key]] for key in ("rungs", "earlier"))
    return rungs, earlier, [(int(size), float(rate)) for size, rate in kept["more"]["rates"]]


def _announce(ground: Ground, design: Design, rungs: list[Rung], seconds: float) -> None:
    planned, sizes = ground.planned, [rung.size.parameters for rung in rungs]
    share = sum(rung.flops for rung in rungs) / planned.flops
    repeats = sum(rung.seed > 0 for rung in rungs)
    seeds = f", {repeats} runs with other seeds" if repeats else ""
    say(
        f"{len(rungs) - repeats} rungs ({design}{seeds}) of {amount(min(sizes))} to {amount(max(sizes))} parameters for one of "
        f"{amount(planned.size.parameters)} on {amount(planned.tokens)} tokens: {share:.0%} of its compute, about "
        f"{duration(seconds)}"
    )
    available = sum(ground.store.split(name, "train").num_tokens for name in ground.store.sources)
    epochs = max(max(rung.tokens for rung in rungs), planned.tokens) / max(available, 1)
    if epochs > REPEATS_WORTH_A_WARNING:
        warn(
            f"the text is read up to {epochs:.1f} times; the law is one of fresh tokens, and after {REPEATS_WORTH_A_WARNING} "
            "times repeated text helps less and less (Muennighoff et al. 2023): the prediction will be too low"
        )


def result(
    ground: Ground, design: Design, ratio: float, rungs: list[Rung], scores: dict[str, runs.Score]
) -> dict[str, Any]:
    """Fit the law to finished rungs and return the content of ladder.json."""
    planned, recipe = ground.planned, ground.planned.recipe
    points = tuple(_point(planned, rung, scores[rung.name].loss) for rung in rungs)
    found = law.fitted(design, points, recipe.run.seed)
    at = (planned.size.parameters, planned.tokens, planned.flops)
    on_the_line = design == "isoflop" or abs(ratio / planned.ratio - 1) < 0.05
    if not on_the_line:
        warn(
            f"the rungs have {ratio:.3g} tokens a parameter, the planned run {planned.ratio:.3g}: the law holds at the rungs' "
            "own ratio, so nothing is predicted of the planned run; leave out --ratio for that"
        )
    values: dict[str, Any] = {
        "design": design,
        "planned": {
            **dict(zip(("parameters", "tokens", "flops"), at, strict=True)),
            "tokens_per_parameter": planned.ratio,
        },
        "rungs": [_rung(found, rung, point, scores[rung.name]) for rung, point in zip(rungs, points, strict=True)],
        "compute_share": sum(rung.flops for rung in rungs) / planned.flops,
        "fit": _law(found) | {"draws": len(found.drawn), "spread": found.spread, "freedom": found.freedom},
        "prediction": None,
        "left_out": law.left_out(design, points, recipe.run.seed),
        "optimum": None,
        "curves": _curves(found, planned.flops),
    }  # fmt: skip
    if on_the_line:
        beyond = planned.flops / max(point.flops for point in points)
        values["prediction"] = {**asdict(found.loss(*at)), "beyond": beyond}
    if design == "isoflop":
        values["optimum"] = law.optimum(found, planned.flops, planned.flops / planned.tokens / planned.size.parameters)
    return dict(runs.plain(values))


def _point(planned: Planned, rung: Rung, loss: float) -> Point:
    excess = batch_excess(planned.recipe, rung.batch, rung.flops, planned.flops)
    return Point(rung.name, rung.group, rung.size.parameters, rung.tokens, rung.flops, loss, excess)


def _rung(found: FittedLaw, rung: Rung, point: Point, score: runs.Score) -> dict[str, Any]:
    size = (point.parameters, point.tokens, point.flops)
    said = found.loss(*size, of_a_run=False, batch_excess=point.batch_excess).value
    shape = {key: value for key, value in rung.to_dict().items() if key != "model"}
    return {**shape, "batch_excess": point.batch_excess, "loss": score.loss, "loss_by_source": score.by_source,
            "seconds": score.seconds,
            "residual": point.loss / said - 1}  # fmt: skip


def _law(found: FittedLaw) -> dict[str, Any]:
    """Return the law's parameters as medians with their intervals."""
    is_surface, rows = found.design == "isoflop", found.drawn
    names = ("A", "alpha", "B", "beta") if is_surface else ("K", "gamma")
    powers = len(names) // 2
    drawn = {"E": np.exp(rows[:, 0])}
    for power in range(powers):
        exponents = rows[:, 1 + powers + power]
        drawn[names[2 * power]] = np.exp(rows[:, 1 + power] + exponents * found.best.centre[power])
        drawn[names[2 * power + 1]] = exponents
    numbers = {name: Interval.of(float(np.median(values)), values) for name, values in drawn.items()}
    law_text = "E + A / N^alpha + B / D^beta" if is_surface else "E + K / C^gamma"
    return {"law": law_text, "numbers": {name: asdict(interval) for name, interval in numbers.items()}}


def _curves(found: FittedLaw, flops: float) -> list[dict[str, Any]]:
    """Return the fitted loss as a function of compute, with its band, up to slightly beyond the planned run.

    A ratio ladder has one line. A surface gives its lowest loss for each amount of compute.
    """
    rows, low = [], min(point.flops for point in found.points)
    each = float(np.median([point.flops / point.parameters / point.tokens for point in found.points]))
    for compute in np.geomspace(low / 1.3, flops * 1.5, 41):
        on_line = asdict(found.loss(0, 0, compute, of_a_run=False)) if found.design == "ratio" else None
        rows.append({"flops": compute, **(on_line or law.optimum(found, compute, each)["loss"])})
    return rows
