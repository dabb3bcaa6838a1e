"""Commands that inspect: `bessemer trace`, `watch` and `report` show runs, `recipe` shows recipes and keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import runs
from bessemer.common.console import one_line, printable, say, text_table
from bessemer.common.errors import InputError
from bessemer.run.directory import RunDirectory
from bessemer.run.files import require_output_path

if TYPE_CHECKING:
    import argparse

    from bessemer.recipe import ResolvedRecipe


def trace(args: argparse.Namespace) -> Any:
    from bessemer.guard.journal import Journal
    from bessemer.recipe import load_resolved
    from bessemer.tokens import trace
    from bessemer.tokens.shards import TokenStore

    if args.replay and args.step is None:
        raise InputError("--replay: it needs the step to replay; add --step N")
    if not args.replay:
        args.trust_code = None  # only a replay loads code
    if args.step is not None:
        session, resolved = runs.open_trained(args)
        replayed = _replay(args, resolved, session.run) if args.replay else {}
        store, omitted = TokenStore.open(session.run.tokens), Journal.read(session.run.journal).omitted
        omitted = replayed.get("omitted", omitted)
        rows = trace.step_documents(resolved, store, session.run.corpus, args.step, args.text, omitted)
        if not args.json:
            _print_columns(rows)
        return {**replayed, "documents": rows} if replayed else rows
    # Tracing a document needs no recipe, and a run directory has none before training is prepared.
    folder = Path(args.run)
    run = RunDirectory(folder) if folder.is_dir() else runs.open_run(args).run
    tokens = TokenStore.open(run.tokens) if (run.tokens / "manifest.json").exists() else None
    document = trace.find_document(tokens, run.corpus, args.document, args.text)
    if tokens is not None and run.recipe.exists() and document.get("split") == "train":
        resolved = load_resolved(run.recipe, args.overrides)
        omitted = Journal.read(run.journal).omitted
        document["steps"] = trace.document_steps(resolved, tokens, run.corpus, document["document"], omitted)
    if not args.json:
        _print_document(document)
    return document


def _print_columns(rows: list[dict[str, Any]]) -> None:
    """Print rows that share the same keys as a table, without empty columns."""
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


def _replay(args: argparse.Namespace, recipe: ResolvedRecipe, run: RunDirectory) -> dict[str, Any]:
    """Replay training step `args.step`, print if it gave the same numbers as in the run, and return the result."""
    from bessemer.check.replay import replay

    result = replay(recipe, run, args.step)
    tests = result["figures"] | {f"sample {name} alone": test for name, test in [*result["sequences"].items()][:5]}
    if not args.json:
        incident, first = result["incident"] or {"what": "none", "cause": ""}, result["first_difference"] or "none"
        print(f"step {args.step}: {result['kind']}: {result['meaning']}")
        print(f"  incident: {incident['what']} {incident['cause']}")
        print(f"  replayed from step {result['replayed_from']}; first step that differs from the run: {first}")
        for name, test in tests.items():
            print(f"  {name}: loss {test['loss']}, gradient norm {test['grad_norm']}")
    return result


def _folders(args: argparse.Namespace) -> list[RunDirectory]:
    """Return the run directories that `args.run` names. Raises InputError if one is named twice."""
    folders = [runs.folder_of(name, args.overrides, args.command) for name in args.run]
    if len({run.path.resolve() for run in folders}) < len(folders):
        raise InputError(f"{args.command}: a run is named twice; name each run once")
    return folders


def watch(args: argparse.Namespace) -> Any:
    """Serve the live page until Ctrl-C; with --json print the status of the runs once."""
    from bessemer.report.data import RunReader
    from bessemer.report.live_page import read_runs

    folders = _folders(args)
    if args.json and args.port is not None:
        raise InputError("watch: --json and --port exclude each other; give one of them")
    if args.json:
        runs_now = read_runs([RunReader(run) for run in folders])
        return {"runs": [{"run": run.run.path, "name": run.name, **asdict(run.status)} for run in runs_now]}
    from bessemer.report.live_server import Server

    with Server(folders, args.port) as server:
        say("watching; Ctrl-C ends this page, not the training")
        print(server.address, flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("the page has ended")
    return None


def report(args: argparse.Namespace) -> Any:
    from bessemer.report import comparison, page
    from bessemer.report.template import PAGE_MARK

    places = _folders(args)
    if len(places) > 1:
        path = require_output_path(Path(args.out or "comparison.html"), "--out", PAGE_MARK)
        written = comparison.write(path, places)
    elif args.out is not None:
        raise InputError(f"--out {args.out}: one run is reported in its own folder; name several runs, or leave it out")
    else:
        written = page.write(places[0])
    if not args.json:
        print(written)
    return {"report": written}


def recipe(args: argparse.Namespace) -> Any:
    from bessemer import recipe as recipes
    from bessemer.cli.explain_key import explain

    if args.explain is not None:
        text = explain(args.explain) if args.explain else "\n".join(
            f"{key:<36} {info.description}" for key, info in recipes.keys().items()
        )  # fmt: skip
    elif args.name is None:
        text = "\n".join(f"{name:<12} {toml.splitlines()[0].lstrip('# ')}" for name, toml in recipes.shipped().items())
    elif args.name in recipes.shipped():
        text = recipes.shipped()[args.name].rstrip()
    else:
        names = ", ".join(recipes.shipped())
        raise InputError(f"{args.name}: no such shipped recipe; choose one of {names}, or explain a key with --explain")
    if not args.json:
        print(text)
    return {"text": text}
