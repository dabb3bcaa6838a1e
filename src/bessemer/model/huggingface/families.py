"""Model families: options, names of keys in config.json, and names of tensors. families.toml has the built-in ones. No torch."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import BaseModel, PlainValidator, TypeAdapter, ValidationError, create_model

from bessemer.common.errors import BessemerError, InputError
from bessemer.common.extensions import failure, is_own
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import mixtures, rope, rules
from bessemer.model.huggingface.rules import ConfigRule, Values
from bessemer.recipe.keys import nearest
from bessemer.recipe.model import FamilyName
from bessemer.recipe.uses import ExtensionBase, make

Rate = Literal["hidden", "attention", "classifier"]


def _rule(value: Any) -> ConfigRule:
    """Return the ConfigRule that a value of `rules` stands for, after checking the signatures of its functions.

    The value is a rule, the name of one in rules.py, rope.py or mixtures.py, or (name, arguments...) of a function there that
    returns one.
    """
    try:
        if not isinstance(value, ConfigRule):
            name, *arguments = [value] if isinstance(value, str) else value
            named: Any = next((vars(module)[name] for module in (rules, rope, mixtures) if name in vars(module)), None)
            value = named if isinstance(named, ConfigRule) else named(*arguments)
        for method, count in (("read", 2), ("write", 1), ("obstacles", 1)):
            inspect.signature(getattr(value, method)).bind(*range(count))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{value!r} is not a rule ({error})") from None
    return value  # type: ignore[no-any-return]


class ModelFamily(ExtensionBase):
    """A model family of `transformers`: the options of its models, and the names in its config.json and of its tensors.

    A subclass inherits from the family in `like` every attribute that it does not set, except `harmless` and `examples`. In a
    table it sets only the entries that differ; None removes an entry from a table of names.

    Attributes:
        like: Name of a built-in family to start from.
        model_type: The family's `model_type` in config.json.
        architecture: Class of transformers for language models.
        classifier: Class of transformers for classifiers; by default named like the architecture.
        title: The family's name as people write it; by default the name of the class.
        summary: Norm, positions, MLP and other features, for the documentation.
        options: Options that differ from the defaults of `ModelConfig`.
        keys: Maps an option to its key in config.json. Options with the same key have the same value.
        defaults: Maps an option to the value that transformers uses if config.json lacks its key, if that differs from
            `options`; None for a value that follows from others. The dimensions have no other default.
        rules: What single keys do not express: a `ConfigRule`, the name of one in rules.py, rope.py or
            mixtures.py, or a name with arguments.
        fixed: Keys without an option. Exports write the value, and imports reject any other.
        dropout: Maps a dropout key to the rate of [train.dropout] that it states.
        harmless: Keys that do not change the computation.
        poolings: Poolings that the classifier supports.
        token_keys: Keys that an export fills with the end-of-text token.
        outer_tensors: Maps our modules outside of the blocks to theirs, in the order in which an export writes them. A
            module is its weight and its bias, if the model has them. Ours is a path ("attention.out"), a parameter
            ("head.bias"), or a part of a joint parameter ("attention.qkv:q", "mlp.gate_up:up"; without a part if theirs is
            joint too).
        layer_tensors: Maps our modules within a block to theirs, in the same form.
        layer_prefix: Their name of block {}.
        base_prefix: Prefix that tensor names lack in a folder saved from the model without its head.
        transposed: Their modules whose weight is (in, out).
        unread: Prefixes of tensors that a folder may have and none of our models reads.
        examples: Changes of options, by a title, to compare with transformers in both directions.
    """

    like: ClassVar[str] = ""
    model_type: ClassVar[str] = ""
    architecture: ClassVar[str] = ""
    classifier: ClassVar[str] = ""
    title: ClassVar[str] = ""
    summary: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Values] = {}
    keys: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Values] = {}
    rules: ClassVar[tuple[Annotated[ConfigRule, PlainValidator(_rule)], ...]] = ()
    fixed: ClassVar[Values] = {}
    dropout: ClassVar[Mapping[str, Rate]] = {}
    harmless: ClassVar[tuple[str, ...]] = ()
    poolings: ClassVar[tuple[str, ...]] = ("last",)
    token_keys: ClassVar[tuple[str, ...]] = ("bos_token_id", "eos_token_id", "pad_token_id")
    outer_tensors: ClassVar[Mapping[str, str]] = {}
    layer_tensors: ClassVar[Mapping[str, str]] = {}
    layer_prefix: ClassVar[str] = ""
    base_prefix: ClassVar[str] = "model."
    transposed: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[Mapping[str, Values]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Inherit the other attributes from the family in `like`, and check all. Raises InputError that names the attribute."""
        super().__pydantic_init_subclass__(**kwargs)
        own = {fact: value for fact, value in vars(cls).items() if fact in ModelFamily.__annotations__}
        if cls.like not in ("", *FAMILIES):
            raise cls.error("like", f"{cls.like!r} is not a built-in family{_near(cls.like, FAMILIES)}")
        base = type(FAMILIES[cls.like]) if "like" in own else cls.__mro__[1]
        facts: Values = {fact: getattr(base, fact) for fact in ModelFamily.__annotations__}
        facts |= {"title": cls.__name__, "classifier": "", "harmless": (), "examples": {}}
        for fact, value in own.items():
            table = facts[fact] | value if isinstance(facts[fact], dict) and isinstance(value, dict) else value
            has_names = fact in ("keys", "dropout", "outer_tensors", "layer_tensors") and isinstance(table, dict)
            facts[fact] = {key: name for key, name in table.items() if name is not None} if has_names else table
        facts["defaults"] = {option: value for option, value in facts["defaults"].items() if option in facts["keys"]}
        try:
            facts = vars(_Facts.model_validate(facts))
        except ValidationError as error:
            first = error.errors()[0]
            where, *inside = map(str, first["loc"])
            raise cls.error(where, ": ".join([*inside, first["msg"]])) from None
        named = re.sub(r"(For[A-Z]\w*|LMHeadModel)$", "ForSequenceClassification", facts["architecture"])
        for fact, value in facts.items():
            setattr(cls, fact, value or named if fact == "classifier" else value)
        if not is_own(cls):
            cls._require_valid(own)
        BY_TYPE[cls.model_type] = cls()

    @classmethod
    def _require_valid(cls, own: Values) -> None:
        """Raise InputError that names the first invalid attribute among those that a user's class sets itself (`own`)."""
        known = {"options": OPTIONS, "keys": OPTIONS, "defaults": cls.keys} | {
            fact: {name for family in FAMILIES.values() for name in getattr(family, fact)}
            for fact in ("outer_tensors", "layer_tensors")
        }
        for fact, names in known.items():
            for name in own.get(fact, ()):
                if name not in names:
                    raise cls.error(fact, f"{name!r} is unknown{_near(name, names)}")
        for option, value in cls.options.items():
            try:
                TypeAdapter(OPTIONS[option]).validate_python(value, strict=True)
            except ValidationError as error:
                raise cls.error("options", f"{option} = {value!r}: {error.errors()[0]['msg']}") from None
        for fact in ("model_type", "architecture"):
            if (name := getattr(cls, fact)) in ("", *(getattr(family, fact) for family in FAMILIES.values())):
                raise cls.error(fact, f"{name!r} is empty or belongs to a built-in family; choose another name")
        if cls.model_fields:
            field = next(iter(cls.model_fields))
            raise cls.error(field, f"unknown attribute of a family{_near(field, ModelFamily.__annotations__)}")

    @classmethod
    def error(cls, attribute: str, problem: str) -> InputError:
        """Return an error that names the file, the class, the attribute and the problem, for the caller to raise."""
        return InputError(f"{cls.location(attribute)}: {problem}")

    @classmethod
    def location(cls, attribute: str) -> str:
        """Return `FILE: CLASS.ATTRIBUTE`, for errors."""
        return f"{getattr(sys.modules.get(cls.__module__), '__file__', cls.__module__)}: {cls.__name__}.{attribute}"

    def about(self, attribute: str) -> str:
        """Return ` (FILE: CLASS.ATTRIBUTE)`, the end of an error about a user's class; empty for a built-in family."""
        return "" if is_own(type(self)) else f" ({self.location(attribute)})"

    def about_tensor(self, name: str) -> str:
        """Return the result of `about` for the attribute that has the name of a `transformers` tensor."""
        return self.about("layer_tensors" if name.startswith(self.layer_prefix.partition("{")[0]) else "outer_tensors")

    def apply_rules(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Yield the result of one method (read, write or obstacles) of each rule. Raises BessemerError that names the rule."""
        for rule in self.rules:
            try:
                result = getattr(rule, method)(*arguments)
                if not isinstance(result, list if method == "obstacles" else dict):
                    raise TypeError(f"returned {result!r}")
                if unknown := [option for option in result if method == "read" and option not in OPTIONS]:
                    raise ValueError(f"{unknown[0]!r} is not a model option")
            except BessemerError:
                raise
            except Exception as error:
                raise failure(
                    self, "rules", error, f"{method}, of the keys {', '.join(rule.keys) or '(none)'}"
                ) from error
            yield result

    @property
    def standard(self) -> Values:
        """The value of each option that a recipe leaves out: that of `options`, else ModelConfig's default."""
        return {field.name: field.default for field in fields(ModelConfig)} | self.options

    @property
    def reads(self) -> set[str]:
        """The keys of config.json that the rules read."""
        return {key for rule in self.rules for key in rule.keys}

    @property
    def understood(self) -> set[str]:
        """The keys of config.json that are read, or compared with the only supported value."""
        return {*self.keys.values(), *self.fixed, *self.dropout, *self.reads, *self.token_keys, *_EVERY["understood"]}

    @property
    def known(self) -> set[str]:
        """The keys in `understood`, and the keys that do not change the computation."""
        return self.understood | {*self.harmless, *HARMLESS, *FIXED}


def family_named(name: str) -> ModelFamily:
    """Return a family by its name in a recipe. Raises InputError if its class cannot be used."""
    if name in FAMILIES:
        return FAMILIES[name]
    family: ModelFamily = make("model_families", name, {})
    type(family).name = name
    BY_TYPE[family.model_type] = family
    return family


def family_of_type(model_type: str) -> ModelFamily:
    """Return the family of a `model_type`: a built-in one, that of a loaded class, or the entry point of this name.

    Raises InputError if there is none, or if its class cannot be used.
    """
    if model_type not in BY_TYPE and ":" in model_type:  # would name a file, which a foreign config.json must not load
        raise InputError("it may not name a file")
    family = BY_TYPE.get(model_type) or family_named(model_type)
    if family.model_type != model_type:
        raise family.error("model_type", f"{family.model_type!r} differs from its entry point, {model_type!r}")
    return family


def _near(name: str, names: Iterable[str]) -> str:
    near = nearest(name, list(names))
    return f"; did you mean {near}?" if near else f"; use one of {', '.join(names)}"


def _with_none(value: Any) -> Any:
    """Replace "null" in families.toml by None."""
    if isinstance(value, dict):
        return {key: _with_none(item) for key, item in value.items()}
    return None if value == "null" else value


OPTIONS: Mapping[str, Any] = get_type_hints(ModelConfig)
_hints = get_type_hints(ModelFamily, include_extras=True)
_types: dict[str, Any] = {fact: (get_args(_hints[fact])[0], ...) for fact in ModelFamily.__annotations__}
_Facts: type[BaseModel] = create_model("_Facts", **_types)
_TABLES = _with_none(tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8")))
_EVERY = _TABLES.pop("every_family")
FIXED: Values = _EVERY["fixed"]  # other values would change the computation, and we have no option for them
READ_ANYWHERE = frozenset(_EVERY["read_anywhere"])
HARMLESS = frozenset(_EVERY["harmless"])
# The built-in families and those whose classes this process has loaded, by model_type.
BY_TYPE: dict[str, ModelFamily] = {}
FAMILIES: dict[str, ModelFamily] = {}
_metaclass: Any = type(ModelFamily)
for _name, _table in _TABLES.items():  # a family comes after the one in its `like`
    _family: Any = _metaclass(_name, (ModelFamily,), {"__module__": __name__, "model_type": _name, **_table})
    FAMILIES[_name] = _family()
FAMILIES = {name: FAMILIES[name] for name in get_args(FamilyName)}
globals().update({name: type(family) for name, family in FAMILIES.items()})
BUILT_IN = {name: f"{__name__}:{name}" for name in FAMILIES}
