"""Checkpoints written by one layout and loaded by another, for every pair of layouts, equal bit for bit."""

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bessemer.checkpoint import latest, save, verify
from bessemer.checkpoint.format import ShardMetadata, StoredShard, StoredTensor, assemble, global_plan, require_cover
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import MESH_AXES, SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import as_shard_of, local
from bessemer.recipe import Parallel
from tests.distributed.processes import run_on
from tests.distributed.small_model import whole

# Small and uneven versions of the transformer's parameters: shape, how tensor parallelism splits it, and the dimension that FSDP2
# splits.
PARAMETERS = {
    "embedding": ((11, 6), Shard(0), 0),
    "qkv": ((2, 3, 4, 12), Shard(0), 3),
    "qkv_bias": ((2, 3, 12), Shard(0), 2),
    "gate_up": ((2, 6, 6), Shard(1), 0),
    "out": ((5, 8), Shard(1), 0),
    "up_bias": ((7,), Shard(0), 0),  # both split its only dimension
    "norm": ((5,), Replicate(), 0),
    "tiny": ((1,), Replicate(), 0),  # all processes but one hold nothing
}
LAYOUTS = {
    "1": Parallel(),
    "ddp2": Parallel(replicate=2),
    "fsdp2": Parallel(shard=2),
    "fsdp3": Parallel(shard=3),
    "fsdp4": Parallel(shard=4),
    "tp2": Parallel(tensor=2),
    "fsdp2 x tp2": Parallel(shard=2, tensor=2),
    "hsdp 2x2": Parallel(replicate=2, shard=2),
    "ddp2 x tp2": Parallel(replicate=2, tensor=2),
    "pp2": Parallel(pipeline=2),
    "pp2 x fsdp2": Parallel(pipeline=2, shard=2),
}
STAGES = ({"embedding", "qkv", "qkv_bias", "tiny"}, {"embedding", "gate_up", "out", "up_bias", "norm"})  # tied


def truth(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(PARAMETERS[name.split("/")[0]][0], generator=generator)


def teams() -> dict[str, ProcessMesh | None]:
    """Return a mesh of the first processes of the group for each layout; None if this process is not in it."""
    rank = dist.get_rank()
    found: dict[str, ProcessMesh | None] = {}
    for name, layout in LAYOUTS.items():
        if layout.world == 1:
            found[name] = SINGLE_PROCESS if rank == 0 else None
            continue
        sizes = [getattr(layout, axis) for axis in MESH_AXES]
        device_mesh = DeviceMesh("cpu", torch.arange(layout.world).view(sizes), mesh_dim_names=MESH_AXES)
        control = dist.new_group(list(range(layout.world)), backend="gloo")
        found[name] = ProcessMesh(layout, rank, device_mesh, control) if rank < layout.world else None
    return found


def parameters(mesh: ProcessMesh, known: bool) -> dict[str, nn.Parameter]:
    """Return a model's parameters, split by the layout and filled with zeros."""
    stage = STAGES[mesh.coordinate("pipeline")] if mesh.layout.pipeline > 1 else set(PARAMETERS)
    module = nn.Module()
    for name, (shape, placement, _) in PARAMETERS.items():
        if name not in stage:
            continue
        whole = truth(name) if known else torch.zeros(shape)
        if mesh.device_mesh is not None and mesh.layout.tensor > 1:
            whole = distribute_tensor(whole, mesh.device_mesh["tensor"], [placement])
        module.register_parameter(name, nn.Parameter(whole))
    if mesh.device_mesh is not None and mesh.layout.shard > 1:
        device_mesh = mesh.device_mesh["replicate", "shard"] if mesh.layout.replicate > 1 else mesh.device_mesh["shard"]
        along = {parameter: PARAMETERS[name][2] for name, parameter in module.named_parameters()}
        fully_shard(module, mesh=device_mesh, shard_placement_fn=lambda parameter: Shard(along[parameter]))
    return dict(module.named_parameters())


def state(mesh: ProcessMesh, known: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Return a run's state: parameters, moments in local tensors, counters, and random states of each process."""
    model = parameters(mesh, known)
    optimizer: dict[str, torch.Tensor] = {}
    for name, parameter in model.items():
        for kind, dtype in (("exp_avg", torch.float32), ("exp_avg_sq", torch.bfloat16)):
            whole = truth(f"{name}/{kind}").to(dtype)
            moment = torch.zeros_like(local(parameter), dtype=dtype)
            if known:  # split by PyTorch, independently of the code under test
                moment.copy_(redistributed(whole, parameter))
            optimizer[f"{name}/{kind}"] = as_shard_of(parameter, moment)
        optimizer[f"{name}/step"] = torch.tensor(7.0 if known else 0.0)
    mine = torch.full((5,), mesh.rank, dtype=torch.uint8) if known else torch.zeros(5, dtype=torch.uint8)
    return {"model": dict(model), "optimizer": optimizer, "rng": {f"{mesh.rank}/cpu": mine, "none": torch.empty(0, 3)}}


def redistributed(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    for number, placement in reversed(
        list(enumerate(parameter.placements))
    ):  # tensor parallelism, the inner split, comes first
        if not placement.is_replicate():
            chunks = list(torch.chunk(whole, parameter.device_mesh.size(number), dim=placement.dim))
            place = parameter.device_mesh.get_local_rank(number)
            whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def same(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    return tensor.dtype == wanted.dtype and tensor.shape == wanted.shape and torch.equal(tensor, wanted)


def is_true(found: dict[str, dict[str, torch.Tensor]]) -> bool:
    wanted = {name: truth(name) for name in found["model"]}
    moments = {
        name: truth(name).to(torch.bfloat16 if name.endswith("_sq") else torch.float32)
        for name in found["optimizer"]
        if not name.endswith("/step")
    }
    return (
        all(same(whole(found["model"][name]).detach(), value) for name, value in wanted.items())
        and all(same(whole(found["optimizer"][name]), value) for name, value in moments.items())
        and all(found["optimizer"][f"{name}/step"] == 7 for name in wanted)
    )


def matrix(folder: Path) -> list[str]:
    join(Parallel(shard=4), torch.device("cpu"))
    wrong, known = [], teams()
    for name, mesh in known.items():
        if mesh is not None:
            save(folder / name, 3, state(mesh, known=True), {"layout": name}, keep=1, mesh=mesh)
        dist.barrier()
    for written, name in itertools.product(LAYOUTS, LAYOUTS):
        mesh = known[name]
        if mesh is None:
            continue
        checkpoint = latest(folder / written, mesh=mesh)
        assert checkpoint is not None and checkpoint.facts == {"layout": written}
        empty = state(mesh, known=False)
        for part in ("model", "optimizer"):
            checkpoint.fill(part, empty[part].items())
        if not is_true(empty):
            wrong.append(f"{written} -> {name}")
    return wrong


@pytest.mark.long
def test_every_layout_loads_what_every_layout_wrote(tmp_path: Path) -> None:
    assert run_on(4, matrix, tmp_path) == [[]] * 4
    for name, layout in LAYOUTS.items():
        checkpoint = verify(tmp_path / name / "step-00000003")
        model = checkpoint.tensors("model")
        assert model.keys() == PARAMETERS.keys()
        assert all(torch.equal(model[key], truth(key)) for key in model), name
        rng = checkpoint.tensors("rng")
        assert [rng[f"{rank}/cpu"].tolist() for rank in range(layout.world)] == [
            [rank] * 5 for rank in range(layout.world)
        ]
        assert rng["none"].shape == (0, 3)
        # Nothing is written twice, and every process writes something.
        files = list(checkpoint.folder.glob("*.safetensors"))
        held = sum(value.nbytes for part in checkpoint.contents for value in checkpoint.tensors(part).values())
        pieces = [piece for of in checkpoint.contents["optimizer"].values() for piece in of.shards]
        assert sum(math.prod(piece.shape) for piece in pieces) == sum(value.numel() for value in checkpoint.tensors("optimizer").values())  # fmt: skip
        assert held < sum(path.stat().st_size for path in files) < held + 6000 * len(files)
        assert len([path for path in files if path.name.startswith("optimizer")]) == layout.world


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 3 and 4, written in shards by two processes that have ended."""
    folder = tmp_path_factory.mktemp("sharded")
    run_on(2, write_two, folder)
    return folder


def write_two(folder: Path) -> None:
    mesh = join(Parallel(shard=2), torch.device("cpu"))
    for step in (3, 4):
        save(folder, step, state(mesh, known=True), {}, keep=2, mesh=mesh)


@contextmanager
def changed(path: Path, data: bytes | None) -> Iterator[None]:
    """Replace or remove a file while the block runs."""
    before = path.read_bytes()
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    yield
    path.write_bytes(before)


@pytest.mark.fault(4)
def test_damage_to_any_shard_falls_back(sharded: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    files = sorted((sharded / "step-00000004").iterdir())
    assert len(files) >= 6
    for path in files:
        data = path.read_bytes()
        damages: list[bytes | None] = [None, *(data[:length] for length in (0, 1, len(data) // 2, len(data) - 1))]
        for place in torch.randint(len(data), (20,), generator=generator).tolist():
            damages.append(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        for damaged in damages:
            with changed(path, damaged):
                said: list[str] = []
                found = latest(sharded, on_damage=said.append)
                assert found is not None and found.step == 3, path
                assert len(said) == 1 and "step-00000004" in said[0]
    assert latest(sharded).step == 4  # type: ignore[union-attr]


def find_damage(folder: Path) -> tuple[int, list[str]]:
    """Damage a file that only one process verifies, and check that all processes fall back."""
    mesh = join(Parallel(shard=3), torch.device("cpu"))
    said: list[str] = []
    found = latest(folder, lambda damage: said.append(str(damage)), mesh)
    assert found is not None
    empty = state(mesh, known=False)
    found.fill("model", empty["model"].items())
    found.fill("optimizer", empty["optimizer"].items())
    assert is_true(empty)
    return found.step, said


def test_damage_found_by_one_process_makes_all_fall_back(sharded: Path) -> None:
    path = sharded / "step-00000004" / "optimizer-00002-of-00002.safetensors"
    with changed(path, path.read_bytes()[:-1] + b"\x01"):
        for step, said in run_on(3, find_damage, sharded):
            assert step == 3
            assert len(said) == 1 and path.name in said[0] and said[0].startswith("rank ")


def test_reading_slices_and_missing_tensors(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model": {"w": torch.arange(12.0).view(3, 4), "s": torch.tensor(2.0)}}, {}, keep=1)
    checkpoint = verify(tmp_path / "step-00000001")
    assert "model" in checkpoint and "ema" not in checkpoint
    with checkpoint.open_files() as files:
        assert files.read_slice("model", "w", (1, 2), (2, 1)).tolist() == [[6.0], [10.0]]
        assert files.read_slice("model", "w", (3, 0), (0, 4)).shape == (0, 4)
        assert files.read("model", "s") == 2
        with pytest.raises(BessemerError, match="part model .* x$"):
            files.read("model", "x")
    with pytest.raises(BessemerError, match="'ema'"):
        checkpoint.tensors("ema")


def test_the_state_of_another_model_is_rejected_before_anything_changes(tmp_path: Path) -> None:
    save(tmp_path, 1, {"model": {"w": torch.ones(3), "v": torch.ones(2)}}, {}, keep=1)
    checkpoint = verify(tmp_path / "step-00000001")
    for other, says in (({"w": torch.zeros(3), "v": torch.zeros(4)}, r"model tensor v .*\[2\].*\[4\]"),
                        ({"w": torch.zeros(3), "x": torch.zeros(4)}, "model tensor x ")):  # fmt: skip
        with pytest.raises(BessemerError, match=says):
            checkpoint.fill("model", other.items())
        assert other["w"].sum() == 0


Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def cut(shape: tuple[int, ...], draw: random.Random) -> Boxes:
    """Split a tensor repeatedly at random into boxes that need not form a grid."""
    boxes: Boxes = [((0,) * len(shape), shape)]
    for _ in range(draw.randrange(8)):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        axis = draw.randrange(len(shape))
        if size[axis] < 2:
            boxes.append((offset, size))
            continue
        at = draw.randrange(1, size[axis])
        boxes.append((offset, (*size[:axis], at, *size[axis + 1 :])))
        boxes.append(((*offset[:axis], offset[axis] + at, *offset[axis + 1 :]), (*size[:axis], size[axis] - at, *size[axis + 1 :])))  # fmt: skip
    return boxes


def counted(shape: tuple[int, ...], boxes: Boxes) -> torch.Tensor:
    count = torch.zeros(shape, dtype=torch.int64)
    for offset, size in boxes:
        count[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))] += 1
    return count


def test_only_exact_covers_of_a_tensor_pass() -> None:
    draw = random.Random(0)
    wrong = 0
    for _ in range(300):
        shape = tuple(draw.randrange(1, 7) for _ in range(draw.randrange(1, 4)))
        boxes = cut(shape, draw)
        require_cover("it", shape, boxes)
        if len(boxes) > 1 and draw.random() < 0.8:  # one box is left out, duplicated, or moved onto another
            number = draw.randrange(len(boxes))
            others = boxes[:number] + boxes[number + 1 :]
            boxes = draw.choice([others, [*boxes, boxes[number]], [*others, draw.choice(others)]])
            assert not bool((counted(shape, boxes) == 1).all())
            wrong += 1
            with pytest.raises(BessemerError, match="it: "):
                require_cover("it", shape, boxes)
    assert wrong > 100


def test_any_slice_can_be_read_from_any_shards() -> None:
    draw = random.Random(1)
    for _ in range(100):
        shape = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(1, 4)))
        whole = torch.randn(shape)
        sources = tuple(StoredShard(str(number), "x", *box) for number, box in enumerate(cut(shape, draw)))
        files = {
            source.file: whole[tuple(slice(a, a + n) for a, n in zip(source.offset, source.shape, strict=True))]
            for source in sources
        }
        stored = StoredTensor("torch.float32", shape, sources)
        offset = tuple(draw.randrange(n) for n in shape)
        size = tuple(draw.randrange(n - at + 1) for n, at in zip(shape, offset, strict=True))
        found = assemble(stored, offset, size, lambda source, there: files[source.file][there], torch.float32)  # noqa: B023
        assert torch.equal(found, whole[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))])


def described(
    dtype: str = "torch.float32", shape: tuple[int, ...] = (4, 100), offset: int = 0, rows: int = 4
) -> ShardMetadata:
    size = (rows, *shape[1:])
    return ShardMetadata(dtype, shape, (offset, 0), size, rows * shape[1] * 4)


def test_replicas_share_the_writing() -> None:
    names = [("model", f"w{number}") for number in range(12)]
    duties, contents = global_plan([dict.fromkeys(names, described()) for _ in range(4)])
    written = [duty["model"][1] for duty in duties]
    assert sorted(itertools.chain(*written)) == sorted(name for _, name in names)
    assert [len(mine) for mine in written] == [3, 3, 3, 3]
    assert [duty["model"][0] for duty in duties] == [f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    for rank, mine in enumerate(written):
        for name in mine:
            assert [source.file for source in contents["model"][name].shards] == [duties[rank]["model"][0]]
