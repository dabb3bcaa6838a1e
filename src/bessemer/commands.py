"""What each command does: read the arguments, call the stage, print for people or return a value for machines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import BessemerError, InputError
from bessemer.screens import demo_screen, planned_lines, print_columns, run_screen
from bessemer.terminal import amount, say

if TYPE_CHECKING:
    from bessemer.evaluate.generation import Sampling
    from bessemer.model.transformer import Transformer
    from bessemer.recipe import Recipe
    from bessemer.run import RunFolder
    from bessemer.stages import Session
    from bessemer.tokens.shards import TokenStore
    from bessemer.tokens.tokenizer import Tokenizer


def demo(given: argparse.Namespace) -> Any:
    given.recipe = "demo"
    return run(given, finish=demo_screen)


def run(given: argparse.Namespace, finish: Callable[[RunFolder], None] | None = None) -> Any:
    from bessemer import preflight, stages

    session = _session(given, fills=False)
    preflight.check(session.recipe, session.run, given.recipe)
    with session.run.writing():
        _restart(given, session)
        say(f"[bold]bessemer[/] {given.recipe} -> {session.run.path}")
        _say_recipe(Path(given.recipe), given.overrides)
        stages.run_all(session)
    (finish or run_screen)(session.run)
    return _summary(session)


def _say_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Print the recipe that was made for a folder or a file of text."""
    from rich.markup import escape

    from bessemer.recipe import is_text, recipe_for_text

    if is_text(path):
        text = escape(recipe_for_text(path.resolve(), overrides).strip()).replace("\n", "\n  ")
        say(f"[dim]  {text}[/]")


def corpus(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session = _session(given, fills=False)
    with session.run.writing():
        stages.corpus(session)
    return {"stages": session.told, "folder": session.run.corpus, **_funnel(session)}


def tokens(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session = _session(given, fills=False)
    with session.run.writing():
        stages.tokens(session)
    return {"stages": session.told, "folder": session.run.tokens}


def plan(given: argparse.Namespace) -> Any:
    from bessemer import calibrating, planning

    return calibrating.plan(given, _session) if calibrating.wanted(given) else planning.plan(given, _session)


def train(given: argparse.Namespace) -> Any:
    if given.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own lines; read when torch is loaded
    from bessemer import preflight, processes, stages

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        processes.train_as_member(given, _session)
    if given.nnodes is not None:
        return processes.train_on_node(given, _session)
    session = _session(given, fills=False)
    preflight.check(session.recipe, session.run, given.recipe)
    with session.run.writing():
        _restart(given, session)
        stages.train(session, stages.prepare(session), given.profile)
    if not given.profile:
        return _summary(session)
    return {**_summary(session), "profile": _profile(given, session)}


def launch(given: argparse.Namespace) -> Any:
    from bessemer.launch import files

    session = _session(given)
    folder = Path(given.out) if given.out else session.run.path / "launch"
    written = files.write(session.recipe, given.on, folder)
    if not given.json:
        for path in written:
            print(path)
    return {"on": given.on, "files": written}


def _profile(given: argparse.Namespace, session: Session) -> Any:
    from bessemer.run import read_json
    from bessemer.train.profile import show

    if session.told[-1]["skipped"]:
        raise InputError(
            f"{session.run.path}: trained to its last step already, so there was no step to profile; "
            "add --restart, or train longer with --set train.steps=N"
        )
    found = read_json(session.run.profile / "profile.json")
    if not given.json:
        print(show(found))
    return found


def evaluate(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session, resolved = _trained(given)
    with session.run.writing():
        found = stages.evaluate(session, resolved, _average(given))
    return {key: value for key, value in found.items() if key != "inputs"}


def _average(given: argparse.Namespace) -> int:
    count: int = given.average
    if count < 1:
        raise InputError(f"--average: {count} is not a number of checkpoints; give 1 or more")
    return count


def generate(given: argparse.Namespace) -> Any:
    from bessemer.evaluate.final import complete

    sampling = _sampling(given)
    store, tokenizer, model = _opened(given)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    text = complete(model, tokenizer, prompt, given.max_tokens, sampling, store.framing, store.ends)
    if not given.json:
        print(prompt + text)
    return {"prompt": prompt, "text": text}


def chat(given: argparse.Namespace) -> Any:
    from bessemer.evaluate.chat import Chat, Template

    sampling = _sampling(given)
    store, tokenizer, model = _opened(given)
    template = Template.choose(given.template, store.folder, tokenizer)
    chat = Chat(model, tokenizer, template, sampling, given.system, store.ends)
    shown = not given.json
    if shown and sys.stdin.isatty():
        print("Write a message and press Enter; an empty line or Ctrl-D ends the conversation.")
    while message := _asked("> " if shown and sys.stdin.isatty() else ""):
        for piece in chat.reply(message, given.max_tokens):
            if shown:
                print(piece, end="", flush=True)
        if shown:
            print()
    return {"messages": chat.messages}


def _asked(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


def _sampling(given: argparse.Namespace) -> Sampling:
    from bessemer.evaluate.generation import Sampling

    if given.max_tokens < 1:
        raise InputError(f"--max-tokens: {given.max_tokens} is not a number of tokens to write; give 1 or more")
    return Sampling(given.temperature, given.top_k, given.top_p, given.seed)


def _opened(given: argparse.Namespace) -> tuple[TokenStore, Tokenizer, Transformer]:
    from bessemer.stages import opened
    from bessemer.tokens.tokenizer import Tokenizer

    session, resolved = _trained(given)
    store, restored = opened(resolved, session.run)
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", resolved.tokenizer.end_of_text)
    return store, tokenizer, restored.step.model


def import_(given: argparse.Namespace) -> Any:
    from bessemer import hub
    from bessemer.run import RunFolder
    from bessemer.train.imported import import_model

    text, commit = given.folder.removeprefix("hf:"), None
    source, name = Path(text), given.name or Path(text).resolve().name
    if given.folder.startswith("hf:") and hub.is_name(text):
        model = hub.fetched(text)
        source, commit, name = model.folder, model.commit, given.name or model.name.rpartition("/")[2]
    run = RunFolder(Path(given.dir) / name)
    if not source.is_dir():
        raise InputError(
            f"{source}: no such folder; give one with config.json, safetensors and tokenizer.json, or hf:ORG/NAME of the hub"
        )
    found = import_model(source, run, name, given.dir, commit)
    compared = "" if found.logits_max_difference is None else (
        f": transformers' logits differ by {found.logits_max_difference:.1e}"
        + (f", {found.greedy_tokens_equal} greedy tokens equal" if found.greedy_tokens_equal else "")
    )  # fmt: skip
    say(f"[green]✓[/] {found.architecture} of {amount(found.parameters)} parameters in {run.path}{compared}")
    if found.note:
        say(f"  compared: {found.note}")
    return {"run": run.path, **found.__dict__}


def export(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session, resolved = _trained(given)
    found = stages.export(session, resolved, Path(given.folder), _average(given), given.to, given.dtype)
    return {key: value for key, value in found.items() if key != "inputs"}


def trace(given: argparse.Namespace) -> Any:
    from bessemer.recipe import load
    from bessemer.run import RunFolder
    from bessemer.tokens import ledger
    from bessemer.tokens.shards import TokenStore

    if given.step is not None:
        session, resolved = _trained(given)
        store = TokenStore.open(session.run.tokens)
        rows = ledger.step_documents(resolved, store, session.run.corpus, given.step, given.text)
        if not given.json:
            print_columns(rows)
        return rows
    # What a corpus and its tokens hold needs no recipe, which a run folder has once training is prepared.
    folder = Path(given.run)
    run = RunFolder(folder) if folder.is_dir() else _existing(given).run
    opened = TokenStore.open(run.tokens) if (run.tokens / "manifest.json").exists() else None
    if given.token is not None:
        found = ledger.token(opened or TokenStore.open(run.tokens), run.corpus, given.token, given.text)
    else:
        found = ledger.document(opened, run.corpus, given.document, given.text)
        if opened is not None and run.recipe.exists() and found.get("split") == "train":
            resolved = load(run.recipe, given.overrides)
            found["steps"] = ledger.document_steps(resolved, opened, run.corpus, given.document)
    if not given.json:
        _print_document(found)
    return found


def _print_document(found: dict[str, Any]) -> None:
    for key, value in found.items():
        if key == "steps":
            for row in value:
                print(f"{'step':<12} {row['step']}  sample {row['sample']}")
        elif value != "":
            print(f"{key:<12} {value}")


def report(given: argparse.Namespace) -> Any:
    from bessemer.report import page

    session = _existing(given)
    written = page.write(session.run)
    if not given.json:
        print(written)
        if compared := planned_lines(session.run):
            print(compared)
    return {"report": written}


def study(given: argparse.Namespace) -> Any:
    from bessemer import studies

    if given.name is None:
        rows = {name: study.what for name, study in studies.STUDIES.items()}
        if not given.json:
            print("\n".join(f"{name:<26} {what}" for name, what in rows.items()))
        return rows
    found, table = studies.run(given.name, given.short, None if given.folder is None else Path(given.folder))
    if not given.json:
        print(table)
    if missed := found.get("missed"):
        more = f"; and {len(missed) - 1} more" if len(missed) > 1 else ""
        raise BessemerError(f"study {given.name}: {missed[0]}{more}; all of it is in {found['folder']}")
    return found


def ladder(given: argparse.Namespace) -> Any:
    from bessemer.ladder import options

    return options.do(_session(given), given)


def recipe(given: argparse.Namespace) -> Any:
    from bessemer import recipe as recipes

    if given.explain is not None:
        text = recipes.explain(given.explain) if given.explain else "\n".join(
            f"{key:<36} {info.description}" for key, info in recipes.keys().items()
        )  # fmt: skip
    elif given.name is None:
        text = "\n".join(f"{name:<12} {toml.splitlines()[0].lstrip('# ')}" for name, toml in recipes.shipped().items())
    elif given.name in recipes.shipped():
        text = recipes.shipped()[given.name].rstrip()
    else:
        raise InputError(f"{given.name}: no shipped recipe of that name; there are {', '.join(recipes.shipped())}")
    if not given.json:
        print(text)
    return {"text": text}


def _session(given: argparse.Namespace, fills: bool = True) -> Session:
    """The recipe of a command and its run; fills: with what was derived, which the commands that build a run do themselves."""
    from bessemer import derived
    from bessemer.recipe import is_text, load
    from bessemer.run import RunFolder
    from bessemer.stages import Session
    from bessemer.tokens.pretrained import followed

    if Path(given.recipe).is_dir() and not is_text(Path(given.recipe)):
        given.run = given.recipe
        session = _existing(given)
        session.accept_changes = getattr(given, "accept_changes", False)
        return session
    recipe = followed(load(given.recipe, given.overrides))
    folder, has_horizon = RunFolder(recipe.run.folder), recipe.train.has_horizon
    if fills and folder.derived.exists():
        recipe = derived.filled(recipe, folder)
    if recipe.parallel.auto:
        from bessemer.planning import with_chosen_layout

        recipe = with_chosen_layout(recipe, folder)
    accept_changes = getattr(given, "accept_changes", False)
    return Session(recipe, folder, accept_changes, has_horizon)


def _existing(given: argparse.Namespace) -> Session:
    """The run that an argument names: by its folder, or by its recipe."""
    from bessemer.recipe import load, shipped
    from bessemer.run import RunFolder
    from bessemer.stages import Session

    folder = Path(given.run)
    if not folder.is_dir():
        if not folder.exists() and folder.suffix != ".toml" and given.run not in shipped():
            raise InputError(f"{folder}: no such run folder or recipe{_runs_beside(folder)}")
        given.recipe = given.run
        session = _session(given)
        if not session.run.path.is_dir():
            sets = "".join(f" --set {override}" for override in given.overrides)
            raise InputError(
                f"{session.run.path}: this run does not exist yet; make it with `bessemer run {given.run}{sets}`"
            )
        return session
    run = RunFolder(folder)
    if not run.recipe.exists():
        raise InputError(f"{folder}: not a run folder (it has no recipe.toml){_runs_beside(folder / 'x')}")
    return Session(load(folder, given.overrides), run)


def _runs_beside(folder: Path) -> str:
    """The end of a sentence about a run folder that is not there: the runs in the same folder, or in runs/."""
    for parent in dict.fromkeys((folder.parent, Path("runs"))):
        found = sorted(str(path.parent) for path in parent.glob("*/recipe.toml"))
        if found:
            return f"; there are {', '.join(found[:6])}{', ...' if len(found) > 6 else ''}"
    return ""


def _trained(given: argparse.Namespace) -> tuple[Session, Recipe]:
    """A run that has been trained, with its recipe as resolved; overrides apply on top."""
    from bessemer.recipe import load

    session = _existing(given)
    if not session.run.recipe.exists():
        raise InputError(f"{session.run.path}: not trained yet; do it with `bessemer train {given.run}`")
    return session, load(session.run.recipe, given.overrides)


def _restart(given: argparse.Namespace, session: Session) -> None:
    from bessemer.previous import set_aside

    if given.restart and (place := set_aside(session.run)) is not None:
        say(f"what was trained before is in {place}")


def _funnel(session: Session) -> dict[str, Any]:
    """The corpus' statistics: what came in, what stayed, why the rest did not. Nothing for a run of another's tokens."""
    from bessemer.run import read_json

    path = session.run.corpus / "statistics.json"
    return {"corpus": read_json(path)} if path.exists() else {}


def _summary(session: Session) -> dict[str, Any]:
    from bessemer.run import read_json

    run = session.run
    found: dict[str, Any] = {"run": run.path, "stages": session.told, **_funnel(session)}
    if run.evaluation.exists():
        evaluation = read_json(run.evaluation)
        keys = ("step", "loss", "bits_per_byte", "accuracy", "ngram")
        found |= {key: evaluation[key] for key in keys if key in evaluation}
    for name in ("report", "export"):
        path: Path = getattr(run, name)
        if path.exists():
            found[name] = path
    return found
