"""Every command with its options, in the order in which `bessemer --help` lists them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bessemer.cli import experiments, inspection, model, plan, run, train

Option = tuple[str, dict[str, Any]]
RECIPE = "a recipe file, the name of a shipped one (`bessemer recipe`), a run directory, or a folder of text"


@dataclass(frozen=True)
class Command:
    """A command with its options.

    Attributes:
        name: The word after `bessemer`.
        help: Its line in the help.
        do: Called with the parsed arguments; what it returns is printed under --json.
        options: Options and positional arguments.
        either: Options of which exactly one is given.
        groups: More options, by the title under which the help lists them.
        usage: Usage line, None for argparse's.
    """

    name: str
    help: str
    do: Callable[[argparse.Namespace], Any]
    options: tuple[Option, ...] = ()
    either: tuple[Option, ...] = ()
    groups: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    usage: str | None = None


def number(text: str) -> float:
    """Parse a finite number."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def integer(text: str) -> int:
    """Parse a whole number of at most 64 bits."""
    if not -(2**63) <= (value := int(text)) < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; give a number below 2^63")
    return value


def option(name: str, help: str, **how: Any) -> Option:
    """An option or a positional argument, in argparse's terms."""
    checked = {float: number, int: integer}
    return name, {"help": help, **how, **({"type": checked.get(how["type"], how["type"])} if "type" in how else {})}


def flag(name: str, help: str) -> Option:
    """An option without a value."""
    return option(name, help, action="store_true")


class _Once(argparse.Action):
    """An option with a value. Given twice it is refused: either value would be dropped without a word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = namespace.__dict__.setdefault("_given", {})
        if self.dest in given:
            raise argparse.ArgumentError(self, f"given twice, as {given[self.dest]} and {values}: keep one")
        given[self.dest] = values
        setattr(namespace, self.dest, values)


def add_options(parser: Any, options: Iterable[Option]) -> None:
    for name, how in options:
        parser.add_argument(name, **({"action": _Once} if name.startswith("-") else {}) | how)


OVERRIDES = option(
    "--set", "override a recipe key, for example train.steps=50", action="append", default=[], metavar="KEY=VALUE",
    dest="overrides",
)  # fmt: skip
TRUST_CODE = flag("--trust-code", "run the Python files that the recipe of a run directory names, which is code")
OF_RECIPE = (option("recipe", RECIPE), OVERRIDES, TRUST_CODE)
OF_RUN = (option("run", "a run directory, or the recipe of a run"), OVERRIDES)
RESTART = flag("--restart", "remove the earlier training, and train from the start")
AVERAGE = option(
    "--average", "use the mean of the weights of the N newest checkpoints", type=int, default=1, metavar="N"
)
STEP = option(
    "--step", "use the checkpoint of step N, or the one with the lowest held-out loss (default: the newest)", dest="of_step",
    metavar="N|best",
)  # fmt: skip
SAMPLING = (
    option("--max-tokens", "tokens to write (default 200)", type=int, default=200, metavar="N"),
    option("--temperature", "0 is greedy (default 0.8)", type=float, default=0.8, metavar="T"),
    option("--top-k", "sample from the K likeliest tokens; 0: all (default 50)", type=int, default=50, metavar="K"),
    option("--top-p", "sample from the likeliest tokens that together have probability P (default 1: all)", type=float,
           default=1.0, metavar="P"),
    option("--seed", "seed of the sampling (default 0)", type=int, default=0, metavar="S"),
)  # fmt: skip

COMMANDS = (
    Command("demo", "the whole way, end to end, on text already on this machine, in minutes", run.demo, (OVERRIDES, RESTART)),
    Command("run", "every stage of a recipe; what is done already is skipped", run.run, (*OF_RECIPE, RESTART)),
    Command("corpus", "raw sources to clean documents", run.corpus, (
        *OF_RECIPE,
        option("--sample", "take so many documents through the rules instead, and show what goes and why", type=int, metavar="N"),
    )),
    Command("tokens", "clean documents to a tokenizer and token shards", run.tokens, OF_RECIPE[:2]),
    Command("plan", "what a training run takes: layout, memory, time, money", plan.plan, (
        option("recipe", "a recipe file or a shipped one, a run directory, or a folder of text", nargs="?"),
        OVERRIDES, TRUST_CODE,
        flag("--search", "list the layouts that fit, and why others do not"),
        option("--what-if", "a plan with changes beside it, as gpus=64,precision=fp8; repeatable", action="append", default=[],
               metavar="NAME=VALUE,..."),
        flag("--devices", "list the catalogue of devices instead"),
        option("--schedule", "draw a pipeline: NAME:RANKSxMICROBATCHES, as 1f1b:4x8", metavar="NAME:PxM"),
        option("--html", "write the plan as a page with pictures as well", metavar="FILE"),
    ), groups={  # values stay text: plan/plan_request.py reads 70B and 2048xH100
        "the devices": (
            option("--gpus", "plan for a cluster, for example 2048xH100", metavar="NxDEVICE"),
            option("--catalogue", "a file of your own devices, in the catalogue's form", metavar="FILE"),
            option("--price", "dollars of a device-hour", metavar="P"),
            option("--framework", "whose memory and overlap to model (default bessemer)", metavar="NAME"),
        ),
        "the model, without a recipe or in place of its own": (
            option("--model", "a published shape, as llama-3-70b; list: all of them", metavar="NAME"),
            option("--params", "a shape of so many parameters, for example 70B", metavar="N"),
        ),
        "the training": (
            option("--tokens", "tokens to train on, for example 2T", metavar="N"),
            option("--unique", "tokens that differ, where they are fewer than --tokens", metavar="N"),
            option("--seq", "tokens of a sequence (default 4096)", metavar="N"),
            option("--batch", "tokens of a step, for example 4M", metavar="N"),
            option("--precision", "bf16, fp8, ...", metavar="NAME"),
            option("--recompute", "none, selective or full; left out: what fits", metavar="NAME"),
            option("--micro-batch", "sequences of a forward pass; left out: the fastest", metavar="N"),
        ),
        "or a budget: the tokens that it pays for, or model and tokens, or (--gpus H100) the devices": (
            option("--flops", "FLOPs, for example 6e23", metavar="N"),
            option("--days", "days on the devices of --gpus, as 30 or 0.5", metavar="N"),
            option("--money", "dollars", metavar="N"),
        ),
        "the layout; left out: chosen": (
            option("--dp", "data-parallel ranks (parallel.shard)", metavar="N"),
            option("--tp", "parallel.tensor", metavar="N"),
            option("--pp", "parallel.pipeline", metavar="N"),
            option("--cp", "parallel.context", metavar="N"),
            option("--zero", "parallel.zero: 1, 2 or 3", metavar="N"),
        ),
    }, usage="bessemer plan [RECIPE] [options]"),
    Command("check", "the launch checklist of a recipe, executed on small trainings: go, or no-go", experiments.check, OF_RECIPE),
    Command("train", "train on the token shards; continues from the newest checkpoint", train.train, (
        *OF_RECIPE, RESTART,
        flag("--profile", "profile a few steps: a trace, and the profiler's table of operators"),
    )),
    Command("launch", "write the files that start a run on a cluster", train.launch, (
        *OF_RECIPE,
        option("--on", "the cluster's scheduler", choices=["slurm", "kubernetes"], required=True),
        option("--out", "folder for the files (default: launch/ in the run directory)", metavar="DIR"),
    )),
    Command("evaluate", "held-out scores and samples of a run's newest checkpoint", model.evaluate, (
        *OF_RUN, AVERAGE, STEP,
        option("--task", "score on this task too: a YAML file, or the name of a task of lm-evaluation-harness; repeatable",
               action="append", default=[], metavar="TASK"),
    )),
    Command("generate", "continue a prompt", model.generate, (
        *OF_RUN, option("prompt", "the text to continue; - reads it from standard input"), STEP, *SAMPLING,
    )),
    Command("chat", "talk with a model, by its chat template", model.chat, (
        *OF_RUN, STEP, *SAMPLING,
        option("--system", "a system message before the conversation", metavar="TEXT"),
        option("--template", "plain, chatml or a Jinja file (default: the model's own, else plain)", metavar="NAME|FILE"),
    )),
    Command("import", "make a run of a model in the Hugging Face layout, checked against it", model.import_model, (
        option("folder", "a folder with config.json, safetensors and tokenizer.json, or hf:ORG/NAME"),
        option("--name", "name of the run (default: the folder's)"),
        option("--dir", "folder that holds run directories (default runs)", default="runs"),
    )),
    Command("export", "write a run's model in another layout, checked there", model.export, (
        *OF_RUN, TRUST_CODE, AVERAGE, STEP,
        option("folder", "where to; it must be empty or not exist"),
        option("--to", "hf: what `transformers` loads (default); gguf: one file for llama.cpp, with a Modelfile for Ollama",
               choices=["hf", "gguf"], default="hf"),
        option("--dtype", "of the weights; q8_0: 8 bits, GGUF only (default: export.dtype, else an import's own, else float32)",
               choices=["float32", "bfloat16", "float16", "q8_0"]),
    )),
    Command("trace", "from a step or a token to its documents and their raw files, and back", inspection.trace, (
        *OF_RUN, TRUST_CODE, flag("--text", "also show how the documents begin"),
        flag("--replay", "take the step again: was the machine, the precision, the data or the weights wrong?"),
    ), either=(
        option("--step", "list the documents in the batch of step N (1-based)", type=int, metavar="N"),
        option("--document", "where a document (identity, URL or path) came from, where its tokens are, and, once trained, its "
               "steps", metavar="ID"),
        option("--token", "the document of one token, as in prose-train-00000:1234", metavar="SHARD:OFFSET"),
    )),
    Command("watch", "runs while they train: a page on this machine that updates itself", inspection.watch, (
        option("run", "a run directory, or the recipe of a run; several: side by side", nargs="+", metavar="RUN"), OVERRIDES,
        flag("--terminal", "show them here as text instead"),
        option("--port", "port on 127.0.0.1 (default 8421, or a free one)", type=int, metavar="N"),
    )),
    Command("report", "write report.html of a run, or a page of several side by side", inspection.report, (
        option("run", "a run directory, or the recipe of a run; several are compared", nargs="+", metavar="RUN"), OVERRIDES,
        option("--out", "file for the page of several runs (default comparison.html)", metavar="FILE"),
    )),
    Command("ladder", "small runs that predict a large one: a scaling law on your own tokens", experiments.ladder, (
        *OF_RECIPE,
        option("--design", "ratio (default): a fixed number of tokens a parameter; isoflop: several sizes at each of several "
               "amounts of compute", choices=("ratio", "isoflop")),
        option("--rungs", "small runs (default: 6 of ratio, 12 of isoflop)", type=int, metavar="N"),
        option("--budget", "of all together: 5min, 2h, or FLOPs as 1e15 (default 5min)", metavar="B"),
        option("--ratio", "tokens a parameter (default: the planned run's)", type=float, metavar="R"),
        option("--seeds", "of each of the 3 smallest rungs, for the noise of a single run (default 3)", type=int, metavar="N"),
        flag("--mixture", "search better shares of the sources instead"),
        option("--target", "whose held-out loss to lower (with --mixture; default mean)", metavar="SOURCE"),
        flag("--verify", "train a proxy on the proposed mixture (with --mixture)"),
        option("--folder", "of its runs (default: ladder/, or mixture/, in the run directory)", metavar="DIR"),
        flag("--restart", "start over; the earlier training is set aside"),
    )),
    Command("recipe", "show a shipped recipe, or explain a key", inspection.recipe, (
        option("name", "the shipped recipe to print; left out: list them", nargs="?"),
        option("--explain", "what a key means; without KEY: list all keys", nargs="?", const="", metavar="KEY"),
    )),
)  # fmt: skip
