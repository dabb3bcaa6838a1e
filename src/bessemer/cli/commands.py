"""All commands with their options, in the order of `bessemer --help`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bessemer.cli import experiments, inspection, model, plan, run, train

Option = tuple[str, dict[str, Any]]
RECIPE = "a recipe file, a shipped recipe, a run directory, or a folder of text"


@dataclass(frozen=True)
class Command:
    """A command with its options.

    Attributes:
        name: The word after `bessemer`.
        help: Its line in the help.
        do: Function that runs the command; `--json` prints its result.
        options: Options and positional arguments.
        either: Options of which exactly one must be given.
        groups: More options by the title of their group in the help.
        usage: Usage line; None: argparse's.
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
    """Define an option or a positional argument with the arguments of `add_argument`."""
    checked = {float: number, int: integer}
    return name, {"help": help, **how, **({"type": checked.get(how["type"], how["type"])} if "type" in how else {})}


def flag(name: str, help: str) -> Option:
    """Define an option without a value."""
    return option(name, help, action="store_true")


class _Once(argparse.Action):
    """An argparse action for an option with a value. Giving the option twice is an error.

    argparse by default keeps the last value and silently drops the first.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flags = namespace.__dict__.setdefault("_given", {})
        if self.dest in flags:
            raise argparse.ArgumentError(self, f"it is given twice, as {flags[self.dest]} and {values}; keep one")
        flags[self.dest] = values
        setattr(namespace, self.dest, values)


def add_options(parser: Any, options: Iterable[Option]) -> None:
    for name, how in options:
        parser.add_argument(name, **({"action": _Once} if name.startswith("-") else {}) | how)


OVERRIDES = option(
    "--set", "override a recipe key, for example train.steps=50", action="append", default=[], metavar="KEY=VALUE",
    dest="overrides",
)  # fmt: skip
TRUST_CODE = flag("--trust-code", "run the Python files that the recipe of a run directory names")
OF_RECIPE = (option("recipe", RECIPE), OVERRIDES, TRUST_CODE)
OF_RUN = (option("run", "a run directory, or the recipe of a run"), OVERRIDES)
RESTART = flag("--restart", "remove what was trained, and train from the start")
AVERAGE = option("--average", "average the weights of the N newest checkpoints", type=int, default=1, metavar="N")
STEP = option(
    "--step", "checkpoint of step N, or with the lowest held-out loss (default: newest)", dest="of_step",
    metavar="N|best",
)  # fmt: skip
SAMPLING = (
    option("--max-tokens", "tokens to generate (default 200)", type=int, default=200, metavar="N"),
    option("--temperature", "sampling temperature; 0: greedy (default 0.8)", type=float, default=0.8, metavar="T"),
    option("--top-k", "sample from the K most likely tokens; 0: all (default 50)", type=int, default=50, metavar="K"),
    option("--top-p", "sample from the most likely tokens with a total probability of P (default 1)", type=float,
           default=1.0, metavar="P"),
    option("--seed", "seed of the sampling (default 0)", type=int, default=0, metavar="S"),
)  # fmt: skip

COMMANDS = (
    Command("demo", "train a small model on text already on this machine", run.demo, (OVERRIDES, RESTART)),
    Command("run", "run every stage of a recipe; finished stages are skipped", run.run, (*OF_RECIPE, RESTART)),
    Command("corpus", "build clean documents from the sources of a recipe", run.corpus, (
        *OF_RECIPE,
        option("--sample", "clean only N documents, and show which are rejected and why", type=int, metavar="N"),
    )),
    Command("tokens", "train a tokenizer and write token shards", run.tokens, OF_RECIPE[:2]),
    Command("plan", "plan layout, memory, time and cost of a training", plan.plan, (
        option("recipe", argparse.SUPPRESS, nargs="?"),
        OVERRIDES, TRUST_CODE,
        flag("--search", "list the layouts that fit, and why others do not"),
        flag("--devices", "list the known devices"),
        option("--html", "also write the plan as a page", metavar="FILE"),
    ), groups={  # values stay text, because plan/plan_request.py parses 70B and 2048xH100
        "without a recipe, or in place of its values": (
            option("--gpus", "devices, for example 2048xH100", metavar="NxDEVICE"),
            option("--catalogue", "file with own devices", metavar="FILE"),
            option("--price", "dollars per device-hour", metavar="P"),
            option("--framework", "program to model (default bessemer)", metavar="NAME"),
            option("--model", "a published shape, such as llama-3-70b; list: all of them", metavar="NAME"),
            option("--params", "number of parameters, for example 70B", metavar="N"),
            option("--tokens", "tokens to train on, for example 2T", metavar="N"),
            option("--seq", "tokens per sequence (default 4096)", metavar="N"),
            option("--batch", "tokens per step, for example 4M", metavar="N"),
            option("--precision", "bf16, fp8, ...", metavar="NAME"),
            option("--recompute", "none, selective or full (default: what fits)", metavar="NAME"),
            option("--micro-batch", "sequences per forward pass (default: the fastest)", metavar="N"),
            option("--flops", "budget in FLOPs, for example 6e23", metavar="N"),
            option("--days", "budget in days on --gpus", metavar="N"),
            option("--money", "budget in dollars", metavar="N"),
        ),
        "layout (default: chosen)": (
            option("--dp", "data-parallel ranks (parallel.shard)", metavar="N"),
            option("--tp", "parallel.tensor", metavar="N"),
            option("--pp", "parallel.pipeline", metavar="N"),
            option("--cp", "parallel.context", metavar="N"),
            option("--ep", "parallel.expert", metavar="N"),
            option("--zero", "parallel.zero: 1, 2 or 3", metavar="N"),
        ),
    }, usage="bessemer plan [RECIPE] [options]"),
    Command("check", "run the launch checklist of a recipe on small trainings", experiments.check, OF_RECIPE),
    Command("train", "train, from the newest checkpoint if there is one", train.train, (
        *OF_RECIPE, RESTART,
        flag("--profile", "profile a few steps; writes a trace and a table of operators"),
    )),
    Command("launch", "write the files that start a run on a cluster", train.launch, (
        *OF_RECIPE,
        option("--on", "scheduler of the cluster", choices=["slurm", "kubernetes"], required=True),
        option("--out", "folder for the files (default: launch/ in the run directory)", metavar="DIR"),
    )),
    Command("evaluate", "score a checkpoint on held-out text and tasks", model.evaluate, (
        *OF_RUN, AVERAGE, STEP,
        option("--task", "also score this task: a YAML file or a task of lm-evaluation-harness; repeatable",
               action="append", default=[], metavar="TASK"),
    )),
    Command("generate", "continue a prompt with the model of a run", model.generate, (
        *OF_RUN, option("prompt", "text to continue; - reads it from standard input"), STEP, *SAMPLING,
    )),
    Command("chat", "chat with the model of a run", model.chat, (
        *OF_RUN, STEP, *SAMPLING,
        option("--system", "a system message before the conversation", metavar="TEXT"),
        option("--template", "plain, chatml or a Jinja file (default: that of the model, else plain)", metavar="NAME|FILE"),
    )),
    Command("import", "import a Hugging Face model as a run, and verify it", model.import_model, (
        option("folder", "a folder with config.json, safetensors and tokenizer.json, or hf:ORG/NAME"),
        option("--name", "name of the run (default: name of the folder)"),
        option("--dir", "folder that holds run directories (default runs)", default="runs"),
    )),
    Command("export", "export the model of a run to Hugging Face or GGUF, and verify it", model.export, (
        *OF_RUN, TRUST_CODE, AVERAGE, STEP,
        option("folder", "output folder; must be empty or not exist"),
        option("--to", "hf: for transformers (default); gguf: for llama.cpp and Ollama",
               choices=["hf", "gguf"], default="hf"),
        option("--dtype", "type of the weights; q8_0: 8 bits, GGUF only (default: export.dtype)",
               choices=["float32", "bfloat16", "float16", "q8_0"]),
    )),
    Command("trace", "name the documents of a step, or the steps of a document", inspection.trace, (
        *OF_RUN, TRUST_CODE, flag("--text", "also show the beginning of each document"),
        flag("--replay", "replay the step, and tell device, precision, data and weights apart"),
    ), either=(
        option("--step", "list the documents of step N, counted from 1", type=int, metavar="N"),
        option("--document", "show origin, tokens and steps of a document (identity, URL or path)", metavar="ID"),
    )),
    Command("watch", "show runs while they train, on a page that updates itself", inspection.watch, (
        option("run", "a run directory, or the recipe of a run; repeatable", nargs="+", metavar="RUN"), OVERRIDES,
        option("--port", "port on 127.0.0.1 (default 8421, or a free one)", type=int, metavar="N"),
    )),
    Command("report", "write the report of a run, or compare several runs", inspection.report, (
        option("run", "a run directory, or the recipe of a run; several are compared", nargs="+", metavar="RUN"), OVERRIDES,
        option("--out", "file for the page of several runs (default comparison.html)", metavar="FILE"),
    )),
    Command("ladder", "predict a large run from small runs by a scaling law", experiments.ladder, (
        *OF_RECIPE,
        option("--design", "ratio: fixed tokens per parameter (default); isoflop: several sizes per budget",
               choices=("ratio", "isoflop"), default="ratio"),
        option("--rungs", "number of small runs (default: 6 for ratio, 12 for isoflop)", type=int, metavar="N"),
        option("--budget", "budget of all runs: 5min, 2h, or FLOPs such as 1e15 (default 5min)", default="5min", metavar="B"),
        option("--ratio", "tokens per parameter (default: that of the planned run)", type=float, metavar="R"),
        option("--seeds", "seeds of the 3 smallest runs, to measure noise (default 3)", type=int, default=3, metavar="N"),
        option("--folder", "folder of the runs (default: ladder/ in the run directory)", metavar="DIR"),
        flag("--restart", "start again; earlier runs are set aside"),
    )),
    Command("compare", "train two recipes with the same seeds, and decide which one is better", experiments.compare, (
        option("recipes", "A, the baseline, and B", nargs=2, metavar="RECIPE"), OVERRIDES,
        option("--seeds", "number of seeds; 1 to N replace run.seed (default 3)", type=int, default=3, metavar="N"),
    )),
    Command("recipe", "show a shipped recipe, or explain a key", inspection.recipe, (
        option("name", "shipped recipe to print; without it: list them", nargs="?"),
        option("--explain", "explain a key; without KEY: list all keys", nargs="?", const="", metavar="KEY"),
    )),
)  # fmt: skip
