"""ladder.html: the plots and tables of a ladder, in the report's frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bessemer.ladder import text
from bessemer.report.page import compose
from bessemer.run import write_atomic

Figure = dict[str, Any]
PAGE = "ladder.html"


def write(folder: Path, found: dict[str, Any]) -> Path:
    """Write the page of what ladder.json holds, and return where it lies."""
    path = folder / PAGE
    write_atomic(path, render(found).encode("utf-8", errors="replace"))
    return path


def render(found: dict[str, Any]) -> str:
    """The page as HTML."""
    told = text.sentences(found)
    parts: list[dict[str, Any]] = [
        {
            "id": "loss",
            "title": "Loss over compute",
            "finding": f"{told['law']}.",
            "figures": [loss(found)],
        },
        {
            "id": "rungs",
            "title": "Rungs",
            "finding": f"{text.left_out(found)}.",
            "figures": [residuals(found)],
            "table": {"titles": text.TITLES, "rows": text.rows(found)},
        },
    ]
    if found["isoflop"] is not None and found["isoflop"]["profiles"]:
        best = f"{told['best size']}. {told['isoFLOP']}."
        parts.insert(
            1,
            {
                "id": "isoflop",
                "title": "IsoFLOP profiles",
                "finding": best,
                "figures": [profiles(found)],
                "table": None,
            },
        )
    parts.append(words(told))
    return page(Path(found["folder"]).parent.name, "ladder", text.headline(found), tiles(found), parts)


def words(told: dict[str, str]) -> dict[str, Any]:
    """The part that answers question by question."""
    return {"id": "answers", "title": "All of it in words", "finding": "", "figures": [], "words": list(told.items())}


def page(name: str, kind: str, headline: str, tiles: list[dict[str, str]], parts: list[dict[str, Any]]) -> str:
    """A page of parts: each with id, title and finding, and figures, a table (titles, rows) or words (name, sentence)."""
    figures = {figure["id"]: figure for part in parts for figure in part["figures"]}
    return compose(
        "ladder.html",
        {
            "name": name,
            "kind": kind,
            "headline": headline,
            "origin": "",
            "notes": [],
            "tiles": tiles,
            "sections": {part["id"]: part["title"] for part in parts},
            "parts": [{"table": None, "words": [], **part} for part in parts],
            "figures": figures,
        },
    )


def tiles(found: dict[str, Any]) -> list[dict[str, str]]:
    """The numbers at the top."""
    told = []
    if (said := found["prediction"]) is not None:
        note = f"{said['low']:.3f} to {said['high']:.3f}, nats a token"
        told.append({"label": "Predicted loss", "value": f"{said['value']:.3f}", "note": note})
    if (left := found["left_out"]) is not None:
        note = f"{'inside' if left['covered'] else 'outside'} its interval"
        told.append({"label": "Largest rung, left out", "value": f"{left['error']:+.2%}", "note": note})
    e = found["fit"]["numbers"]["E"]
    told.append({"label": "E", "value": f"{e['value']:.3f}", "note": f"{e['low']:.2f} to {e['high']:.2f}"})
    told.append(
        {
            "label": "Rungs",
            "value": str(len(found["rungs"])),
            "note": f"{found['compute_share']:.0%} of the run's compute",
        }
    )
    return told


def loss(found: dict[str, Any]) -> Figure:
    """Loss over compute: the rungs, the law with its band, the rung that was left out, the planned run."""
    curve = found["curves"]
    x = [row["flops"] for row in curve]
    label = "fit" if found["design"] == "ratio" else "fit, at the best size"
    traces = [
        {**line("", x, [row["low"] for row in curve], "raw", 0), "hoverinfo": "skip", "showlegend": False},
        {
            **line("90% of the draws", x, [row["high"] for row in curve], "raw", 0),
            "fill": "tonexty",
            "hoverinfo": "skip",
        },
        line(label, x, [row["value"] for row in curve], "train", 2),
    ]
    groups = sorted({rung["group"] for rung in found["rungs"]}) if found["design"] == "isoflop" else [None]
    for number, group in enumerate(groups):
        mine = [rung for rung in found["rungs"] if group is None or rung["group"] == group]
        name = "rungs" if group is None else f"{np.mean([rung['flops'] for rung in mine]):.1e} FLOPs"
        labels = [rung["name"] for rung in mine]
        xs, ys = [rung["flops"] for rung in mine], [rung["loss"] for rung in mine]
        traces.append(points(name, xs, ys, f"source-{number % 6 + 1}", labels))
    if (left := found["left_out"]) is not None:
        at = next(rung["flops"] for rung in found["rungs"] if rung["name"] == left["name"])
        traces.append(_with_bar(points("largest, from the others", [at], [left["predicted"]["value"]], "reference",
                                       ["predicted"], "x"), left["predicted"]))  # fmt: skip
    planned = found["planned"]
    if (said := found["prediction"]) is not None:
        shown = points("planned run", [planned["flops"]], [said["value"]], "accent", ["predicted"], "diamond")
        traces.append(_with_bar(shown, said))
    if planned["measured"] is not None:
        traces.append(
            points(
                "planned run, measured", [planned["flops"]], [planned["measured"]["loss"]], "good", ["measured"], "star"
            )
        )
    return figure("loss", "Held-out loss", "compute, FLOPs", "nats a token", traces, log_x=True)


def profiles(found: dict[str, Any]) -> Figure:
    """Loss over size at each amount of compute, with the parabolas."""
    traces = []
    for number, profile in enumerate(found["isoflop"]["profiles"]):
        mine = [rung for rung in found["rungs"] if rung["group"] == profile["group"]]
        ink, sizes = f"source-{number % 6 + 1}", [rung["parameters"] for rung in mine]
        labels = [rung["name"] for rung in mine]
        traces.append(points(f"{profile['flops']:.1e} FLOPs", sizes, [rung["loss"] for rung in mine], ink, labels))
        x = np.geomspace(min(sizes) / 1.15, max(sizes) * 1.15, 31)
        curve = line("parabola", x.tolist(), np.polyval(profile["curve"], np.log(x)).tolist(), ink, 1.25)
        traces.append({**curve, "showlegend": False, "hoverinfo": "skip"})
    return figure("profiles", "IsoFLOP profiles", "parameters in matrix products", "nats a token", traces, log_x=True)


def residuals(found: dict[str, Any]) -> Figure:
    """How far each rung lies from the law."""
    rungs = found["rungs"]
    trace = points("rungs", [rung["flops"] for rung in rungs], [100 * rung["residual"] for rung in rungs], "train",
                   [rung["name"] for rung in rungs])  # fmt: skip
    made = figure("residuals", "Measured against the law", "compute, FLOPs", "difference", [trace], log_x=True)
    made["layout"]["yaxis"] |= {"ticksuffix": "%"}
    made["layout"]["yaxis"]["zeroline"] = True
    return made


def figure(name: str, title: str, x: str, y: str, traces: list[dict[str, Any]], log_x: bool = False) -> Figure:
    """A figure with axes of its own."""
    xaxis: dict[str, Any] = {"title": {"text": x}}
    if log_x:
        xaxis |= {"type": "log", "exponentformat": "power"}
    layout = {"xaxis": xaxis, "yaxis": {"title": {"text": y}}, "hovermode": "closest"}
    return {"id": name, "title": title, "group": "own", "traces": traces, "shapes": [], "note": "", "layout": layout}


def line(name: str, x: list[float], y: list[float], ink: str, width: float) -> dict[str, Any]:
    """A curve."""
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": _short(x), "y": _short(y), "ink": ink,
        "line": {"width": width}, "marker": {}, "hovertemplate": "%{y:.4f}",
    }  # fmt: skip


def points(
    name: str, x: list[float], y: list[float], ink: str, labels: list[str], symbol: str = "circle"
) -> dict[str, Any]:
    """Marks, each with a label."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": _short(x), "y": _short(y), "ink": ink, "line": {},
        "marker": {"size": 9, "symbol": symbol}, "text": labels, "hovertemplate": "%{text}: %{y:.4f}",
    }  # fmt: skip


def _with_bar(trace: dict[str, Any], said: dict[str, float]) -> dict[str, Any]:
    """A mark with its interval."""
    above, below = [said["high"] - said["value"]], [said["value"] - said["low"]]
    return {
        **trace,
        "error_y": {"type": "data", "symmetric": False, "array": _short(above), "arrayminus": _short(below)},
    }


def _short(values: list[float]) -> list[float]:
    """Six significant digits."""
    return [float(f"{value:.6g}") for value in values]
