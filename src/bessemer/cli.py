"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from bessemer import __version__, calibrating, commands, interrupt
from bessemer.errors import BessemerError, Stopped
from bessemer.terminal import QUIET, silence_libraries, working

EPILOG = """\
Start here:  bessemer demo            a model trained on the text already on this machine, in minutes
             bessemer run my.toml     the same on your own text
             bessemer recipe demo     a recipe to begin with
Exit codes:  0 ok, 1 failure, 2 wrong input, 75 stopped on request (the same command goes on)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `bessemer`; leaves the process with the command's exit code."""
    code = run_command(sys.argv[1:] if arguments is None else arguments)
    if code == Stopped.exit_code:
        # Threads of the corpus engine may still be at work, and the interpreter's own way out can abort over them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


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
    silence_libraries()
    interrupt.listen()
    try:
        with nullcontext() if given.do is commands.chat else working(given.do.__name__.rstrip("_")):
            result = given.do(given)
        if given.json:
            print(json.dumps(result, indent=2, default=str), flush=True)
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
    return 0


class _Parser(argparse.ArgumentParser):
    """Says of an unknown option that is a key of the recipe how to give it."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '([\w-]*)' \(choose from (.*)\)", message):
            if close := difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), 1):
                message = f"{message.partition(' (')[0]}; did you mean {close[0]}?"
        elif match := re.search(r"unrecognized arguments: --([\w.-]+)", message):
            from bessemer.recipe.keys import keys, nearest

            name, known = match[1].replace("-", "_"), list(keys())
            same = [key for key in known if key == name or key.endswith(f".{name}")]
            if near := next(
                (key for key in same if key.startswith("train.")), same[0] if same else nearest(name, known)
            ):
                message += f"; keys of the recipe are given as --set {near}=VALUE"
        elif "unrecognized arguments" in message and "--set" in sys.argv:
            message += "; write --set KEY=VALUE, with quotes around it where it has spaces"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="bessemer",
        description="Train language models, from raw text to a verified, exported model.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bessemer {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(
        name: str, help: str, do: Callable[[argparse.Namespace], Any], *, recipe: bool = False, run: bool = False
    ) -> Any:
        command = added.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        command.set_defaults(do=do)
        command.add_argument("--json", action="store_true", help="print one JSON value for machines, nothing else")
        if recipe:
            command.add_argument(
                "recipe",
                help="a recipe file, the name of a shipped one (`bessemer recipe`), a run folder, or a folder of text",
            )
        if run:
            command.add_argument("run", help="a run folder, or the recipe of a run")
        if recipe or run or name == "demo":
            overrides(command)
        return command

    def overrides(command: Any) -> None:
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
            help="override a recipe key, for example train.steps=50",
        )  # fmt: skip

    def changes(command: Any) -> None:
        command.add_argument("--accept-changes", action="store_true", help="go on although the recipe has changed")
        command.add_argument(
            "--restart", action="store_true", help="start training over; what was trained is set aside"
        )

    def sampling(command: Any) -> None:
        command.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to write (default 200)")
        command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default 0.8)")
        command.add_argument(
            "--top-k", type=int, default=50, metavar="K", help="draw from the K likeliest; 0: all (default 50)"
        )
        command.add_argument(
            "--top-p", type=float, default=1.0, metavar="P",
            help="draw from the likeliest that together have probability P (default 1: all)",
        )  # fmt: skip
        command.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws (default 0)")

    def averaged(command: Any) -> None:
        command.add_argument(
            "--average",
            type=int,
            default=1,
            metavar="N",
            help="take the mean of the weights of the N newest checkpoints",
        )

    changes(add("demo", "the whole way, end to end, on text already on this machine, in minutes", commands.demo))
    changes(add("run", "every stage of a recipe; what is done already is skipped", commands.run, recipe=True))
    add("corpus", "raw sources to clean documents", commands.corpus, recipe=True)
    add("tokens", "clean documents to a tokenizer and token shards", commands.tokens, recipe=True)
    _plan_arguments(
        add("plan", "what a run, a corpus or a pipeline will take: parameters, memory, time, money", commands.plan),
        overrides,
    )
    train = add("train", "train on the token shards; goes on from the newest checkpoint", commands.train, recipe=True)
    changes(train)
    train.add_argument(
        "--profile", action="store_true", help="profile a few steps: a trace, and a table of where their time goes"
    )
    train.add_argument("--nnodes", metavar="MIN:MAX", help="take part with this node in a training on several; the same "
        "command runs on each (`bessemer launch` writes it for a cluster)")  # fmt: skip
    train.add_argument("--nproc-per-node", type=int, metavar="N", help="processes on this node")
    train.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", help="where the nodes meet: a free port of the first one"
    )
    train.add_argument("--rdzv-id", metavar="ID", help="tells this start from others that meet there")
    launch = add("launch", "write the files that start a training on a cluster", commands.launch, recipe=True)
    launch.add_argument("--on", choices=["slurm", "kubernetes"], required=True, help="the cluster's scheduler")
    launch.add_argument("--out", metavar="DIR", help="folder for the files (default: launch/ in the run folder)")
    evaluate = add("evaluate", "held-out scores and samples of a run's newest checkpoint", commands.evaluate, run=True)
    averaged(evaluate)
    generate = add("generate", "continue a prompt", commands.generate, run=True)
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    sampling(generate)
    chat = add("chat", "talk with a model, by its chat template", commands.chat, run=True)
    sampling(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    chat.add_argument(
        "--template", metavar="NAME|FILE", help="plain, chatml or a Jinja file; left out: the model's own, else plain"
    )
    imported = add("import", "make a run of a model in the Hugging Face layout, checked against it", commands.import_)
    imported.add_argument("folder", help="a folder with config.json, safetensors and tokenizer.json, or hf:ORG/NAME")
    imported.add_argument("--name", help="name of the run (default: the folder's)")
    imported.add_argument("--dir", default="runs", help="folder that holds run folders (default runs)")
    export = add("export", "write a run's model in another layout, checked there", commands.export, run=True)
    averaged(export)
    export.add_argument("folder", help="where to; it must be empty or not exist")
    export.add_argument(
        "--to", choices=["hf", "gguf"], default="hf",
        help="hf: what `transformers` loads (default); gguf: one file for llama.cpp, with a Modelfile for Ollama",
    )  # fmt: skip
    export.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "q8_0"],
        help="of the weights; q8_0: 8 bits, GGUF only (default: export.dtype, else what an import came in, else float32)",
    )  # fmt: skip
    trace = add(
        "trace", "from a step or a token to its documents and their raw files, and back", commands.trace, run=True
    )
    which = trace.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="list the documents in the batch of step N (1-based)")
    which.add_argument(
        "--document",
        metavar="ID",
        help="where a document came from, where its tokens are, and, once trained, its steps",
    )
    which.add_argument(
        "--token", metavar="SHARD:OFFSET", help="the document of one token, as in prose-train-00000:1234"
    )
    trace.add_argument("--text", action="store_true", help="show how the documents begin as well")
    add("report", "write report.html of a run", commands.report, run=True)
    ladder = add("ladder", "small runs that say what a large one will reach: a scaling law on your own tokens",
        commands.ladder, recipe=True)  # fmt: skip
    ladder.add_argument("--design", metavar="NAME", help="ratio (default): a fixed number of tokens a "
        "parameter; isoflop: several sizes at each of several amounts of compute")  # fmt: skip
    ladder.add_argument("--rungs", type=int, metavar="N", help="small runs (default: 6 of ratio, 12 of isoflop)")
    ladder.add_argument("--budget", metavar="B", help="of all together: 5min, 2h, or FLOPs as 1e15 (default 5min)")
    ladder.add_argument("--ratio", type=float, metavar="R", help="tokens a parameter (default: the planned run's)")
    ladder.add_argument("--mixture", action="store_true", help="look for better shares of the sources instead")
    ladder.add_argument(
        "--target", metavar="SOURCE", help="whose held-out loss to lower (with --mixture; default mean)"
    )
    ladder.add_argument("--verify", action="store_true", help="train a proxy on what is proposed (with --mixture)")
    ladder.add_argument(
        "--folder", metavar="DIR", help="where its runs lie (default: ladder/, or mixture/, in the run folder)"
    )
    ladder.add_argument("--restart", action="store_true", help="start over; what was trained is set aside")
    study = add("study", "an experiment that teaches, done here and now; without NAME: list them", commands.study)
    study.add_argument("name", nargs="?", metavar="NAME", help="the study; left out: list them")
    study.add_argument("--short", action="store_true", help="a small part of a long study, in a minute (layouts)")
    study.add_argument("--folder", metavar="DIR", help="where a long study keeps what is done and writes its tables")
    recipe = add("recipe", "show a shipped recipe, or explain a key", commands.recipe)
    recipe.add_argument("name", nargs="?", help="the shipped recipe to print; left out: list them")
    recipe.add_argument(
        "--explain", nargs="?", const="", metavar="KEY", help="what a key means; without KEY: list all keys"
    )
    return parser


def _plan_arguments(plan: Any, overrides: Callable[[Any], None]) -> None:
    """Of `bessemer plan`: values stay text, since 70B and 2048xH100 are read where their names are known (plan/ask.py)."""
    plan.add_argument(
        "recipe",
        nargs="?",
        help="a recipe file, the name of a shipped one (`bessemer recipe`), a run folder, or a folder of text",
    )
    overrides(plan)
    plan.add_argument("--gpus", metavar="NxDEVICE", help="plan for a cluster, for example 2048xH100")
    plan.add_argument(
        "--search", action="store_true", help="try every layout: those that fit, by speed, and why others do not"
    )
    plan.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=VALUE,...",
        help="the same with changes, beside it, for example gpus=1024 or precision=fp8,tp=4; several times for several",
    )  # fmt: skip
    plan.add_argument("--devices", action="store_true", help="list the catalogue of devices instead")
    plan.add_argument("--catalogue", metavar="FILE", help="a file of your own devices, in the catalogue's form")
    plan.add_argument("--html", metavar="FILE", help="write the plan as a page with pictures as well")
    model = plan.add_argument_group("the model, without a recipe or otherwise than it has it")
    model.add_argument("--model", metavar="NAME", help="a published shape, for example llama3-70b")
    model.add_argument("--params", metavar="N", help="a shape of so many parameters, for example 70B")
    for name in ("layers", "width", "heads", "kv-heads", "mlp-width", "vocabulary"):
        model.add_argument(f"--{name}", metavar="N", help=f"model.{name.replace('-', '_')}")
    training = plan.add_argument_group("the training")
    training.add_argument("--tokens", metavar="N", help="tokens to train on, for example 2T")
    training.add_argument("--unique", metavar="N", help="tokens that differ, where they are fewer than --tokens")
    training.add_argument("--seq", metavar="N", help="tokens of a sequence (default 4096)")
    training.add_argument("--batch", metavar="N", help="tokens of a step, for example 4M")
    training.add_argument("--precision", metavar="NAME", help="bf16, fp8, ...")
    training.add_argument("--recompute", metavar="NAME", help="none, selective or full; left out: what fits")
    training.add_argument("--micro-batch", metavar="N", help="sequences of a forward pass; left out: the fastest")
    for name, help in (
        ("flops", "FLOPs, for example 6e23"),
        ("days", "days on the devices of --gpus"),
        ("money", "dollars"),
    ):
        training.add_argument(f"--{name}", metavar="N", help=f"a budget of {help}: model size and tokens are proposed")
    layout = plan.add_argument_group("the layout; left out: the fastest that fits")
    for name, help in (
        ("dp", "devices that each take a part of the batch (parallel.shard)"),
        ("replicate", "parallel.replicate"), ("tp", "parallel.tensor"), ("pp", "parallel.pipeline"), ("cp", "parallel.context"),
        ("zero", "parallel.zero: 1, 2 or 3"), ("virtual", "stages on each device (interleaved; default 2)"),
    ):  # fmt: skip
        layout.add_argument(f"--{name}", metavar="N", help=help)
    layout.add_argument("--per-node", metavar="N", help="devices of a node")
    layout.add_argument("--stack", metavar="NAME", help="whose habits to count with (default bessemer)")
    plan.add_argument("--price", metavar="P", help="of a device (with --corpus: of a core; default 0.05) for an hour")
    memory = plan.add_argument_group("memory of a step")
    memory.add_argument(
        "--simulate",
        action="store_true",
        help="count the memory of a step of every kind of process, on tensors without memory",
    )
    corpus = plan.add_argument_group("a corpus")
    corpus.add_argument("--corpus", metavar="SIZE", help="work out a crawl of this size instead, for example 100TB")
    corpus.add_argument("--cores", type=int, default=64, metavar="N", help="cores of a machine (default 64)")
    corpus.add_argument("--machines", type=int, default=16, metavar="N", help="machines (default 16)")
    corpus.add_argument("--memory", default="256GB", metavar="SIZE", help="memory of a machine (default 256GB)")
    corpus.add_argument(
        "--storage-price", type=float, default=0.023, metavar="P", help="of a gigabyte for a month (default 0.023)"
    )
    corpus.add_argument("--rates", metavar="FILE", help="measured rates, as benchmarks/corpus.py writes them")
    pipeline = plan.add_argument_group("a pipeline")
    pipeline.add_argument("--schedule", metavar="NAME", help="draw a pipeline schedule instead: gpipe, 1f1b, interleaved, "
        "zbv or dualpipev; with a recipe, for its model cut into stages; with --gpus: the layout's")  # fmt: skip
    pipeline.add_argument("--stages", type=int, metavar="N", help="processes of the pipeline")
    pipeline.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of a step")
    pipeline.add_argument("--backward", type=float, metavar="B", help="of a stage, in its forwards (default 2)")
    pipeline.add_argument("--send", type=float, metavar="S", help="from a process to another, in forwards (default 0)")
    pipeline.add_argument("--svg", metavar="FILE", help="draw it in this file as well")
    calibrating.add_arguments(plan)


def _failed(given: argparse.Namespace, error: BessemerError) -> int:
    if given.json:
        print(json.dumps({"error": str(error), "exit": error.exit_code}))
    elif str(error):  # else another node says it
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
