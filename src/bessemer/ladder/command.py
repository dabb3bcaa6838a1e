"""`bessemer ladder`: from a recipe to a fitted law and the planned run's loss."""

from __future__ import annotations

import difflib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.ladder import parabola, prepare, runs
from bessemer.ladder.design import DESIGNS, RUNGS, Budget, Design, Rung, refuse_few, rungs_within
from bessemer.ladder.fit import Fitted, Interval, Point, fitted, left_out, more_runs, optimum
from bessemer.ladder.prepare import Ground
from bessemer.ladder.sizes import RATE_RULES, rate_rule
from bessemer.recipe import digest
from bessemer.run import RunFolder, write_json
from bessemer.stages import Session
from bessemer.terminal import amount, duration, say, warn
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING

COUNTED = "those of the matrix products: blocks and output matrix, without the input embedding"


@dataclass(frozen=True)
class Asked:
    """The options of the command. folder: None for ladder/ in the run folder; rungs, ratio: None for the design's own."""

    design: str = "ratio"
    rungs: int | None = None
    budget: str | None = None
    ratio: float | None = None
    folder: Path | None = None
    restart: bool = False


def ladder(session: Session, asked: Asked) -> dict[str, Any]:
    """Train the ladder of a recipe, fit its law, predict the recipe's run. Writes ladder.json and ladder.html.

    Goes on where it was stopped: finished rungs are kept, the one in hand resumes. Raises InputError for options that make no
    ladder, Stopped on a signal.
    """
    design = design_of(asked.design)
    budget = prepare.budget_of(asked.budget)
    count = RUNGS[design] if asked.rungs is None else asked.rungs
    refuse_few(design, count)
    if asked.ratio is not None and (design != "ratio" or not asked.ratio > 0):
        raise InputError(f"--ratio {asked.ratio:g}: tokens a parameter, above 0, of a ladder of --design ratio")
    folder = asked.folder or session.run.path / "ladder"
    with ExitStack() as locks:
        locks.enter_context(session.run.writing())
        if asked.restart:
            prepare.set_aside(folder)
        locks.enter_context(RunFolder(folder).writing())
        ground = prepare.ground(session, folder)
        ratio = asked.ratio or ground.planned.ratio
        rungs, earlier, rates = _design(ground, design, count, budget, ratio)
        _say_what_comes(ground, design, rungs, rates)
        recipes = {rung.name: runs.recipe_of(ground.planned.recipe, rung, folder) for rung in [*rungs, *earlier]}
        scores = runs.train_all([(rung.name, recipes[rung.name]) for rung in rungs], ground.run.tokens)
        for rung in earlier:
            done = runs.score(RunFolder(recipes[rung.name].run.folder), rung.steps)
            if done is not None:
                scores[rung.name] = done
        found = result(ground, design, ratio, [rung for rung in [*rungs, *earlier] if rung.name in scores], scores)
        found["folder"] = str(folder)
        found["predicted_seconds"] = _predicted_seconds(ground, rungs, rates)
        write_json(folder / "ladder.json", found)
        from bessemer.ladder import page

        found["page"] = str(page.write(folder / "ladder.html", found))
    return found


def design_of(name: str) -> Design:
    """Raises InputError for a name that is none."""
    for known in DESIGNS:
        if name == known:
            return known  # type: ignore[return-value]
    near = difflib.get_close_matches(name, DESIGNS, 1)
    raise InputError(
        f"--design {name}: no such design; there are {' and '.join(DESIGNS)}"
        + (f"; did you mean {near[0]}?" if near else "")
    )


def _design(
    ground: Ground, design: Design, count: int, budget: Budget, ratio: float
) -> tuple[list[Rung], list[Rung], list[tuple[int, float]]]:
    """The rungs, finished ones of earlier designs of this folder, and the rates they were chosen by: as kept, or worked out."""
    protocol = prepare.protocol_of(ground, design, ratio if design == "ratio" else None)
    key = digest(protocol, count, str(budget))
    held = prepare.kept(ground.folder, key, protocol)
    if held is None:
        rates = prepare.timing(ground)
        made = rungs_within(
            design, ground.planned, ground.sizes, count, budget, ratio, prepare.seconds_by(ground, rates)
        )
        held = prepare.keep(ground.folder, key, protocol, [rung.to_dict() for rung in made], rates=rates)
    recipe = ground.planned.recipe
    rungs, earlier = ([Rung.of(row, recipe) for row in rows] for rows in (held.rungs, held.earlier))
    return rungs, earlier, [(int(size), float(rate)) for size, rate in held.more["rates"]]


def _predicted_seconds(ground: Ground, rungs: list[Rung], rates: list[tuple[int, float]]) -> float:
    return sum(map(prepare.seconds_by(ground, rates), rungs))


def _say_what_comes(ground: Ground, design: Design, rungs: list[Rung], rates: list[tuple[int, float]]) -> None:
    planned = ground.planned
    spent = sum(rung.flops for rung in rungs)
    say(
        f"{len(rungs)} rungs ({design}) of {amount(min(r.size.parameters for r in rungs))} to "
        f"{amount(max(r.size.parameters for r in rungs))} parameters for one of {amount(planned.size.parameters)} on "
        f"{amount(planned.tokens)} tokens: {spent / planned.flops:.0%} of its compute, about "
        f"{duration(_predicted_seconds(ground, rungs, rates))}"
    )
    held = sum(ground.store.split(name, "train").num_tokens for name in ground.store.sources)
    turns = max(max(rung.tokens for rung in rungs), planned.tokens) / max(held, 1)
    if turns > REPEATS_WORTH_A_WARNING:
        warn(
            f"the text is read up to {turns:.1f} times; the law is one of fresh tokens, and after {REPEATS_WORTH_A_WARNING} "
            "times repeated text helps less and less (Muennighoff et al. 2023): the prediction will be too low"
        )


def result(
    ground: Ground, design: Design, ratio: float, rungs: list[Rung], scores: dict[str, runs.Score]
) -> dict[str, Any]:
    """What ladder.json holds, of rungs that are done: plain values."""
    planned = ground.planned
    points = tuple(
        Point(r.name, r.group, r.size.parameters, r.tokens, r.flops, scores[r.name].loss) for r in rungs
    )  # fmt: skip
    seed = planned.recipe.run.seed
    found = fitted(design, points, seed)
    at = (planned.size.parameters, planned.tokens, planned.flops)
    on_the_line = design == "isoflop" or abs(ratio / planned.ratio - 1) < 0.05
    if not on_the_line:
        warn(
            f"the rungs have {ratio:.3g} tokens a parameter, the planned run {planned.ratio:.3g}: the law holds at the rungs' "
            "own ratio, so nothing is predicted of the planned run; leave out --ratio for that"
        )
    laid = found.law
    told: dict[str, Any] = {
        "design": design,
        "planned": {
            "parameters": planned.size.parameters,
            "tokens": planned.tokens,
            "flops": planned.flops,
            "tokens_per_parameter": planned.ratio,
            "measured": prepare.measured(ground),
        },
        "parameters_counted": COUNTED,
        "learning_rate_rule": rate_rule(planned.recipe),
        "learning_rate_rule_says": RATE_RULES[rate_rule(planned.recipe)],
        "rungs": [
            {
                **{key: value for key, value in rung.to_dict().items() if key not in ("model",)},
                "loss": scores[rung.name].loss,
                "loss_by_source": scores[rung.name].by_source,
                "seconds": scores[rung.name].seconds,
                "residual": float(_residual(found, point)),
            }
            for rung, point in zip(rungs, points, strict=True)
        ],
        "compute_share": sum(rung.flops for rung in rungs) / planned.flops,
        "fit": _law(found, design) | {"bootstrap": found.method, "draws": len(found.noise), "spread": found.spread,
                                      "freedom": found.freedom, "loss_at_infinity": laid.constant},
        "prediction": None,
        "left_out": left_out(design, points, seed),
        "more_runs": more_runs(found, *at) if on_the_line else None,
        "optimum": None,
        "isoflop": None,
    }  # fmt: skip
    if on_the_line:
        said = found.loss(*at)
        beyond = planned.flops / max(point.flops for point in points)
        told["prediction"] = {**said.to_dict(), "beyond": beyond}
    if design == "isoflop":
        told["optimum"] = optimum(found, planned.flops, planned.flops / planned.tokens / planned.size.parameters)
        told["isoflop"] = {"profiles": parabola.profiles(points), "best": parabola.best_size(found, planned.flops)}
    told["curves"] = curves(found, planned.flops)
    plain: dict[str, Any] = runs.plain(told)
    return plain


def _law(found: Fitted, design: Design) -> dict[str, Any]:
    """The law's numbers, each with its interval."""
    powers = 2 if design == "isoflop" else 1
    names = ("A", "alpha", "B", "beta") if design == "isoflop" else ("K", "gamma")
    value, rows = found.law, found.draws.parameters
    told: dict[str, Any] = {"E": Interval.of(value.constant, np.exp(rows[:, 0])).to_dict()}
    for number in range(powers):
        exponents = rows[:, 1 + powers + number]
        drawn = np.exp(rows[:, 1 + number] + exponents * found.draws.centre[number])
        told[names[2 * number]] = Interval.of(value.coefficients[number], drawn).to_dict()
        told[names[2 * number + 1]] = Interval.of(value.exponents[number], exponents).to_dict()
    return {
        "law": "E + A / N^alpha + B / D^beta" if design == "isoflop" else "E + K / C^gamma",
        "numbers": told,
    }


def _residual(found: Fitted, point: Point) -> float:
    said = found.loss(point.parameters, point.tokens, point.flops, of_a_run=False).value
    return point.loss / said - 1


def curves(found: Fitted, flops: float) -> list[dict[str, Any]]:
    """The fitted loss over compute, with its band, up to a little beyond the planned run: a ratio ladder's own line; of a
    surface its lowest loss at each amount of compute."""
    rows = []
    low = min(point.flops for point in found.points)
    each = float(np.median([point.flops / point.parameters / point.tokens for point in found.points]))
    for compute in np.geomspace(low / 1.3, flops * 1.5, 41):
        if found.design == "ratio":
            rows.append({"flops": compute, **found.loss(0, 0, compute, of_a_run=False).to_dict()})
        else:
            best = optimum(found, compute, each)
            rows.append({"flops": compute, **best["loss"]})
    return rows
