"""Commands without a run: `bessemer schedule` draws a pipeline, `calibrate` measures this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.terminal import coloured, counted, rate, size

if TYPE_CHECKING:
    import argparse

    from bessemer.model.config import ModelConfig
    from bessemer.stages import Session


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.plan import pipeline
    from bessemer.run import writable, write_atomic

    if args.svg is not None:
        writable(Path(args.svg), "--svg", "<svg")
    model = None if args.recipe is None else _resolved_model(runs.open_recipe(args, may_be_unnamed=True))
    planned = pipeline.plan(
        args.name, args.stages, args.microbatches, args.virtual, backward=args.backward, send=args.send, model=model
    )
    if args.svg is not None:
        write_atomic(Path(args.svg), pipeline.svg(planned.timetable))
    if not args.json:
        print(pipeline.table(planned, shutil.get_terminal_size((100, 24)).columns, coloured()))
        if args.svg is not None:
            print(f"{'drawn in':<12} {args.svg}")
    return pipeline.to_dict(planned)


def _resolved_model(session: Session) -> ModelConfig:
    """The dimensions of the resolved recipe's model, from the recipe alone: nothing is measured."""
    from bessemer.defaults import derived_keys
    from bessemer.model.huggingface.config import model_config
    from bessemer.tokens import outlook

    vocabulary = outlook.planned_vocabulary(session.recipe, session.run.tokens)
    labels = outlook.labels(session.recipe, session.run.tokens)
    resolved = derived_keys.resolve(session.recipe, vocabulary, labels=labels)
    return model_config(resolved, vocabulary, labels=labels if resolved.train.objective == "classify" else 0)


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, write the entry, and show it. Raises InputError where a folder or file cannot be written."""
    from bessemer.calibrate import MEASURED, SHARED, device_entry, disk_rates, write
    from bessemer.run import writable

    if Path(args.out).exists():
        writable(Path(args.out), "--out", MEASURED)
    disk = disk_rates(Path(args.disk))
    entry = device_entry(args.device, disk)
    write(Path(args.out), entry)
    if not args.json:
        count = entry["per_node"]
        shown = {
            "device": f"{entry['name']}, {size(1e9 * entry['memory'])}",
            "node": f"{counted(count, 'device')}, {size(1e9 * count * entry['memory'])} in all"
            + (f"; {SHARED}" if SHARED in entry["source"] else ""),
            "matmul": ", ".join(
                f"{name} {rate(1e12 * entry['matmul'] * peak)}" for name, peak in entry["flops"].items()
            ),
            "memory": f"{size(1e9 * entry['bandwidth'])}/s",
            "all-reduce": f"{size(1e9 * entry['intra_bandwidth'])}/s from each process",
            "disk": ", ".join(f"{verb} {size(value)}/s" for verb, value in disk.items())
            + f"; cluster.storage_bandwidth = {disk['writes'] / 1e9:.2g}",
            "kept in": f"{args.out}: `bessemer plan --catalogue {args.out} --gpus '{count}x{entry['name']}'` plans with it",
        }
        print("\n".join(f"{name:<12} {value}" for name, value in shown.items()))
    return {"file": args.out, "device": entry, "disk": disk}
