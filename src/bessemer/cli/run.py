"""`bessemer run` and `bessemer demo`, every stage of a recipe; `bessemer corpus` and `bessemer tokens`, those before training."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bessemer.cli import runs
from bessemer.common.console import say
from bessemer.run.directory import RunDirectory


def demo(args: argparse.Namespace) -> Any:
    args.recipe = "demo"
    return run(args, finish=_print_demo)


def run(args: argparse.Namespace, finish: Callable[[RunDirectory], None] | None = None) -> Any:
    from bessemer.workflow import preflight, stages

    session = runs.open_recipe(args, fill_derived=False)
    preflight.check(session.recipe, session.run, args.recipe, session.recipe.export.hf, restarts=args.restart)
    with session.run.lock():
        runs.restart(args, session)
        say(f"[bold]bessemer[/] {args.recipe} -> {session.run.path}")
        _print_recipe_of_text(Path(args.recipe), args.overrides)
        stages.run_all(session)
    (finish or print_results)(session.run)
    return runs.summary(session)


def corpus(args: argparse.Namespace) -> Any:
    from bessemer.workflow import stages

    if args.sample is not None:
        return _sample(args)
    session = runs.open_recipe(args, fill_derived=False)
    with session.run.lock():
        stages.corpus(session, reads=True)
    return {"stages": session.results, "folder": session.run.corpus, **runs.corpus_statistics(session.run)}


def _sample(args: argparse.Namespace) -> Any:
    """A dry run of the rules; no run directory is touched."""
    from bessemer.common.errors import InputError
    from bessemer.corpus import dry_run
    from bessemer.recipe import load

    if args.sample < 1:
        raise InputError(f"--sample {args.sample}: give the number of documents, for example 1000")
    corpus = load(args.recipe, args.overrides, may_be_unnamed=True, trust_code=args.trust_code).corpus
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe names no source of text; add a [[corpus.sources]] table")
    found = dry_run.dry_run(corpus, args.sample)
    if not args.json:
        print("\n".join(dry_run.lines(found)))
    return found


def tokens(args: argparse.Namespace) -> Any:
    from bessemer.storage.path import published_folder
    from bessemer.workflow import stages

    session = runs.open_recipe(args, fill_derived=False)
    if session.recipe.corpus.sources:
        runs.require_stage(args, published_folder(session.run.corpus) / "documents", "documents", "corpus")
    with session.run.lock():
        stages.tokens(session)
    return {"stages": session.results, "folder": session.run.tokens}


def _print_recipe_of_text(path: Path, overrides: Sequence[str]) -> None:
    """The recipe that was made for a folder or a file of text."""
    from rich.markup import escape

    from bessemer.recipe.load import is_text, recipe_for_text

    if is_text(path):
        text = escape(recipe_for_text(path.resolve(), overrides).strip()).replace("\n", "\n  ")
        say(f"[dim]  {text}[/]")


def planned_against_measured(run: RunDirectory) -> str:
    """Return lines that compare the plan's step time and memory with the measured ones; empty where one is unknown."""
    from bessemer.report import data, planned

    rows = planned.rows(planned.compare(data.read(run)))
    return "\n".join(f"  {name:<7} {text}" for name, text in rows.items())


def print_verdict(run: RunDirectory) -> None:
    """Print a line about a model that has learned nothing or is worse than a byte 5-gram."""
    from rich.markup import escape

    from bessemer.report import data, summary

    if line := summary.verdict(data.read(run)):
        say(f"\n  [yellow]{escape(line)}[/]")


def print_results(run: RunDirectory) -> None:
    print_verdict(run)
    if compared := planned_against_measured(run):
        say(f"\n{compared}")
    model = f"\n  model   {run.export}" if run.export.exists() else ""
    say(f"\n  report  {run.report}{model}\n  folder  {run.path}")


def _print_demo(run: RunDirectory) -> None:
    """Print the result, a sample, where the files are, and what to try next."""
    from rich.markup import escape

    from bessemer.report import data, summary

    found = data.read(run)
    say(f"\n[bold]{escape(summary.headline(found))}[/]")
    samples = found.evaluation["samples"]
    for sample in samples[-1:]:
        say("\n[dim]It writes, after the bold:[/]")
        say("  [bold]" + escape(sample["prompt"]) + "[/]" + escape(sample["text"].rstrip()).replace("\n", "\n  "))
    print_results(run)
    say(
        "\n[bold]Try next[/]"
        + (f"\n  bessemer generate {run.path} 'import os' --temperature 0.5" if samples else "")
        + f"\n  bessemer trace {run.path} --step 100          which documents step 100 read"
        "\n  bessemer demo --set run.name=longer --set train.minutes=20"
        "\n  bessemer recipe demo > my.toml                make it yours, then: bessemer run my.toml"
    )
