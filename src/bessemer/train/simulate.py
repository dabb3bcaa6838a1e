"""The memory of a large run's step on a small machine: the real code, with fake tensors in a fake process group.

The tensors are torch's FakeTensorMode's (shapes and dtypes, no values), the process group is torch's fake one, whose collectives
return at once. A tracker of storages records what a device would hold, and when. Differences from a device: kernels are those
that torch would choose on a CPU, blocks are not compiled, and every sequence is one document.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bessemer.defaults import derived_keys
from bessemer.errors import InputError
from bessemer.layout.memory import RMS_COPIES_CPU, rank_memory
from bessemer.layout.pipeline_stages import pipeline_ranks
from bessemer.model.config import ModelConfig
from bessemer.model.kernels import as_on_gpu
from bessemer.model.transformer import Transformer, meta_model
from bessemer.parallel.dtensors import clip_gradients
from bessemer.parallel.mesh import MESH_AXES, ProcessMesh
from bessemer.recipe import Parallel, Recipe, Train
from bessemer.recipe.parallel import SCHEDULES
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train import split
from bessemer.train.device import Device
from bessemer.train.engine import Engine, MicroBatch
from bessemer.train.task import config_of, task_of

OWNERS = ("weights", "gathered", "gradients", "optimizer", "ema", "activations")
STATES = OWNERS[:-1]
FSDP_GATHERS = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy")
FSDP_REDUCES = ("fsdp::chunk_cat",)
REDUCE_SCATTERS = ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")
CONCATENATION = "aten::cat"  # by which FSDP2 assembles shards along another dimension than the first
FSDP_OPERATORS = {*FSDP_GATHERS, *FSDP_REDUCES, *REDUCE_SCATTERS, CONCATENATION}


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that operators create while it is entered, and when it grows, shrinks or is freed.

    It counts bytes and allocates none, so it serves real and fake tensors alike. Owners are `weights`, `gathered` (FSDP2's
    unsharded weights and its buffers for them), `gradients` (whole and sharded, FSDP2's buffers included), `optimizer`,
    `ema` (of the weights), and `activations`: all else. An owner is often known only after the storage is freed, so sums are
    taken at the end; the first owner of a storage stays. Buffers that C++ code allocates by itself (gloo's) are not counted.

    `torch.UntypedStorage.resize_` is replaced meanwhile: FSDP2 frees gathered weights by it, it is no operator that a dispatch
    mode could see, and comparing all sizes at each operator would take longer than the step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[tuple[int, int]] = []  # (number of the storage, change of its bytes)
        self._sizes: list[int] = []  # by number, now
        self._owner: dict[int, str] = {}
        self._numbers: dict[int, tuple[int, Any]] = {}  # id of a storage to its number and a weak reference
        self._concatenated: dict[int, list[int]] = {}  # inputs of a concatenation
        self._marks: dict[str, int] = {}

    def __enter__(self) -> MemoryTracker:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._recording(self._resize)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result, name = operator(*arguments, **(options or {})), operator._schema.name
        outputs = [self._number(x) for x in _local_tensors(result)]
        if name not in FSDP_OPERATORS:
            return result
        inputs = [self._number(x) for x in _local_tensors((arguments, options))]
        owners = {self._owner.get(number) for number in (*outputs, *inputs)}
        if name in FSDP_GATHERS:
            self._assign([*outputs, *inputs], "gathered")
        elif name in FSDP_REDUCES:
            parts = [part for number in (*outputs, *inputs) for part in self._concatenated.get(number, ())]
            self._assign([*outputs, *inputs, *parts], "gradients")
        elif name in REDUCE_SCATTERS and "gradients" in owners:
            self._assign([*outputs, *inputs], "gradients")
        elif name == CONCATENATION:
            self._concatenated |= dict.fromkeys(outputs, inputs)
            if any(self._owner.get(number) == "gathered" for number in inputs):
                self._assign(outputs, "gathered")
        return result

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Set the owner of tensors' storages; those not seen before count from now on."""
        for tensor in tensors:
            self._assign([self._number(x) for x in _local_tensors(tensor)], owner)

    def mark(self, name: str) -> None:
        self._marks[name] = len(self._events)

    def at(self, name: str) -> dict[str, int]:
        """Bytes by owner at a named moment."""
        return self._by_owner(self._marks[name])

    def peak(self, start: str, end: str, owners: Iterable[str] = OWNERS) -> dict[str, int]:
        """Bytes by owner at the moment between two named ones at which `owners` together hold the most."""
        wanted = set(owners)
        changes = [change if self._owner.get(number, OWNERS[-1]) in wanted else 0 for number, change in self._events]
        live = np.concatenate(([0], np.cumsum(np.array(changes, dtype=np.int64))))
        first, last = self._marks[start], self._marks[end]
        return self._by_owner(first + int(np.argmax(live[first : last + 1])))

    def _by_owner(self, end: int) -> dict[str, int]:
        totals = dict.fromkeys(OWNERS, 0)
        for number, change in self._events[:end]:
            totals[self._owner.get(number, OWNERS[-1])] += change
        return totals

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, recorded when it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._numbers:
            number = len(self._sizes)
            self._sizes.append(0)
            self._numbers[key] = number, weakref.ref(storage, functools.partial(self._freed, key, number))
        number = self._numbers[key][0]
        self._resized(number, storage.nbytes())
        return number

    def _resized(self, number: int, size: int) -> None:
        if (change := size - self._sizes[number]) != 0:
            self._sizes[number] = size
            self._events.append((number, change))

    def _freed(self, key: int, number: int, reference: Any) -> None:
        del self._numbers[key]
        self._concatenated.pop(number, None)
        self._resized(number, 0)

    def _assign(self, numbers: Iterable[int], owner: str) -> None:
        for number in numbers:
            self._owner.setdefault(number, owner)

    def _recording(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(resize)
        def recorded(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._numbers.get(id(storage))) is not None:
                self._resized(known[0], storage.nbytes())
            return result

        return recorded


def _local_tensors(values: Any) -> list[Tensor]:
    """The tensors with storage among values; of a DTensor the local shard."""
    tensors = [x._local_tensor if isinstance(x, DTensor) else x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [x for x in tensors if not is_traceable_wrapper_subclass(x) and x.device.type != "meta"]


def total(by_owner: Mapping[str, int]) -> int:
    return sum(by_owner.values())


@dataclass(frozen=True)
class Moments:
    """Bytes of one process by owner (see MemoryTracker): between steps, after the backward passes, at the peak of all, and at
    the peak of weights, gradients and optimizer with their buffers."""

    between: dict[str, int]
    after_backward: dict[str, int]
    peak: dict[str, int]
    states_peak: dict[str, int]


@dataclass(frozen=True)
class Simulated:
    """The memory of one process. place: its pipeline coordinate; seconds: of the simulation."""

    rank: int
    place: int
    moments: Moments
    seconds: float


def beside_the_plan(recipe: Recipe, vocabulary: int) -> dict[str, Any]:
    """The memory of each pipeline stage's process, simulated and planned: for `bessemer plan --simulate`.

    On GPUs, unless the recipe names the CPU; the plan's allowance for a CPU's heap is left out.
    """
    is_cuda = recipe.train.device != "cpu"
    resolved = derived_keys.resolve(recipe, vocabulary, micro_batch_tokens=derived_keys.MICRO_BATCH_TOKENS_ON[is_cuda])
    config, train, layout = config_of(resolved, vocabulary, 0), resolved.train, resolved.parallel
    element_bytes, recomputed, rows = _precision(train, is_cuda).element_bytes, blocks_recomputed(train, config), []
    for rank in pipeline_ranks(config, layout):
        simulated = simulate(resolved, config, rank.pipeline_rank, is_cuda=is_cuda)
        planned = rank_memory(
            train.model_copy(update={"compile": "off"}), layout, config, rank, element_bytes, recomputed_per_rank=recomputed,
            is_cuda=is_cuda, rms_copies=RMS_COPIES_CPU,
        )  # fmt: skip
        more = {"total": total(simulated.moments.peak), "planned": planned.to_dict(), "blocks": rank.blocks}
        if is_cuda:  # with the kernels of a GPU, and blocks compiled as the recipe has it
            as_run = rank_memory(
                train, layout, config, rank, element_bytes, recomputed_per_rank=recomputed, is_cuda=True
            )
            more["planned_as_run"] = as_run.to_dict()
        rows.append({**asdict(simulated), **more})
    device, micro_batch = "GPU" if is_cuda else "CPU", train.micro_batch
    return {
        "processes": layout.world, "parameters": config.parameters, "device": device, "micro_batch": micro_batch,
        "stages": rows,
    }  # fmt: skip


def simulate(recipe: Recipe, config: ModelConfig, place: int = 0, *, is_cuda: bool = True) -> Simulated:
    """One step of one process of a resolved recipe's run, the first at a pipeline coordinate.

    is_cuda: as on a GPU (train.precision auto is bf16, the loss in the configured chunks), else as on a CPU. The step has as
    many micro-batches as it takes to reach the peak, and optimizer state from an earlier step. Raises InputError where the
    recipe cannot be simulated or split.
    """
    layout, begun = recipe.parallel, perf_counter()
    require_simulable(recipe.train, layout)
    device = Device(torch.device("cpu"), "simulated", _precision(recipe.train, is_cuda), compile=False)
    train = recipe.train.model_copy(update={"device": "cuda" if is_cuda else "cpu"})
    split.require_trainable(recipe.train, layout, config, device.torch_device)
    task = task_of(train, False, config, 0)  # one document in each sequence
    rank = place * (layout.world // layout.pipeline)
    fake, uses_ddp = FakeTensorMode(allow_non_fake_inputs=True), layout.uses_ddp
    with _fake_group(layout, rank) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        # DDP reads values; besides the model it holds only gradients, in buckets that exist from the start.
        built_mesh = ProcessMesh(Parallel(), 0, mesh.device_mesh, mesh.control) if uses_ddp else mesh
        recomputed = blocks_recomputed(train, config)
        shell = meta_model(config)
        model, engine = split.build(recipe.train, shell, built_mesh, task, device, recomputed, memory=fake)
        with fake, AssumedValues(), as_on_gpu() if is_cuda else contextlib.nullcontext():  # type: ignore[no-untyped-call]
            moments = watch_step(recipe.train, layout, config, model, engine, in_buckets=uses_ddp)
    return Simulated(rank, place, moments, perf_counter() - begun)


def watch_step(
    train: Train, layout: Parallel, config: ModelConfig, model: Transformer, engine: Engine, *, in_buckets: bool = False
) -> Moments:
    """Memory of a step of random tokens on a process's part of a run, real or simulated, with optimizer state from an earlier
    step. in_buckets: gradients stay allocated from step to step, as DDP's."""
    with MemoryTracker() as tracker:
        weights = list(model.parameters())
        tracker.own("weights", [weight.detach() for weight in weights])
        trained = [weight for weight in weights if weight.requires_grad]
        optimizer = optimizers.build(model, train.optimizer)
        average = optimizers.WeightAverage(model, train.ema) if train.ema else None
        if average is not None:
            tracker.own("ema", average.tensors.values())
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        tracker.own("optimizer", [value for value in states if isinstance(value, Tensor)])
        parts = [_micro_batch(train, config) for _ in range(_num_micro_batches(train, layout, config.sequence_length))]
        if in_buckets:
            for _ in range(2):  # DDP rebuilds its buckets after the first step
                engine.accumulate(parts, len(parts), 1.0)
                optimizer.zero_grad(set_to_none=False)
            tracker.own("gradients", _gradients(trained))
        else:
            optimizer.zero_grad(set_to_none=True)
        tracker.mark("start")
        engine.accumulate(parts, len(parts), 1.0)
        tracker.own("gradients", _gradients(trained))
        tracker.mark("backward")
        clip_gradients(trained, train.optimizer.clip_norm, 1.0)
        optimizer.step()
        if average is not None:
            average.update(0)
        tracker.mark("end")
    peak, states_peak = tracker.peak("start", "end"), tracker.peak("start", "end", STATES)
    return Moments(tracker.at("start"), tracker.at("backward"), peak, states_peak)


def _precision(train: Train, is_cuda: bool) -> precisions.Precision:
    automatic = "bf16" if is_cuda else "fp32"
    return precisions.PRECISIONS[automatic if train.precision == "auto" else train.precision]


def blocks_recomputed(train: Train, config: ModelConfig) -> int:
    """Recomputed blocks; with a budget all of them, since the devices' free memory is not known here."""
    return 0 if train.recompute == "none" else config.layers


def require_simulable(train: Train, layout: Parallel) -> None:
    """Raise InputError for what fake tensors cannot stand in for."""
    if train.objective != "causal":
        raise InputError(
            f"simulate: train.objective = {train.objective} chooses its work by the values of tokens, which a simulation "
            "does not have; only causal can be simulated"
        )
    if layout.offload or train.optimizer.offload:
        raise InputError("simulate: offload moves memory between devices, and there is only one here; switch it off")
    if train.precision.startswith("fp8"):
        raise InputError(
            "simulate: fp8 matmuls read the values they scale; take train.precision = bf16, which holds more"
        )


class AssumedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces values that code reads from fake tensors: True, or 1."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            kind = arguments[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return operator(*arguments, **(options or {}))


@contextlib.contextmanager
def _fake_group(layout: Parallel, rank: int) -> Iterator[ProcessMesh]:
    """This process in a fake process group, without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError("simulate: this process belongs to a group already; simulate in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        device_mesh = init_device_mesh(
            "cpu", tuple(int(getattr(layout, axis)) for axis in MESH_AXES), mesh_dim_names=MESH_AXES
        )
        yield ProcessMesh(layout, rank, device_mesh, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _num_micro_batches(train: Train, layout: Parallel, sequence_length: int) -> int:
    """The fewest that reach the peak: a first and a last one; in a pipeline two rounds, but all of them for gpipe."""
    batch, size = train.global_batch_tokens, train.micro_batch
    assert batch is not None and size is not None, "the recipe is resolved"
    every = batch // sequence_length // layout.data // size
    if layout.pipeline == 1:
        return min(every, 2)
    enough = range(2 * layout.pipeline * layout.stages_per_rank, every)
    if SCHEDULES[layout.schedule].all_forward_first:
        return every
    return next((count for count in enough if layout.fits_micro_batches(count)), every)


def _micro_batch(train: Train, config: ModelConfig) -> MicroBatch:
    assert train.micro_batch is not None, "the recipe is resolved"
    shape = train.micro_batch, config.sequence_length
    keys_B = torch.zeros(shape[0], dtype=torch.int64) if train.dropout.is_on else None
    return MicroBatch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), None, keys_B)


def _gradients(weights: list[torch.nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]
