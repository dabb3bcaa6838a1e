"""Live tensor bytes and sent bytes of a training step: of real processes, or of one rank of any layout on fake tensors.

Fake tensors (FakeTensorMode) have shapes and no values; the collectives of torch's fake process group return at once.
"""

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from bessemer.distributed.mesh import MESH_AXES, ProcessMesh
from bessemer.distributed.sharded_tensors import clip_gradients
from bessemer.model import kernels
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer, meta_model
from bessemer.recipe import Parallel, Recipe, Train
from bessemer.train import optimizer as optimizers
from bessemer.train import parallelize
from bessemer.train.device import Device
from bessemer.train.engine import Engine, MicroBatch
from bessemer.train.precision import PRECISIONS
from bessemer.train.task import task_of

KINDS = {"gather": "all_gather", "reduce_scatter": "reduce_scatter", "reduce": "all_reduce", "send": "send"}


def local_tensors(values: Any) -> list[Tensor]:
    """Return the tensors with storage among `values`; for a DTensor its shard."""
    tensors = [x._local_tensor if isinstance(x, DTensor) else x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [x for x in tensors if not is_traceable_wrapper_subclass(x) and x.device.type != "meta"]


def num_bytes(values: Any) -> int:
    return sum(x.untyped_storage().nbytes() for x in local_tensors(values))


@dataclass
class StepBytes:
    """Bytes of one process in a training step.

    They are the live bytes between steps, after the backward passes and at the peak, those of weights and optimizer, and those
    sent around a ring, by kind.
    """

    between: int = 0
    after_backward: int = 0
    peak: int = 0
    weights: int = 0
    optimizer: int = 0
    sent: Counter[str] = field(default_factory=Counter)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the live bytes of all storages and the bytes sent by collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.sent: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        # FSDP2 frees weights with this function, which is not an operator
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._sizes:
                self._set(id(storage), storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operator(*arguments, **(options or {}))
        tensors = local_tensors((result, arguments, options))
        self.see(tensors)
        if operator.namespace in ("c10d", "_c10d_functional"):
            name = operator._schema.name.replace("all_", "all").replace("c10d_functional", "")
            kind = next((kind for word, kind in KINDS.items() if word in name), None)
            if kind is not None:
                whole, n = max(x.numel() * x.element_size() for x in tensors), _group_size(arguments)
                self.sent[kind] += {"send": n, "all_reduce": 2 * (n - 1)}.get(kind, n - 1) * whole // n
        return result

    def see(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if id(storage) not in self._sizes:
                self._sizes[id(storage)] = 0
                weakref.finalize(storage, self._freed, id(storage))
            self._set(id(storage), storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self.peak, self._sizes[key] = max(self.peak, self.live), size

    def _freed(self, key: int) -> None:
        self._set(key, 0)
        del self._sizes[key]


def _group_size(arguments: Any) -> int:
    for x in arguments:
        if isinstance(x, torch.ScriptObject) and x._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(x).size()
    return dist.distributed_c10d._resolve_process_group(arguments[-1]).size()


class AssumedValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that replaces values read from fake tensors by True or 1."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            kind = arguments[0].dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        return operator(*arguments, **(options or {}))


def watch_step(train: Train, layout: Parallel, config: ModelConfig, model: Transformer, engine: Engine) -> StepBytes:
    """Take a step of tokens that differ, with optimizer state from an earlier step."""
    batch, size = train.global_batch_tokens, train.micro_batch
    assert batch is not None and size is not None
    count = batch // config.sequence_length // layout.data // size
    tokens = torch.arange(size * config.sequence_length).remainder(config.vocabulary).view(size, -1)
    keys_B = torch.zeros(size, dtype=torch.int64) if train.dropout.is_on else None
    # Two micro-batches reach the peak without a pipeline: a first and a last one.
    parts = [MicroBatch(tokens, tokens, None, keys_B)] * (count if layout.pipeline > 1 else min(count, 2))
    held = StepBytes()
    with Ledger() as ledger:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        ledger.see(local_tensors(list(model.parameters())))
        optimizer = optimizers.build(model, train.optimizer)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(2 if layout.uses_ddp else 0):  # DDP rebuilds its buckets after the first step
            engine.accumulate(parts, torch.tensor(len(parts)), torch.ones(()))
            optimizer.zero_grad(set_to_none=False)
        held.weights = num_bytes([weight.detach() for weight in model.parameters()])
        held.optimizer = num_bytes([list(state.values()) for state in optimizer.state.values()])
        held.between = ledger.peak = ledger.live
        ledger.sent.clear()
        engine.accumulate(parts, torch.tensor(len(parts)), torch.ones(()))
        held.after_backward, held.sent = ledger.live, Counter(ledger.sent)
        clip_gradients(weights, train.optimizer.clip_norm, torch.ones(()))
        optimizer.step()
        held.peak = ledger.peak
    return held


def simulate(recipe: Recipe, config: ModelConfig, stage: int = 0) -> StepBytes:
    """Take a bf16 step on the first rank of a pipeline stage, eagerly, with all blocks recomputed."""
    train, layout = recipe.train, recipe.parallel
    device = Device(torch.device("cpu"), "simulated", PRECISIONS["bf16"], compile=False)
    task, fake = task_of(train, False, config, 0), FakeTensorMode(allow_non_fake_inputs=True)
    materialise = parallelize.materialise

    def materialise_fake(*arguments: Any) -> None:
        with fake:
            materialise(*arguments)

    with (
        _fake_group(layout, stage * (layout.world // layout.pipeline)) as mesh,
        warnings.catch_warnings(), formulas_of_gpu(), patch.object(parallelize, "materialise", materialise_fake),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        model, engine = parallelize.parallelize(train, meta_model(config), mesh, task, device, config.layers)
        with fake, AssumedValues():  # type: ignore[no-untyped-call]
            return watch_step(train, layout, config, model, engine)


def formulas_of_gpu() -> contextlib.AbstractContextManager[Any]:
    """Context in which bf16 uses the formulas for a GPU, without the fused functions for a CPU."""
    is_fused = kernels.is_eager_cpu
    return patch.object(kernels, "is_eager_cpu", lambda x, *others: x.dtype != torch.bfloat16 and is_fused(x, *others))


@contextlib.contextmanager
def _fake_group(layout: Parallel, rank: int) -> Iterator[ProcessMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())  # type: ignore[no-untyped-call]
    try:
        sizes = tuple(int(getattr(layout, axis)) for axis in MESH_AXES)
        device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_AXES)
        yield ProcessMesh(layout, rank, device_mesh, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
