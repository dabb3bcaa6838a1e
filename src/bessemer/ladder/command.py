"""Implementation of `bessemer ladder`: train the rungs of a recipe, fit a scaling law and predict the planned run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.common.console import amount, duration, say, warn
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.ladder import law, runs, summary
from bessemer.ladder.design import (
    RUNGS,
    SEEDS,
    Budget,
    Design,
    Planned,
    Rung,
    batch_excess,
    design_rungs,
    parse_budget,
    require_enough,
)
from bessemer.ladder.law import FittedLaw, Interval, Point
from bessemer.ladder.runs import LadderInputs, Resolve, Train
from bessemer.recipe import Recipe
from bessemer.report import page
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING

DEFAULT_BUDGET = "5min"


def ladder(
    recipe: Recipe, run: RunDirectory, resolve: Resolve, train: Train, *, design: Design = "ratio", rungs: int | None = None,
    budget: str = DEFAULT_BUDGET, ratio: float | None = None, seeds: int = SEEDS, folder: Path | None = None,
    restart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train the ladder of a recipe, fit its law and predict the loss of the recipe's run.

    A ladder is a series of smaller runs (rungs) of increasing compute, to which a scaling law is fitted. The function writes
    ladder.json and, if the ladder's folder is in the run directory, the report of the run. A stopped ladder continues:
    finished rungs are kept and the unfinished one resumes.

    Args:
        recipe: The recipe of the planned run.
        run: Its run directory.
        resolve: Builds the tokens of the run and returns its resolved recipe.
        train: Trains the recipe of a rung in its run directory.
        design: Design of the ladder.
        rungs: Number of sizes of rungs; None: the default of the design.
        budget: Time or FLOPs of all rungs, as in `parse_budget`.
        ratio: Tokens per parameter of the rungs; None: that of the planned run.
        seeds: Runs of each of the smallest rungs.
        folder: Folder of the rungs; None: ladder/ in the run directory.
        restart: True to move an earlier ladder aside and start again.

    Raises:
        InputError: The options make no valid ladder.
        Stopped: A signal stopped the ladder.
    """
    limit, count = parse_budget(budget), RUNGS[design] if rungs is None else rungs
    require_enough(design, count)
    if ratio is not None and (design != "ratio" or not ratio > 0):
        raise InputError(f"--ratio {ratio:g}: it needs --design ratio and a number of tokens per parameter above 0")
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: not a number of runs; give 1, or more to measure the effect of chance")
    folder = folder or run.path / "ladder"
    with run.lock():
        if restart:
            runs.set_aside(folder)
        with RunDirectory(folder).lock():
            inputs = runs.resolve_inputs(recipe, run, resolve, train, folder)
            values = _train_and_fit(inputs, design, count, limit, ratio or inputs.planned.ratio, seeds)
            values |= {"folder": str(folder), "answers": summary.sentences(values)}
            values |= {"columns": list(summary.COLUMNS), "rows": summary.rung_rows(values)}
            write_json(folder / "ladder.json", values)
            is_shown = folder.parent.resolve() == run.path.resolve()  # else --folder names another folder
            return {**values, "page": str(page.write(run)) if is_shown else None}


def _train_and_fit(
    inputs: LadderInputs, design: Design, count: int, budget: Budget, ratio: float, seeds: int
) -> dict[str, Any]:
    """Train the rungs, fit the law and return the content of ladder.json. The arguments are as for `ladder`.

    Finished rungs that an earlier call with other options left in the folder are fitted too.
    """
    rungs, earlier, rates = _design(inputs, design, count, budget, ratio, seeds)
    seconds = sum(map(runs.predict_seconds(inputs.planned, rates), rungs))
    _announce(inputs, design, rungs, seconds)
    recipes = {rung.name: runs.recipe_of(inputs.planned.recipe, rung, inputs.folder) for rung in [*rungs, *earlier]}
    scores = runs.train_all([(rung, recipes[rung.name]) for rung in rungs], inputs)
    for rung in earlier:
        if (score := runs.score(RunDirectory(recipes[rung.name].run.folder), rung.steps)) is not None:
            scores[rung.name] = score
    scored = [rung for rung in [*rungs, *earlier] if rung.name in scores]
    return {**result(inputs.planned, design, ratio, scored, scores), "predicted_seconds": seconds}


def _design(
    inputs: LadderInputs, design: Design, count: int, budget: Budget, ratio: float, seeds: int
) -> tuple[list[Rung], list[Rung], list[tuple[int, float]]]:
    """Return the rungs, the rungs of earlier options, and the measured training rates as (N parameters, FLOP/s).

    All three are read from design.json if it was written for the same options, else computed and saved there.
    """
    planned, recipe = inputs.planned, inputs.planned.recipe

    def new() -> dict[str, Any]:
        rates = runs.measure_rates(planned, inputs.sizes, inputs.store.vocabulary)
        seconds = runs.predict_seconds(planned, rates)
        rungs = design_rungs(design, planned, inputs.sizes, count, budget, ratio, seconds, seeds)
        return {"rungs": [rung.to_dict() for rung in rungs], "more": {"rates": rates}}

    protocol = inputs.protocol(design, ratio if design == "ratio" else None)
    saved = runs.saved_design(inputs.folder, digest(protocol, count, str(budget), seeds), protocol, new)
    rungs, earlier = ([Rung.from_dict(row, recipe) for row in saved[key]] for key in ("rungs", "earlier"))
    return rungs, earlier, [(int(size), float(rate)) for size, rate in saved["more"]["rates"]]


def _announce(inputs: LadderInputs, design: Design, rungs: list[Rung], seconds: float) -> None:
    planned, sizes = inputs.planned, [rung.size.parameters for rung in rungs]
    share = sum(rung.flops for rung in rungs) / planned.flops
    repeats = sum(rung.seed > 0 for rung in rungs)
    seeds = f", {repeats} runs with other seeds" if repeats else ""
    say(
        f"{len(rungs) - repeats} rungs ({design}{seeds}) of {amount(min(sizes))} to {amount(max(sizes))} parameters, to predict "
        f"{amount(planned.size.parameters)} parameters on {amount(planned.tokens)} tokens: {share:.0%} of that compute, about "
        f"{duration(seconds)}"
    )
    available = sum(inputs.store.split(name, "train").num_tokens for name in inputs.store.sources)
    epochs = max(max(rung.tokens for rung in rungs), planned.tokens) / max(available, 1)
    if epochs > REPEATS_WORTH_A_WARNING:
        warn(
            f"the text is read up to {epochs:.1f} times, and the law assumes new text: after {REPEATS_WORTH_A_WARNING} times "
            "repeated text helps less and less (Muennighoff et al. 2023), so the predicted loss will be too low"
        )


def result(
    planned: Planned, design: Design, ratio: float, rungs: list[Rung], scores: dict[str, runs.Score]
) -> dict[str, Any]:
    """Fit the law to finished rungs, and return the content of ladder.json: rungs, law, predictions and curves.

    `scores` has the score of each rung by its name.
    """
    points = tuple(_point(planned, rung, scores[rung.name].loss) for rung in rungs)
    fitted = law.fit_law(design, points, planned.recipe.run.seed)
    at = (planned.size.parameters, planned.tokens, planned.flops)
    on_the_line = design == "isoflop" or abs(ratio / planned.ratio - 1) < 0.05
    if not on_the_line:
        warn(
            f"--ratio {ratio:.3g}: the planned run has {planned.ratio:.3g} tokens per parameter, and the law holds only for the "
            "ratio of the rungs, so its loss is not predicted; leave out --ratio to predict it"
        )
    values: dict[str, Any] = {
        "design": design,
        "planned": {
            **dict(zip(("parameters", "tokens", "flops"), at, strict=True)),
            "tokens_per_parameter": planned.ratio,
        },
        "rungs": [_rung(fitted, rung, point, scores[rung.name]) for rung, point in zip(rungs, points, strict=True)],
        "compute_share": sum(rung.flops for rung in rungs) / planned.flops,
        "fit": _law(fitted) | {"draws": len(fitted.bootstrap), "spread": fitted.spread, "freedom": fitted.freedom},
        "prediction": None,
        "left_out": law.left_out(design, points, planned.recipe.run.seed),
        "optimum": None,
        "curves": _curves(fitted, planned.flops),
    }  # fmt: skip
    if on_the_line:
        beyond = planned.flops / max(point.flops for point in points)
        values["prediction"] = {**asdict(fitted.loss(*at)), "beyond": beyond}
    if design == "isoflop":
        values["optimum"] = law.optimum(fitted, planned.flops, planned.flops / planned.tokens / planned.size.parameters)
    return values


def _point(planned: Planned, rung: Rung, loss: float) -> Point:
    excess = batch_excess(planned.recipe, rung.batch, rung.flops, planned.flops)
    return Point(rung.name, rung.group, rung.size.parameters, rung.tokens, rung.flops, loss, excess)


def _rung(fitted: FittedLaw, rung: Rung, point: Point, score: runs.Score) -> dict[str, Any]:
    size = (point.parameters, point.tokens, point.flops)
    by_law = fitted.loss(*size, of_a_run=False, batch_excess=point.batch_excess).value
    shape = {key: value for key, value in rung.to_dict().items() if key != "model"}
    return {**shape, "batch_excess": point.batch_excess, "loss": score.loss, "loss_by_source": score.by_source,
            "seconds": score.seconds,
            "residual": point.loss / by_law - 1}  # fmt: skip


def _law(fitted: FittedLaw) -> dict[str, Any]:
    """Return the law as text, and each of its parameters by name as a median with its interval."""
    is_surface, rows = fitted.design == "isoflop", fitted.bootstrap
    names = ("A", "alpha", "B", "beta") if is_surface else ("K", "gamma")
    powers = len(names) // 2
    samples = {"E": np.exp(rows[:, 0])}
    for power in range(powers):
        exponents = rows[:, 1 + powers + power]
        samples[names[2 * power]] = np.exp(rows[:, 1 + power] + exponents * fitted.best.centre[power])
        samples[names[2 * power + 1]] = exponents
    numbers = {name: Interval.of(float(np.median(values)), values) for name, values in samples.items()}
    law_text = "E + A / N^alpha + B / D^beta" if is_surface else "E + K / C^gamma"
    return {"law": law_text, "numbers": {name: asdict(interval) for name, interval in numbers.items()}}


def _curves(fitted: FittedLaw, flops: float) -> list[dict[str, Any]]:
    """Return the points of the fitted loss curve, up to slightly beyond the planned run: FLOPs, loss and its interval.

    A ratio ladder has one line. A surface gives its lowest loss for each amount of compute.
    """
    rows, low = [], min(point.flops for point in fitted.points)
    each = float(np.median([point.flops / point.parameters / point.tokens for point in fitted.points]))
    for compute in np.geomspace(low / 1.3, flops * 1.5, 41).tolist():
        on_line = asdict(fitted.loss(0, 0, compute, of_a_run=False)) if fitted.design == "ratio" else None
        rows.append({"flops": compute, **(on_line or law.optimum(fitted, compute, each)["loss"])})
    return rows
