"""Figure of the scaling ladder."""

from __future__ import annotations

from bessemer.report import parts
from bessemer.report.data import Json, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Figure


def loss(result: Json) -> list[Figure]:
    """Return the figure of held-out loss over compute from the result of a ladder (ladder.json).

    It shows the trained rungs, the fit with its band, and the planned run with its interval.
    """
    rungs = [rung for rung in as_objects(result, "rungs") if as_number(rung, "flops") and as_number(rung, "loss")]
    keys = ("flops", "low", "high", "value")
    curve = [row for row in as_objects(result, "curves") if all(as_number(row, key) for key in keys)]
    if not rungs or not curve:
        return []
    x, low, high, middle = ([row[key] for row in curve] for key in keys)
    traces = [
        parts.trace("", x, low, "raw", width=0, hoverinfo="skip", showlegend=False),
        parts.trace("80% of the draws", x, high, "raw", width=0, fill="tonexty", hoverinfo="skip"),
        parts.trace("fit", x, middle, "train", width=2),
        parts.trace("rungs", [rung["flops"] for rung in rungs], [rung["loss"] for rung in rungs], "source-1",
                    hover="%{text}: %{y:.4f}", lines=False, marks=9, text=[as_text(rung, "name") for rung in rungs]),
    ]  # fmt: skip
    prediction, planned = as_object(result, "prediction"), as_object(result, "planned")
    flops = as_number(planned, "flops")
    if flops is not None and (value := as_number(prediction, "value")) is not None:
        above, below = ((as_number(prediction, key) or value) - value for key in ("high", "low"))
        bounds = {"type": "data", "symmetric": False, "array": [above], "arrayminus": [-below]}
        traces.append(parts.trace("planned run", [flops], [value], "accent", lines=False, marks=9, error_y=bounds))
    if flops is not None and (measured := as_number(planned, "measured", "loss")) is not None:
        star: Json = {"lines": False, "marks": 9, "symbol": "star"}
        traces.append(parts.trace("planned run, measured", [flops], [measured], "good", **star))
    compute = parts.axis("compute, FLOPs", type="log", exponentformat="power")
    loss = parts.axis("nats a token")
    return [parts.figure("ladder-loss", "Held-out loss of the rungs", traces, compute, loss, hovermode="closest")]
