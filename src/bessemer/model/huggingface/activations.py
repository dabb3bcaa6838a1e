"""Activations by the names of `transformers`, several of which mean the same function."""

from __future__ import annotations

from bessemer.model.config import Activation
from bessemer.model.huggingface.settings import Settings

# The first name of each is written.
_NAMES: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
    "gelu_quick": ("quick_gelu",),
    "relu": ("relu",),
    "relu2": ("relu2",),
}
OURS: dict[str, Activation] = {theirs: ours for ours, names in _NAMES.items() for theirs in names}


def read_activation(settings: Settings, key: str) -> Activation:
    """Our name of an activation. Raises InputError on one that we do not have."""
    name = settings.text(key, "")
    if name not in OURS:
        raise settings.wrong(key, f"is not supported; supported: {', '.join(OURS)}")
    return OURS[name]


def write_activation(activation: Activation) -> str:
    """The name that `transformers` has for an activation."""
    return _NAMES[activation][0]
