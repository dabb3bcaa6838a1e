"""A large run on one small machine: the real code of a step, on tensors without memory and in a group without others.

Everything that a process of the run would do is done: the same cuts in the same order, a step of forward and backward
passes, the update. The tensors are fake ones (torch's FakeTensorMode: shapes and types, no values), the process group is
torch's fake one, which answers every collective at once. A ledger of storages then says what a device would hold, and when.

What differs from a device: kernels are those that torch would pick on a CPU (attention keeps the same: its result and one
number a query), blocks are not compiled, and every sequence is one document.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.errors import InputError
from bessemer.layout import dial
from bessemer.layout import memory as layout_memory
from bessemer.layout.stages import parts_of
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.numbers import clip
from bessemer.parallel.team import AXES, Team
from bessemer.recipe import Batches, Parallel, Recipe
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train import split
from bessemer.train.device import Device
from bessemer.train.ema import WeightAverage
from bessemer.train.engine import Engine, MicroBatch
from bessemer.train.ledger import Ledger, total
from bessemer.train.task import config_of, task_of

STATES = ("weights", "gathered", "gradients", "optimizer", "average")


@dataclass(frozen=True)
class Moments:
    """Bytes by owner (see `Ledger`) of one process: between steps, after the backward passes, when it holds the most, and
    when weights, gradients and optimizer, with their buffers, are the most."""

    between: dict[str, int]
    after_backward: dict[str, int]
    peak: dict[str, int]
    states_peak: dict[str, int]


@dataclass(frozen=True)
class Simulated:
    """What one process would hold. place: on the pipeline axis; seconds: that the simulation took."""

    rank: int
    place: int
    moments: Moments
    seconds: float

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return total(self.moments.peak)


def beside_the_plan(recipe: Recipe, vocabulary: int) -> dict[str, Any]:
    """What each place of a recipe's pipeline holds in a step, beside what the plan says: for `bessemer plan --simulate`.

    On GPUs, unless the recipe names the CPU; the plan's allowance for a CPU's heap is left out, since it is no tensor.
    """
    is_cuda = recipe.train.device != "cpu"
    tokens = dial.MICRO_BATCH_TOKENS if is_cuda else dial.CPU_MICRO_BATCH_TOKENS
    resolved = dial.resolve(recipe, vocabulary, micro_batch_tokens=tokens)
    config = config_of(resolved, vocabulary, 0)
    widths = precisions.PRECISIONS[precision_of(resolved, is_cuda)].widths
    recomputed, rows = blocks_recomputed(resolved, config), []
    for part in parts_of(config, resolved.parallel):
        found = simulate(resolved, config, part.place, is_cuda=is_cuda)
        planned = layout_memory.split_memory(
            resolved, config, [part], base=0, recomputed=recomputed, is_cuda=True, **widths
        )
        rows.append({**asdict(found), "total": found.total, "planned": planned.to_dict(), "blocks": part.blocks})
    return {"processes": resolved.parallel.world, "parameters": config.parameters, "stages": rows}


def simulate(recipe: Recipe, config: ModelConfig, place: int = 0, *, is_cuda: bool = True) -> Simulated:
    """One process of a resolved recipe's run, the first at a place of the pipeline, through one step.

    is_cuda: as on a GPU (train.precision auto is bf16, the loss in chunks as asked for), else as on a CPU. The step has as
    many micro-batches as it takes to reach the peak, and optimizer state from a step before. Raises InputError where the
    recipe cannot be simulated or split.
    """
    require_simulable(recipe)
    begun = perf_counter()
    layout = recipe.parallel
    arithmetic = precisions.PRECISIONS[precision_of(recipe, is_cuda)]
    device = Device(torch.device("cpu"), "simulated", arithmetic, compile=False)
    task = task_of(_one_document_each(recipe, is_cuda), config, 0)
    recomputed = blocks_recomputed(recipe, config)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    rank = place * (layout.world // layout.pipeline)
    with _group(layout, rank) as team, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        copies = data.uses_ddp(team)
        # DDP asks for values; what it holds beside the model are the gradients, in buckets that are there from the start.
        built_by = Team(Parallel(), 0, team.mesh, team.control) if copies else team
        model, engine = split.build(recipe, config, built_by, task, device, recomputed, None, fake)
        with fake, Assumed():  # type: ignore[no-untyped-call]
            moments = watch_step(recipe, config, model, engine, in_buckets=copies)
    return Simulated(rank, place, moments, perf_counter() - begun)


def watch_step(
    recipe: Recipe, config: ModelConfig, model: Transformer, engine: Engine, *, in_buckets: bool = False
) -> Moments:
    """A step of a process's part of a run, of made-up tokens, with optimizer state from a step before; real or simulated.

    in_buckets: gradients lie in memory that stays from step to step, as DDP's.
    """
    ledger = Ledger()
    with ledger:
        weights = list(model.parameters())
        ledger.own("weights", [weight.detach() for weight in weights])
        trained = [weight for weight in weights if weight.requires_grad]
        optimizer = optimizers.build(model, recipe.train.optimizer)
        average = WeightAverage(model, recipe.train.ema) if recipe.train.ema else None
        if average is not None:
            ledger.own("average", average.tensors.values())
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        ledger.own("optimizer", _tensors(list(optimizer.state.values())))
        parts = [_micro_batch(recipe, config) for _ in range(_micro_batches(recipe))]
        if in_buckets:
            for _ in range(2):  # DDP makes its buckets anew after the first step
                engine.accumulate(parts, len(parts), 1.0)
                optimizer.zero_grad(set_to_none=False)
            ledger.own("gradients", _gradients(trained))
        else:
            optimizer.zero_grad(set_to_none=True)
        ledger.mark("start")
        engine.accumulate(parts, len(parts), 1.0)
        ledger.own("gradients", _gradients(trained))
        ledger.mark("backward")
        clip(trained, recipe.train.optimizer.clip_norm, 1.0)
        optimizer.step()
        if average is not None:
            average.update(0)
        ledger.mark("end")
    peak, states = ledger.peak("start", "end"), ledger.peak("start", "end", STATES)
    return Moments(ledger.at("start"), ledger.at("backward"), peak, states)


def precision_of(recipe: Recipe, is_cuda: bool) -> str:
    """The name of the precision that is simulated."""
    asked = recipe.train.precision
    return asked if asked != "auto" else "bf16" if is_cuda else "fp32"


def blocks_recomputed(recipe: Recipe, config: ModelConfig) -> int:
    """Blocks that recompute; with a budget all of them, since how much the devices have free is not known here."""
    return 0 if recipe.train.recompute == "none" else config.layers


def require_simulable(recipe: Recipe) -> None:
    """Raise InputError for what fake tensors cannot stand in for."""
    if recipe.train.objective != "causal":
        raise InputError(
            f"simulate: train.objective = {recipe.train.objective} chooses its work by the values of tokens, which a simulation "
            "does not have; only causal can be simulated"
        )
    if recipe.parallel.offload or recipe.train.optimizer.offload:
        raise InputError("simulate: offload moves memory between devices, and there is only one here; switch it off")
    if recipe.train.precision.startswith("fp8"):
        raise InputError(
            "simulate: fp8 products read the values they scale; take train.precision = bf16, which holds more"
        )


class Assumed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what code asks of values that nobody has: yes, or 1."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            kind = arguments[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return operator(*arguments, **(options or {}))


@contextlib.contextmanager
def _group(layout: Parallel, rank: int) -> Iterator[Team]:
    """This process as one of a group whose others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("simulate: this process belongs to a group already; simulate in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        mesh = init_device_mesh("cpu", tuple(int(getattr(layout, axis)) for axis in AXES), mesh_dim_names=AXES)
        yield Team(layout, rank, mesh, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _one_document_each(recipe: Recipe, is_cuda: bool) -> Recipe:
    train = recipe.train.model_copy(update={"device": "cuda" if is_cuda else "cpu"})
    tokens = recipe.tokens.model_copy(update={"document_mask": False})
    return recipe.model_copy(update={"tokens": tokens, "train": train})


def _micro_batches(recipe: Recipe) -> int:
    """As few as reach the peak: one that comes first and one that comes last; in a pipeline two rounds, but for gpipe, which
    holds all of them."""
    layout, size = recipe.parallel, recipe.train.micro_batch
    assert size is not None, "the recipe is resolved"
    every = Batches.of(recipe).full // layout.data // size
    if layout.pipeline == 1:
        return min(every, 2)
    enough = range(2 * layout.pipeline * layout.stages_each, every)
    return (
        every
        if layout.schedule == "gpipe"
        else next((count for count in enough if layout.fits_micro_batches(count)), every)
    )


def _micro_batch(recipe: Recipe, config: ModelConfig) -> MicroBatch:
    assert recipe.train.micro_batch is not None, "the recipe is resolved"
    shape = recipe.train.micro_batch, config.sequence_length
    keys_B = torch.zeros(shape[0], dtype=torch.int64) if recipe.train.dropout.is_on else None
    return MicroBatch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), None, keys_B)


def _gradients(weights: list[torch.nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def _tensors(states: list[dict[str, Any]]) -> list[Tensor]:
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
