"""`bessemer plan`: memory, time, money and layout of a run; its other questions: a crawl, a pipeline. `bessemer calibrate`: this
machine measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bessemer.cli import options, runs

if TYPE_CHECKING:
    import argparse


def add(commands: Any) -> None:
    """Values stay text: plan/ask.py reads 70B and 2048xH100."""
    plan_ = commands.add("plan", "what a run, a corpus or a pipeline takes: parameters, memory, time, money", plan)
    options.add_recipe(plan_, nargs="?")
    plan_.add_argument("--gpus", metavar="NxDEVICE", help="plan for a cluster, for example 2048xH100")
    plan_.add_argument(
        "--search", action="store_true", help="try every layout: those that fit, by speed, and why others do not"
    )
    plan_.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=VALUE,...",
        help="compare with the same plan with changes, for example gpus=1024 or precision=fp8,tp=4; several times for several",
    )  # fmt: skip
    plan_.add_argument("--devices", action="store_true", help="list the catalogue of devices instead")
    plan_.add_argument("--catalogue", metavar="FILE", help="a file of your own devices, in the catalogue's form")
    plan_.add_argument("--html", metavar="FILE", help="write the plan as a page with pictures as well")
    model = plan_.add_argument_group("the model, without a recipe or otherwise than it has it")
    model.add_argument("--model", metavar="NAME", help="a published shape, for example llama3-70b")
    model.add_argument("--params", metavar="N", help="a shape of so many parameters, for example 70B")
    for name in ("layers", "width", "heads", "kv-heads", "mlp-width", "vocabulary"):
        model.add_argument(f"--{name}", metavar="N", help=f"model.{name.replace('-', '_')}")
    training = plan_.add_argument_group("the training")
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
    layout = plan_.add_argument_group("the layout; left out: the fastest that fits")
    for name, help in (
        ("dp", "devices that each take a part of the batch (parallel.shard)"),
        ("replicate", "parallel.replicate"), ("tp", "parallel.tensor"), ("pp", "parallel.pipeline"), ("cp", "parallel.context"),
        ("zero", "parallel.zero: 1, 2 or 3"), ("virtual", "stages on each device (interleaved; default 2)"),
    ):  # fmt: skip
        layout.add_argument(f"--{name}", metavar="N", help=help)
    layout.add_argument("--per-node", metavar="N", help="devices of a node")
    layout.add_argument(
        "--stack", metavar="NAME", help="framework whose memory and overlap behaviour to model (default bessemer)"
    )
    plan_.add_argument("--price", metavar="P", help="of a device (with --corpus: of a core; default 0.05) for an hour")
    memory = plan_.add_argument_group("memory of a step")
    memory.add_argument(
        "--simulate",
        action="store_true",
        help="count the memory of a step of every kind of process, on tensors without memory",
    )
    corpus = plan_.add_argument_group("a corpus")
    corpus.add_argument("--corpus", metavar="SIZE", help="work out a crawl of this size instead, for example 100TB")
    corpus.add_argument("--cores", type=int, default=64, metavar="N", help="cores of a machine (default 64)")
    corpus.add_argument("--machines", type=int, default=16, metavar="N", help="machines (default 16)")
    corpus.add_argument("--memory", default="256GB", metavar="SIZE", help="memory of a machine (default 256GB)")
    corpus.add_argument(
        "--storage-price", type=float, default=0.023, metavar="P", help="of a gigabyte for a month (default 0.023)"
    )
    corpus.add_argument("--rates", metavar="FILE", help="measured rates, as benchmarks/corpus.py writes them")
    pipeline = plan_.add_argument_group("a pipeline")
    pipeline.add_argument("--schedule", metavar="NAME", help="draw a pipeline schedule instead: gpipe, 1f1b, interleaved, "
        "zbv or dualpipev; with a recipe, for its model cut into stages; with --gpus: the layout's")  # fmt: skip
    pipeline.add_argument("--stages", type=int, metavar="N", help="processes of the pipeline")
    pipeline.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of a step")
    pipeline.add_argument("--backward", type=float, metavar="B", help="of a stage, in its forwards (default 2)")
    pipeline.add_argument("--send", type=float, metavar="S", help="from a process to another, in forwards (default 0)")
    pipeline.add_argument("--svg", metavar="FILE", help="draw it in this file as well")
    plan_.add_argument("--measured", metavar="RUN", help="scale the plan by what this run took beside its own plan")
    calibrate_ = commands.add("calibrate", "measure this machine's matmuls, memory, all-reduce and disk", calibrate)
    calibrate_.add_argument(
        "--out", default="machine.toml", metavar="FILE", help="file to write (default machine.toml)"
    )
    calibrate_.add_argument(
        "--disk", default=".", metavar="DIR", help="folder of the disk to measure (default: this one)"
    )
    calibrate_.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")


def plan(args: argparse.Namespace) -> Any:
    from bessemer import planning

    return planning.plan(args, runs.open_recipe)


def calibrate(args: argparse.Namespace) -> Any:
    from bessemer import calibrate

    return calibrate.command(args)
