"""Time and largest tensor of each attention implementation on this device, forward and backward.

On a CPU: one fused call per document, a boolean mask over the whole sequence, and an explicit softmax; sliding windows as chunks
of queries with the keys they attend to, and as a mask; soft caps. On CUDA: FlexAttention with a block mask, and the fused kernel
with the same mask. The implementations take turns.

    python benchmarks/attention.py --json FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from machine import describe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.model.attention import attention
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents

BATCH, HEADS, WIDTH = 4, 6, 64


class Largest(TorchDispatchMode):
    """Dispatch mode that records the bytes of the largest tensor any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, Tensor):
                self.bytes = max(self.bytes, part.nbytes)
        return result


def dense(scope: AttentionScope, length: int, place: torch.device) -> Tensor:
    """Return the scope as a boolean mask of shape (B, 1, T, T)."""
    index = torch.arange(length, device=place)
    allowed = scope.spec.allows(index[:, None], index)[None]
    if scope.documents is not None:
        number = scope.documents.document_BT
        allowed = allowed & (number[:, :, None] == number[:, None, :])
    return allowed.expand(BATCH, -1, -1)[:, None]


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    length, dtype = given.length, torch.bfloat16 if place.type == "cuda" else torch.float32
    draw = torch.Generator(place).manual_seed(0)
    shape = (BATCH, HEADS, length, WIDTH)
    q, k, v = (torch.randn(shape, generator=draw, device=place, dtype=dtype, requires_grad=True) for _ in range(3))
    tokens = torch.randint(0, 300, (BATCH, length), generator=draw, device=place)  # documents of about 300 tokens
    documents = Documents.from_tokens(tokens, end_of_text=0)
    cases = {
        "causal": AttentionScope.build(AttentionSpec(), None, length, place),
        "causal, within documents": AttentionScope.build(AttentionSpec(), documents, length, place),
        "causal, window 256": AttentionScope.build(AttentionSpec(window=256), None, length, place),
        "both sides": AttentionScope.build(AttentionSpec(causal=False), None, length, place),
        "both sides, window 256": AttentionScope.build(AttentionSpec(causal=False, window=256), None, length, place),
        "causal, soft cap": AttentionScope.build(AttentionSpec(soft_cap=30.0), None, length, place),
    }
    rows = []
    print(f"{BATCH} x {length} tokens, {HEADS} heads of {WIDTH}, forward and backward, on {place}")
    print(f"{'':<26} {'way':<28} {'ms':>8} {'largest tensor, MB':>20}")
    for name, scope in cases.items():
        mask = dense(scope, length, place)
        ways: dict[str, Callable[[], Tensor]] = {
            "ours": partial(attention, q, k, v, scope),
            "fused kernel, boolean mask": partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask),
            "written out": partial(written_out, q, k, v, mask),
        }
        if scope.spec.soft_cap:
            ways = {"ours": ways["ours"]}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        largest = {}
        for way, compute in ways.items():
            with Largest() as seen:
                compute().sum().backward()
            largest[way] = seen.bytes
        for _ in range(given.rounds):
            for way, compute in ways.items():
                started = perf_counter()
                compute().sum().backward()
                if place.type == "cuda":
                    torch.cuda.synchronize()
                seconds[way].append(perf_counter() - started)
        for way in ways:
            row = {"case": name, "way": way, "seconds": median(seconds[way]), "largest_tensor_bytes": largest[way]}
            print(f"{name:<26} {way:<28} {1e3 * row['seconds']:>8.1f} {largest[way] / 1e6:>20.1f}", flush=True)
            rows.append(row)
    if given.json:
        machine = describe(threads=torch.get_num_threads(), length=length, rounds=given.rounds)
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
