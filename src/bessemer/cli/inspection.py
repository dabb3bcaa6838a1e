"""Commands that look: `bessemer trace`, `diagnose`, `watch` and `report` at runs, `recipe` at shipped recipes and keys."""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.cli.run import planned_against_measured
from bessemer.errors import InputError
from bessemer.terminal import one_line, printable, say, text_table

if TYPE_CHECKING:
    import argparse

    from bessemer.run import RunFolder
    from bessemer.train.diagnose import Diagnosis

SHOWN_SEQUENCES, SHOWN_DOCUMENTS = 5, 3  # of a diagnosed step's batch
SHOWN_CHARACTERS = 240  # of a sequence


def trace(args: argparse.Namespace) -> Any:
    from bessemer.guard.journal import Journal
    from bessemer.recipe import load
    from bessemer.run import RunFolder
    from bessemer.tokens import ledger
    from bessemer.tokens.shards import TokenStore

    if args.step is not None:
        session, resolved = runs.open_trained(args)
        store = TokenStore.open(session.run.tokens)
        omitted = Journal.read(session.run.journal).omitted
        rows = ledger.step_documents(resolved, store, session.run.corpus, args.step, args.text, omitted)
        if not args.json:
            _print_columns(rows)
        return rows
    # Documents of a corpus and its tokens need no recipe, which a run folder has only once training is prepared.
    folder = Path(args.run)
    run = RunFolder(folder) if folder.is_dir() else runs.open_run(args).run
    opened = TokenStore.open(run.tokens) if (run.tokens / "manifest.json").exists() else None
    if args.token is not None:
        document = ledger.token(opened or TokenStore.open(run.tokens), run.corpus, args.token, args.text)
    else:
        document = ledger.document(opened, run.corpus, args.document, args.text)
        if opened is not None and run.recipe.exists() and document.get("split") == "train":
            resolved = load(run.recipe, args.overrides)
            omitted = Journal.read(run.journal).omitted
            document["steps"] = ledger.document_steps(resolved, opened, run.corpus, document["document"], omitted)
    if not args.json:
        _print_document(document)
    return document


def _print_columns(rows: list[dict[str, Any]]) -> None:
    """Rows of the same keys under their names; columns without any value are left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] != "" for row in rows)]
    cells = [[one_line(str(row[name])) for name in names] for row in rows]
    if cells:
        print("\n".join(text_table(names, cells, "l" * len(names))))


def _print_document(document: dict[str, Any]) -> None:
    for key, value in document.items():
        if key == "steps":
            for row in value:
                print(f"{'step':<12} {row['step']}  sample {row['sample']}")
        elif value != "":
            print(f"{key:<12} {printable(str(value))}")


def diagnose(args: argparse.Namespace) -> dict[str, Any]:
    from bessemer.tokens import ledger
    from bessemer.train.diagnose import diagnose

    session, resolved = runs.open_trained(args)
    found = diagnose(resolved, session.run, args.step)
    names = [name for one in found.sequences[:SHOWN_SEQUENCES] for name in one.documents[:SHOWN_DOCUMENTS]]
    documents = ledger.known(session.run.corpus, names, text=True)
    if not args.json:
        _print_diagnosis(found, documents)
    return {**found.to_dict(), "documents": documents}


def _print_diagnosis(found: Diagnosis, documents: dict[str, dict[str, Any]]) -> None:
    from bessemer.tokens import ledger
    from bessemer.train.diagnose import MEANINGS

    print(f"step {found.step}: {found.kind}: {MEANINGS[found.kind]}")
    if found.incident is not None:
        row = found.incident
        print(f"  the run recorded at step {row['step']}: {row['what']}: {row['cause']}; {row['action']}")
        if row["onset"] < found.step:
            print(f"  that began at step {row['onset']}: look at it too")
    since = f"step {found.replayed_from}" if found.replayed_from else "the start"
    first = found.first_difference
    print(f"  replayed from {since}; " + (f"step {first} was the first to differ" if first else "every step repeats"))
    for finding in found.findings:
        print(f"  {finding}")
    print("the worst sequences of its batch, each alone")
    for one in found.sequences[:SHOWN_SEQUENCES]:
        print(f"  sample {one.sample}: {one.figures}\n    {one_line(one.text)[:SHOWN_CHARACTERS]}")
        for name in one.documents[:SHOWN_DOCUMENTS]:
            place = ledger.where(documents.get(name, {}))
            print(f"    in {name}{f'  {place}' if place else ''}")
        if (rest := len(one.documents) - SHOWN_DOCUMENTS) > 0:
            print(f"    and {rest} more")


def _folders(args: argparse.Namespace) -> list[RunFolder]:
    """The runs that `args.run` names, each once."""
    folders = [runs.folder_of(place, args.overrides, args.command) for place in args.run]
    if len({run.path.resolve() for run in folders}) < len(folders):
        raise InputError(f"{args.command}: one run is given twice; name each once")
    return folders


def watch(args: argparse.Namespace) -> Any:
    """Serve the live page until Ctrl-C, or show the same as text; with --json print where the runs stand and end."""
    from bessemer.watch.live import LivePage

    folders = _folders(args)
    page = [name for name in ("port", "token") if getattr(args, name) is not None]
    if page and (other := [name for name in ("json", "terminal") if getattr(args, name)]):
        raise InputError(f"watch: --{page[0]} is of the page, which --{other[0]} does not serve; leave one of them out")
    if args.json and args.terminal:
        raise InputError("watch: --json and --terminal exclude each other")
    if args.json:
        rows = [{"run": one.run.path, "name": one.name, **asdict(one.status)} for one in LivePage(folders).watched()]
        return {"runs": rows}
    if args.terminal:
        from bessemer.watch.screen import follow

        follow(folders)
        return None
    from bessemer.watch.server import Server

    with Server(folders, args.port, args.token) as server:
        say("watching; Ctrl-C ends this page, not the training")
        print(server.address, flush=True)
        if "SSH_CONNECTION" in os.environ:
            port = server.server_address[1]
            say(f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE, then open the address there")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("the page has ended")
    return None


def report(args: argparse.Namespace) -> Any:
    from bessemer.report import compare, page
    from bessemer.report.template import PAGE_MARK
    from bessemer.run import writable

    places = _folders(args)
    if len(places) > 1:
        place = writable(Path(args.out or "comparison.html"), "--out", PAGE_MARK)
        written = compare.write(place, places)
    elif args.out is not None:
        raise InputError(
            f"--out {args.out}: the page of one run is report.html in its folder; --out is for several runs"
        )
    else:
        written = page.write(places[0])
    if not args.json:
        print(written)
        if len(places) == 1 and (compared := planned_against_measured(places[0])):
            print(compared)
    return {"report": written}


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
    elif args.name in set(recipes.keys()):
        said = f"`bessemer recipe --explain {args.name}` explains it"
        raise InputError(f"{args.name}: a part of recipes, no shipped recipe; {said}")
    else:
        near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(args.name, recipes.shipped(), 1))
        raise InputError(f"{args.name}: no shipped recipe of that name; {near}there are {', '.join(recipes.shipped())}")
    if not args.json:
        print(text)
    return {"text": text}
