"""What is timed of a training step: the trainer's own products, attention and element-wise operations, by size.

Operands beside the one that a step has just made lie in fresh memory at each call, as weights and kept activations do: a product
whose both operands stay in the cache would be timed too fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from bessemer.measure.rounds import Item, timed, timer_of
from bessemer.model.attention import AttentionScope, AttentionSpec
from bessemer.model.attention import attention as attend
from bessemer.model.kernels import linear_kernel, matmul_kernel, rms_norm, rotate, swiglu
from bessemer.model.layers import activate
from bessemer.plan.machine import TRANSPOSES
from bessemer.train.optimizer.rules import adamw

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ARENA = 3  # operands of the largest size that the memory for fresh ones holds
KEPT = 8  # results that are kept alive, so that the next ones lie elsewhere, as those of a step do
COLD = 1 << 22  # elements of one operand in all its copies: 16 MiB of fp32, beyond a core's own caches
MOST_PROBES = 1000
ROW = 256  # elements of a row in element-wise operations over rows, about a model's width
HEAD_ROW = 64  # of a head
Everywhere = Callable[["Work"], Callable[[int], float]]
Work = Callable[[int, int], None]  # (place, repeats): places work at the same time, each with its own operands


@dataclass(frozen=True)
class Sizes:
    """What is measured: edges of products (every combination), lengths and widths of heads for attention, elements of passes."""

    edges: tuple[int, ...]
    lengths: tuple[int, ...]
    head_dims: tuple[int, ...]
    elements: tuple[int, ...]


FEW_PASSES, PASSES = (1 << 13, 1 << 17, 1 << 21), (1 << 13, 1 << 16, 1 << 19, 1 << 22)
CPU_SIZES = (  # the finest first
    Sizes((32, 96, 256, 512, 1024, 2048), (32, 128, 256, 512, 1024, 2048), (32, 64, 128), PASSES),
    Sizes((32, 128, 512, 1024), (64, 256, 1024), (32, 128), FEW_PASSES),
    Sizes((32, 128, 512), (64, 256), (32, 128), FEW_PASSES),
    Sizes((32, 128), (32, 128), (32,), FEW_PASSES[:2]),
)
GPU_PASSES = (1 << 16, 1 << 20, 1 << 24, 1 << 27)
GPU_SIZES = (
    Sizes((128, 512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192), (64, 128), GPU_PASSES),
    Sizes((128, 1024, 4096), (512, 2048), (64, 128), GPU_PASSES[:3]),
)
ROUNDS_WANTED = 5  # that fit into the time, the two that warm up counted
OF_PRODUCTS = 0.5  # of a round's time, about: the rest is attention and passes
PROBE, PROBE_SECONDS = 256, 0.2  # edge of the products that tell how fast this machine is at the moment


def sizes_for(seconds: float, flops: float, is_cuda: bool) -> Sizes:
    """The finest grid that so many seconds measure a few times over, where products run at so many FLOP/s; else the coarsest."""
    grids = GPU_SIZES if is_cuda else CPU_SIZES
    fitting = (one for one in grids if ROUNDS_WANTED * round_flops(one) / (OF_PRODUCTS * flops) <= seconds)
    return next(fitting, grids[-1])


def round_flops(sizes: Sizes) -> float:
    """FLOPs of every product of a grid, once in each transpose."""
    return 2.0 * len(TRANSPOSES) * sum(sizes.edges) ** 3


def probe(
    precision: str, device: torch.device, count: int, everywhere: Everywhere, clock: Callable[[], float]
) -> float:
    """FLOP/s by the wall's clock of products at every place, at the moment, neighbours included."""
    edge = PROBE * (16 if device.type == "cuda" else 1)
    only = next(
        item for item in products(Sizes((edge,), (), (), ()), precision, device, count, everywhere) if "nt" in item.key
    )
    only.call(2)
    began, calls = clock(), 0
    while calls < 3 or clock() - began < PROBE_SECONDS:
        only.call(1)
        calls += 1
        if calls >= MOST_PROBES:
            break
    return 2.0 * edge**3 * calls / max(clock() - began, 1e-9)


@contextmanager
def places(count: int, threads: int, is_cuda: bool = False) -> Iterator[Everywhere]:
    """A way to do work at so many places at the same time, each with its threads of torch's.

    Yields what turns work into a call that does it everywhere and gives the seconds of the place that took longest.
    """
    timer = timer_of(threads, is_cuda)

    def here(work: Work) -> Callable[[int], float]:
        return timed(partial(work, 0), timer)

    if count == 1:
        yield here
        return
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(threads,)) as pool:

        def everywhere(work: Work) -> Callable[[int], float]:
            calls = [timed(partial(work, place), timer) for place in range(count)]

            def call(repeats: int) -> float:
                return max(ended.result() for ended in [pool.submit(one, repeats) for one in calls])

            return call

        yield everywhere


def done(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Fresh:
    """Views of one piece of memory, each at another place, so that what they hold is not in the cache."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory, self._next = torch.randn(ARENA * elements, device=device).to(dtype), 0

    def of(self, *shape: int) -> Tensor:
        """A tensor of this shape."""
        size = 1
        for length in shape:
            size *= length
        if self._next + size > len(self._memory):
            self._next = 0
        view = self._memory[self._next : self._next + size].view(shape)
        self._next += size
        return view


def products(sizes: Sizes, precision: str, device: torch.device, count: int, everywhere: Everywhere) -> list[Item]:
    """Every m x k times k x n of the edges, in each transpose. Keys: (precision, transpose, m, n, k)."""
    largest = max(sizes.edges) ** 2
    kept: list[deque[Tensor]] = [deque(maxlen=KEPT) for _ in range(count)]
    fresh = [Fresh(largest, TYPES[precision], device) for _ in range(count)]
    near = [torch.randn(largest, device=device).to(TYPES[precision]) for _ in range(count)]

    def work(place: int, repeats: int, transpose: str, m: int, n: int, k: int) -> None:
        hot = near[place][: m * k]
        for _ in range(repeats):
            if transpose == "nt":
                made = linear_kernel(hot.view(m, k), fresh[place].of(n, k))
            elif transpose == "nn":
                made = matmul_kernel(hot.view(m, k), fresh[place].of(k, n))
            else:
                made = torch.mm(hot.view(k, m).T, fresh[place].of(k, n))
            kept[place].append(made)
        done(device)

    edges = sizes.edges
    return [
        Item((precision, transpose, m, n, k), everywhere(partial(work, transpose=transpose, m=m, n=n, k=k)))
        for m in edges
        for n in edges
        for k in edges
        for transpose in TRANSPOSES
    ]


def attention(sizes: Sizes, precision: str, device: torch.device, count: int, everywhere: Everywhere) -> list[Item]:
    """Causal attention, forward and backward. Keys: (precision, heads, length, head_dim), heads over all sequences."""
    made: list[Item] = []
    for length in sizes.lengths:
        heads = max(4, (4096 if device.type == "cpu" else 65536) // length)
        for head_dim in sizes.head_dims:
            shape = (1, heads, length, head_dim)
            copies = _copies(heads * length * head_dim)
            operands = [cycle([_leaves(shape, 4, precision, device) for _ in range(copies)]) for _ in range(count)]
            scope = AttentionScope.of(AttentionSpec(), None, length, device)

            def work(
                place: int,
                repeats: int,
                operands: Sequence[Iterator[list[Tensor]]] = operands,
                scope: AttentionScope = scope,
            ) -> None:
                for _ in range(repeats):
                    q, k, v, upstream = next(operands[place])
                    torch.autograd.grad(attend(q, k, v, scope), (q, k, v), upstream)
                done(device)

            made.append(Item((precision, heads, length, head_dim), everywhere(work)))
    return made


def _copies(elements: int) -> int:
    """How many sets of operands of so many elements each are needed for them not to stay in the cache."""
    return max(min(COLD // elements, 32), 1)


def _leaves(shape: tuple[int, ...], count: int, precision: str, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, device=device).to(TYPES[precision]).requires_grad_() for _ in range(count)]


def passes(sizes: Sizes, device: torch.device, count: int, everywhere: Everywhere) -> tuple[list[Item], dict[str, int]]:
    """Element-wise operations in fp32, those of the model forward and backward. Keys: (name, elements). Also the bytes that an
    element of each moves at the least."""
    made: list[Item] = []
    for elements in sizes.elements:
        instances = [[_passes(elements, device) for _ in range(_copies(elements))] for _ in range(count)]
        for name in instances[0][0]:
            calls = [cycle([one[name] for one in copies]) for copies in instances]

            def work(place: int, repeats: int, calls: Sequence[Iterator[Callable[[], object]]] = calls) -> None:
                for _ in range(repeats):
                    next(calls[place])()
                done(device)

            made.append(Item((name, elements), everywhere(work)))
    return made, dict(MOVED)


MOVED = {  # reads and writes of an fp32 element, in bytes: what the operation must, not what a given kernel does
    "copy": 8, "add": 12, "accumulate": 12, "square": 4, "norm": 20, "head_norm": 20, "layer_norm": 20, "swiglu": 32, "gelu": 20,
    "rotate": 16, "softmax": 24, "adamw": 28,
}  # fmt: skip


def _passes(elements: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Each operation over so many elements, as a call."""

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).requires_grad_()

    rows = elements // ROW
    a, b = torch.randn(rows, ROW, device=device), torch.randn(rows, ROW, device=device)
    x, weight, bias, heads_weight = leaf(rows, ROW), leaf(ROW), leaf(ROW), leaf(HEAD_ROW)
    by_head = leaf(1, elements // (4 * HEAD_ROW), 4, HEAD_ROW)
    gate_up = leaf(rows, 2 * ROW)
    cos, sin = torch.randn(2, by_head.shape[1], 1, HEAD_ROW // 2, device=device)
    wide = a.expand(1, rows, ROW)[0]
    turned = b.view(by_head.shape)
    moments = [
        {"exp_avg": torch.zeros_like(a), "exp_avg_sq": torch.zeros_like(a), "step": torch.zeros((), device=device)}
    ]
    rule = {"lr": 1e-9, "rate": 1.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    # Small numbers, of which the exponential below stays finite when it is taken again and again.
    logits = torch.zeros(rows, ROW, device=device)

    def softmax() -> None:
        largest = logits.amax(dim=1, keepdim=True)
        sums = logits.sub_(largest).exp_().sum(dim=1)
        logits.mul_((1.0 / sums)[:, None])

    return {
        "copy": lambda: b.copy_(wide),
        "add": lambda: torch.add(a, b),
        "accumulate": lambda: torch._foreach_add_([a], [b]),
        "square": lambda: torch.linalg.vector_norm(a),
        "norm": lambda: torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), b),
        "head_norm": lambda: torch.autograd.grad(rms_norm(by_head, heads_weight, 1e-6), (by_head, heads_weight), turned),
        "layer_norm": lambda: torch.autograd.grad(torch.nn.functional.layer_norm(x, (ROW,), weight, bias), (x, weight, bias), b),
        "swiglu": lambda: torch.autograd.grad(swiglu(gate_up), gate_up, b),
        "gelu": lambda: torch.autograd.grad(activate("gelu_tanh", x), x, b),
        "rotate": lambda: torch.autograd.grad(rotate(by_head, (cos, sin)), by_head, turned),
        "softmax": softmax,
        "adamw": lambda: adamw([a], [b], moments, rule),
    }  # fmt: skip
