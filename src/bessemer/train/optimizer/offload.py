"""Moments in the CPU's memory while the weights are on the GPU.

The moments of a bunch of parameters travel to the GPU, the update runs there, and they travel back. So the update is the
same kernel with the same bits as without offload, and the bus carries each moment once in each direction, at the same
time: with 8-bit moments a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BUNCH_BYTES = 256 * 1024 * 1024  # of moments on the GPU at a time; a single larger tensor goes alone

State = dict[str, Tensor]


class Host:
    """The CPU as the home of the moments. pinned: page-locked memory, from which CUDA copies without waiting."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._back: torch.cuda.Stream | None = None  # the way back, so that both directions are busy at once

    def settle(self, state: State) -> State:
        """A parameter's new state, moved home."""
        home = {name: value.cpu() for name, value in state.items()}
        return {name: value.pin_memory() for name, value in home.items()} if self.pinned else home

    def fetch(self, states: list[State], device: torch.device) -> list[State]:
        """Copies of states on the device; only a count that no kernel reads stays itself."""
        return [
            {
                name: value
                if name == "step" and not _is_plain(state)
                else value.to(device, non_blocking=True, copy=True)
                for name, value in state.items()
            }
            for state in states
        ]

    def put_back(self, states: list[State], fetched: list[State], device: torch.device) -> None:
        """Copy what the update left in `fetched` home, beside what comes next."""
        moved = [
            (state[name], value)
            for state, there in zip(states, fetched, strict=True)
            for name, value in there.items()
            if value is not state[name]
        ]
        if device.type != "cuda":
            for home, value in moved:
                home.copy_(value)
            return
        if self._back is None:
            self._back = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._back.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._back):
            for home, value in moved:
                value.record_stream(self._back)
                home.copy_(value, non_blocking=True)

    def finish(self, device: torch.device) -> None:
        """What the device does next waits for the way back: the next step must not fetch half-written moments."""
        if self._back is not None:
            torch.cuda.current_stream(device).wait_stream(self._back)

    def wait(self) -> None:
        """Wait here until every moment is home, before the CPU reads them."""
        if self._back is not None:
            self._back.synchronize()


def _is_plain(state: State) -> bool:
    return all(value.dtype == torch.float32 for value in state.values())


def bunches(parameters: list[Tensor], states: list[State]) -> Iterator[slice]:
    """Neighbouring parameters whose states hold at most BUNCH_BYTES together, as slices of the lists."""
    first, held = 0, 0
    for number in range(len(parameters)):
        weight = sum(value.nbytes for value in states[number].values())
        if number > first and held + weight > BUNCH_BYTES:
            yield slice(first, number)
            first, held = number, 0
        held += weight
    if parameters:
        yield slice(first, len(parameters))
