"""`bessemer corpus` and `bessemer tokens`: the stages before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    options.add_recipe(commands.add("corpus", "raw sources to clean documents", corpus))
    options.add_recipe(commands.add("tokens", "clean documents to a tokenizer and token shards", tokens))


def corpus(args: argparse.Namespace) -> Any:
    from bessemer import stages

    session = runs.open_recipe(args, fill_derived=False)
    with session.run.writing():
        stages.corpus(session)
    return {"stages": session.results, "folder": session.run.corpus, **runs.corpus_statistics(session.run)}


def tokens(args: argparse.Namespace) -> Any:
    from bessemer import stages

    session = runs.open_recipe(args, fill_derived=False)
    if session.recipe.corpus.sources:
        runs.require_stage(args, session.run.corpus / "documents", "documents", "corpus")
    with session.run.writing():
        stages.tokens(session)
    return {"stages": session.results, "folder": session.run.tokens}
