"""The options of `bessemer ladder`: which of its two works is asked for, and which options belong to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.ladder import command, mixture, page
from bessemer.stages import Session
from bessemer.terminal import say


def do(session: Session, given: argparse.Namespace) -> dict[str, Any]:
    """Do what the options ask and, unless it is for a machine, print it."""
    found, shown, ending = run(session, vars(given))
    if not given.json:
        print(shown)
        say(ending)
    return found


def run(session: Session, given: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Do what the options ask. Returns the values, the table of them, and where they lie; raises InputError for options that
    do not belong together."""
    folder = Path(given["folder"]) if given["folder"] else None
    shared = {"rungs": given["rungs"], "budget": given["budget"], "folder": folder, "restart": given["restart"]}
    if given["mixture"]:
        if given["design"] is not None or given["ratio"] is not None:
            raise InputError("ladder: --mixture has proxies of one size; leave out --design and --ratio")
        asked = mixture.AskedMixture(target=given["target"] or mixture.MEAN, verify=given["verify"], **shared)
        found = mixture.mixture(session, asked)
        return found, page.table(found), page.ending(found)
    if given["target"] is not None or given["verify"]:
        raise InputError("ladder: --target and --verify belong to --mixture; add it, or leave them out")
    design = given["design"] or command.Asked.design
    found = command.ladder(session, command.Asked(design=design, ratio=given["ratio"], **shared))
    return found, page.table(found), page.ending(found)
