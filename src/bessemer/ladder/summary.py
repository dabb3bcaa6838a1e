"""Result of a ladder as a table and sentences, for the terminal and the report."""

from __future__ import annotations

from typing import Any

from bessemer.common.console import amount, duration, text_table

Json = dict[str, Any]
COLUMNS: tuple[str, ...] = ("rung", "N", "D", "D/N", "C, FLOPs", "rate", "batch", "loss", "law")


def table(result: Json) -> str:
    """Format a result for the terminal: the runs, then the law and the conclusions."""
    answers = (f"{name:<12} {sentence}" for name, sentence in sentences(result).items())
    return "\n".join([*text_table(COLUMNS, rung_rows(result), "r"), "", *answers])


def ending(result: Json) -> str:
    """Format the duration of a ladder and the paths of its results."""
    seconds = sum(rung["seconds"] for rung in result["rungs"])
    page = result["page"] or "none: --folder is not in the run directory"
    return f"\n  training {duration(seconds)} in all\n  page     {page}\n  folder   {result['folder']}"


def rung_rows(result: Json) -> list[list[str]]:
    """Return the cells of COLUMNS for each rung."""
    return [
        [
            rung["name"], amount(rung["parameters"]), amount(rung["tokens"]), f"{rung['tokens'] / rung['parameters']:.1f}",
            f"{rung['flops']:.2e}", f"{rung['learning_rate']:.4g}", amount(rung["batch_tokens"]), f"{rung['loss']:.4f}",
            f"{rung['residual']:+.2%}",
        ]
        for rung in result["rungs"]
    ]  # fmt: skip


def sentences(result: Json) -> dict[str, str]:
    """Return the conclusions of a ladder, one sentence for each topic."""
    answers = {"law": _law(result), "left out": _left_out(result)}
    prediction, planned = result["prediction"], result["planned"]
    if prediction is not None:
        answers["prediction"] = (
            f"{_between(prediction, '.4f')} nats a token for the planned {amount(planned['parameters'])} parameters on "
            f"{amount(planned['tokens'])} tokens, {prediction['beyond']:.1f} times beyond the largest rung"
        )
    if result["optimum"] is not None:
        answers["best size"] = _best_size(result)
    return answers


def _law(result: Json) -> str:
    """Describe the law with the intervals of its parameters."""
    fit = result["fit"]
    numbers = ", ".join(f"{name} {value['value']:.4g} [{value['low']:.3g}, {value['high']:.3g}]"
                        for name, value in fit["numbers"].items())  # fmt: skip
    is_low = fit["numbers"]["E"]["value"] < 0.1 * min(rung["loss"] for rung in result["rungs"])
    none = "; E is near 0: rungs as small as these do not show where the loss ends" if is_low else ""
    return (
        f"L = {fit['law']}: {numbers} (medians and 80% of {fit['draws']} draws); the runs lie {fit['spread']:.2%} about it "
        f"({fit['freedom']} degrees of freedom){none}"
    )


def _left_out(result: Json) -> str:
    left = result["left_out"]
    if left is None:
        return "too few rungs to leave one out and fit the others: the law is untested; add rungs with --rungs"
    return (
        f"{left['name']}, {left['beyond']:.1f} times beyond the {left['from_rungs']} it is predicted from: predicted "
        f"{_between(left['predicted'], '.4f')}, measured {left['measured']:.4f}, error {left['error']:+.2%}, "
        f"{'inside' if left['covered'] else 'OUTSIDE'} the interval"
    )


def _best_size(result: Json) -> str:
    best, planned = result["optimum"], result["planned"]
    return (
        f"for {planned['flops']:.2e} FLOPs {_amounts(best['parameters'])} parameters on {_amounts(best['tokens'])} tokens "
        f"({best['tokens_per_parameter']['value']:.1f} a parameter; planned {planned['tokens_per_parameter']:.1f}), loss "
        f"{best['loss']['value']:.4f}; N_opt ~ C^{_between(best['exponent'], '.2f')}"
    )


def _between(interval: dict[str, float], form: str) -> str:
    return f"{interval['value']:{form}} [{interval['low']:{form}}, {interval['high']:{form}}]"


def _amounts(interval: dict[str, float]) -> str:
    return f"{amount(interval['value'])} [{amount(interval['low'])}, {amount(interval['high'])}]"
