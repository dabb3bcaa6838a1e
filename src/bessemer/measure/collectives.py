"""All-reduce between processes of this machine: two over gloo on a CPU, one on each GPU over NCCL.

`python -m bessemer.measure.collectives FILE SECONDS cpu|cuda` is one of the processes; launch/agent.py starts them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from bessemer.launch.agent import LaunchSpec
from bessemer.plan.machine import AllReduce, Timing

SIZES = {"cpu": (8, 1 << 16, 1 << 20, 1 << 24), "cuda": (8, 1 << 20, 1 << 24, 1 << 28)}  # bytes
SHORTEST = 2e-3  # seconds of one timing
START_SECONDS = 60.0  # for the processes to be there, on a busy machine


def measure(budget: float, kind: str, processes: int) -> tuple[AllReduce, ...]:
    """Time all-reduce by size for about `budget` seconds; empty when the processes did not come to it."""
    if processes < 2:
        return ()
    with tempfile.TemporaryDirectory(prefix="bessemer-") as folder:
        found = Path(folder) / "found.json"
        arguments = ("-m", "bessemer.measure.collectives", str(found), str(budget), kind)
        above = str(Path(__file__).parent.parent.parent)
        path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": path,
            "BESSEMER_NODE": folder,
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        try:
            subprocess.run(
                LaunchSpec(arguments, processes, 0).command(), env=environment, timeout=budget + START_SECONDS, check=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
            return ()
        rows = json.loads(found.read_text(encoding="utf-8"))
        backend = "nccl" if kind == "cuda" else "gloo"
        return tuple(AllReduce(processes, backend, size, Timing(seconds, spread)) for size, seconds, spread in rows)


def main() -> None:
    """One process of the group; the first writes the file."""
    import torch
    import torch.distributed as dist

    from bessemer.measure.rounds import Item, timed
    from bessemer.parallel.mesh import join, leave
    from bessemer.recipe import Parallel

    file, budget, kind = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    mesh = join(Parallel(shard=int(os.environ["WORLD_SIZE"])), place)
    rows = []
    # In step with each other: every process takes the same number of rounds, which the first one's clock decides.
    for size in SIZES[kind]:
        tensor = torch.zeros(size // 4, device=place)

        def work(repeats: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(repeats):
                dist.all_reduce(tensor)
            if kind == "cuda":
                torch.cuda.synchronize()

        call = timed(work, perf_counter)
        once = max(call(3) / 3, 1e-6)
        times = budget / len(SIZES[kind]) / max(once, SHORTEST)
        rounds, repeats = mesh.broadcast((int(min(max(times, 3), 50)), int(max(1, min(SHORTEST / once, 100)))))
        item = Item((size,), call, repeats)
        item.seconds = [call(repeats) / repeats for _ in range(rounds)]
        timing = item.timing()
        rows.append((size, timing.seconds, timing.spread))
    if mesh.is_main:
        file.write_text(json.dumps(rows), encoding="utf-8")
    mesh.barrier()
    leave()


if __name__ == "__main__":
    main()
