"""`bessemer schedule`: a pipeline schedule as a diagram, its bubble and its activations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs
from bessemer.errors import InputError
from bessemer.terminal import coloured

if TYPE_CHECKING:
    import argparse

    from bessemer.model.config import ModelConfig
    from bessemer.stages import Session


def add(commands: Any) -> None:
    schedule_ = commands.add("schedule", "a pipeline schedule drawn: bubble, utilisation, activations", schedule)
    schedule_.add_argument("name", metavar="NAME", help="gpipe, 1f1b, interleaved, zbv or dualpipev")
    schedule_.add_argument("recipe", nargs="?", help=f"cut the model of this recipe into stages: {options.RECIPE}")
    options.add_overrides(schedule_)
    schedule_.add_argument("--stages", type=int, metavar="N", help="ranks of the pipeline", required=True)
    schedule_.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of a step", required=True)
    schedule_.add_argument("--virtual", type=int, metavar="V", help="stages of each rank (interleaved; default 2)")
    schedule_.add_argument("--backward", type=float, default=2.0, metavar="B",
                           help="duration of a stage's backward, in its forwards (default 2)")  # fmt: skip
    schedule_.add_argument("--send", type=float, default=0.0, metavar="S",
                           help="delay from one rank to the next, in forwards (default 0)")  # fmt: skip
    schedule_.add_argument("--svg", metavar="FILE", help="draw it in this file as well")


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.plan import pipeline
    from bessemer.run import write_atomic

    if args.svg is not None and not Path(args.svg).parent.is_dir():
        raise InputError(f"--svg: {Path(args.svg).parent}: no such folder to draw in; make it first")
    model = None if args.recipe is None else _resolved_model(runs.open_recipe(args))
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
    from bessemer.layout import derived_keys
    from bessemer.model.huggingface.config import model_config
    from bessemer.tokens import outlook

    vocabulary = outlook.vocabulary(session.recipe, session.run.tokens)
    labels = outlook.labels(session.recipe, session.run.tokens)
    resolved = derived_keys.resolve(session.recipe, vocabulary, labels=labels)
    return model_config(resolved, vocabulary, labels=labels if resolved.train.objective == "classify" else 0)
