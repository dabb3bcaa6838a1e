"""The command-line interface: parse the arguments, run the command, print its result.

Heavy modules are imported only by the commands that need them.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import faulthandler
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

from bessemer import __version__
from bessemer.common import interrupt
from bessemer.common.console import FOR_JSON, QUIET, discard, keep_streams, printable, progress, silence_libraries
from bessemer.common.errors import BessemerError, Stopped, memory_error, redact
from bessemer.common.log_file import close_logs

EPILOG = """\
Start here:  bessemer demo            a model trained on the text already on this machine, in minutes
             bessemer run my.toml     the same on your own text
             bessemer recipe demo     a recipe to begin with
Exit codes:  0 ok, 1 failure, 2 wrong input, 75 stopped on request (the same command continues)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `bessemer` with command-line arguments, and exit with the command's exit code."""
    keep_streams()
    faulthandler.enable()  # prints the Python traceback of a crash inside a library
    try:
        interrupt.listen()
        code = run_command(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # a second Ctrl-C while the first was being reported
        code = Stopped.exit_code
    if code == Stopped.exit_code:
        # Threads of the corpus engine may still be running, and a normal exit of the interpreter can abort because of them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


RESUMABLE = frozenset({"run", "demo", "corpus", "tokens", "train", "ladder", "compare", "evaluate", "export"})


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run one command, and return its exit code.

    Every expected failure prints one line on standard error.
    """
    parser = command_parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "do"):
        parser.print_help()
        return 2
    if args.json:
        os.environ[QUIET] = FOR_JSON
    # OpenMP threads spin at a barrier before they sleep. With another process on the cores, steps are 3.7 times slower
    # with GNU OpenMP's default and 2.1 times with a short spin (benchmarks/contention.py). Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    silence_libraries()
    interrupt.listen()
    try:
        with nullcontext() if args.command in ("chat", "watch") else progress(args.command):
            result = args.do(args)
            if args.command != "watch":  # Ctrl-C is the normal end of `watch`
                interrupt.check()
        if args.json:
            print(json.dumps(result, indent=2, default=str), flush=True)
    except KeyboardInterrupt:
        advice = "; nothing is half-written, and the same command continues" if args.command in RESUMABLE else ""
        return _failed(args, Stopped(f"stopped{advice}"))
    except BessemerError as error:
        return _failed(args, error)
    except BrokenPipeError:  # the reader of a pipe has closed it, as in `bessemer trace ... | head`
        discard(sys.stdout)  # prevents an error in Python's last flush
        return 0
    except OSError as error:
        return _failed(args, BessemerError(_os_error(error)))
    except (MemoryError, RuntimeError) as error:
        if (lack := memory_error(error, f"bessemer {args.command}")) is None:
            raise
        return _failed(args, lack)
    finally:
        close_logs()
    return int(getattr(args, "exit_code", 0))  # `check` and `plan` set it by their result


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command, or the recipe key that an unknown option means.

    No option begins with a digit, so -1T and -5TB are values, which their own parsers check.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own matches only numbers such as -1 and -0.5

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '([\w-]*)' \(choose from (.*)\)", message):
            if close := difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), 1):
                message = f"{message.partition(' (')[0]}; did you mean {close[0]}?"
        elif match := re.search(r"unrecognized arguments: --([\w.-]+)", message):
            from bessemer.recipe.keys import keys_and_limits, nearest

            name, known = match[1].replace("-", "_"), list(keys_and_limits())
            same = (key for key in (f"train.{name}", *known) if key in known and key.endswith(f".{name}"))
            if near := next(same, None) or nearest(f"train.{name}", known):
                message += f"; keys of the recipe are given as --set {near}=VALUE"
        elif "unrecognized arguments" in message and "--set" in sys.argv:
            message += "; write --set KEY=VALUE, with quotes around it where it has spaces"
        super().error(redact(message))


def command_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    from bessemer.cli.commands import COMMANDS, add_options

    parser = _Parser(
        prog="bessemer",
        description="Train language models, from raw text to a verified, exported model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bessemer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for one in COMMANDS:
        command = commands.add_parser(
            one.name, help=one.help, description=f"{one.help[0].upper()}{one.help[1:]}.", usage=one.usage,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=28),
        )  # fmt: skip
        command.set_defaults(do=one.do, command=one.name)
        command.add_argument("--json", action="store_true", help="print one JSON value; warnings go to standard error")
        add_options(command, one.options)
        if one.either:
            add_options(command.add_mutually_exclusive_group(required=True), one.either)
        for title, options in one.groups.items():
            add_options(command.add_argument_group(title), options)
    return parser


def _failed(args: argparse.Namespace, error: BessemerError) -> int:
    message = str(error)
    if args.json:
        print(json.dumps({"error": message, "exit": error.exit_code}))
    elif message:  # an empty message means that another node reports the error
        print(f"bessemer: {printable(message)}", file=sys.stderr)
    return error.exit_code


def _os_error(error: OSError) -> str:
    """Describe an error of the file system, with advice."""
    path, advice = f"{error.filename}: " if error.filename else "", ""
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        advice = "; free some space, the same command then continues"
    elif error.errno in (errno.EACCES, errno.EROFS):
        advice = "; choose another folder with --set run.dir=PATH"
    return f"{path}{error.strerror or error}{advice}"
