"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError

if TYPE_CHECKING:
    import argparse

    from bessemer.evaluate.generation import Sampling

RECIPE = "a recipe file, the name of a shipped one (`bessemer recipe`), a run folder, or a folder of text"


def add_recipe(command: Any, help: str = RECIPE, **how: Any) -> None:
    """The recipe that the command is about, and changes of its keys."""
    command.add_argument("recipe", help=help, **how)
    add_overrides(command)


def add_run(command: Any) -> None:
    """The run that the command is about, and changes of its recipe."""
    command.add_argument("run", help="a run folder, or the recipe of a run")
    add_overrides(command)


def add_overrides(command: Any) -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="override a recipe key, for example train.steps=50",
    )  # fmt: skip


def add_changes(command: Any) -> None:
    command.add_argument("--accept-changes", action="store_true", help="continue although the recipe has changed")
    command.add_argument(
        "--restart", action="store_true", help="train from the start; the earlier training is set aside"
    )


def add_average(command: Any) -> None:
    command.add_argument(
        "--average", type=int, default=1, metavar="N", help="use the mean of the weights of the N newest checkpoints"
    )


def average(args: argparse.Namespace) -> int:
    """Number of checkpoints to average. Raises InputError."""
    count: int = args.average
    if count < 1:
        raise InputError(f"--average: {count} is not a number of checkpoints; give 1 or more")
    return count


def add_sampling(command: Any) -> None:
    command.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to write (default 200)")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default 0.8)")
    command.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="sample from the K likeliest tokens; 0: all (default 50)"
    )
    command.add_argument(
        "--top-p", type=float, default=1.0, metavar="P",
        help="sample from the likeliest tokens that together have probability P (default 1: all)",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampling (default 0)")


def sampling(args: argparse.Namespace) -> Sampling:
    """How to sample. Raises InputError."""
    from bessemer.evaluate.generation import Sampling

    if args.max_tokens < 1:
        raise InputError(f"--max-tokens: {args.max_tokens} is not a number of tokens to write; give 1 or more")
    return Sampling(args.temperature, args.top_k, args.top_p, args.seed)
