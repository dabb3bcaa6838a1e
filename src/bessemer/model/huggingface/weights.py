"""Our parameters under the names of `transformers`: one list of views, read on export and written on import.

Shapes: G key/value heads, R query heads for each, K width of a head, D width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.model.huggingface.config import family_of
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.transformer import Transformer

Value = Callable[[Tensor], Tensor]

# Views of joint parameters: of `qkv` (G, R + 2, K, D) and its bias (G, R + 2, K), of `gate_up` (2, F, D) and its bias.
_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "q": lambda joint: joint[:, :-2],
    "k": lambda joint: joint[:, -2:-1],
    "v": lambda joint: joint[:, -1:],
    "gate": lambda joint: joint[0],
    "up": lambda joint: joint[1],
}
_JOINT = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # the order in which transformers' joint tensors have them


@dataclass(frozen=True)
class Part:
    """A tensor of `transformers` as views of our parameters, one after another along its rows.

    ours: the path of our parameter; matrix: theirs has two dimensions, ours may have more before the last; transposed:
    theirs is (in, out), as GPT-2's.
    """

    name: str
    ours: str
    views: tuple[Tensor, ...]
    matrix: bool
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of their tensor."""
        if not self.matrix:
            return (sum(view.numel() for view in self.views),)
        rows, columns = sum(self._rows(view) for view in self.views), self.views[0].shape[-1]
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of their tensor."""
        return sum(view.nbytes for view in self.views)

    def theirs(self) -> Tensor:
        """Their tensor, copied out of ours."""
        flat = [view.reshape(self._rows(view), -1) if self.matrix else view.reshape(-1) for view in self.views]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        return (whole.T if self.transposed else whole).clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def take(self, theirs: Tensor) -> None:
        """Write their tensor into ours. Its shape has been checked."""
        rows = [self._rows(view) for view in self.views]
        for view, values in zip(self.views, torch.split(theirs.T if self.transposed else theirs, rows), strict=True):
            view.copy_(values.reshape(view.shape))

    def _rows(self, view: Tensor) -> int:
        return view.shape[:-1].numel() if self.matrix else view.numel()


def parts(
    model: Transformer, value: Value = lambda parameter: parameter.detach(), family: str | None = None
) -> Iterator[Part]:
    """Every tensor of `transformers`' model of this family as views of ours; a tied matrix stands once.

    value: what of each parameter is meant: itself, its gradient, or its values read from a checkpoint; family: whose names,
    left out: those of the one that has the model's options.
    """
    tensors = FAMILIES[family or family_of(model.config)].tensors
    held = _Held(value)
    for theirs, ours in tensors.outer:
        yield from _module(model, theirs, ours, held)
    for number in range(len(model.blocks)):
        for theirs, ours in tensors.block:
            name = f"{tensors.prefix.format(number)}.{theirs}"
            yield from _module(model, name, f"blocks.{number}.{ours}", held, theirs in tensors.transposed)


def _module(model: Transformer, theirs: str, ours: str, held: _Held, transposed: bool = False) -> Iterator[Part]:
    """The tensors of one pair of names: a weight and a bias, one of them, or none."""
    path, _, view = ours.partition(":")
    joint = path.rpartition(".")[2]
    if path.endswith((".weight", ".bias")):
        found = {theirs: path}
    elif joint in _JOINT:
        found = {f"{theirs}.weight": path, f"{theirs}.bias": f"{path}_bias"}
    else:
        found = {f"{theirs}.{kind}": f"{path}.{kind}" for kind in ("weight", "bias")}
    for name, parameter_name in found.items():
        parameter = _find(model, parameter_name)
        if parameter is None:
            continue
        whole = held(parameter_name, parameter)
        views = (
            (whole,) if joint not in _JOINT else tuple(_VIEWS[v](whole) for v in ((view,) if view else _JOINT[joint]))
        )
        bias = name.endswith("bias")
        yield Part(name, parameter_name, views, whole.dim() >= 2 and not bias, transposed and not bias)


def _find(model: Transformer, name: str) -> Tensor | None:
    """A parameter by its path; None where this configuration has none, or where it is another's (a tied matrix)."""
    if name == "head.weight" and model.config.tie_embeddings:
        return None
    found: object = model
    for step in name.split("."):
        found = found[int(step)] if step.isdecimal() else getattr(found, step, None)  # type: ignore[index]
        if found is None:
            return None
    return found if isinstance(found, Tensor) else None


class _Held:
    """The values of parameters; of a joint one, of which several views are taken one after another, they are kept."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._last: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, name: str, parameter: Tensor) -> Tensor:
        kind = name.rpartition(".")[2]
        if kind in ("weight", "bias"):
            return self._value(parameter)
        if kind not in self._last or self._last[kind][0] is not parameter:
            self._last.pop(kind, None)  # before the next one is read
            self._last[kind] = (parameter, self._value(parameter))
        return self._last[kind][1]
