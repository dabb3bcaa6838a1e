"""Commands that train small models: `bessemer check` runs the launch checklist of a recipe, `ladder` predicts a large run or a
better mixture, `study` teaches."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.errors import BessemerError, InputError
from bessemer.terminal import say

if TYPE_CHECKING:
    import argparse


def check(args: argparse.Namespace) -> Any:
    """Print the checklist; the exit code is 1 where a row fails. Returns it as plain values."""
    from bessemer.check.command import checked
    from bessemer.check.rows import is_go, table, to_dict, verdict

    session = runs.open_recipe(args, fill_derived=False)
    rows = checked(session.recipe, session.run, args.recipe)
    if not args.json:
        print(f"{table(rows)}\n\n{verdict(rows)}")
    args.exit_code = 0 if is_go(rows) else 1
    return to_dict(rows)


def ladder(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.ladder import command, mixture, summary

    session = runs.open_recipe(args)
    folder = Path(args.folder) if args.folder else None
    shared = {"rungs": args.rungs, "budget": args.budget, "folder": folder, "restart": args.restart}
    result: dict[str, Any]
    if args.mixture:
        if args.design is not None or args.ratio is not None or args.seeds is not None:
            raise InputError("ladder: --mixture has proxies of one size; leave out --design, --ratio and --seeds")
        result = mixture.mixture(session, target=args.target or mixture.MEAN, verify=args.verify, **shared)
    elif args.target is not None or args.verify:
        raise InputError("ladder: --target and --verify belong to --mixture; add it, or leave them out")
    else:
        result = command.ladder(session, design=args.design, ratio=args.ratio, seeds=args.seeds, **shared)
    if not args.json:
        print(summary.table(result))
        say(summary.ending(result))
    return result


def study(args: argparse.Namespace) -> Any:
    from bessemer import studies

    folder = None if args.folder is None else Path(args.folder)
    if args.all:
        return _all_studies(args, folder)
    if args.name is None:
        if args.html is not None or args.short or folder is not None:
            raise InputError(
                "study: --html, --short and --folder are of one study; give its NAME, or --all with --folder"
            )
        rows = {name: study.what for name, study in studies.STUDIES.items()}
        if not args.json:
            print("\n".join(f"{name:<26} {what}" for name, what in rows.items()))
        return rows
    page = None
    if args.html is not None:
        from bessemer.report.template import PAGE_MARK
        from bessemer.run import writable

        page = writable(Path(args.html), "--html", PAGE_MARK)
    result, table = studies.run(args.name, args.short, folder)
    if page is not None:
        from bessemer.studies import pages

        pages.write(page, args.name, result, table)
    if not args.json:
        print(table)
        sentences = (f"Expected: {result['expected']}", *(f"- {sentence}" for sentence in result["shows"]))
        print("\n".join(["", *(textwrap.fill(line, 120, subsequent_indent="  ") for line in sentences)]))
        if page is not None:
            say(f"written: {page}")
    if missed := result.get("missed"):
        more = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        raise BessemerError(f"study {args.name}: {missed[0]}{more}; all of it is in {result['folder']}")
    return result


def _all_studies(args: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    from bessemer.studies import pages

    if args.name is not None or args.html is not None or args.short:
        raise InputError("study --all: it takes neither a NAME nor --html nor --short; leave them out")
    place = folder or Path("runs/studies")
    done = pages.run_all(place)
    say(f"written: {place / 'index.html'}")
    if failed := [name for name, entry in done.items() if "error" in entry]:
        raise BessemerError(f"study --all: failed: {', '.join(failed)}; the rest is in {place / 'index.html'}")
    return done
