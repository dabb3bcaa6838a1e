"""`bessemer recipe`: shipped recipes, and what keys mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError

if TYPE_CHECKING:
    import argparse
import difflib


def add(commands: Any) -> None:
    recipe_ = commands.add("recipe", "show a shipped recipe, or explain a key", recipe)
    recipe_.add_argument("name", nargs="?", help="the shipped recipe to print; left out: list them")
    recipe_.add_argument(
        "--explain", nargs="?", const="", metavar="KEY", help="what a key means; without KEY: list all keys"
    )


def recipe(args: argparse.Namespace) -> Any:
    from bessemer import recipe as recipes

    if args.explain is not None:
        text = recipes.explain(args.explain) if args.explain else "\n".join(
            f"{key:<36} {info.description}" for key, info in recipes.keys().items()
        )  # fmt: skip
    elif args.name is None:
        text = "\n".join(f"{name:<12} {toml.splitlines()[0].lstrip('# ')}" for name, toml in recipes.shipped().items())
    elif args.name in recipes.shipped():
        text = recipes.shipped()[args.name].rstrip()
    else:
        near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(args.name, recipes.shipped(), 1))
        raise InputError(f"{args.name}: no shipped recipe of that name; {near}there are {', '.join(recipes.shipped())}")
    if not args.json:
        print(text)
    return {"text": text}
