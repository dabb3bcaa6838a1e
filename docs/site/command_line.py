"""The reference of the command line, made from the parser of the program."""

from __future__ import annotations

import argparse
import re

from bessemer.cli import command_parser

PLACEHOLDER = re.compile(r"[<>|]")


def command_line() -> str:
    """Return Markdown: each command with its usage and a table of its options."""
    parser = command_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, command in commands.choices.items():
        command.prog = f"bessemer {name}"
        usage = command.format_usage().removeprefix("usage: ").rstrip()
        parts += [f"## bessemer {name}", command.description or "", f"```\n{usage}\n```"]
        rows = [
            row(action) for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"
        ]
        if rows:
            parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def row(action: argparse.Action) -> str:
    """Return the row of one argument or option."""
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    names = ", ".join(action.option_strings)
    word = f"{names} {value}".strip() if names else value
    choices = f" One of {', '.join(map(str, action.choices))}." if action.choices else ""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%") + choices
    return f"| `{word}` | {PLACEHOLDER.sub(lambda sign: chr(92) + sign[0], text)} |"
