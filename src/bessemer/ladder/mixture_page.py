"""What a mixture search found: for a terminal, and mixture.html in the report's frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.ladder.page import Figure, figure, line, page, points, words
from bessemer.run import write_atomic
from bessemer.terminal import amount, duration

PAGE = "mixture.html"


def table(found: dict[str, Any]) -> str:
    """For a terminal: the proxies, the proposal, what it gains."""
    names = found["sources"]
    titles = ["proxy", *names, "target", "unseen"]
    widths = [6, *(max(len(name), 6) for name in names), 7, 7]
    lines = ["  ".join(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True))]
    for row in rows(found):
        lines.append("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
    lines.append("")
    lines += [f"{name:<12} {sentence}" for name, sentence in sentences(found).items()]
    return "\n".join(lines)


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The proxies: shares, the target's loss, and what the others say of it."""
    told = []
    for number, row in enumerate(found["proxies"]):
        shown = [f"{row['shares'][name]:.1%}" for name in found["sources"]]
        told.append(
            ["given" if not number else str(number), *shown, f"{row['target']:.4f}", f"{row['predicted_unseen']:.4f}"]
        )
    return told


def sentences(found: dict[str, Any]) -> dict[str, str]:
    """What was found, a sentence for each question."""
    proxy, gain, proposed = found["proxy"], found["gain"], found["proposed"]
    what = ", ".join(found["targets"])
    off = gain["optimism"]
    off = f", after taking off the {off:.4f} by which the best of many looks better than it is" if off >= 5e-5 else ""
    told = {
        "target": f"mean of the held-out losses of {what}, nats a token, of {len(found['proxies'])} models of "
        f"{amount(proxy['parameters'])} parameters on {amount(proxy['tokens'])} tokens",
        "regression": "; ".join(
            f"{name}: {one['form']}, misses a left-out run by {one['left_out_error']:.4f}"
            for name, one in found["regressions"].items()
        ),
        "left out": f"each proxy predicted from the others: off by {found['left_out_error']:.4f} (root mean square), where the "
        f"targets differ by {found['spread_of_targets']:.4f}",
        "given": ", ".join(f"{name} {share:.1%}" for name, share in found["given"].items()),
        "proposed": ", ".join(f"{name} {share:.1%}" for name, share in proposed["shares"].items()) + _bounds(found),
        "gain": f"{gain['value']:+.4f} [{gain['low']:+.4f}, {gain['high']:+.4f}] nats a token{off}: " + _verdict(found),
    }
    if (checked := found["verify"]) is not None:
        told["verified"] = (
            f"predicted {checked['predicted']:.4f}, measured {checked['measured']:.4f} ({checked['error']:+.2%}, "
            f"{'inside' if checked['covered'] else 'OUTSIDE'} its interval); the gain over the given mixture, measured: "
            f"{checked['measured_gain']:+.4f}"
        )
    told["to use it"] = " ".join(
        f"--set {found['keys'][name]}={share:.4f}" for name, share in proposed["shares"].items()
    )
    return told


def _bounds(found: dict[str, Any]) -> str:
    at = found["proposed"]["at_bound"]
    if not at:
        return ""
    return f" (at the edge of what was tried, or of four readings of the text: {', '.join(at)})"


def _verdict(found: dict[str, Any]) -> str:
    if found["gain"]["inside_noise"]:
        return "inside the noise, so nothing says that the proposed mixture is better than the given one"
    return "the proposed mixture is better, as far as models of this size can tell"


def ending(found: dict[str, Any]) -> str:
    """Where it all is."""
    seconds = sum(row["seconds"] for row in found["proxies"])
    return f"\n  training {duration(seconds)} in all\n  page     {found['page']}\n  folder   {found['folder']}"


def write(folder: Path, found: dict[str, Any]) -> Path:
    """Write the page of what mixture.json holds, and return where it lies."""
    path = folder / PAGE
    write_atomic(path, render(found).encode("utf-8", errors="replace"))
    return path


def render(found: dict[str, Any]) -> str:
    """The page as HTML."""
    told = sentences(found)
    titles = ("Proxy", *found["sources"], "Target, nats a token", "Predicted from the others")
    parts: list[dict[str, Any]] = [
        {"id": "shares", "title": "Shares", "finding": f"Gain: {told['gain']}.", "figures": [_shares(found)]},
        {
            "id": "prediction", "title": "Predicted and measured", "finding": f"{told['left out'].capitalize()}.",
            "figures": [_unseen(found), *_by_share(found)], "table": {"titles": titles, "rows": rows(found)},
        },
        words(told),
    ]  # fmt: skip
    gain = found["gain"]
    tiles = [
        {
            "label": "Predicted gain", "value": f"{gain['value']:+.4f}",
            "note": f"{gain['low']:+.4f} to {gain['high']:+.4f}{', inside the noise' if gain['inside_noise'] else ''}",
        },
        {"label": "Left-out error", "value": f"{found['left_out_error']:.4f}", "note": "nats a token"},
        {"label": "Proxies", "value": str(len(found["proxies"])), "note": f"{amount(found['proxy']['parameters'])} parameters"},
    ]  # fmt: skip
    return page(Path(found["folder"]).parent.name, "mixture search", f"Proposed: {told['proposed']}.", tiles, parts)


def _shares(found: dict[str, Any]) -> Figure:
    """The given and the proposed shares, side by side."""
    traces = [
        {
            "type": "bar", "name": name, "x": list(by), "y": [round(100 * share, 3) for share in by.values()], "ink": ink,
            "hovertemplate": "%{y:.1f}%",
        }
        for name, by, ink in (
            ("given", found["given"], "raw"), ("proposed", found["proposed"]["shares"], "accent"),
        )
    ]  # fmt: skip
    made = figure("mixture", "Shares of the tokens", "source", "share", traces)
    made["layout"] |= {"barmode": "group", "bargap": 0.3}
    made["layout"]["xaxis"]["type"] = "category"
    made["layout"]["yaxis"] |= {"ticksuffix": "%", "rangemode": "tozero"}
    return made


def _unseen(found: dict[str, Any]) -> Figure:
    """Each proxy's target as predicted from the others, against what was measured."""
    measured = [row["target"] for row in found["proxies"]]
    labels = ["given", *(str(number) for number in range(1, len(measured)))]
    ends = [min(measured), max(measured)]
    traces = [
        {**line("equal", ends, ends, "reference", 1.5), "line": {"width": 1.5, "dash": "dash"}},
        points("proxies", measured, [row["predicted_unseen"] for row in found["proxies"]], "train", labels),
    ]
    if (checked := found["verify"]) is not None:
        traces.append(
            points("proposed", [checked["measured"]], [checked["predicted"]], "accent", ["proposed"], "diamond")
        )
    return figure("unseen", "Predicted from the others", "measured, nats a token", "predicted", traces)


def _by_share(found: dict[str, Any]) -> list[Figure]:
    """The losses of all sources over each source's share."""
    made = []
    for number, source in enumerate(found["sources"]):
        x = [100 * row["shares"][source] for row in found["proxies"]]
        traces = []
        for place, target in enumerate(found["proxies"][0]["loss_by_source"]):
            y = [row["loss_by_source"][target] for row in found["proxies"]]
            traces.append(points(target, x, y, f"source-{place % 6 + 1}", [target] * len(x)))
        one = figure(
            f"share-{number}", f"Held-out losses by the share of {source}", f"share of {source}", "nats a token", traces
        )
        one["layout"]["xaxis"]["ticksuffix"] = "%"
        made.append(one)
    return made
