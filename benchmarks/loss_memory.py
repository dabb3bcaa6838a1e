"""Peak memory and time of the loss, forward and backward, with all logits and in chunks.

The loss with all logits (F.cross_entropy) runs twice: with torch's default allocator, and with an allocator that keeps freed
memory, as `bessemer train` sets it and as the chunked loss has it. Each side runs in a separate process. Its peak is counted from
the moment its inputs exist: resident memory on a CPU, allocated memory on CUDA.

    python benchmarks/loss_memory.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from machine import describe

SHAPES = ((1024, 384, 8192), (4096, 384, 8192), (4096, 768, 50304))
GPU_SHAPES = ((16384, 2048, 65536), (16384, 4096, 131072))


def loss(way: str, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if way.startswith("plain"):
        return F.cross_entropy((hidden @ head.T).float(), targets, reduction="sum")
    from bessemer.train.loss import chunked_cross_entropy

    return chunked_cross_entropy(hidden, head, targets, chunk=4096).total


def side(way: str, shape: tuple[int, int, int], repeats: int) -> dict[str, float]:
    from bessemer.train import device as devices

    if way != "plain":
        devices.keep_freed_memory()
    tokens, width, vocabulary = shape
    cuda = torch.cuda.is_available()
    place, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    hidden = torch.randn(tokens, width, device=place, dtype=dtype, requires_grad=True)
    head = (torch.randn(vocabulary, width, device=place, dtype=dtype) * width**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=place)
    seconds = []
    # A tiny product first, so that the libraries' own buffers are not counted.
    (hidden[:2].detach() @ head[:2].detach().T).sum().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        devices.reset_peak_resident()
        before = devices.resident_bytes()
    for _ in range(repeats):
        hidden.grad = head.grad = None
        started = perf_counter()
        loss(way, hidden, head, targets).backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if cuda else devices.peak_resident_bytes()
    return {"peak_bytes": peak - before, "seconds": median(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.side:
        way, *shape = given.side
        print(json.dumps(side(way, tuple(map(int, shape)), given.repeats)))  # type: ignore[arg-type]
        return
    rows = []
    for shape in GPU_SHAPES if torch.cuda.is_available() else SHAPES:
        found = {}
        for way in ("plain", "plain, memory kept", "chunked"):
            command = [sys.executable, __file__, "--threads", str(given.threads), "--repeats", str(given.repeats)]
            done = subprocess.run(
                [*command, "--side", way, *map(str, shape)], capture_output=True, text=True, check=True
            )
            found[way] = json.loads(done.stdout)
            print(
                f"{' x '.join(map(str, shape)):<20} {way:<20} {found[way]['peak_bytes'] / 1e6:>7.0f} MB "
                f"{1e3 * found[way]['seconds']:>7.0f} ms"
            )
        rows.append({"tokens": shape[0], "width": shape[1], "vocabulary": shape[2], **found})
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(threads=given.threads), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
