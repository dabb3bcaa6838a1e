"""Families of models, as data in families.toml: options, names of keys in config.json, names of tensors. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from bessemer.model.huggingface import rope, rules
from bessemer.model.huggingface.rules import ConfigRule, Values
from bessemer.model.options import SCALINGS, RotaryScaling
from bessemer.recipe.model import FamilyName

Rate = Literal["hidden", "attention", "classifier"]


@dataclass(frozen=True)
class Family:
    """A family of `transformers`. families.toml says what each field is, `docs/models.md` how to add a family."""

    name: str
    model_type: str
    title: str
    summary: tuple[str, str, str, str]
    architecture: str
    classifier: str
    options: Values
    keys: Mapping[str, str]
    defaults: Values
    rules: tuple[ConfigRule, ...]
    outer_tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    layer_prefix: str
    base_prefix: str = "model."
    transposed: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    fixed: Values = field(default_factory=dict)
    dropout: Mapping[str, Rate] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    poolings: tuple[str, ...] = ("last",)
    token_keys: tuple[str, ...] = ("bos_token_id", "eos_token_id", "pad_token_id")
    examples: Mapping[str, Values] = field(default_factory=dict)

    @property
    def reads(self) -> set[str]:
        """The keys that the rules read."""
        return {key for rule in self.rules for key in rule.keys}

    @property
    def understood(self) -> set[str]:
        """The keys of config.json that are read or compared with the only value that is supported."""
        return {*self.keys.values(), *self.fixed, *self.dropout, *self.reads, *self.token_keys, *_EVERY["understood"]}

    @property
    def known(self) -> set[str]:
        """`understood`, and the keys that change nothing in what is computed."""
        return self.understood | {*self.harmless, *HARMLESS, *FIXED}


def _value(value: Any) -> Any:
    """A value of families.toml: tuples for lists, None for "null", a RotaryScaling for its table."""
    if isinstance(value, list):
        return tuple(map(_value, value))
    if isinstance(value, dict):
        return {
            key: RotaryScaling.from_dict(item) if key in SCALINGS and isinstance(item, dict) else _value(item)
            for key, item in value.items()
        }
    return None if value == "null" else value


def _rule(name: str, *arguments: Any) -> ConfigRule:
    """A rule by its name in rules.py or rope.py: a constant, or what the function makes of the arguments."""
    rule: Any = getattr(rules, name, None) or getattr(rope, name)
    made: ConfigRule = rule if isinstance(rule, ConfigRule) else rule(*arguments)
    return made


def _read_families(tables: dict[str, Any]) -> dict[str, Family]:
    """The families in the order of recipe/model.py."""
    complete: dict[str, Any] = {}
    for name, table in tables.items():  # a family follows the one it is like
        inherited = complete[table.pop("like")] if "like" in table else {}
        own = {"model_type": name, "harmless": (), "examples": {}}
        complete[name] = inherited | own | table
    families = {}
    for name in get_args(FamilyName):
        made = tuple(_rule(*([rule] if isinstance(rule, str) else rule)) for rule in complete[name].pop("rules"))
        families[name] = Family(name=name, rules=made, **complete[name])
    return families


_TABLES = _value(tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8")))
_EVERY = _TABLES.pop("every_family")
FIXED: Values = _EVERY["fixed"]  # a value other than this would change what is computed, and we have no option for it
READ_ANYWHERE = frozenset(_EVERY["read_anywhere"])
HARMLESS = frozenset(_EVERY["harmless"])
FAMILIES = _read_families(_TABLES)
