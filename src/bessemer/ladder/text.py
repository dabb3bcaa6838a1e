"""What a ladder found, in words and tables for a terminal; the page says the same sentences."""

from __future__ import annotations

from typing import Any

from bessemer.terminal import amount, duration


def table(found: dict[str, Any]) -> str:
    """For a terminal: the rungs, the law, and what it says."""
    lines = ["  ".join(f"{title:>{width}}" for title, width in zip(TITLES, WIDTHS, strict=True))]
    for row in rows(found):
        lines.append("  ".join(f"{cell:>{width}}" for cell, width in zip(row, WIDTHS, strict=True)))
    lines.append("")
    lines += [f"{name:<12} {sentence}" for name, sentence in sentences(found).items()]
    return "\n".join(lines)


TITLES = ("rung", "N", "D", "D/N", "C, FLOPs", "rate", "batch", "loss", "law")
WIDTHS = (20, 7, 7, 6, 9, 8, 6, 7, 7)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The rungs, one a row."""
    told = []
    for rung in found["rungs"]:
        ratio = rung["tokens"] / rung["parameters"]
        told.append(
            [
                rung["name"], amount(rung["parameters"]), amount(rung["tokens"]), f"{ratio:.1f}", f"{rung['flops']:.2e}",
                f"{rung['learning_rate']:.4g}", amount(rung["batch_tokens"]), f"{rung['loss']:.4f}",
                f"{rung['residual']:+.2%}",
            ]
        )  # fmt: skip
    return told


def sentences(found: dict[str, Any]) -> dict[str, str]:
    """What was found, a sentence for each question."""
    told = {"law": law(found), "left out": left_out(found)}
    if found["prediction"] is not None:
        told["prediction"] = prediction(found)
    measured = found["planned"]["measured"]
    if measured is not None and found["prediction"] is not None:
        said = found["prediction"]
        inside = "inside" if said["low"] <= measured["loss"] <= said["high"] else "outside"
        told["the run"] = (
            f"trained already: {measured['loss']:.4f}, the prediction is off by {said['value'] / measured['loss'] - 1:+.2%}, "
            f"it lies {inside} its interval"
        )
    if found["more_runs"] is not None:
        told["more runs"] = _more(found["more_runs"])
    told |= _optimum(found)
    told["N counts"] = f"{found['parameters_counted']}; C is exact, with attention"
    told["rate"] = found["learning_rate_rule_says"]
    return told


def headline(found: dict[str, Any]) -> str:
    """The page's first sentence."""
    if found["prediction"] is None:
        return law(found)
    planned, said = found["planned"], found["prediction"]
    return (
        f"{amount(planned['parameters'])} parameters on {amount(planned['tokens'])} tokens will reach {said['value']:.3f} nats a "
        f"token, between {said['low']:.3f} and {said['high']:.3f} with 90% certainty, by {len(found['rungs'])} small runs that "
        f"took {found['compute_share']:.0%} of its compute."
    )


def law(found: dict[str, Any]) -> str:
    """The law with the intervals of its numbers."""
    fit = found["fit"]
    numbers = ", ".join(f"{name} {_number(of)}" for name, of in fit["numbers"].items())
    low = fit["numbers"]["E"]["value"] < 0.1 * min(rung["loss"] for rung in found["rungs"])
    none = "; E is near 0: rungs as small as these do not show where the loss ends" if low else ""
    how = "rungs drawn with replacement" if fit["bootstrap"] == "rungs" else "losses drawn anew about the law"
    return (
        f"L = {fit['law']}: {numbers} (90% of {fit['draws']} draws; {how}); the rungs lie {fit['spread']:.2%} about it "
        f"({fit['freedom']} degrees of freedom){none}"
    )


def _number(of: dict[str, float]) -> str:
    return f"{of['value']:.4g} [{of['low']:.3g}, {of['high']:.3g}]"


def left_out(found: dict[str, Any]) -> str:
    left = found["left_out"]
    if left is None:
        return "too few rungs to leave one out and fit the others: the law is untested; add rungs with --rungs"
    said = left["predicted"]
    return (
        f"{left['name']}, {left['beyond']:.1f} times beyond the {left['from_rungs']} it is predicted from: predicted "
        f"{said['value']:.4f} [{said['low']:.4f}, {said['high']:.4f}], measured {left['measured']:.4f}, error "
        f"{left['error']:+.2%}, {'inside' if left['covered'] else 'OUTSIDE'} the interval"
    )


def prediction(found: dict[str, Any]) -> str:
    """The planned run's loss."""
    planned, said = found["planned"], found["prediction"]
    return (
        f"{said['value']:.4f} [{said['low']:.4f}, {said['high']:.4f}] nats a token for the planned "
        f"{amount(planned['parameters'])} parameters on {amount(planned['tokens'])} tokens, {said['beyond']:.1f} times "
        "beyond the largest rung"
    )


def _more(more: dict[str, Any]) -> str:
    same = f"{more['of_the_same_kind']} more like these ({more['same_kind_flops']:.1e} FLOPs)"
    if more["going_upwards"] is None:
        return f"{same} would halve the law's error of {more['error_now']:.2%} ({more['method']})"
    runs = f"{more['going_upwards']} more run{'s' if more['going_upwards'] > 1 else ''}"
    return (
        f"{runs} going on upwards ({more['upwards_flops']:.1e} FLOPs), or {same}, would halve the law's error of "
        f"{more['error_now']:.2%} ({more['method']})"
    )


def _optimum(found: dict[str, Any]) -> dict[str, str]:
    best, planned = found["optimum"], found["planned"]
    if best is None:
        return {"best size": "a ladder of one ratio cannot tell; --design isoflop does"}
    size, tokens, exponent = best["parameters"], best["tokens"], best["exponent"]
    told = {
        "best size": f"for {planned['flops']:.2e} FLOPs {_amounts(size)} parameters on {_amounts(tokens)} tokens "
        f"({best['tokens_per_parameter']['value']:.1f} a parameter; planned {planned['tokens_per_parameter']:.1f}), loss "
        f"{best['loss']['value']:.4f}; N_opt ~ C^{exponent['value']:.2f} [{exponent['low']:.2f}, {exponent['high']:.2f}]"
    }
    profile = (found["isoflop"] or {}).get("best")
    if profile is None or profile["parameters"] is None:
        told["isoFLOP"] = (
            "no second opinion: of fewer than two amounts of compute the best size lies between the smallest and the largest"
        )
    else:
        told["isoFLOP"] = (
            f"by parabolas {_amounts(profile['parameters'])} parameters, N_opt ~ C^{profile['exponent']['value']:.2f}"
        )
    return told


def _amounts(of: dict[str, float]) -> str:
    return f"{amount(of['value'])} [{amount(of['low'])}, {amount(of['high'])}]"


def ending(found: dict[str, Any]) -> str:
    """Where it all is."""
    seconds = sum(rung["seconds"] for rung in found["rungs"])
    return f"\n  training {duration(seconds)} in all\n  page     {found['page']}\n  folder   {found['folder']}"
