"""Reference pages generated from source: recipe keys, incidents, model families, command line and modules."""

from __future__ import annotations

import ast
import json
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import result_tables
from command_line import command_line
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bessemer.corpus.filters.chain import REASONS
from bessemer.guard.incidents import INCIDENT_KINDS
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import shipped
from bessemer.recipe.keys import keys_and_limits

SOURCE = Path(__file__).parents[2] / "src" / "bessemer"
MODULES = {
    "api": ("documents", "tokens", "training", "run", "plan"),
    "workflow": ("prepare", "stages", "extend", "resume_policy", "preflight", "sizing"),
    "recipe": ("schema", "load", "keys", "batches"),
    "corpus": ("document", "filters.base", "readers.base", "global_steps"),
    "tokens": ("loader", "shards", "order", "mixture", "packing", "trace", "tokenizer"),
    "model": (
        "config",
        "transformer",
        "attention",
        "flops",
        "recipe_defaults",
        "scaling_rules",
        "huggingface.families",
        "huggingface.rules",
    ),
    "distributed": ("mesh", "validity", "stages", "schedules", "memory"),
    "checkpoint": ("protocol", "format", "selection", "retention", "mirror"),
    "guard": ("detection", "policy", "incidents", "journal", "trends"),
    "train": (
        "callback",
        "schedule",
        "update_rule",
        "run_spec",
        "loop",
        "trainer",
        "objective",
        "task",
        "loss",
        "setup",
        "step",
        "generation",
    ),
    "export": ("export_run", "import_model", "hugging_face", "gguf"),
    "evaluate": ("final", "ngram", "task_files", "harness"),
    "plan": (
        "goal",
        "search",
        "intervals",
        "local_plan",
        "scaling_laws",
        "failures",
        "run_cost",
        "devices",
    ),
}
"""The modules of the API reference, by package."""

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "min_length": "length ≥", "max_length": "length ≤"}


def recipe_keys() -> str:
    """Return Markdown with a table of keys for each table of the recipe."""
    known = keys_and_limits()
    tables = {name: info for name, info in known.items() if section_of(info.annotation)}
    parts = []
    for table, info in tables.items():
        rows = [
            "| " + " | ".join([f"`{name.rpartition('.')[2]}`", *map(cell, described(key))]) + " |"
            for name, key in known.items()
            if name.rpartition(".")[0] == table and name not in tables
        ]
        if rows:
            title = f"[[{table}]]" if is_array(info) else f"[{table}]"
            head = ["| key | type and range | default | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([f"## `{title}`", "", info.description or "", "", *head, *rows, ""]))
    return "\n".join(parts)


def described(info: FieldInfo) -> tuple[str, str, str]:
    """Return type and range, default and meaning of a key."""
    return kind_of(info), default_of(info), info.description or ""


def kind_of(info: FieldInfo) -> str:
    """Return the type of a key and the range of its values, in TOML terms."""
    bounds = [*bounds_of(info.metadata), *_inner_bounds(info.annotation)]
    return ", ".join([type_name(info.annotation), *dict.fromkeys(bounds)])


def type_name(annotation: Any) -> str:
    """Return the name of a type in TOML terms."""
    origin, inside = get_origin(annotation), [part for part in get_args(annotation) if part is not type(None)]
    if origin is Annotated:
        return type_name(inside[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(part) for part in inside))
    if origin in (tuple, list):
        return f"list of {type_name(inside[0])}"
    if origin is dict:
        return f"table of {type_name(inside[1])}"
    return {bool: "true or false", int: "integer", float: "number", str: "text"}.get(annotation) or str(annotation)


def bounds_of(metadata: Any) -> Iterator[str]:
    """Yield the limits in pydantic's metadata."""
    for limit in metadata:
        if isinstance(limit, FieldInfo):
            yield from bounds_of(limit.metadata)
            continue
        for name, sign in BOUNDS.items():
            if (value := getattr(limit, name, None)) is not None:
                yield f"{sign} {value:g}"


def _inner_bounds(annotation: Any) -> Iterator[str]:
    """Yield the limits of the parts of a type, such as those of the number in `Positive | None`."""
    if get_origin(annotation) is Annotated:
        yield from bounds_of(annotation.__metadata__)
    if get_origin(annotation) is not Literal:
        for part in get_args(annotation):
            yield from _inner_bounds(part)


def default_of(info: FieldInfo) -> str:
    """Return the default of a key as TOML."""
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "none" if value is not None else "derived, or none"
    return f"`{json.dumps(value)}`"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a table that a key holds, alone or in a list; None for a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part))), None)


def is_array(info: FieldInfo) -> bool:
    """True if a recipe may repeat the table."""
    return any(get_origin(part) is tuple for part in (info.annotation, *get_args(info.annotation)))


def cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return re.sub("([≥≤<>]) ", "\\1\u00a0", text).replace("|", "\\|").replace("<", "&lt;")


def incidents() -> str:
    """Return Markdown with the response to each kind of incident, and the advice on it."""
    done = {
        "skip": "skip the update",
        "roll back": "roll back",
        "restart": "restart the processes",
        "record": "record it",
    }
    rows = [
        f"| `{kind.name}` | {done[kind.response]} | {cell(' '.join(kind.advice.split()))} |"
        for kind in INCIDENT_KINDS.values()
        if kind.advice
    ]
    return "\n".join(["| kind | response | what to do |", "|---|---|---|", *rows])


def rejections() -> str:
    """Return Markdown with the reasons for which documents are rejected."""
    rows = [f"| `{reason}` | {cell(meaning)} |" for reason, meaning in REASONS.items()]
    return "\n".join(["| reason | meaning |", "|---|---|", *rows])


def shipped_recipes() -> str:
    """Return Markdown with the shipped recipes and their leading comments."""
    tops = ((name, re.match(r"(?:#.*\n)+", text)) for name, text in shipped().items())
    rows = (f"| `{name}` | {cell(' '.join(top[0].replace('#', ' ').split()))} |" for name, top in tops if top)
    return "\n".join(["| recipe | what it is |", "|---|---|", *rows])


def families() -> str:
    """Return Markdown with the parts of each model family's block and its export format."""
    rows = (
        f"| `{name}` | " + " | ".join([*map(cell, family.summary), family.title]) + " |"
        for name, family in FAMILIES.items()
    )
    head = ["| family | norm | positions | MLP | also | exported as |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def api_pages() -> dict[str, str]:
    """Return the API pages: Markdown by name on the site."""
    return {f"api/{package}.md": api_page(package) for package in MODULES}


def api_page(package: str) -> str:
    """Return the page of a package, with mkdocstrings for each module."""
    parts = [f"# bessemer.{package}\n\n{docstring(package)}\n"]
    parts += [f"## {module}\n\n::: bessemer.{package}.{module}\n" for module in MODULES[package]]
    return "\n".join(parts)


def api() -> str:
    """Return Markdown with the packages and links to their pages."""
    rows = (
        f"| [`bessemer.{package}`](api/{package}.md) | {cell(docstring(package).splitlines()[0])} |"
        for package in MODULES
    )
    return "\n".join(["| package | what it is |", "|---|---|", *rows])


def docstring(package: str) -> str:
    """Return a package's docstring without importing it."""
    text = (SOURCE / package / "__init__.py").read_text(encoding="utf-8")
    return re.sub(r"\[(?=\w)", r"\\[", ast.get_docstring(ast.parse(text)) or "")


MADE: dict[str, Callable[[], str]] = {
    "recipe_keys": recipe_keys,
    "incidents": incidents,
    "rejections": rejections,
    "shipped_recipes": shipped_recipes,
    "families": families,
    "api": api,
    "command_line": command_line,
    **result_tables.TABLES,
}
"""Functions that generate the Markdown for a marker in a page."""
