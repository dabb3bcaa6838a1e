"""What tensors hold memory, and when: every storage that an operator makes is written down, and when it is freed.

It counts bytes and allocates none itself, so it serves real tensors and fake ones alike. Which storage is whose (weights,
gradients, ...) is often known only after it is gone, so owners are told at any time and the sums made at the end.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

OWNERS = ("weights", "gathered", "gradients", "optimizer", "average", "activations")
FSDP_GATHERS = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy")
FSDP_REDUCES = ("fsdp::chunk_cat",)
REDUCE_SCATTERS = ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, writes down the storages that operators make and, of all it knows, when they grow, shrink or go.

    Owners are `weights` (what is kept between steps), `gathered` (FSDP2's whole copies of them and its buffers on the way
    there), `gradients` (of the whole and of the part, FSDP2's buffers included), `optimizer`, `average` (of the weights),
    and `activations`: all else. The first owner told stays. What C++ code makes out of sight of the dispatcher (gloo's own
    buffers) is not counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events: list[tuple[int, int]] = []  # (number of the storage, change of its bytes)
        self._sizes: list[int] = []  # by number, now
        self._owner: dict[int, str] = {}
        self._known: dict[
            int, tuple[int, Any]
        ] = {}  # id of a storage to its number and a reference that tells of its end
        self._joined: dict[int, list[int]] = {}  # what a concatenation was made of
        self._marks: dict[str, int] = {}

    def __enter__(self) -> Ledger:
        # Resizing a storage, as FSDP2 does to free what it gathered, is no operator.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized(self._resize)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = operator(*arguments, **(options or {}))
        made = [self._number(x) for x in _plain(found)]
        name = operator._schema.name
        if name in FSDP_GATHERS:
            for number in (*made, *(self._number(x) for x in _plain((arguments, options)))):
                self._give(number, "gathered")
        elif name in FSDP_REDUCES:
            for number in (*made, *(self._number(x) for x in _plain((arguments, options)))):
                self._give(number, "gradients")
                for part in self._joined.get(number, ()):
                    self._give(part, "gradients")
        elif name in REDUCE_SCATTERS:
            both = [*made, *(self._number(x) for x in _plain((arguments, options)))]
            if any(self._owner.get(number) == "gradients" for number in both):
                for number in both:
                    self._give(number, "gradients")
        elif name == "aten::cat":  # FSDP2 puts parts together by it that it cut along another dimension than the first
            parts = [self._number(x) for x in _plain(arguments)]
            for number in made:
                self._joined[number] = parts
                if any(self._owner.get(part) == "gathered" for part in parts):
                    self._give(number, "gathered")
        return found

    def own(self, owner: str, tensors: Iterable[Tensor]) -> None:
        """Say whose the storages of some tensors are; those not seen before count from now on."""
        for tensor in tensors:
            for plain in _plain(tensor):
                self._give(self._number(plain), owner)

    def mark(self, name: str) -> None:
        """Name this moment."""
        self._marks[name] = len(self._events)

    def at(self, name: str) -> dict[str, int]:
        """Bytes by owner at a named moment."""
        return self._by_owner(self._marks[name])

    def peak(self, start: str, end: str, owners: Iterable[str] = OWNERS) -> dict[str, int]:
        """Bytes by owner at the moment between two named ones at which those of `owners` together hold the most."""
        changes = np.array([change for _, change in self._events], dtype=np.int64)
        wanted = set(owners)
        counts = np.array([self._owner.get(number, OWNERS[-1]) in wanted for number, _ in self._events], dtype=bool)
        live = np.concatenate(([0], np.cumsum(np.where(counts, changes, 0))))
        first, last = self._marks[start], self._marks[end]
        return self._by_owner(first + int(np.argmax(live[first : last + 1])))

    def _by_owner(self, end: int) -> dict[str, int]:
        held = dict.fromkeys(OWNERS, 0)
        for number, change in self._events[:end]:
            held[self._owner.get(number, OWNERS[-1])] += change
        return held

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage, which is written down when it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if (found := self._known.get(key)) is not None:
            number = found[0]
            self._becomes(number, storage.nbytes())
            return number
        number = len(self._sizes)
        self._sizes.append(0)
        self._known[key] = number, weakref.ref(storage, functools.partial(self._gone, key, number))
        self._becomes(number, storage.nbytes())
        return number

    def _becomes(self, number: int, size: int) -> None:
        if (change := size - self._sizes[number]) != 0:
            self._sizes[number] = size
            self._events.append((number, change))

    def _gone(self, key: int, number: int, reference: Any) -> None:
        del self._known[key]
        self._joined.pop(number, None)
        self._becomes(number, 0)

    def _give(self, number: int, owner: str) -> None:
        self._owner.setdefault(number, owner)

    def _resized(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if (known := self._known.get(id(storage))) is not None:
                self._becomes(known[0], storage.nbytes())
            return found

        return resized


def _plain(values: Any) -> list[Tensor]:
    """The tensors with storage among values; of a DTensor the part that is here."""
    found = [x._local_tensor if isinstance(x, DTensor) else x for x in tree_leaves(values) if isinstance(x, Tensor)]
    return [x for x in found if not is_traceable_wrapper_subclass(x) and x.device.type != "meta"]


def total(held: Mapping[str, int]) -> int:
    """Bytes of all owners."""
    return sum(held.values())
