"""`bessemer run` and `bessemer demo` (all stages of a recipe), `bessemer corpus` and `bessemer tokens` (single stages)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from bessemer.cli import runs
from bessemer.common.console import say
from bessemer.run.directory import RunDirectory

WIDTH = 100  # characters per line of the results


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
    """Run the corpus filters on a sample of documents, print the counts by reason, and return them.

    It neither reads nor writes a run directory.
    """
    from bessemer.common.errors import InputError
    from bessemer.corpus import dry_run
    from bessemer.recipe import load

    if args.sample < 1:
        raise InputError(f"--sample {args.sample}: not a number of documents; give for example 1000")
    corpus = load(args.recipe, args.overrides, may_be_unnamed=True, trust_code=args.trust_code).corpus
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe names no source of text; add a [[corpus.sources]] table")
    result = dry_run.dry_run(corpus, args.sample)
    if not args.json:
        print("\n".join(dry_run.lines(result)))
    return result


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
    """Print the recipe that was made for a folder or a file of text."""
    from rich.markup import escape

    from bessemer.recipe.load import is_text, recipe_for_text

    if is_text(path):
        text = escape(recipe_for_text(path.resolve(), overrides).strip()).replace("\n", "\n  ")
        say(f"[dim]  {text}[/]")


def print_verdict(run: RunDirectory) -> None:
    """Print a warning if the run's model has learned nothing or is worse than a byte 5-gram."""
    from rich.markup import escape

    from bessemer.report import data, summary

    if line := summary.verdict(data.read(run)):
        say(f"\n[yellow]{escape(fill(line, WIDTH))}[/]")


def print_results(run: RunDirectory, *more: str) -> None:
    """Print the score with its baselines, the paths of the run's files, and commands to try next.

    `more` are commands to print after the usual ones.
    """
    from rich.markup import escape

    from bessemer.report import data, planned, story, summary

    values = data.read(run)
    say(f"\n[bold]{escape(fill(summary.headline(values), WIDTH))}[/]")
    if not summary.learned_nothing(values):  # the headline has that
        print_verdict(run)
    rows = [("curve", summary.curve_finding(values)), ("report", str(run.report))]
    if incidents := story.incident_counts(values):
        rows.insert(1, ("incidents", f"{incidents}: the report has causes and advice"))
    rows += [("model", str(run.export))] * run.export.exists()
    rows += [("measured", planned.in_short(planned.compare(values)))]
    next_commands = list(more)
    for sample in (values.evaluation or {}).get("samples", ())[-1:]:
        prompt, answers = sample["prompt"], any(values.has_conversations)
        text = prompt + " " * answers + sample["text"]
        rows.insert(0, ("sample", shorten(text, WIDTH - 12, placeholder=" ...")))
        first_line = shlex.quote(prompt.partition("\n")[0])
        talk = f"chat {run.path}" if answers else f"generate {run.path} {first_line}"
        next_commands.insert(0, f"bessemer {talk}")
    rows += [("next" if number == 0 else "", command) for number, command in enumerate(next_commands)]
    say("\n" + "\n".join(f"  {name:10}{escape(text)}" for name, text in rows if text))


def _print_demo(run: RunDirectory) -> None:
    print_results(
        run,
        f"bessemer trace {run.path} --step 10    # which documents step 10 read",
        "bessemer demo --set run.name=longer --set train.minutes=20",
        "bessemer recipe demo > my.toml    # edit it, then: bessemer run my.toml",
    )
