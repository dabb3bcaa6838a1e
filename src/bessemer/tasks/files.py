"""Evaluation tasks as small files: a template, and the rows of a data file that it is filled in with.

| kind | what is scored |
|---|---|
| choice | which of several continuations of the prompt is the likeliest, as it is and divided by its length |
| cloze | whether the target is what the model would write after the prompt, and how likely it is |
| exact | what the model writes after the prompt until a stop, compared with the answers |
| text | bits per byte of a text |

A task is a TOML file, or the name of a shipped one with the data: `hellaswag:validation.jsonl`. The shipped templates ask as
EleutherAI's lm-evaluation-harness does (tasks of the same names, version 0.4).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from bessemer.errors import InputError
from bessemer.hashing import digest
from bessemer.recipe.corpus import Source
from bessemer.recipe.keys import nearest
from bessemer.recipe.load import shipped
from bessemer.recipe.section import Positive, Section, Words
from bessemer.terminal import warn

Kind = Literal["choice", "cloze", "exact", "text"]
SCORE_NAMES: dict[str, str] = {
    "accuracy": "accuracy", "accuracy_norm": "accuracy by length", "exact_match": "exact match", "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
}  # fmt: skip
"""Scores with their names in the report, the main one of a task first."""

ONE_NAME = "give each a name of its own, a shipped one by OWN=NAME:DATA"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of a task
ONE_WORD = "is no name of a task: a letter or digit, then letters, digits, dots, dashes and underscores"
NEEDED: dict[Kind, tuple[str, ...]] = {  # keys
    "choice": ("prompt", "choices", "answer"), "cloze": ("prompt", "target"), "exact": ("prompt", "answers"), "text": ("text",),
}  # fmt: skip
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")


class TaskFile(Section):
    """A task file. Templates are Jinja over the fields of a row; `answer` is the number of the right choice, from 0, its letter
    or its text; few_shot rows of `examples`, else of the data's own beginning, stand answered before each prompt."""

    name: str = Field(pattern=f"^{NAME}$")
    kind: Kind
    data: str | None = None
    description: str = ""
    prompt: str = ""
    choices: str | Words = ()
    answer: str = ""
    target: str = ""
    answers: str = ""
    text: str = ""
    joiner: str = " "
    few_shot: int = Field(0, ge=0)
    examples: str | None = None
    separator: str = "\n\n"
    stop: Words = ("\n",)
    max_tokens: Positive = 32
    ignore_case: bool = True
    limit: int | None = Field(None, gt=0)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def _complaints(self) -> Iterator[str]:
        if missing := [key for key in NEEDED[self.kind] if not getattr(self, key)]:
            yield f"a task of kind {self.kind!r} needs {' and '.join(missing)}"
        if "" in self.stop:
            yield "stop: an empty text ends every answer before it begins; give what ends one, or leave it out"
        of_prompts = {"few_shot", "examples", "separator", "description"}
        of_kinds = {"exact": {"stop", "max_tokens", "ignore_case", "joiner", *of_prompts}, "text": set()}
        used = {*NEEDED[self.kind], *of_kinds.get(self.kind, {"joiner", *of_prompts})}
        if unused := sorted(self.model_fields_set - used - {"name", "kind", "data", "limit"}):
            yield f"a task of kind {self.kind!r} does not use {' and '.join(unused)}; leave it out"
        if not self.few_shot and (unused := sorted({"examples", "separator"} & self.model_fields_set)):
            yield f"{' and '.join(unused)}: only used with few_shot, which is 0; give few_shot = N, or leave it out"


@dataclass(frozen=True)
class Item:
    """One question. context: prompt with what stands before it; continuations: the choices, the target or the text; right: number
    of the right choice; answers: that an exact match accepts."""

    context: str
    continuations: tuple[str, ...]
    right: int = 0
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationTask:
    """A task with its items. place: of its data."""

    file: TaskFile
    place: str
    items: tuple[Item, ...]

    @property
    def content(self) -> str:
        """Digest of what is asked and how it is scored: equal scores of two tasks are of the same."""
        settings = self.file.model_dump(mode="json", exclude={"name", "data", "examples", "limit"})
        return digest(settings, [asdict(item) for item in self.items])[:16]


def shipped_tasks() -> dict[str, str]:
    """EvaluationTask files that come with Bessemer: name to TOML text."""
    return shipped("bessemer.tasks")


def open_task(reference: str, folder: Path = Path(), limit: int | None = None) -> EvaluationTask:
    """Read a task and its data. reference: a TOML file, or NAME:DATA of a shipped one, or OWN=NAME:DATA with a name of one's
    own, relative to `folder`; limit: of the items. Raises InputError that names the file, the row and the key."""
    names, _, data = reference.partition(":")
    own, _, name = names.rpartition("=")
    known = shipped_tasks()
    if data and name in known:
        file, base = _parse(known[name], f"task {name}"), folder
        if file.kind == "text" and not own:  # of texts of one's own there may be several
            own = f"{name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(data.removesuffix('.gz')).stem)}"
        if own and not re.fullmatch(NAME, own):
            raise InputError(f"evaluate.tasks: {reference}: {own!r} {ONE_WORD}")
        file = file.changed(data=data, name=own or name)
    elif name in known:
        raise InputError(f"evaluate.tasks: {reference}: say where its data is, as {names}:PATH/TO/FILE.jsonl")
    else:
        path = folder / reference
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"evaluate.tasks: {reference}: no task file ({getattr(error, 'strerror', None) or error}); give a TOML file, or "
                f"NAME:DATA with a shipped name ({', '.join(known)})"
            ) from None
        file, base = _parse(text, str(path)), path.parent
    if file.data is None:
        raise InputError(f'task {file.name}: it names no data; add data = "FILE"')
    place = file.data if "://" in file.data else str(base / file.data)
    limits = [one for one in (limit, file.limit) if one is not None]
    rows = _rows(place, file, min(limits, default=None))
    shots, shots_place = rows, place
    if file.examples is not None:
        shots_place = file.examples if "://" in file.examples else str(base / file.examples)
        shots = _rows(shots_place, file, file.few_shot + 1)
    others = len(shots) - (file.examples is None)  # a row is never its own example
    if others < file.few_shot:
        raise InputError(f"task {file.name}: few_shot = {file.few_shot}, and there are {others} rows to take them from")
    return EvaluationTask(file, place, tuple(_items(file, rows, shots, place, shots_place)))


def current_scores(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of scores on tasks that earlier commands named those whose task and data are as they were; the others are named."""
    kept = []
    for row in rows:
        try:
            is_current = open_task(row["reference"]).content == row["content"]
        except (InputError, KeyError):
            is_current = False
        if is_current:
            kept.append(row)
        else:
            warn(f"{row['name']}: the task or its data has changed since it was scored, so its score is left out; name it with "
                 "--task to score it")  # fmt: skip
    return kept


def _parse(text: str, where: str) -> TaskFile:
    try:
        return TaskFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise InputError(f"{where}: {'; '.join(map(_what, error.errors()))}") from None


def _what(error: ErrorDetails) -> str:
    key, what = ".".join(map(str, error["loc"])) or "task", error["msg"]
    if error["type"] == "extra_forbidden":
        near, known = nearest(key, list(TaskFile.model_fields)), ", ".join(TaskFile.model_fields)
        what = f"unknown key; did you mean {near}?" if near else f"unknown key; there are {known}"
    elif error["type"] == "value_error":
        return str(error["ctx"]["error"])
    elif error["type"] == "literal_error":
        what = f"{error['input']!r} is not one of {', '.join(get_args(Kind))}"
    elif error["type"] == "string_pattern_mismatch":
        what = f"{error['input']!r} {ONE_WORD}"
    return f"{key}: {what}"


def _items(
    file: TaskFile, rows: list[dict[str, Any]], shots: list[dict[str, Any]], place: str, shots_place: str
) -> Iterator[Item]:
    """The items of the rows. A row is never its own example."""
    fill, examples = _Filler(file, place), _Filler(file, shots_place)
    used = shots[: file.few_shot + 1] if file.few_shot else []
    answered = [examples.example(number, row) for number, row in enumerate(used, 1)]
    for number, row in enumerate(rows, 1):
        own = [text for text, shot in zip(answered, shots, strict=False) if shot != row][: file.few_shot]
        item = fill.item(number, row)
        if not all(text.strip() for text in item.continuations):
            what = "an empty text" if file.kind == "text" else "an empty answer"
            raise InputError(f"task {file.name}: {place}, row {number}: {what}, of which there is nothing to score")
        try:
            "".join((item.context, *item.continuations, *item.answers)).encode()
        except UnicodeEncodeError:
            why = "half of a character (a lone surrogate), which no text has"
            raise InputError(f"task {file.name}: {place}, row {number}: {why}") from None
        before = f"{file.description}{''.join(f'{text}{file.separator}' for text in own)}"
        yield Item(before + item.context, item.continuations, item.right, item.answers)


NULL = "a field is empty (null)"


def _not_null(value: Any) -> Any:
    """What a template writes. Raises ValueError for null, which it would write as the word None."""
    if value is None:
        raise ValueError(NULL)
    return value


class _Filler:
    """Fills the templates of a task in."""

    def __init__(self, file: TaskFile, place: str) -> None:
        from jinja2 import StrictUndefined, TemplateSyntaxError
        from jinja2.sandbox import SandboxedEnvironment

        self._file, self._place = file, place
        self._environment = SandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, finalize=_not_null
        )

        self._template = cache(self._environment.from_string)
        for key in NEEDED[file.kind]:
            given = getattr(file, key)
            # A field or an expression.
            if key in ("answer", "answers") or (key == "choices" and isinstance(given, str)):
                continue
            try:
                for template in (given,) if isinstance(given, str) else given:
                    self._template(template)
            except TemplateSyntaxError as error:
                raise InputError(f"task {file.name}: {key}: no valid template: {error}") from None

    def item(self, number: int, row: dict[str, Any]) -> Item:
        file = self._file
        if file.kind == "text":
            text = self._text("text", file.text, number, row)
            return Item("", (text.replace("\r\n", "\n").replace("\r", "\n"),))  # as the corpus has it
        context = self._text("prompt", file.prompt, number, row)
        if file.kind == "cloze":
            return Item(context, (file.joiner + self._text("target", file.target, number, row),))
        if file.kind == "exact":
            answers = self._value("answers", file.answers, number, row)
            listed = answers if isinstance(answers, list) else [answers]
            if None in listed or not listed:
                raise self._error(number, "answers", NULL if listed else "an empty list")
            return Item(context, (), answers=tuple(str(answer) for answer in listed))
        choices, answer = self._choices(number, row), self._value("answer", file.answer, number, row)
        right = self._right(answer, choices, number, file.answer in row)
        return Item(context, tuple(file.joiner + choice for choice in choices), right)

    def example(self, number: int, row: dict[str, Any]) -> str:
        """A row with its answer."""
        item = self.item(number, row)
        return item.context + (self._file.joiner + item.answers[0] if item.answers else item.continuations[item.right])

    def _choices(self, number: int, row: dict[str, Any]) -> list[str]:
        given = self._file.choices
        if isinstance(given, str):
            found = self._value("choices", given, number, row)
            if not isinstance(found, list):
                raise self._error(number, "choices", f"{found!r} is no list")
            if None in found:
                raise self._error(number, "choices", NULL)
            choices = [str(choice) for choice in found]
        else:
            choices = [self._text("choices", choice, number, row) for choice in given]
        if len({*choices}) < len(choices):
            raise self._error(number, "choices", f"two of them are equal: {', '.join(choices)}")
        if len(choices) < 2:
            raise self._error(number, "choices", f"{len(choices)} of them; there must be two or more")
        return choices

    def _right(self, answer: Any, choices: list[str], number: int, is_field: bool) -> int:
        """The number of the right choice, of its number from 0, its letter or its text; what may be a number or letter, or a
        text, and means another choice as either, is refused, unless an expression made it a number."""
        text, place = str(answer).strip(), None
        if text.lower() in ("true", "false"):  # of JSON, or as CSV has it
            lowered = [choice.lower() for choice in choices]
            if text.lower() in lowered:
                return lowered.index(text.lower())
            if {"yes", "no"} <= {*lowered}:
                return lowered.index("yes" if text.lower() == "true" else "no")
            text = str(int(text.lower() == "true"))
        if text.lstrip("-").isdigit() and 0 <= int(text) < len(choices):
            place = int(text)
        letter = "ABCDEFGHIJKLMNOPQRSTUVWXYZ".find(text.upper()) if len(text) == 1 else -1
        by_letter = letter if 0 <= letter < len(choices) else None
        # White space around a choice is part of it; an answer without it means the one choice that is alike otherwise.
        whole, bare = str(answer), [choice.strip() for choice in choices]
        is_text = whole in choices or bare.count(text) == 1
        if is_text and (is_field or place is None or isinstance(answer, str)):
            found = choices.index(whole) if whole in choices else bare.index(text)
            other = by_letter if place is None else place
            if other not in (None, found) and not (whole != text and whole in choices):
                key = self._file.answer
                what, code = "number of a choice from 0", f"{key} | int"
                if place is None:
                    what, code = "letter of a choice", f"'ABCDEFGH'.index({key})"
                raise self._error(
                    number, "answer", f"{text!r} may be the {what}, or the text of another one; write "
                    f"answer = \"{code}\" for the {what.split()[0]}, or \".index({key})\" after the list of choices for the text"
                )  # fmt: skip
            return found
        if (place := by_letter if place is None else place) is not None:
            return place
        raise self._error(
            number, "answer", f"{answer!r} is no number from 0, letter or text of the {len(choices)} choices"
        )

    def _value(self, key: str, template: str, number: int, row: dict[str, Any]) -> Any:
        """A field by its name, or else what an expression gives."""
        if template in row:
            return row[template]
        from jinja2 import TemplateError, Undefined

        try:
            value = self._environment.compile_expression(template, undefined_to_none=False)(**row)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            hint = "; it is a field or an expression, written without braces" if "{{" in template else ""
            raise self._error(number, key, f"{error}{hint}") from None
        if isinstance(value, Undefined):
            raise self._error(number, key, f"{template!r} is no field of the row; it has {', '.join(row)}")
        return value

    def _text(self, key: str, template: str, number: int, row: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        if template in row:
            raise self._error(
                number, key, f"{template!r} is a field of the row; write {{{{ {template} }}}} for what it holds"
            )
        try:
            return self._template(template).render(**row)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise self._error(number, key, f"{error}; the row has {', '.join(row)}") from None

    def _error(self, number: int, key: str, what: str) -> InputError:
        return InputError(f"task {self._file.name}: {self._place}, row {number}: {key}: {what}")


def _rows(place: str, task: TaskFile, limit: int | None) -> list[dict[str, Any]]:
    """The rows of a data file, each a JSON object. Of a text with the field `text`: a row a line, for a task of kind text one row
    of all, whatever its ending."""
    from bessemer import storage

    name, plain = task.name, place.removesuffix(".gz")
    if not plain.endswith(ENDINGS) and task.kind != "text":
        raise InputError(f"task {name}: {place}: data is one of {', '.join(ENDINGS)}, or one of them with .gz")
    try:
        with storage.open_file(place, Source(name="task", paths=(place,))) as file:
            raw = file.read()
        raw = gzip.decompress(raw) if place.endswith(".gz") else raw
        rows = _decoded(raw, plain, task.kind)
    except (OSError, EOFError) as error:
        raise InputError(
            f"task {name}: {place}: cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    except (ValueError, ImportError) as error:
        raise InputError(f"task {name}: {place}: cannot be read: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise InputError(f"task {name}: {place}, row {number}: no object with fields")
    if not rows:
        raise InputError(f"task {name}: {place}: holds no rows")
    return rows[:limit]


def _decoded(raw: bytes, place: str, kind: Kind) -> list[Any]:
    if place.endswith(".parquet"):
        import pyarrow.parquet as pq

        return list(pq.read_table(io.BytesIO(raw)).to_pylist())
    text = raw.decode("utf-8-sig")
    if place.endswith(".txt") or not place.endswith(ENDINGS):
        return [{"text": text}] if kind == "text" else [{"text": line} for line in text.splitlines() if line.strip()]
    if place.endswith((".csv", ".tsv")):
        records = list(csv.DictReader(io.StringIO(text), delimiter="\t" if place.endswith(".tsv") else ","))
        for number, record in enumerate(records, 1):
            if None in record:
                raise ValueError(
                    f"row {number} has {len(record) - 1 + len(record[None])} cells, the header {len(record) - 1}"
                )
        return records
    if place.endswith(".json"):
        found = json.loads(text)
        return found if isinstance(found, list) else [found]
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number} is no JSON: {error}") from None
    return rows
