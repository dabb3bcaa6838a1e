"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bessemer import __version__
from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.terminal import QUIET, amount, duration, rate, say, size

if TYPE_CHECKING:
    from bessemer.recipe import Recipe
    from bessemer.run import RunFolder
    from bessemer.stages import Session

EPILOG = """\
Start here:  bessemer demo            a model trained on the text already on this machine, in minutes
             bessemer run my.toml     the same on your own text
             bessemer recipe demo     a recipe to begin with
Exit codes:  0 ok, 1 failure, 2 wrong input, 75 stopped on request (the same command goes on)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bessemer`; leaves the process with the command's exit code."""
    sys.exit(run_command(sys.argv[1:] if arguments is None else arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Parse and do one command. Returns its exit code; every expected failure is one line on standard error."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not hasattr(given, "do"):
        parser.print_help()
        return 2
    if given.json:
        os.environ[QUIET] = "1"
    # A thread that waits for the others spins at a barrier before it sleeps, and takes a core from the one it waits for
    # when another process is there too: 3.7 times slower steps beside one busy process with GNU OpenMP's default, 2.1
    # times with a short spin (benchmarks/contention.py). It has to be set before torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    signal.signal(signal.SIGTERM, _interrupt)  # a stop request; while training, the loop takes it over
    try:
        result = given.do(given)
    except KeyboardInterrupt:
        return _failed(given, Stopped("stopped; nothing is half-written, the same command goes on from here"))
    except BessemerError as error:
        return _failed(given, error)
    except BrokenPipeError:  # the reader has seen enough, as in `bessemer trace ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's last flush is quiet too
        return 0
    except OSError as error:
        return _failed(given, BessemerError(_os_error(error)))
    except MemoryError:
        return _failed(given, BessemerError("out of memory; lower train.micro_batch, or the model's size"))
    if given.json:
        print(json.dumps(result, indent=2, default=str))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bessemer",
        description="Train language models, from raw text to a verified, exported model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bessemer {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(
        name: str, help: str, do: Callable[[argparse.Namespace], Any], *, recipe: bool = False, run: bool = False
    ) -> Any:
        command = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(do=do)
        command.add_argument("--json", action="store_true", help="print one JSON value for machines, nothing else")
        if recipe:
            command.add_argument("recipe", help="a recipe file, or the name of a shipped one (`bessemer recipe`)")
        if run:
            command.add_argument("run", help="a run folder, or the recipe of a run")
        if recipe or run or name == "demo":
            command.add_argument(
                "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                help="override a recipe key, for example train.steps=50",
            )  # fmt: skip
        return command

    def changes(command: Any) -> None:
        command.add_argument("--accept-changes", action="store_true", help="go on although the recipe has changed")
        command.add_argument(
            "--restart", action="store_true", help="start training over; what was trained is set aside"
        )

    changes(add("demo", "the whole way, end to end, on text already on this machine, in minutes", _demo))
    changes(add("run", "every stage of a recipe; what is done already is skipped", _run, recipe=True))
    add("corpus", "raw sources to clean documents", _corpus, recipe=True)
    add("tokens", "clean documents to a tokenizer and token shards", _tokens, recipe=True)
    add("plan", "what a run will take on this machine: parameters, memory, time", _plan, recipe=True)
    train = add("train", "train on the token shards; goes on from the newest checkpoint", _train, recipe=True)
    changes(train)
    train.add_argument(
        "--profile", action="store_true", help="profile a few steps: a trace, and a table of where their time goes"
    )
    add("evaluate", "held-out loss, bits per byte and samples of a run's newest checkpoint", _evaluate, run=True)
    generate = add("generate", "continue a prompt", _generate, run=True)
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to write (default 200)")
    generate.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default 0.8)")
    generate.add_argument(
        "--top-k", type=int, default=50, metavar="K", help="draw from the K likeliest; 0: all (default 50)"
    )
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws (default 0)")
    export = add("export", "write a run's model in another layout, checked there", _export, run=True)
    export.add_argument("folder", help="where to; it must be empty or not exist")
    export.add_argument("--to", choices=["hf"], default="hf", help="hf: what `transformers` loads (default)")
    trace = add("trace", "which documents a step read, or which steps read a document", _trace, run=True)
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="list the documents in the batch of step N (1-based)")
    which.add_argument("--document", metavar="ID", help="list the steps whose batch held the document")
    add("report", "write report.html of a run", _report, run=True)
    study = add("study", "an experiment that teaches, run here and now; without NAME: list them", _study)
    study.add_argument("name", nargs="?", metavar="NAME", help="the study; left out: list them")
    recipe = add("recipe", "show a shipped recipe, or explain a key", _recipe)
    recipe.add_argument("name", nargs="?", help="the shipped recipe to print; left out: list them")
    recipe.add_argument(
        "--explain", nargs="?", const="", metavar="KEY", help="what a key means; without KEY: list all keys"
    )
    return parser


def _demo(given: argparse.Namespace) -> Any:
    given.recipe = "demo"
    return _run(given, finish=_demo_screen)


def _run(given: argparse.Namespace, finish: Callable[[RunFolder], None] | None = None) -> Any:
    from bessemer import stages

    session = _session(given)
    with session.run.writing():
        _restart(given, session)
        say(f"[bold]bessemer[/] {given.recipe} -> {session.run.path}")
        stages.run_all(session)
    (finish or _run_screen)(session.run)
    return _summary(session)


def _corpus(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session = _session(given)
    with session.run.writing():
        stages.corpus(session)
    return {"stages": session.told, "folder": session.run.corpus}


def _tokens(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session = _session(given)
    with session.run.writing():
        stages.tokens(session)
    return {"stages": session.told, "folder": session.run.tokens}


def _plan(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session = _session(given)
    plan, recipe = stages.plan_only(session.recipe, session.run)
    if not given.json:
        _print_plan(plan, recipe)
    return plan


def _train(given: argparse.Namespace) -> Any:
    if given.profile:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own lines; read when torch is loaded
    from bessemer import stages

    session = _session(given)
    with session.run.writing():
        _restart(given, session)
        stages.train(session, stages.prepare(session), given.profile)
    if not given.profile:
        return _summary(session)
    return {**_summary(session), "profile": _profile(given, session)}


def _profile(given: argparse.Namespace, session: Session) -> Any:
    from bessemer.run import read_json
    from bessemer.train.profile import show

    if session.told[-1]["skipped"]:
        raise InputError(f"{session.run.path}: trained to its last step already, so there was no step to profile; "
                         "add --restart, or more steps with --set train.steps=N --accept-changes")  # fmt: skip
    found = read_json(session.run.profile / "profile.json")
    if not given.json:
        print(show(found))
    return found


def _evaluate(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session, resolved = _trained(given)
    with session.run.writing():
        found = stages.evaluate(session, resolved)
    return {key: value for key, value in found.items() if key != "inputs"}


def _generate(given: argparse.Namespace) -> Any:
    from bessemer.evaluate.final import complete
    from bessemer.stages import opened
    from bessemer.tokens.tokenizer import Tokenizer

    if given.max_tokens < 1:
        raise InputError(f"--max-tokens: {given.max_tokens} is not a number of tokens to write; give 1 or more")
    if given.temperature < 0 or given.top_k < 0:
        raise InputError("--temperature and --top-k cannot be negative; 0 is greedy, and 0 draws from all tokens")
    session, resolved = _trained(given)
    store, restored = opened(resolved, session.run)
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", resolved.tokenizer.end_of_text)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    text = complete(restored, tokenizer, prompt, given.max_tokens, given.temperature, given.top_k, given.seed)
    if not given.json:
        print(prompt + text)
    return {"prompt": prompt, "text": text}


def _export(given: argparse.Namespace) -> Any:
    from bessemer import stages

    session, resolved = _trained(given)
    found = stages.export(session, resolved, Path(given.folder))
    return {key: value for key, value in found.items() if key != "inputs"}


def _trace(given: argparse.Namespace) -> Any:
    from bessemer.tokens import ledger
    from bessemer.tokens.shards import TokenStore

    session, resolved = _trained(given)
    store = TokenStore.open(session.run.tokens)
    if given.step is not None:
        rows = ledger.step_documents(resolved, store, session.run.corpus, given.step)
    else:
        rows = ledger.document_steps(resolved, store, session.run.corpus, given.document)
    if not given.json:
        for row in rows:
            print("  ".join(str(value) for value in row.values()))
    return rows


def _report(given: argparse.Namespace) -> Any:
    from bessemer.report import page

    session = _existing(given)
    written = page.write(session.run)
    if not given.json:
        print(written)
    return {"report": written}


def _study(given: argparse.Namespace) -> Any:
    from importlib import import_module

    from bessemer.studies import STUDIES

    if given.name is None:
        if not given.json:
            print("\n".join(f"{name:<26} {sentence}" for name, (_, sentence) in STUDIES.items()))
        return {name: sentence for name, (_, sentence) in STUDIES.items()}
    if given.name not in STUDIES:
        raise InputError(f"{given.name}: no study of that name; there are {', '.join(STUDIES)}")
    study = import_module(STUDIES[given.name][0])
    result = study.run()
    if not given.json:
        print(study.show(result))
    return result


def _recipe(given: argparse.Namespace) -> Any:
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


def _session(given: argparse.Namespace) -> Session:
    from bessemer.recipe import load
    from bessemer.run import RunFolder
    from bessemer.stages import Session

    recipe = load(given.recipe, given.overrides)
    return Session(recipe, RunFolder(recipe.run.folder), accept_changes=getattr(given, "accept_changes", False))


def _existing(given: argparse.Namespace) -> Session:
    """The run that an argument names: by its folder, or by its recipe."""
    from bessemer.recipe import load
    from bessemer.run import RunFolder
    from bessemer.stages import Session

    folder = Path(given.run)
    if not folder.is_dir():
        given.recipe = given.run
        session = _session(given)
        if not session.run.path.is_dir():
            raise InputError(
                f"{session.run.path}: this run does not exist yet; make it with `bessemer run {given.run}`"
            )
        return session
    run = RunFolder(folder)
    if not run.recipe.exists():
        raise InputError(f"{folder}: not a run folder (it has no recipe.toml)")
    return Session(load(run.recipe, given.overrides), run)


def _trained(given: argparse.Namespace) -> tuple[Session, Recipe]:
    """A run that has been trained, with its recipe as resolved; overrides apply on top."""
    from bessemer.recipe import load

    session = _existing(given)
    if not session.run.recipe.exists():
        raise InputError(f"{session.run.path}: not trained yet; do it with `bessemer train {given.run}`")
    return session, load(session.run.recipe, given.overrides)


def _restart(given: argparse.Namespace, session: Session) -> None:
    from bessemer.stages import set_aside

    if given.restart and (place := set_aside(session.run)) is not None:
        say(f"what was trained before is in {place}")


def _summary(session: Session) -> dict[str, Any]:
    from bessemer.run import read_json

    run = session.run
    found: dict[str, Any] = {"run": run.path, "stages": session.told}
    if run.evaluation.exists():
        evaluation = read_json(run.evaluation)
        found |= {key: evaluation[key] for key in ("step", "loss", "bits_per_byte", "ngram")}
    for name in ("report", "export"):
        path: Path = getattr(run, name)
        if path.exists():
            found[name] = path
    return found


def _print_plan(plan: dict[str, Any], recipe: Recipe) -> None:
    memory = plan["memory_bytes"]
    parts = ", ".join(f"{name} {size(value)}" for name, value in memory.items() if name != "total" and value)
    rows = {
        "device": f"{plan['device']} ({rate(plan['peak_flops'])})",
        "parameters": f"{amount(plan['parameters']['total'])} ({amount(plan['parameters']['non_embedding'])} without embeddings)",
        "model": f"{recipe.model.layers} layers, width {recipe.model.width}, {recipe.model.heads} heads "
        f"({recipe.model.kv_heads} key/value), hidden {recipe.model.mlp_width}",
        "training": f"{plan['steps']:,} steps of {amount(recipe.train.global_batch_tokens or 0)} tokens = "
        f"{amount(plan['tokens'])} tokens, {plan['tokens_per_parameter']:.1f} a parameter",
        "learning rate": f"{recipe.train.optimizer.learning_rate}",
        "compute": f"{plan['total_flops']:.3g} FLOP, {plan['flops_per_token']:.3g} a token",
        "time": f"{duration(plan['seconds'])}: {plan['step_seconds']:.3g} s a step ({plan['step_seconds_from']}), "
        f"{amount(plan['tokens_per_second'])} tokens/s, MFU {plan['mfu']:.0%}",
        "memory": f"{size(memory['total'])}: {parts}",
        "fits": "yes" if plan["fits"] else "no: this device has less free memory than that",
    }
    for name, value in rows.items():
        print(f"{name:<14} {value}")


def _run_screen(run: RunFolder) -> None:
    say(f"\n  report  {run.report}\n  model   {run.export}\n  folder  {run.path}")


def _demo_screen(run: RunFolder) -> None:
    """Where everything is, and what to try next."""
    from rich.markup import escape

    from bessemer.run import read_json

    found, plan = read_json(run.evaluation), read_json(run.plan)
    baseline = found["ngram"]
    say(f"\n[bold]A {amount(plan['parameters']['total'])}-parameter model, trained from raw text on this machine.[/]")
    if baseline is not None:
        better = baseline["bits_per_byte"] - found["bits_per_byte"]
        say(
            f"It needs {found['bits_per_byte']:.3f} bits per byte for text it has not seen, "
            f"{abs(better):.3f} {'fewer' if better > 0 else 'more'} than a byte 5-gram ({baseline['bits_per_byte']:.3f})."
        )
    for sample in found["samples"][-1:]:
        say("\n[dim]It writes, after the bold:[/]")
        say("  [bold]" + escape(sample["prompt"]) + "[/]" + escape(sample["text"].rstrip()).replace("\n", "\n  "))
    say(
        f"\n  report   {run.report}   open it in a browser"
        f"\n  model    {run.export}   AutoModelForCausalLM.from_pretrained({str(run.export)!r})"
        f"\n  folder   {run.path}   recipe, corpus, tokens, checkpoints, metrics"
        "\n\n[bold]Try next[/]"
        f"\n  bessemer generate {run.path} 'import os' --temperature 0.5"
        f"\n  bessemer trace {run.path} --step 100          which documents step 100 read"
        "\n  bessemer demo --set run.name=longer --set train.minutes=20"
        "\n  bessemer recipe demo > my.toml                make it yours, then: bessemer run my.toml"
    )


def _failed(given: argparse.Namespace, error: BessemerError) -> int:
    if given.json:
        print(json.dumps({"error": str(error), "exit": error.exit_code}))
    else:
        print(f"bessemer: {error}", file=sys.stderr)
    return error.exit_code


def _os_error(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else ""
    advice = {
        errno.ENOSPC: "the disk is full; free some space, the same command then goes on",
        errno.EDQUOT: "the disk quota is used up; free some space, the same command then goes on",
        errno.EACCES: "no permission; choose another folder with --set run.dir=PATH",
        errno.EROFS: "the file system is read-only; choose another folder with --set run.dir=PATH",
    }
    return place + advice.get(error.errno or 0, error.strerror or str(error))


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt
