"""Results of a ladder or a mixture search as a table and sentences, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.common.console import amount, duration, text_table

Json = dict[str, Any]
LADDER_COLUMNS: tuple[str, ...] = ("rung", "N", "D", "D/N", "C, FLOPs", "rate", "batch", "loss", "law")


def table(found: Json) -> str:
    """Format a result for the terminal: the runs, then the law or the regressions and the conclusions."""
    titles, rows = _table(found)
    answers = (f"{name:<12} {sentence}" for name, sentence in sentences(found).items())
    return "\n".join([*text_table(titles, rows, "r"), "", *answers])


def ending(found: Json) -> str:
    """Format the duration of a ladder and the paths of its results."""
    seconds = sum(row["seconds"] for row in found["proxies" if _is_mixture(found) else "rungs"])
    page = found["page"] or "none: --folder is not in the run directory"
    return f"\n  training {duration(seconds)} in all\n  page     {page}\n  folder   {found['folder']}"


def sentences(found: Json) -> dict[str, str]:
    """Return the answer to each question in one sentence."""
    return _mixture_sentences(found) if _is_mixture(found) else _ladder_sentences(found)


def shown(found: Json) -> Json:
    """Return the part of ladder.json or mixture.json that the report shows: answers and the table of the runs."""
    columns, rows = _table(found)
    return {"answers": sentences(found), "columns": list(columns), "rows": rows}


def _table(found: Json) -> tuple[Sequence[str], list[list[str]]]:
    if _is_mixture(found):
        return ("proxy", *found["sources"], "target", "unseen"), _mixture_rows(found)
    return LADDER_COLUMNS, _rungs(found)


def _is_mixture(found: Json) -> bool:
    return found.get("kind") == "mixture"


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
    prediction, planned = found["prediction"], found["planned"]
    if prediction is not None:
        said["prediction"] = (
            f"{_between(prediction, '.4f')} nats a token for the planned {amount(planned['parameters'])} parameters on "
            f"{amount(planned['tokens'])} tokens, {prediction['beyond']:.1f} times beyond the largest rung"
        )
    if found["optimum"] is not None:
        said["best size"] = _best_size(found)
    return said


def _law(found: Json) -> str:
    """Describe the law with the intervals of its parameters."""
    fit = found["fit"]
    numbers = ", ".join(f"{name} {value['value']:.4g} [{value['low']:.3g}, {value['high']:.3g}]"
                        for name, value in fit["numbers"].items())  # fmt: skip
    is_low = fit["numbers"]["E"]["value"] < 0.1 * min(rung["loss"] for rung in found["rungs"])
    none = "; E is near 0: rungs as small as these do not show where the loss ends" if is_low else ""
    return (
        f"L = {fit['law']}: {numbers} (medians and 80% of {fit['draws']} draws); the runs lie {fit['spread']:.2%} about it "
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


def _best_size(found: Json) -> str:
    best, planned = found["optimum"], found["planned"]
    return (
        f"for {planned['flops']:.2e} FLOPs {_amounts(best['parameters'])} parameters on {_amounts(best['tokens'])} tokens "
        f"({best['tokens_per_parameter']['value']:.1f} a parameter; planned {planned['tokens_per_parameter']:.1f}), loss "
        f"{best['loss']['value']:.4f}; N_opt ~ C^{_between(best['exponent'], '.2f')}"
    )


def _between(of: dict[str, float], form: str) -> str:
    return f"{of['value']:{form}} [{of['low']:{form}}, {of['high']:{form}}]"


def _amounts(of: dict[str, float]) -> str:
    return f"{amount(of['value'])} [{amount(of['low'])}, {amount(of['high'])}]"


def _inside(is_inside: bool) -> str:
    return "inside" if is_inside else "OUTSIDE"


def _mixture_rows(found: Json) -> list[list[str]]:
    """Return the rows of the proxies: shares, target loss, and the prediction from the other proxies."""
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
