"""Extensions that a recipe names: resolve their names relative to its folder, and validate their settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, InputError, first_line
from bessemer.recipe.section import Section

Location = tuple[str | int, ...]  # keys of tables, and indices in arrays of tables
# The kind of extension that a key names. Settings of `use` are in the same table; those of another key in a table next to it.
KEYS = {
    "corpus.filters.use": "filters",
    "corpus.sources.format": "readers",
    "corpus.steps.use": "global_steps",
    "train.callbacks.use": "callbacks",
    "train.optimizer.kind": "optimizers",
    "train.objective": "objectives",
    "train.schedule.kind": "schedules",
    "model.family": "model_families",
}
TABLES = {"format": "reader", "kind": "settings", "objective": "objective_settings", "family": "settings"}


class ExtensionBase(BaseModel):
    """Base of the classes that users extend. The fields of a subclass are its settings, which a recipe sets.

    Attributes:
        name: Name in statistics, errors and the report (default: the class's name in snake case).
        one_of: Methods of a base class of which a subclass must define at least one.
    """

    model_config = Section.model_config

    name: ClassVar[str] = ""
    one_of: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set the default name of the class."""
        super().__pydantic_init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


class Use(Section):
    """A table of the recipe whose key `use` names an extension class; its other keys are the settings of the class."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(min_length=1)

    @property
    def settings(self) -> dict[str, Any]:
        """Every key except `use`."""
        return self.model_extra or {}


def names_extension(kind: str, *known: str, code: str = "code") -> AfterValidator:
    """Return a pydantic validator for a recipe key that names an extension class.

    It checks that the class can be found and, if the validation may load its code, that it can be used.

    Args:
        kind: The kind of the extension.
        known: Names that need no look-up.
        code: Key of the table, declared before this one, with the digest of the class in a resolved recipe. If it is set,
            the class is not looked up, because this machine may lack it. In a table without such a key, a class in a
            file is not looked up.
    """

    def check(name: str, info: ValidationInfo) -> str:
        in_file = code not in info.data and extensions.IN_FILE.fullmatch(name)
        try:
            if _is_loaded(name, info):
                _ = extensions.find(kind, name).target
            elif name not in known and not in_file and info.data.get(code) is None:
                extensions.find(kind, name)
        except InputError as error:
            raise ValueError(str(error)) from None
        return name

    return AfterValidator(check)


def takes_settings(kind: str, key: str = "", *, is_of_own: bool = False) -> AfterValidator:
    """Return a pydantic validator for the settings of an extension.

    If the validation may load the code of the class, the settings are checked by creating an instance.

    Args:
        kind: The kind of the extension.
        key: The key that names it, declared before the settings in the same table; empty for a `Use`.
        is_of_own: Only a user's class may have settings here: reject them for a built-in class.
    """

    def check(value: Any, info: ValidationInfo) -> Any:
        name, settings = (info.data.get(key), value) if key else (value.use, value.settings)
        if is_of_own and settings and name in extensions.built_in_names(kind):
            raise ValueError(f"has no effect with {key} = {name!r}; it is for classes of your own")
        if _is_loaded(name, info) and not (is_of_own and name in extensions.built_in_names(kind)):
            try:
                make(kind, str(name), settings or {})
            except InputError as error:
                raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


def _is_loaded(name: str | None, info: ValidationInfo) -> bool:
    return name in (info.context or {}).get("loaded", ())


def digest_of(kind: str, name: str, code: str | None) -> str | None:
    """Return the digest of a user's class: `code` if it is set, else that of its current code; None for a built-in class."""
    return None if name in extensions.built_in_names(kind) else code or extensions.find(kind, name).digest


class NamedRule(Section):
    """A table of the recipe whose key `kind` names a built-in class or a user's class, with settings for the latter.

    Attributes:
        extension: The kind of the extension, a key of `extensions.KINDS`.
        code: Digest of the code of a user's class, which a resolved recipe records.
        kind: Name of the class.
        settings: Settings of a user's class.
    """

    extension: ClassVar[str]

    code: str | None = None
    kind: str = Field(min_length=1)
    settings: dict[str, Any] | None = None

    @property
    def is_built_in(self) -> bool:
        """True for a class of this package."""
        return self.kind in extensions.built_in_names(self.extension)

    @property
    def digest(self) -> str | None:
        """The digest of the code of a user's class; None for a built-in one."""
        return digest_of(self.extension, self.kind, self.code)

    @property
    def rule(self) -> Any:
        """An instance of the named class with its settings. Raises InputError if it cannot be used."""
        return _make_once(self.extension, self.kind, json.dumps(self.settings or {}), self.digest)


class NamedExtension(NamedTuple):
    """An extension that the values of a recipe name, before validation.

    Attributes:
        kind: The kind of the extension, a key of `extensions.KINDS`.
        table: The table that names it.
        key: The key in the table that has the name.
        location: Location of the table.
    """

    kind: str
    table: dict[str, Any]
    key: str
    location: Location

    @property
    def settings_location(self) -> Location:
        """Location of its settings."""
        return self.location if self.key == "use" else (*self.location, TABLES[self.key])


def named_in(values: dict[str, Any]) -> Iterator[NamedExtension]:
    """Yield the extensions that a recipe's values, before validation, name; malformed values are skipped."""
    for key, kind in KEYS.items():
        *path, last = key.split(".")
        for location, table in tables_at(values, path):
            if isinstance(table.get(last), str):
                yield NamedExtension(kind, table, last, location)


def tables_at(value: Any, path: list[str], at: Location = ()) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield (location, table) for each table under the keys `path` in a recipe's values; malformed values are skipped.

    Several tables match if there are arrays of tables on the path. `at` is the location of `value`.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from tables_at(item, path, (*at, number))
    elif isinstance(value, dict):
        if not path:
            yield at, value
        elif path[0] in value:
            yield from tables_at(value[path[0]], path[1:], (*at, path[0]))


def anchor_names(values: dict[str, Any], folder: Path) -> list[str]:
    """Make the paths of extension files in a recipe's values absolute, in place, and return the names of all extensions.

    Relative paths start at `folder`.
    """
    names = []
    for named in named_in(values):
        named.table[named.key] = extensions.anchor(named.table[named.key], folder)
        names.append(named.table[named.key])
    return names


def settings_at(values: dict[str, Any], location: Location) -> list[Location]:
    """Return the locations of all possible settings of the extension that `location`, that of one setting, belongs to.

    The result is empty if `location` is not that of a setting.
    """
    named = next((named for named in named_in(values) if named.settings_location == location[:-1]), None)
    if named is None:
        return []
    fields = extensions.find(named.kind, named.table[named.key]).target.model_fields
    return [(*named.settings_location, field) for field in fields]


def item_name(item: dict[str, Any]) -> str | None:
    """Return the name of an item in an array of tables for display and overrides: `name`, or the class that `use` names."""
    name = item.get("name", item.get("use"))
    return name.rpartition(":")[2] if isinstance(name, str) else None


@cache
def built_in_classes(kind: str) -> dict[str, Any]:
    """Return a dict from name to class of the built-in extensions of a kind."""
    return {name: resolve_name(reference) for name, reference in extensions.built_in_names(kind).items()}


@cache
def _make_once(kind: str, name: str, settings: str, digest: str | None) -> Any:
    extension = extensions.find(kind, name)
    if digest is not None and extension.digest != digest:
        raise InputError(f"{extension.origin}: changed since the run began; put it back, or set another run.name")
    return make(kind, name, json.loads(settings))


def make(kind: str, name: str, settings: dict[str, Any]) -> Any:
    """Create an extension with its settings.

    Raises:
        InputError: When the class cannot be found or used.
        ValidationError: When it does not accept these settings.
    """
    extension = extensions.find(kind, name)
    target = extension.target
    try:
        return target.model_validate_json(json.dumps(settings, default=str))
    except (ValidationError, BessemerError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{extension.origin}: {target.__qualname__} fails on its settings: {what}") from error
