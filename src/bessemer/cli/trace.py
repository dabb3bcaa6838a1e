"""`bessemer trace`: from a step or a token to its documents and their raw files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    trace_ = commands.add("trace", "from a step or a token to its documents and their raw files, and back", trace)
    options.add_run(trace_)
    which = trace_.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="list the documents in the batch of step N (1-based)")
    which.add_argument(
        "--document",
        metavar="ID",
        help="where a document came from, where its tokens are, and, once trained, its steps",
    )
    which.add_argument(
        "--token", metavar="SHARD:OFFSET", help="the document of one token, as in prose-train-00000:1234"
    )
    trace_.add_argument("--text", action="store_true", help="also show how the documents begin")


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
            document["steps"] = ledger.document_steps(resolved, opened, run.corpus, args.document, omitted)
    if not args.json:
        _print_document(document)
    return document


def _print_columns(rows: list[dict[str, Any]]) -> None:
    """Rows of the same keys under their names; columns without any value are left out."""
    rows = [{name: " ".join(str(value).split()) for name, value in row.items()} for row in rows]
    names = [name for name in (rows[0] if rows else ()) if any(row[name] != "" for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in [{name: name for name in names}, *rows] if rows else []:
        print("  ".join(f"{row[name]:<{widths[name]}}" for name in names).rstrip())


def _print_document(document: dict[str, Any]) -> None:
    for key, value in document.items():
        if key == "steps":
            for row in value:
                print(f"{'step':<12} {row['step']}  sample {row['sample']}")
        elif value != "":
            print(f"{key:<12} {value}")
