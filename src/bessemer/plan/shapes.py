"""Published model shapes by name (shapes.toml, mixtures.toml), and a dense model shape for any number of parameters.

The shape for a number of parameters has that number and is nearest to a target ratio of width to layers. The target is
64, as with `model.depth`, and grows to 112 from 1e9 to 1e10 parameters, as published models do (102 to 130 from 7B on;
Kaplan et al. 2020, figure 5, find a flat optimum from 30 to 150). Heads are those of `model.depth`, but a multiple of 8
from a width of 2,048, and layers are even from 12, so that tensor and pipeline parallelism divide them. The width of
the MLP, nominally 8/3 of the model's, is adjusted to meet the count. Below a width of 256, heads have 32 dimensions.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import chain
from typing import Any

from bessemer.common.console import amount
from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig, default_mlp_width
from bessemer.model.huggingface.families import FAMILIES
from bessemer.plan.devices import NEAR
from bessemer.plan.latent_attention import LatentAttention, PlannedConfig

DIMENSIONS = "its dimensions, as --set model.layers=32 --set model.width=4096 --set model.heads=32"
ASPECT, LARGE_ASPECT = 64, 112
NARROWEST, WIDEST = 24, 150
MOST_LAYERS = 800
MLP_SLACK = 0.3
"""Largest relative change of the MLP's nominal width to meet a parameter count."""
SHARED_HEADS_FROM = 30e9
"""Parameters from which all queries share 8 key-value heads, as in Llama 2 and 3 and Qwen3 of that size."""
VOCABULARIES = {2e9: 128_256, 1e8: 50_304, 1e7: 16_384, 0.0: 4_096}
"""Default vocabulary by least number of parameters. They are Llama 3's, GPT-2's rounded up to a multiple of 64, and smaller
ones for models that larger embeddings would dominate."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# Commas may only separate thousands. A decimal comma would turn 1,5 into 15.
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE
)


ALIASES = {
    "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "gpt2": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m", "gpt2-xl": "gpt2-1.5b", "gpt3": "gpt3-175b",
    "llama-30b": "llama-33b", "deepseek-7b": "deepseek-llm-7b", "deepseek-67b": "deepseek-llm-67b", "bloom": "bloom-176b",
}  # fmt: skip
"""Alternative names of published shapes with equal dimensions."""


@dataclass(frozen=True)
class Shape:
    """A published model.

    Attributes:
        name: Name on the command line.
        config: Model config; `config.parameters` is the exact count.
        parameters: Published number of parameters, which may be rounded.
        source: Source of the dimensions.
    """

    name: str
    config: ModelConfig
    parameters: float
    source: str


@cache
def shapes() -> dict[str, Shape]:
    """Load all published shapes, by name."""
    table: dict[str, Shape] = {}
    for file, kind in (("shapes.toml", ModelConfig), ("mixtures.toml", PlannedConfig)):
        text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
        for group in tomllib.loads(text)["group"]:
            options: dict[str, Any] = {**FAMILIES[group.pop("like")].options, **group}
            rows, source = options.pop("rows"), options.pop("source")
            if "latent" in options:
                options["latent"] = LatentAttention(**options["latent"])
            for name, layers, width, heads, kv_heads, head_dim, mlp_width, parameters in rows:
                sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
                table[name] = Shape(name, kind(**sizes, mlp_width=mlp_width, **options), parameters, source)
    return table


def count_of(text: str | float) -> float:
    """Parse a positive number such as 70e9, "70B", "1.4T" or "70,000,000". Raises InputError for anything else."""
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        match = _NUMBER.fullmatch(text.strip())
        if match is None and _NUMBER.fullmatch(text.strip().removeprefix("-")):
            raise InputError(f"{text}: a number above zero is needed")
        if match is None:
            raise InputError(f"{text!r} is not a number; write it as 70e9, 70B, 1.4T, 124M or 1,500")
        value = float(re.sub("[_,]", "", match[1])) * _UNITS[match[2].lower()]
    if not value > 0 or math.isinf(value):
        raise InputError(f"{text}: a number above zero is needed")
    return value


def find(name: str) -> Shape:
    """Return a published shape by name, ignoring case and separators. Raises InputError that suggests similar names."""
    wanted = _plain(name)
    known = {_plain(key): shape for key, shape in shapes().items()}
    known |= {_plain(alias): shapes()[key] for alias, key in ALIASES.items()}
    if wanted in known:
        return known[wanted]
    near = dict.fromkeys(known[key].name for key in difflib.get_close_matches(wanted, known, n=3, cutoff=NEAR))
    hint = f"the nearest are {', '.join(near)} (`--model list` has all)" if near else "`--model list` has the names"
    raise InputError(f"model {name!r} is not known; {hint}; a number of parameters (70B) gives a shape by rule")


def model(what: str | float, vocabulary: int | None = None, sequence_length: int | None = None) -> ModelConfig:
    """Return the model for a published name or a number of parameters.

    Args:
        what: Name or number of parameters.
        vocabulary: Vocabulary to use instead of the published one; for a number, `default_vocabulary` if None.
        sequence_length: Sequence length to use instead of the published one; for a number, 4,096 if None.
    """
    if isinstance(what, (int, float)) or _NUMBER.fullmatch(what.strip()):
        count = count_of(what)
        return by_parameters(count, vocabulary or default_vocabulary(count), sequence_length or 4096)
    config = find(what).config
    length = sequence_length or config.sequence_length
    positions = max(config.max_positions, length) if config.max_positions else 0
    return config.with_changes(
        vocabulary=vocabulary or config.vocabulary, sequence_length=length, max_positions=positions
    )


def default_vocabulary(parameters: float) -> int:
    """Return the vocabulary that a model of this size has by default."""
    return next(ids for least, ids in VOCABULARIES.items() if parameters >= least)


def by_parameters(parameters: float, vocabulary: int, sequence_length: int) -> ModelConfig:
    """Return the shape for a number of parameters, within 2% of it.

    Embeddings are tied below 4e9 parameters, where a separate output matrix would replace layers. Raises InputError if
    no shape is small enough.
    """
    if vocabulary < 1 or sequence_length < 1:
        raise InputError(f"a vocabulary of {vocabulary} and sequences of {sequence_length}: both must be above zero")
    aspect = min(max(ASPECT * (parameters / 1e9) ** math.log10(LARGE_ASPECT / ASPECT), ASPECT), LARGE_ASPECT)
    best: tuple[float, ModelConfig] | None = None
    for layers in (*range(1, 12), *range(12, MOST_LAYERS + 1, 2)):
        for config in _of_depth(layers, parameters, vocabulary, sequence_length):
            off = abs(math.log(config.parameters / parameters))
            bent = abs(math.log(config.mlp_width / default_mlp_width(config.width, config.gated)))
            score = abs(math.log(config.width / layers / aspect)) + bent + 10 * off
            if off < 0.02 and (best is None or score < best[0]):
                best = (score, config)
    if best is None:
        few = f"no shape by rule has {amount(parameters)} parameters and a vocabulary of {vocabulary:,}"
        raise InputError(f"{few}; give others, or {DIMENSIONS}")
    return best[1]


def _of_depth(layers: int, parameters: float, vocabulary: int, sequence_length: int) -> list[ModelConfig]:
    """Return the models with this number of layers and about this number of parameters, with the MLP adjusted to meet it."""
    fits, options = [], FAMILIES["llama"].options
    for width in _widths(layers):
        least, most = 8 * layers * width**2, 24 * layers * width**2 + 2 * vocabulary * width
        if not least < parameters * 1.5 or most < parameters / 1.5:
            continue  # no MLP width meets the count
        head_dim = 32 if width < 256 else 64 if width <= 1024 else 128
        heads = max(width // head_dim, 1)
        shared = parameters >= SHARED_HEADS_FROM and heads % 8 == 0
        sizes = {
            "vocabulary": vocabulary, "sequence_length": sequence_length, "layers": layers, "width": width, "heads": heads,
            "kv_heads": 8 if shared else heads, "head_dim": head_dim,
            "mlp_width": default_mlp_width(width, options.get("gated", True)),
            "tie_embeddings": options.get("tie_embeddings", False) or parameters < 4e9,
        }  # fmt: skip
        plain = ModelConfig(**{**options, **sizes})
        a_unit = plain.with_changes(mlp_width=plain.mlp_width + 1).parameters - plain.parameters
        step = 16 if width < 512 else 64  # 64 hidden units are several percent of a narrow model
        over = round((parameters - plain.parameters) / a_unit / step) * step
        if abs(over) <= MLP_SLACK * plain.mlp_width:
            fits.append(plain.with_changes(mlp_width=plain.mlp_width + over))
    return fits


def _widths(layers: int) -> list[int]:
    """Return the widths of whole heads for a depth, in steps of eight heads from 2,048."""
    low, high = NARROWEST * layers, WIDEST * layers
    steps = chain(
        range(32, 256, 32), range(256, 1025, 64), range(1152, 2048, 128), range(2048, WIDEST * MOST_LAYERS, 1024)
    )
    return [width for width in steps if low <= width <= high]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
