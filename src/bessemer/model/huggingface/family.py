"""What a family of models is: a set of options, the names of its settings in config.json, and the names of its tensors.

No torch: plans and recipes read it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.keys import FIXED, HARMLESS, UNDERSTOOD
from bessemer.model.huggingface.settings import Settings

Values = dict[str, Any]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tensors:
    """Names of modules, `transformers`' to ours, in the order in which an export writes them.

    A module stands for its weight and its bias, those of them that our model has: a module that this configuration lacks
    (a norm, a classifier, a tied output matrix) gives none, and a name may stand twice with the alternatives. Ours is a
    path such as "attention.out", one parameter such as "head.bias", or a view of a joint parameter ("attention.qkv:q",
    "mlp.gate_up:up"; "attention.qkv" and "mlp.gate_up" where theirs is joint too: all queries, all keys, all values).

    outer: modules outside the blocks; block: modules of block {} under `prefix`; transposed: names of theirs in a block
    whose weight is (in, out); base: prefix that a folder saved from the headless model leaves out; unread: prefixes of
    tensors that a folder may hold and no model of ours reads (heads of other tasks).
    """

    outer: Pairs
    prefix: str
    block: Pairs
    transposed: tuple[str, ...] = ()
    base: str = "model."
    unread: tuple[str, ...] = ()


def _nothing_read(settings: Settings, values: Values) -> Values:
    return {}


def _nothing_written(config: ModelConfig) -> Values:
    return {}


def _no_obstacles(config: ModelConfig) -> list[str]:
    return []


@dataclass(frozen=True)
class Family:
    """A family of `transformers`, as data. `docs/models.md` says how to add one.

    name: in recipes; model_type: in its config.json, where it is another; title: as people write it; summary: norm,
    positions, MLP and what else, for the table of the docs; architecture, classifier: class names of `transformers`;
    options: where it differs from ModelConfig's defaults; keys: our options to the keys of config.json, both ways;
    defaults: of our options, what `transformers` takes where a config.json leaves the key out (the tests compare them
    with its class); a key without a default is required, unless the value follows from others (kv_heads, head_dim);
    fixed: keys for which we have no option: another value is refused, and this one is written;
    dropout: keys of dropout, each with the rate of the recipe's [train.dropout] that it is written from;
    harmless: keys that change nothing in what is computed, each with the reason;
    free: options besides those of `keys` that it takes any value of, but for its obstacles;
    reads: keys that `read` understands; read: our options from those (given what `keys` gave), write: the inverse;
    obstacles: what of a configuration it cannot express; poolings: of a classifier;
    token_keys: keys that an export fills with the end-of-text token;
    examples: name to changes of `options`, each compared with `transformers` both ways in docs/parity.md.
    """

    name: str
    title: str
    summary: tuple[str, str, str, str]
    architecture: str
    classifier: str
    options: Values
    keys: Mapping[str, str]
    defaults: Values
    tensors: Tensors
    fixed: Values = field(default_factory=dict)
    dropout: Mapping[str, Literal["hidden", "attention", "classifier"]] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    read: Callable[[Settings, Values], Values] = _nothing_read
    write: Callable[[ModelConfig], Values] = _nothing_written
    obstacles: Callable[[ModelConfig], list[str]] = _no_obstacles
    free: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ("last",)
    token_keys: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id")
    model_type: str = ""
    examples: Mapping[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_type", self.model_type or self.name)

    @property
    def understood(self) -> set[str]:
        """The keys of config.json that are read or compared with the only value that is supported."""
        return {*self.keys.values(), *self.fixed, *self.dropout, *self.reads, *self.token_keys, *UNDERSTOOD}

    @property
    def known(self) -> set[str]:
        """`understood`, and the keys that change nothing in what is computed."""
        return self.understood | {*self.harmless, *HARMLESS, *FIXED}


def one_kv_head_a_query_head(config: ModelConfig) -> list[str]:
    """The obstacle of a family without grouped-query attention."""
    return [f"kv_heads = {config.kv_heads} of {config.heads} heads"] if config.kv_heads != config.heads else []


def heads_fill_the_width(config: ModelConfig) -> list[str]:
    """The obstacle of a family whose head is always width / heads."""
    fills = config.heads * config.head_dim == config.width
    return [] if fills else [f"head_dim = {config.head_dim} other than width / heads"]


def one_attention_bias(config: ModelConfig) -> list[str]:
    """The obstacle of a family with one key for all biases of attention."""
    found = f"qkv_bias = {config.qkv_bias} with out_bias = {config.out_bias}"
    return [found] if config.qkv_bias != config.out_bias else []


def no_window(config: ModelConfig) -> list[str]:
    """The obstacles of a family without windows."""
    found = [f"window = {config.window}"] if config.window else []
    return found + one_rope_base(config)


def one_rope_base(config: ModelConfig) -> list[str]:
    """The obstacle of a family whose windowed layers have the same rotary positions as the others."""
    same = config.window_rope_theta is None
    return [] if same else [f"window_rope_theta = {config.window_rope_theta}"]
