"""Reads, overrides, explains and writes recipes; says what is wrong with one in a line a person can act on."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from bessemer.errors import InputError
from bessemer.recipe.quality import Quality
from bessemer.recipe.schema import Recipe

HORIZON = ("steps", "tokens", "minutes")  # of [train]: how long a run is, one of them


def shipped() -> dict[str, str]:
    """Recipes that come with Bessemer: name to TOML text."""
    folder = resources.files("bessemer.recipe") / "shipped"
    return {
        Path(entry.name).stem: entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load(reference: str | Path, overrides: Sequence[str] = (), *, may_be_unnamed: bool = False) -> Recipe:
    """Read a recipe file, or a shipped recipe by its name, and apply `key=value` overrides.

    may_be_unnamed: a recipe without [run] is named for its file, for who only asks what it would take.

    Relative paths of sources, tokenizer and starting weights are taken from the recipe file's folder; `run.dir` is
    taken from the working directory. Raises InputError that names the file, the line and the key.
    """
    path = Path(reference)
    if path.suffix != ".toml" and not path.exists():
        texts = shipped()
        if str(reference) not in texts:
            near = _nearest(str(reference), list(texts))
            raise InputError(
                f"{reference}: no such recipe file and no shipped recipe of that name"
                + (f"; did you mean {near}?" if near else f"; shipped: {', '.join(texts)}")
            )
        return parse(texts[str(reference)], f"recipe {reference}", overrides)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a recipe: {error}") from None
    recipe = parse(text, str(path), overrides, _name(path) if may_be_unnamed else None)
    return _from_folder(recipe, path.resolve().parent)


def _name(path: Path) -> str:
    """A name for the run of an unnamed recipe."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-") or "plan"


def parse(text: str, where: str, overrides: Sequence[str] = (), name: str | None = None) -> Recipe:
    """Validate TOML `text`; `where` names it in errors; name: of the run where it has no [run] table."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    if name is not None and isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("name", name)
    for override in overrides:
        _override(values, override)
    _one_horizon(values, overrides)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError("\n".join(_complaints(error, text, where, overrides))) from None


def dump(recipe: Recipe) -> str:
    """The recipe as TOML; values that are left out stay out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True, by_alias=True))


def digest(*parts: Any) -> str:
    """SHA-256 of sections or plain values, as hexadecimal: what stages compare to see whether they are current."""
    plain = [part.model_dump(mode="json", by_alias=True) if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Keys whose values differ, each as `key: old -> new`."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json", by_alias=True))) for recipe in (old, new))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def keys() -> dict[str, FieldInfo]:
    """Every key of the recipe by its dotted name, tables included (`corpus.sources.name` for table arrays)."""
    return dict(_fields(Recipe, ""))


def explain(key: str) -> str:
    """What a key means: its type, its default and the sentence that documents it; a table lists its keys."""
    known = keys()
    if key not in known:
        raise InputError(f"{key}: no such recipe key" + _did_you_mean(key, list(known)))
    info = known[key]
    inner = [name for name in known if name.startswith(key + ".") and "." not in name[len(key) + 1 :]]
    if inner:
        lines = [f"[{key}]  {info.description}", ""]
        width = max(len(name) for name in inner)
        lines += [f"  {name:<{width}}  {known[name].description}" for name in inner]
        return "\n".join(lines)
    default = "required" if info.is_required() else _shown_default(info)
    return f"{key}\n  type     {_shown_type(info)}\n  default  {default}\n  {info.description}"


def _from_folder(recipe: Recipe, folder: Path) -> Recipe:
    """What a recipe file reads lies relative to that file."""

    def anchored(path: str) -> str:
        return path if "://" in path else str(folder / Path(path).expanduser())

    sources = tuple(
        source.model_copy(update={"paths": tuple(anchored(path) for path in source.paths)})
        for source in recipe.corpus.sources
    )
    tokenizer = recipe.tokenizer
    if tokenizer.path is not None:
        tokenizer = tokenizer.model_copy(update={"path": anchored(tokenizer.path)})
    tokenizer = tokenizer.model_copy(update={"compare": tuple(anchored(path) for path in tokenizer.compare)})
    tokens = recipe.tokens.model_copy(
        update={
            "sources": tuple(
                source.model_copy(
                    update={
                        "paths": tuple(anchored(path) for path in source.paths),
                        "tokenizer": source.tokenizer and anchored(source.tokenizer),
                    }
                )
                for source in recipe.tokens.sources
            )
        }
    )
    model, train = recipe.model, recipe.train
    if model.from_ is not None:
        model = model.model_copy(update={"from_": "hf:" + anchored(model.from_.removeprefix("hf:"))})
    if train.start is not None:
        train = train.model_copy(update={"start": anchored(train.start)})
    against = tuple(anchored(path) for path in recipe.corpus.dedup.against)
    dedup = recipe.corpus.dedup.model_copy(update={"against": against})
    quality = _anchored_quality(recipe, anchored)
    language, contamination = recipe.corpus.language, recipe.corpus.contamination
    if language.model is not None:
        language = language.model_copy(update={"model": anchored(language.model)})
    sets = tuple(given.model_copy(update={"path": anchored(given.path)}) for given in contamination.sets)
    contamination = contamination.model_copy(update={"sets": sets})
    changed_corpus = {
        "sources": sources,
        "rules": recipe.corpus.rules.anchored(anchored),
        "language": language,
        "contamination": contamination,
        "quality": quality,
        "dedup": dedup,
    }
    corpus = recipe.corpus.model_copy(update=changed_corpus)
    changed = {"corpus": corpus, "tokenizer": tokenizer, "tokens": tokens, "model": model, "train": train}
    return recipe.model_copy(update=changed)


def _anchored_quality(recipe: Recipe, anchored: Callable[[str], str]) -> Quality:
    """Examples are sources of the corpus or paths; a path is what is no source's name."""
    quality, names = recipe.corpus.quality, {source.name for source in recipe.corpus.sources}
    examples = {
        side: tuple(entry if entry in names else anchored(entry) for entry in getattr(quality, side))
        for side in ("high", "low")
    }
    model = None if quality.model is None else anchored(quality.model)
    return quality.model_copy(update={**examples, "model": model})


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override}: write it as key=value, for example train.steps=50")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *tables, last = key.strip().split(".")
    place: Any = values
    for index, table in enumerate(tables):
        place = _entry(place, table, key, tables[: index + 1])
    if not isinstance(place, dict):
        raise InputError(f"--set {override}: {'.'.join(tables)} is not a table")
    place[last] = value


def _one_horizon(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """An override of one of train.steps, tokens and minutes takes the place of the others that the recipe has."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    chosen = [name for name in HORIZON if f"train.{name}" in keys]
    if chosen and isinstance(train := values.get("train"), dict):
        for name in HORIZON:
            if name not in chosen:
                train.pop(name, None)


def _entry(place: Any, name: str, key: str, path: list[str]) -> Any:
    """The table `name` in `place`; an item of a table array goes by its own name, as in corpus.sources.NAME.weight."""
    if isinstance(place, list):
        for item in place:
            if isinstance(item, dict) and item.get("name") == name:
                return item
        names = [str(item.get("name")) for item in place if isinstance(item, dict)]
        raise InputError(f"--set {key}: no {'.'.join(path[:-1])} is named {name!r}; there are: {', '.join(names)}")
    if not isinstance(place, dict):
        raise InputError(f"--set {key}: {'.'.join(path[:-1])} is not a table")
    return place.setdefault(name, {})


def _complaints(error: ValidationError, text: str, where: str, overrides: Sequence[str]) -> Iterator[str]:
    known = list(keys())
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"] if not isinstance(part, int)]
        key = ".".join(location)
        overridden = any(override.partition("=")[0].strip() == key for override in overrides)
        line = None if overridden else _line_of(text, location)
        place = "--set" if overridden else f"{where}:{line}" if line else where
        if item["type"] == "extra_forbidden":
            yield f"{place}: {key}: unknown key{_did_you_mean(key, known)}"
        elif item["type"] == "missing":
            yield f"{place}: {key}: missing; {keys()[key].description if key in known else 'it is required'}"
        elif item["type"] == "value_error":
            yield f"{place}: {key + ': ' if key else ''}{item['ctx']['error']}"
        else:
            yield f"{place}: {key}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _line_of(text: str, location: list[str]) -> int | None:
    """The line in which a key stands, found by its table header and its name."""
    if not location:
        return None
    header, name = ".".join(location[:-1]), location[-1]
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        opened = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?", line)
        if opened:
            table = opened[1].replace(" ", "")
            if table == ".".join(location):
                return number
        key = re.match(r"\s*([A-Za-z0-9_.\-]+)\s*=", line)
        if key and (f"{table}.{key[1]}".lstrip(".") == f"{header}.{name}".lstrip(".")):
            return number
    return None


def _did_you_mean(key: str, known: list[str]) -> str:
    near = _nearest(key, known)
    return f"; did you mean {near}?" if near else "; `bessemer recipe --explain` lists the keys"


def _nearest(key: str, known: list[str]) -> str | None:
    """The nearest valid name: by the whole dotted key, else a key of that last name in another table."""
    table, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == table}
    close = difflib.get_close_matches(last, list(siblings), n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    if elsewhere:
        return elsewhere[0]
    whole = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if whole:
        return whole[0]
    lasts = {name.rpartition(".")[2]: name for name in known}
    close = difflib.get_close_matches(last, list(lasts), n=1, cutoff=0.75)
    return lasts[close[0]] if close else None


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for field, info in section.model_fields.items():
        name = info.alias or field
        yield prefix + name, info
        inner = _section_of(info.annotation)
        if inner is not None:
            yield from _fields(inner, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_of(part))), None)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}.{inner.get('name', index)}")
    else:
        yield prefix, value


def _shown_default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    return "derived, or none" if value is None else json.dumps(value)


def _shown_type(info: FieldInfo) -> str:
    shown = info.annotation.__name__ if isinstance(info.annotation, type) else str(info.annotation)
    return shown.replace("typing.", "").replace(" | None", "").replace("NoneType", "none")
