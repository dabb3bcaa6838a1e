"""What a ladder or a mixture search found: tables and sentences for a terminal, and the same on a page with figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.report import parts
from bessemer.report.parts import Block, Figure, tile
from bessemer.report.template import render_page, write_page
from bessemer.terminal import amount, duration, text_table

Json = dict[str, Any]
# Of a page: id, title, sentences, figures, columns and rows of a table.
Section = tuple[str, str, list[str], list[Figure], Sequence[str], Sequence[Sequence[str]]]
LADDER_COLUMNS: tuple[str, ...] = ("rung", "N", "D", "D/N", "C, FLOPs", "rate", "batch", "loss", "law")


def table(found: Json) -> str:
    """For a terminal: the runs, the law or the regressions, and what follows."""
    if _is_mixture(found):
        titles, rows = ("proxy", *found["sources"], "target", "unseen"), _mixture_rows(found)
    else:
        titles, rows = LADDER_COLUMNS, _rungs(found)
    answers = (f"{name:<12} {sentence}" for name, sentence in sentences(found).items())
    return "\n".join([*text_table(titles, rows, "r"), "", *answers])


def ending(found: Json) -> str:
    """How long it took, and where it all is."""
    seconds = sum(row["seconds"] for row in found["proxies" if _is_mixture(found) else "rungs"])
    return f"\n  training {duration(seconds)} in all\n  page     {found['page']}\n  folder   {found['folder']}"


def sentences(found: Json) -> dict[str, str]:
    """What was found, a sentence for each question."""
    return _mixture_sentences(found) if _is_mixture(found) else _ladder_sentences(found)


def write(path: Path, found: Json) -> Path:
    """Write the page of what ladder.json or mixture.json holds, and return where it lies."""
    said = sentences(found)
    if _is_mixture(found):
        kind, headline = "mixture search", f"Proposed: {said['proposed']}."
        sections, tiles = _mixture_sections(found, said), _mixture_tiles(found)
    else:
        kind, headline = "ladder", _headline(found)
        sections, tiles = _ladder_sections(found, said), _ladder_tiles(found)
    values, name = {"sections": sections, "answers": said}, Path(found["folder"]).parent.name
    return write_page(path, render_page("ladder.html", name, kind, headline, values, tiles=tiles))


def _is_mixture(found: Json) -> bool:
    return found.get("kind") == "mixture"


# --- A ladder ---------------------------------------------------------------------------------------------------------


def _rungs(found: Json) -> list[list[str]]:
    return [
        [
            rung["name"], amount(rung["parameters"]), amount(rung["tokens"]), f"{rung['tokens'] / rung['parameters']:.1f}",
            f"{rung['flops']:.2e}", f"{rung['learning_rate']:.4g}", amount(rung["batch_tokens"]), f"{rung['loss']:.4f}",
            f"{rung['residual']:+.2%}",
        ]
        for rung in found["rungs"]
    ]  # fmt: skip


def _ladder_sentences(found: Json) -> dict[str, str]:
    said = {"law": _law(found), "left out": _left_out(found)}
    prediction, measured, planned = found["prediction"], found["planned"]["measured"], found["planned"]
    if prediction is not None:
        said["prediction"] = (
            f"{_between(prediction, '.4f')} nats a token for the planned {amount(planned['parameters'])} parameters on "
            f"{amount(planned['tokens'])} tokens, {prediction['beyond']:.1f} times beyond the largest rung"
        )
    if measured is not None and prediction is not None:
        inside = _inside(prediction["low"] <= measured["loss"] <= prediction["high"], "outside")
        error = prediction["value"] / measured["loss"] - 1
        said["the run"] = (
            f"trained already: {measured['loss']:.4f}, the prediction is off by {error:+.2%}, it lies {inside} its interval"
        )
    if found["more_runs"] is not None:
        said["more runs"] = _more_runs(found["more_runs"])
    said |= _best_size(found)
    said["N counts"] = f"{found['parameters_counted']}; C is exact, with attention"
    said["rate"] = found["learning_rate_rule_says"]
    return said


def _headline(found: Json) -> str:
    planned, said = found["planned"], found["prediction"]
    if said is None:
        return _law(found)
    return (
        f"{amount(planned['parameters'])} parameters on {amount(planned['tokens'])} tokens will reach {said['value']:.3f} nats a "
        f"token, between {said['low']:.3f} and {said['high']:.3f} with 80% certainty, by {len(found['rungs'])} small runs that "
        f"took {found['compute_share']:.0%} of its compute."
    )


def _law(found: Json) -> str:
    """The law with the intervals of its parameters."""
    fit = found["fit"]
    numbers = ", ".join(f"{name} {value['value']:.4g} [{value['low']:.3g}, {value['high']:.3g}]"
                        for name, value in fit["numbers"].items())  # fmt: skip
    is_low = fit["numbers"]["E"]["value"] < 0.1 * min(rung["loss"] for rung in found["rungs"])
    none = "; E is near 0: rungs as small as these do not show where the loss ends" if is_low else ""
    return (
        f"L = {fit['law']}: {numbers} (80% of {fit['draws']} draws); the runs lie {fit['spread']:.2%} about it "
        f"({fit['freedom']} degrees of freedom){none}"
    )


def _left_out(found: Json) -> str:
    left = found["left_out"]
    if left is None:
        return "too few rungs to leave one out and fit the others: the law is untested; add rungs with --rungs"
    return (
        f"{left['name']}, {left['beyond']:.1f} times beyond the {left['from_rungs']} it is predicted from: predicted "
        f"{_between(left['predicted'], '.4f')}, measured {left['measured']:.4f}, error {left['error']:+.2%}, "
        f"{_inside(left['covered'])} the interval"
    )


def _more_runs(more: Json) -> str:
    same = f"{more['of_the_same_kind']} more like these ({more['same_kind_flops']:.1e} FLOPs)"
    if more["going_upwards"] is not None:
        runs = f"{more['going_upwards']} more run{'s' if more['going_upwards'] > 1 else ''}"
        same = f"{runs} going on upwards ({more['upwards_flops']:.1e} FLOPs), or {same},"
    return f"{same} would halve the law's error of {more['error_now']:.2%} ({more['method']})"


def _best_size(found: Json) -> dict[str, str]:
    best, planned = found["optimum"], found["planned"]
    if best is None:
        return {"best size": "a ladder of one ratio cannot tell; --design isoflop does"}
    said = (
        f"for {planned['flops']:.2e} FLOPs {_amounts(best['parameters'])} parameters on {_amounts(best['tokens'])} tokens "
        f"({best['tokens_per_parameter']['value']:.1f} a parameter; planned {planned['tokens_per_parameter']:.1f}), loss "
        f"{best['loss']['value']:.4f}; N_opt ~ C^{_between(best['exponent'], '.2f')}"
    )
    profile = (found["isoflop"] or {}).get("best")
    second = "no second opinion: of fewer than two amounts of compute the best size lies between the smallest and the largest"
    if profile is not None and profile["parameters"] is not None:
        exponent = profile["exponent"]["value"]
        second = f"by parabolas {_amounts(profile['parameters'])} parameters, N_opt ~ C^{exponent:.2f}"
    return {"best size": said, "isoFLOP": second}


def _between(of: dict[str, float], form: str) -> str:
    return f"{of['value']:{form}} [{of['low']:{form}}, {of['high']:{form}}]"


def _amounts(of: dict[str, float]) -> str:
    return f"{amount(of['value'])} [{amount(of['low'])}, {amount(of['high'])}]"


def _inside(is_inside: bool, otherwise: str = "OUTSIDE") -> str:
    return "inside" if is_inside else otherwise


def _ladder_tiles(found: Json) -> list[Block]:
    said, left, e = found["prediction"], found["left_out"], found["fit"]["numbers"]["E"]
    shown = [
        said and tile("Predicted loss", f"{said['value']:.3f}", f"{said['low']:.3f} to {said['high']:.3f}, nats a token"),
        left and tile("Largest rung, left out", f"{left['error']:+.2%}",
                      f"{_inside(left['covered'], 'outside')} its interval"),
        tile("E", f"{e['value']:.3f}", f"{e['low']:.2f} to {e['high']:.2f}"),
        tile("Rungs", str(len(found["rungs"])), f"{found['compute_share']:.0%} of the run's compute"),
    ]  # fmt: skip
    return [one for one in shown if one]


def _ladder_sections(found: Json, said: dict[str, str]) -> list[Section]:
    rungs = found["rungs"]
    off = [100 * rung["residual"] for rung in rungs]
    y = parts.axis("difference", ticksuffix="%", zeroline=True)
    points = _points("rungs", _column(rungs, "flops"), off, "train", _column(rungs, "name"))
    residuals = parts.point_figure("residuals", "Measured and fitted", [points], _log("compute, FLOPs"), y)
    columns = _columns(LADDER_COLUMNS)
    sections: list[Section] = [
        ("loss", "Loss over compute", [f"{said['law']}."], [_loss(found)], (), ()),
        ("rungs", "Rungs", [f"{said['left out']}."], [residuals], columns, _rungs(found)),
    ]
    if found["isoflop"] is not None and found["isoflop"]["profiles"]:
        words = [f"{said['best size']}.", f"{said['isoFLOP']}."]
        sections.insert(1, ("isoflop", "IsoFLOP profiles", words, [_profiles(found)], (), ()))
    return sections


def _loss(found: Json) -> Figure:
    """Loss over compute: the rungs, the law with its band, the rung that was left out, the planned run."""
    curve, planned, rungs = found["curves"], found["planned"], found["rungs"]
    is_ratio = found["design"] == "ratio"
    x, low, high, middle = (_column(curve, key) for key in ("flops", "low", "high", "value"))
    traces = [
        parts.trace("", x, low, "raw", width=0, hoverinfo="skip", showlegend=False),
        parts.trace("80% of the draws", x, high, "raw", width=0, fill="tonexty", hoverinfo="skip"),
        parts.trace("fit" if is_ratio else "fit, at the best size", x, middle, "train", width=2),
    ]
    for number, group in enumerate([None] if is_ratio else sorted({rung["group"] for rung in rungs})):
        mine = [rung for rung in rungs if group is None or rung["group"] == group]
        flops = _column(mine, "flops")
        name = "rungs" if group is None else f"{np.mean(flops):.1e} FLOPs"
        traces.append(_points(name, flops, _column(mine, "loss"), parts.series_ink(number), _column(mine, "name")))
    if (left := found["left_out"]) is not None:
        at = next(rung["flops"] for rung in rungs if rung["name"] == left["name"])
        traces.append(_interval("largest, from the others", at, left["predicted"], "reference", "x"))
    if found["prediction"] is not None:
        traces.append(_interval("planned run", planned["flops"], found["prediction"], "accent", "diamond"))
    if planned["measured"] is not None:
        at, loss = [planned["flops"]], [planned["measured"]["loss"]]
        traces.append(_points("planned run, measured", at, loss, "good", ["measured"], "star"))
    return parts.point_figure("loss", "Held-out loss", traces, _log("compute, FLOPs"), "nats a token")


def _profiles(found: Json) -> Figure:
    """Loss over size at each amount of compute, with the parabolas."""
    traces = []
    for number, profile in enumerate(found["isoflop"]["profiles"]):
        mine = [rung for rung in found["rungs"] if rung["group"] == profile["group"]]
        ink, sizes = parts.series_ink(number), _column(mine, "parameters")
        traces.append(
            _points(f"{profile['flops']:.1e} FLOPs", sizes, _column(mine, "loss"), ink, _column(mine, "name"))
        )
        x = np.geomspace(min(sizes) / 1.15, max(sizes) * 1.15, 31)
        y = np.polyval(profile["curve"], np.log(x))
        traces.append(parts.trace("parabola", x, y, ink, width=1.25, showlegend=False, hoverinfo="skip"))
    return parts.point_figure("profiles", "IsoFLOP profiles", traces, _log("parameters in matmuls"), "nats a token")


# --- A mixture search -------------------------------------------------------------------------------------------------


def _mixture_rows(found: Json) -> list[list[str]]:
    """The proxies: shares, the target's loss, and what the others predict of it."""
    return [
        ["given" if not number else str(number), *(f"{row['shares'][name]:.1%}" for name in found["sources"]),
         f"{row['target']:.4f}", f"{row['predicted_unseen']:.4f}"]
        for number, row in enumerate(found["proxies"])
    ]  # fmt: skip


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _mixture_sentences(found: Json) -> dict[str, str]:
    proxy, gain, proposed, at = found["proxy"], found["gain"], found["proposed"], found["proposed"]["at_bound"]
    off = gain["optimism"]
    less = f", after taking off the {off:.4f} by which the best of many looks better than it is" if off >= 5e-5 else ""
    edge = f" (at the edge of what was tried, or of four readings of the text: {', '.join(at)})" if at else ""
    verdict = "the proposed mixture is better, as far as models of this size can tell"
    if gain["inside_noise"]:
        verdict = "inside the noise, so nothing says that the proposed mixture is better than the given one"
    said = {
        "target": f"mean of the held-out losses of {', '.join(found['targets'])}, nats a token, of {len(found['proxies'])} "
        f"models of {amount(proxy['parameters'])} parameters on {amount(proxy['tokens'])} tokens",
        "regression": "; ".join(
            f"{name}: {one['form']}, misses a left-out run by {one['left_out_error']:.4f}"
            for name, one in found["regressions"].items()
        ),
        "left out": f"each proxy predicted from the others: off by {found['left_out_error']:.4f} (root mean square), where the "
        f"targets differ by {found['spread_of_targets']:.4f}",
        "given": _shares(found["given"]),
        "proposed": _shares(proposed["shares"]) + edge,
        "gain": f"{gain['value']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}] nats a token{less}: {verdict}",
    }
    if (checked := found["verify"]) is not None:
        said["verified"] = (
            f"predicted {checked['predicted']:.4f}, measured {checked['measured']:.4f} ({checked['error']:+.2%}, "
            f"{_inside(checked['covered'])} its interval); the gain over the given mixture, measured: "
            f"{checked['measured_gain']:+.4f}"
        )
    said["to use it"] = " ".join(
        f"--set {found['keys'][name]}={share:.4f}" for name, share in proposed["shares"].items()
    )
    return said


def _mixture_tiles(found: Json) -> list[Block]:
    gain = found["gain"]
    noise = ", inside the noise" if gain["inside_noise"] else ""
    return [
        tile("Predicted gain", f"{gain['value']:+.4f}", f"{gain['low']:+.4f} to {gain['high']:+.4f}{noise}"),
        tile("Left-out error", f"{found['left_out_error']:.4f}", "nats a token"),
        tile("Proxies", str(len(found["proxies"])), f"{amount(found['proxy']['parameters'])} parameters"),
    ]


def _mixture_sections(found: Json, said: dict[str, str]) -> list[Section]:
    columns = _columns(["Proxy", *found["sources"], "Target, nats a token", "Predicted from the others"])
    figures, words = [_unseen(found), *_by_share(found)], [f"{parts.capitalised(said['left out'])}."]
    pairs = (("given", found["given"], "raw"), ("proposed", found["proposed"]["shares"], "accent"))
    bars = [parts.bars(name, list(by), [round(100 * share, 3) for share in by.values()], ink, "%{y:.1f}%")
            for name, by, ink in pairs]  # fmt: skip
    shares = parts.point_figure("mixture", "Shares of the tokens", bars, parts.axis("source", type="category"),
                     parts.axis("share", ticksuffix="%", rangemode="tozero"), barmode="group", bargap=0.3)  # fmt: skip
    return [
        ("shares", "Shares", [f"Gain: {said['gain']}."], [shares], (), ()),
        ("prediction", "Predicted and measured", words, figures, columns, _mixture_rows(found)),
    ]


def _unseen(found: Json) -> Figure:
    """Each proxy's target as predicted from the others, and as measured."""
    measured, said = (_column(found["proxies"], key) for key in ("target", "predicted_unseen"))
    ends = [min(measured), max(measured)]
    traces = [
        parts.trace("equal", ends, ends, "reference", width=1.5, dash="dash"),
        _points("proxies", measured, said, "train", ["given", *map(str, range(1, len(measured)))]),
    ]
    if (checked := found["verify"]) is not None:
        place = [checked["measured"]], [checked["predicted"]]
        traces.append(_points("proposed", *place, "accent", ["proposed"], "diamond"))
    return parts.point_figure("unseen", "Predicted from the others", traces, "measured, nats a token", "predicted")


def _by_share(found: Json) -> list[Figure]:
    """The losses of all sources over each source's share."""
    made, proxies = [], found["proxies"]
    losses = _column(proxies, "loss_by_source")
    for number, source in enumerate(found["sources"]):
        x = [100 * row["shares"][source] for row in proxies]
        traces = [
            _points(target, x, _column(losses, target), parts.series_ink(place), [target] * len(x))
            for place, target in enumerate(losses[0])
        ]
        title, axis = f"Held-out losses by the share of {source}", parts.axis(f"share of {source}", ticksuffix="%")
        made.append(parts.point_figure(f"share-{number}", title, traces, axis, "nats a token"))
    return made


# --- Both -------------------------------------------------------------------------------------------------------------


def _log(title: str) -> Block:
    return parts.axis(title, type="log", exponentformat="power")


def _column(rows: Iterable[Json], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _points(
    name: str, x: Iterable[float], y: Iterable[float], ink: str, labels: Sequence[str], symbol: str = "circle"
) -> Block:
    return parts.trace(name, x, y, ink, hover="%{text}: %{y:.4f}", lines=False, marks=9, symbol=symbol, text=labels)


def _interval(name: str, x: float, of: dict[str, float], ink: str, symbol: str) -> Block:
    """A predicted point with its interval."""
    above, below = parts.short([of["high"] - of["value"]]), parts.short([of["value"] - of["low"]])
    error = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {**_points(name, [x], [of["value"]], ink, ["predicted"], symbol), "error_y": error}


def _columns(titles: Sequence[str]) -> list[str]:
    return [titles[0], *(f"n|{title}" for title in titles[1:])]
