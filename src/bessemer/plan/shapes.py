"""Published models by name (shapes.toml, mixtures.toml), and a dense model of any number of parameters.

The rule for a number: the shape nearest a width of 64 x layers, as the dial has it, growing to 112 x layers from 1e9 to 1e10
parameters, as the published ones do (102 to 130 from 7B on; Kaplan et al. 2020, figure 5, find a flat valley from 30 to 150),
that has that many parameters. Heads are the dial's, but a multiple of 8 from a width of 2,048 on, and layers even from 12 on,
so that tensor and pipeline parallelism divide them; the MLP, 8/3 of the width, takes up what is over. Below a width of 256,
heads are of 32.
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
from bessemer.plan.mixture_of_experts import LatentAttention, MixtureConfig

DIMENSIONS = "its dimensions, as --set model.layers=32 --set model.width=4096 --set model.heads=32"
ASPECT, LARGE_ASPECT = 64, 112
NARROWEST, WIDEST = 24, 150
MOST_LAYERS = 800
MLP_SLACK = 0.3
"""How far the MLP may be from its usual width to meet a count."""
SHARED_HEADS_FROM = 30e9
"""Parameters from which 8 heads of keys and values serve all queries, as in Llama 2 and 3 and Qwen3 at that size."""
VOCABULARIES = {2e9: 128_256, 1e8: 50_304, 1e7: 16_384, 0.0: 4_096}
"""Of a shape by number of parameters, when none is given: Llama 3's, GPT-2's rounded up to 64, and smaller ones where the
embeddings of those would take the place of the layers."""

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# A comma stands between thousands, three digits each, and never for a point: 1,5 would be taken for 15.
_NUMBER = re.compile(
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([kmbt]?)", re.IGNORECASE
)


ALIASES = {
    "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.3-70b": "llama-3-70b",
    "llama-3.1-405b": "llama-3-405b",
    "gpt2": "gpt2-124m", "gpt2-medium": "gpt2-355m", "gpt2-large": "gpt2-774m", "gpt2-xl": "gpt2-1.5b", "gpt3": "gpt3-175b",
    "llama-30b": "llama-33b", "deepseek-7b": "deepseek-llm-7b", "deepseek-67b": "deepseek-llm-67b", "bloom": "bloom-176b",
}  # fmt: skip
"""Other names of the same dimensions."""


@dataclass(frozen=True)
class Shape:
    """A published model. parameters: as published, which for some is a rounded number; config.parameters counts them."""

    name: str
    config: ModelConfig
    parameters: float
    source: str


@cache
def shapes() -> dict[str, Shape]:
    """All published shapes, by name."""
    found: dict[str, Shape] = {}
    for file, kind in (("shapes.toml", ModelConfig), ("mixtures.toml", MixtureConfig)):
        text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
        for group in tomllib.loads(text)["group"]:
            options: dict[str, Any] = {**FAMILIES[group.pop("like")].options, **group}
            rows, source = options.pop("rows"), options.pop("source")
            if "latent" in options:
                options["latent"] = LatentAttention(**options["latent"])
            for name, layers, width, heads, kv_heads, head_dim, mlp_width, parameters in rows:
                sizes = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
                found[name] = Shape(name, kind(**sizes, mlp_width=mlp_width, **options), parameters, source)
    return found


def count_of(text: str | float) -> float:
    """A number as people write it: 70e9, "70B", "1.4T", "124M", "70,000,000". Raises InputError on anything else."""
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        found = _NUMBER.fullmatch(text.strip())
        if found is None and _NUMBER.fullmatch(text.strip().removeprefix("-")):
            raise InputError(f"{text}: a number above zero is needed")
        if found is None:
            raise InputError(f"{text!r} is not a number; write it as 70e9, 70B, 1.4T, 124M or 1,500")
        value = float(re.sub("[_,]", "", found[1])) * _UNITS[found[2].lower()]
    if not value > 0 or math.isinf(value):
        raise InputError(f"{text}: a number above zero is needed")
    return value


def find(name: str) -> Shape:
    """A published shape by name; case and the signs between its parts do not matter. Raises InputError with the nearest names."""
    wanted = _plain(name)
    known = {_plain(key): shape for key, shape in shapes().items()}
    known |= {_plain(alias): shapes()[key] for alias, key in ALIASES.items()}
    if wanted in known:
        return known[wanted]
    near = dict.fromkeys(known[key].name for key in difflib.get_close_matches(wanted, known, n=3, cutoff=NEAR))
    meant = f"the nearest are {', '.join(near)} (`--model list` has all)" if near else "`--model list` has the names"
    raise InputError(f"model {name!r} is not known; {meant}; a number of parameters (70B) gives a shape by rule")


def model(what: str | float, vocabulary: int | None = None, sequence_length: int | None = None) -> ModelConfig:
    """The model that a name or a number of parameters stands for.

    vocabulary, sequence_length: in place of the published ones; of a number, default_vocabulary and 4,096.
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
    """Ids of the tokenizer that a model of this size is taken to have."""
    return next(ids for least, ids in VOCABULARIES.items() if parameters >= least)


def by_parameters(parameters: float, vocabulary: int, sequence_length: int) -> ModelConfig:
    """The shape by rule, its own count within 2% of `parameters`. Embeddings are tied below 4e9 parameters, where the output
    matrix would otherwise take the place of layers. Raises InputError where no shape has so few."""
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
    """The widths of a depth within the flat valley that come near a count, their MLPs adjusted to meet it."""
    found, options = [], FAMILIES["llama"].options
    for width in _widths(layers):
        least, most = 8 * layers * width**2, 24 * layers * width**2 + 2 * vocabulary * width
        if not least < parameters * 1.5 or most < parameters / 1.5:
            continue  # far from the count whatever the MLP
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
        step = 16 if width < 512 else 64  # where 64 would be several percent of the model
        over = round((parameters - plain.parameters) / a_unit / step) * step
        if abs(over) <= MLP_SLACK * plain.mlp_width:
            found.append(plain.with_changes(mlp_width=plain.mlp_width + over))
    return found


def _widths(layers: int) -> list[int]:
    """Widths of whole heads, eight heads at a time from 2,048 on."""
    low, high = NARROWEST * layers, WIDEST * layers
    steps = chain(
        range(32, 256, 32), range(256, 1025, 64), range(1152, 2048, 128), range(2048, WIDEST * MOST_LAYERS, 1024)
    )
    return [width for width in steps if low <= width <= high]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
