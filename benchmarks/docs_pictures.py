"""Draw the pictures of the documentation from a run that docs_run.py trained.

They show curves of the run, how its documents fill sequences, what attention sees in them, and learning-rate schedules. The data
comes from the run's files and from the functions that training calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from svg import INKS, svg

from bessemer.recipe.resolved import ResolvedSchedule as Schedule
from bessemer.report import data as run_data
from bessemer.report import parts
from bessemer.report.curves import DEFAULT_WINDOW, curves
from bessemer.report.data import Curves, RunData
from bessemer.report.parts import Figure
from bessemer.run.directory import RunDirectory
from bessemer.tokens.packing import pack
from bessemer.tokens.shards import TokenStore
from bessemer.train.schedule import learning_rate_share

SHOWN = ("loss", "bits")  # curves of the report that the documentation shows
LENGTH, SOURCE = 2048, "code"  # the sequences in the pictures of packing
NUM_ROWS, ROW, WIDTH = 9, 13, 720
COLOURS = [INKS[f"source-{number}"] for number in range(1, 7)]

Piece = tuple[int, int, int]
"""Document, offset of its piece in the sequence, tokens of the piece."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="folder of the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(args.run)
    data = run_data.read(run)
    pictures = {figure["id"]: svg(figure, smoothing=DEFAULT_WINDOW) for figure in curves(data) if figure["id"] in SHOWN}
    pictures["rollback"] = svg(rollback(data))
    pictures["schedules"] = svg(schedules())
    starts, sizes = TokenStore.open(run.path / "tokens").split(SOURCE, "train").document_spans()
    rows = {"concatenate": list(stream(starts, sizes)), "best-fit": list(packed(starts, sizes))}
    pictures["packing"] = sequences(rows)
    several = max(rows["best-fit"], key=lambda pieces: min(len(pieces), 5))
    pictures["masks"] = masks(several)
    pictures["stages"] = stages()
    for name, drawing in pictures.items():
        assert drawing, f"the run has nothing to draw for {name}"
        (args.out / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")
        print(f"{name}.svg {len(drawing) / 1000:.0f} kB")


def rollback(data: RunData) -> Figure:
    """Return the loss around the first rollback: the kept steps and the undone ones."""
    undone = data.forks[0].step
    kept = (data.train.step >= undone[0] - 25) & (data.train.step <= undone[-1] + 60)
    part = Curves(data.train.step[kept], {"loss": data.train.columns["loss"][kept]})
    figure = next(one for one in curves(replace(data, train=part)) if one["id"] == "loss")
    names = {"train, each step": "training", "rolled back (1)": "undone by the rollback"}
    traces = [{**trace, "name": names[trace["name"]]} for trace in figure["traces"] if trace["name"] in names]
    return {**figure, "traces": traces}


def schedules() -> Figure:
    """Return the learning rate over 1,000 steps for each kind of schedule."""
    steps, x = 1000, np.arange(1, 1001)
    kinds = {"wsd": "train", "cosine": "source-1", "linear": "source-2", "inverse_sqrt": "source-3"}
    traces = []
    for kind, ink in kinds.items():
        schedule = Schedule(kind=kind, warmup_steps=50, final_share=0.0, decay_share=0.3)
        y = [learning_rate_share(schedule, step, steps) for step in range(steps)]
        traces.append(parts.trace(kind, x[::5], y[::5], ink, width=2.0))
    return parts.figure(
        "schedules", "Schedules", traces, parts.axis("step"), parts.axis("share of the peak", rangemode="tozero")
    )


def stream(starts: np.ndarray, sizes: np.ndarray) -> Iterator[list[Piece]]:
    """Yield sequences cut from one stream of documents."""
    for number in range(NUM_ROWS):
        begin, end = number * LENGTH, (number + 1) * LENGTH
        inside = np.flatnonzero((starts < end) & (starts + sizes > begin))
        yield [
            (
                int(one),
                max(int(starts[one]) - begin, 0),
                min(int(starts[one] + sizes[one]), end) - max(int(starts[one]), begin),
            )
            for one in inside
        ]


def packed(starts: np.ndarray, sizes: np.ndarray) -> Iterator[list[Piece]]:
    """Yield the sequences of best-fit packing that have the most documents."""
    filled = pack(starts, sizes, LENGTH, "best-fit")
    counts = np.diff(filled.first)
    for number in np.sort(np.argsort(-counts, kind="stable")[:NUM_ROWS]):
        place, pieces = 0, []
        for piece in range(filled.first[number], filled.first[number + 1]):
            document = int(np.searchsorted(starts, filled.starts[piece], "right")) - 1
            pieces.append((document, place, int(filled.sizes[piece])))
            place += int(filled.sizes[piece])
        yield pieces


def sequences(rows: dict[str, list[list[Piece]]]) -> str:
    """Return an SVG with a bar per sequence and a colour per document."""
    height = 30 + len(rows) * (NUM_ROWS * ROW + 34)
    drawn, y = opened(WIDTH, height, "Sequences and the documents in them, by packing"), 12
    for name, sequences_of_it in rows.items():
        drawn.append(
            text(12, y + 12, f"tokens.packing = {name}: {NUM_ROWS} sequences of {LENGTH:,} tokens of a run's code")
        )
        y += 20
        number, last = -1, -1
        for pieces in sequences_of_it:
            drawn.append(f'<rect x="12" y="{y}" width="{WIDTH - 24}" height="{ROW - 3}" fill="{INKS["line"]}"/>')
            for document, place, size in pieces:
                number, last = number + (document != last), document
                x, width = 12 + place * (WIDTH - 24) / LENGTH, size * (WIDTH - 24) / LENGTH
                colour = COLOURS[number % len(COLOURS)]
                drawn.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{ROW - 3}" fill="{colour}"/>'
                )
            y += ROW
        y += 14
    drawn.append(
        text(12, y + 6, "A change of colour is a document boundary; grey is padding, which is never a target.", "soft")
    )
    return closed(drawn)


def masks(pieces: Sequence[Piece]) -> str:
    """Return an SVG of the tokens each token attends to in one sequence, without and with `tokens.document_mask`."""
    side, top = 300, 44
    drawn = opened(WIDTH, top + side + 34, "Attention within a packed sequence, without and with a document mask")
    for column, (name, is_masked) in enumerate((("document_mask = false", False), ("document_mask = true", True))):
        left = 30 + column * (side + 60)
        drawn += [
            text(left, 28, name),
            f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="{INKS["panel"]}"/>',
        ]
        triangle = f"M{left} {top}V{top + side}H{left + side}Z"
        drawn.append(f'<path d="{triangle}" fill="{INKS["line" if is_masked else "raw"]}"/>')
        for number, (_, place, size) in enumerate(pieces):
            x, y, long = left + place * side / LENGTH, top + place * side / LENGTH, size * side / LENGTH
            if is_masked:
                colour = COLOURS[number % len(COLOURS)]
                drawn.append(f'<path d="M{x:.1f} {y:.1f}v{long:.1f}h{long:.1f}Z" fill="{colour}"/>')
            drawn.append(f'<path d="M{left} {y:.1f}H{x:.1f}V{top + side}" fill="none" stroke="{INKS["paper"]}"/>')
    drawn.append(
        text(30, top + side + 20, "Vertical: the token that attends. Horizontal: the token it attends to.", "soft")
    )
    return closed(drawn)


BOXES = {
    "recipe": (20, 20, "recipe.toml", "one run"),
    "derived": (165, 20, "derived", "fills in open keys"),
    "plan": (310, 20, "plan/", "time, memory, cost"),
    "sources": (20, 110, "raw sources", "files, crawls, hubs"),
    "corpus": (165, 110, "corpus/", "extract, filter, dedup"),
    "tokens": (310, 110, "tokens/", "tokenizer, shards"),
    "train": (455, 110, "train/", "step, loop, guard"),
    "evaluate": (600, 110, "evaluate/", "held-out text, tasks"),
    "model": (310, 200, "model/", "over parallel/ meshes"),
    "checkpoint": (455, 200, "checkpoint/", "verified safetensors"),
    "export": (600, 200, "export/", "Hugging Face, GGUF"),
    "launch": (455, 20, "launch/", "processes, restarts"),
    "report": (600, 20, "report.html", "all of it"),
}
ARROWS = (
    "recipe derived", "derived plan", "derived corpus", "sources corpus", "corpus tokens", "tokens train", "train evaluate",
    "launch train", "train checkpoint", "checkpoint train", "checkpoint export", "evaluate report", "model train",
)  # fmt: skip
BOX_WIDTH, BOX_HEIGHT = 124, 52


def stages() -> str:
    """Return an SVG of the stages of a run and the data that each passes on."""
    drawn = opened(744, 272, "From raw sources to a report and an export, stage by stage")
    drawn.append(
        f'<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8Z" fill="{INKS["soft"]}"/></marker>'
    )
    for one, other in (arrow.split() for arrow in ARROWS):
        (x, y), (right, below) = BOXES[one][:2], BOXES[other][:2]
        if y == below:
            ends = f"M{x + (BOX_WIDTH if right > x else 0)} {y + BOX_HEIGHT / 2}H{right if right > x else right + BOX_WIDTH}"
        elif x == right:
            shift = BOX_WIDTH / 2 + (
                14 if (other, one) in {tuple(arrow.split()) for arrow in ARROWS} and below > y else 0
            )
            ends = f"M{x + shift} {y + (BOX_HEIGHT if below > y else 0)}V{below if below > y else below + BOX_HEIGHT}"
        else:
            ends = f"M{x + BOX_WIDTH - 10} {y}L{right} {below + BOX_HEIGHT - 10}"
        drawn.append(f'<path d="{ends}" fill="none" stroke="{INKS["soft"]}" marker-end="url(#tip)"/>')
    for x, y, name, words in BOXES.values():
        drawn += [
            f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4" fill="{INKS["panel"]}" '
            f'stroke="{INKS["rule"]}"/>',
            f'<g font-weight="600">{text(x + 9, y + 22, name)}</g><g font-size="10">{text(x + 9, y + 40, words, "soft")}</g>',
        ]
    return closed(drawn)


def opened(width: int, height: int, label: str) -> list[str]:
    """Return the opening elements of an SVG."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif" aria-label="{label}">',
        f'<rect width="{width}" height="{height}" fill="{INKS["paper"]}"/>',
    ]


def text(x: float, y: float, words: str, ink: str = "ink") -> str:
    """Return an SVG text element."""
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{INKS[ink]}">{words}</text>'


def closed(drawn: list[str]) -> str:
    """Join the elements and close the SVG."""
    return "".join([*drawn, "</svg>"])


if __name__ == "__main__":
    main()
