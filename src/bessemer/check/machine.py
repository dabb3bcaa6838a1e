"""What the devices, links, clocks and the file system of a run do when they are tried, by every process of its layout.

`python -m bessemer.check.machine FOLDER` is one process of them; FOLDER has recipe.toml and gets machine.json.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bessemer.check.rows import CheckRow, judged
from bessemer.check.trial import fits_here
from bessemer.environment import num_cores
from bessemer.errors import BessemerError
from bessemer.launch.group import run_group
from bessemer.parallel.mesh import MESH_AXES, SINGLE_PROCESS, ProcessMesh, join, leave
from bessemer.recipe import Recipe, dump, load
from bessemer.run import read_json, sync_folder, write_atomic, write_json
from bessemer.terminal import counted, rate, size
from bessemer.train import device as devices
from bessemer.train.device import Device, synchronize

TOPIC = "machine"
EDGE, REPEATS = {"cpu": 512, "cuda": 4096}, 20  # of the matmul with a known answer
REDUCED_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}
SLOW_SHARE = {"cpu": 0.6, "cuda": 0.85}  # of the median rate, below which a device is warned of; CPUs are shared
MAX_SKEW = 1.0  # seconds between two clocks
SEEN_SECONDS = 5.0  # after which a file that another process wrote must be there
GROUP_SECONDS = 240.0
RESULT = "machine.json"


def machine_rows(recipe: Recipe, place: Path) -> Iterator[CheckRow]:
    """Try this machine with the processes of the layout where they fit, else with one. place: a scratch folder in that of the
    run's folder."""
    layout, is_cuda = recipe.parallel, devices.choose(recipe.train).is_cuda
    if layout.world == 1 or not fits_here(layout, is_cuda):
        facts = examined(recipe, SINGLE_PROCESS, place, devices.choose(recipe.train))
        yield from rows_of({**facts, "folder": str(place.parent)}, is_cuda)
        if layout.world > 1:
            said = f"{layout.world} processes do not fit on this machine; start `bessemer check` on the cluster as the training"
            yield CheckRow(TOPIC, "collectives by axis", "not here", said)
        return
    folder = place / "machine"
    folder.mkdir()
    write_atomic(folder / "recipe.toml", dump(recipe))
    variables = {"OMP_NUM_THREADS": str(max(num_cores() // layout.world, 1))}
    arguments = ("-m", "bessemer.check.machine", str(folder), str(place))
    why = run_group(arguments, layout.world, folder / "log", seconds=GROUP_SECONDS, variables=variables)
    if why is not None:
        raise BessemerError(f"the {layout.world} processes of the layout could not be tried: {why}")
    yield from rows_of({**read_json(folder / RESULT), "folder": str(place.parent)}, is_cuda)


def rows_of(facts: dict[str, Any], is_cuda: bool) -> Iterator[CheckRow]:
    """The rows of what `examined` found."""
    ranks, kind = facts["ranks"], "cuda" if is_cuda else "cpu"
    wrong = [f"rank {row['rank']} on {row['host']}" for row in ranks if row["wrong"]]
    said = f"{REPEATS} matmuls of {EDGE[kind]} x {EDGE[kind]} integers on {len(ranks)} x {ranks[0]['device']}"
    said += f", {len(wrong)} wrong {', '.join(wrong)}"
    yield judged(TOPIC, "matmul has the known answer", not wrong, said.strip())
    rates = [row["rate"] for row in ranks]
    if len(ranks) == 1:
        said = f"{rate(rates[0])}; there is no other device to compare it with"
        yield CheckRow(TOPIC, "matmul rate", "not here", said)
    else:
        slow = [f"rank {row['rank']} on {row['host']}: {rate(row['rate'])}" for row in ranks
                if row["rate"] < SLOW_SHARE[kind] * median(rates)]  # fmt: skip
        said = f"{rate(min(rates))} to {rate(max(rates))}, median {rate(median(rates))}"
        busy = [note] if slow and (note := devices.busy_note()) else []
        yield judged(TOPIC, "matmul rate", not slow, "; ".join([said, *slow, *busy]), otherwise="warn")
    for axis, found in facts["axes"].items():
        said = f"all-reduce of {size(found['bytes'])} over {found['processes']}: {size(found['rate'])}/s sent by each"
        yield judged(TOPIC, f"links along {axis}", found["right"], said + ("" if found["right"] else ", a wrong sum"))
    if len(ranks) == 1:
        yield CheckRow(TOPIC, "clocks agree", "not here", "one process has one clock")
    else:
        hosts = sorted({row["host"] for row in ranks})
        said = f"within {facts['skew'] * 1000:.1f} ms on {counted(len(hosts), 'node')}"
        yield judged(TOPIC, "clocks agree", facts["skew"] < MAX_SKEW, said, otherwise="warn")
    unseen = [f"rank {row['rank']} on {row['host']} does not see {row['unseen']}" for row in ranks if row["unseen"]]
    torn = [f"rank {row['rank']} on {row['host']}" for row in ranks if row["torn"]]
    said = f"{facts['folder']}: fsync {1000 * max(row['fsync'] for row in ranks):.1f} ms, renames replace whole files"
    if len(ranks) > 1:
        said += f", files of {len(ranks)} processes seen by all"
    bad = [*unseen, *(f"{name} read a torn file during a rename" for name in torn)]
    yield judged(TOPIC, "file system", not bad, "; ".join(bad) or said)


def examined(recipe: Recipe, mesh: ProcessMesh, disk: Path, device: Device) -> dict[str, Any]:
    """What every process finds of its device, links, clock and file system. disk: a folder that all share. Collective."""
    wrong, speed = known_matmul(device), devices.matmul_rate(device)
    used = [] if mesh.is_single else [axis for axis in MESH_AXES if mesh.size(axis) > 1]
    axes = {axis: _all_reduce(mesh, axis, device) for axis in used}
    skews = []
    for _ in range(5):
        mesh.barrier()
        times = mesh.gather(time.time())
        skews.append(max(times) - min(times))
    own: dict[str, Any] = {"rank": mesh.rank, "host": socket.gethostname(), "device": device.name, "wrong": wrong,
                           "rate": speed, **_files(mesh, disk)}  # fmt: skip
    return {"ranks": mesh.gather(own), "axes": axes, "skew": min(skews), "folder": str(disk)}


def known_matmul(device: Device) -> int:
    """Number of matmuls of small integers that are not exactly the known ones. In every precision these sums are exact."""
    n = EDGE[device.torch_device.type]
    index = torch.arange(n)
    a, b = ((index[:, None] * p + index[None, :] * q) % 5 - 2 for p, q in ((3, 7), (11, 2)))
    # Rows of a repeat every 5 rows and columns of b every 5 columns: 25 sums say all of the matmul.
    known = torch.einsum("ik,kj->ij", a[:5].long(), b[:, :5].long()).repeat(-(-n // 5), -(-n // 5))[:n, :n]
    dtype = device.dtype if device.dtype.itemsize > 1 else torch.bfloat16
    left, right = (x.to(device.torch_device, dtype) for x in (a, b))
    expected = known.to(device.torch_device).to(dtype)
    return sum(not bool(torch.equal(left @ right, expected)) for _ in range(REPEATS))


def _all_reduce(mesh: ProcessMesh, axis: str, device: Device) -> dict[str, Any]:
    """Bytes/s that each process sends along an axis, and whether the sum is the known one."""
    import torch.distributed as dist

    group, count, place = mesh.group(axis), mesh.size(axis), device.torch_device
    num_bytes, seconds, right = REDUCED_BYTES[place.type], list[float](), True
    for _ in range(6):
        tensor = torch.full((num_bytes // 4,), float(mesh.coordinate(axis) + 1), device=place)
        mesh.barrier()
        synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        right &= bool((tensor == count * (count + 1) / 2).all())
    sent = 2.0 * (count - 1) / count * num_bytes  # of a ring (Patarasuk and Yuan 2009, section 3)
    return {"processes": count, "bytes": num_bytes, "rate": sent / median(seconds[1:]),
            "right": not mesh.any(not right)}  # fmt: skip


def _files(mesh: ProcessMesh, disk: Path) -> dict[str, Any]:
    """Write, sync and rename files in a new folder, and look for those of the others."""
    name = mesh.broadcast(tempfile.mkdtemp(prefix=".bessemer-", dir=disk) if mesh.is_main else None)
    folder = Path(name)
    try:
        mesh.barrier()
        began = time.perf_counter()
        mine = folder / f"{mesh.rank}.txt"
        with mine.open("wb") as file:
            file.write(str(mesh.rank).encode() * 4096)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)
        seconds = time.perf_counter() - began
        mesh.barrier()
        unseen = [rank for rank in range(mesh.world) if not _seen(folder / f"{rank}.txt", str(rank).encode() * 4096)]
        mesh.barrier()
        return {"fsync": seconds, "unseen": ", ".join(f"the file of rank {rank}" for rank in unseen),
                "torn": _renames(mesh, folder)}  # fmt: skip
    finally:
        mesh.barrier()
        if mesh.is_main:
            shutil.rmtree(folder, ignore_errors=True)


def _seen(path: Path, content: bytes) -> bool:
    deadline = time.monotonic() + SEEN_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            if path.read_bytes() == content:
                return True
        time.sleep(0.05)
    return False


def _renames(mesh: ProcessMesh, folder: Path) -> bool:
    """Whether a read found something other than a whole file while rank 0 replaced it by renames."""
    path, contents = folder / "replaced", (b"a" * 65_536, b"b" * 65_536)
    if mesh.is_main:
        write_atomic(path, contents[0])
    mesh.barrier()
    torn = False
    for number in range(20):
        if mesh.is_main:
            staged = folder / "staged"
            staged.write_bytes(contents[number % 2])
            os.replace(staged, path)
        torn |= path.read_bytes() not in contents
    mesh.barrier()
    return torn


def examine_as_member(recipe: Recipe, disk: Path) -> dict[str, Any]:
    """As one process of a group that a launcher started."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = devices.choose(recipe.train, local_rank)
    mesh = join(recipe.parallel, device.torch_device)
    facts = examined(recipe, mesh, disk, device)
    mesh.barrier()
    leave()
    return facts


def main() -> None:
    folder, disk = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        facts = examine_as_member(load(folder / "recipe.toml"), disk)
        if os.environ["RANK"] == "0":
            write_json(folder / RESULT, facts)
    except BessemerError as error:
        print(error)
        os._exit(error.exit_code)
    sys.stdout.flush()
    os._exit(0)  # Python's teardown may wait for a thread of the group


if __name__ == "__main__":
    main()
