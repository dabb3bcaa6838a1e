"""Options as data, and those that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError

if TYPE_CHECKING:
    import argparse

    from bessemer.model.generation import Sampling

Option = tuple[str, dict[str, Any]]
RECIPE = "a recipe file, the name of a shipped one (`bessemer recipe`), a run folder, or a folder of text"


@dataclass(frozen=True)
class Command:
    """A command. do: called with the parsed arguments; what it returns is printed under --json. either: options of which
    exactly one is given; groups: more options, by the title under which the help lists them."""

    name: str
    help: str
    do: Callable[[argparse.Namespace], Any]
    options: tuple[Option, ...] = ()
    either: tuple[Option, ...] = ()
    groups: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    usage: str | None = None


def option(name: str, help: str, **how: Any) -> Option:
    """An option or a positional argument, in argparse's terms."""
    return name, {"help": help, **how}


def flag(name: str, help: str) -> Option:
    """An option without a value."""
    return option(name, help, action="store_true")


def add_options(parser: Any, options: Iterable[Option]) -> None:
    for name, how in options:
        parser.add_argument(name, **how)


OVERRIDES = option(
    "--set", "override a recipe key, for example train.steps=50", action="append", default=[], metavar="KEY=VALUE",
    dest="overrides",
)  # fmt: skip
OF_RECIPE = (option("recipe", RECIPE), OVERRIDES)
OF_RUN = (option("run", "a run folder, or the recipe of a run"), OVERRIDES)
CHANGES = (
    flag("--accept-changes", "continue although the recipe has changed"),
    flag("--restart", "train from the start; the earlier training is set aside"),
)
AVERAGE = option(
    "--average", "use the mean of the weights of the N newest checkpoints", type=int, default=1, metavar="N"
)
SAMPLING = (
    option("--max-tokens", "tokens to write (default 200)", type=int, default=200, metavar="N"),
    option("--temperature", "0 is greedy (default 0.8)", type=float, default=0.8, metavar="T"),
    option("--top-k", "sample from the K likeliest tokens; 0: all (default 50)", type=int, default=50, metavar="K"),
    option("--top-p", "sample from the likeliest tokens that together have probability P (default 1: all)", type=float,
           default=1.0, metavar="P"),
    option("--seed", "seed of the sampling (default 0)", type=int, default=0, metavar="S"),
)  # fmt: skip


def average(args: argparse.Namespace) -> int:
    """Number of checkpoints to average. Raises InputError."""
    count: int = args.average
    if count < 1:
        raise InputError(f"--average: {count} is not a number of checkpoints; give 1 or more")
    return count


def sampling(args: argparse.Namespace) -> Sampling:
    """How to sample. Raises InputError."""
    from bessemer.model.generation import Sampling

    if args.max_tokens < 1:
        raise InputError(f"--max-tokens: {args.max_tokens} is not a number of tokens to write; give 1 or more")
    return Sampling(args.temperature, args.top_k, args.top_p, args.seed)
