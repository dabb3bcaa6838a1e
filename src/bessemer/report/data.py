"""Contents of a run directory as plain values for reports.

Every file is optional, because a run is reported at any stage. A damaged file becomes a note on the page instead of an error,
because a report is most useful when something went wrong.
"""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from bessemer.common.console import amount, counted
from bessemer.common.errors import BessemerError, InputError
from bessemer.guard.goodput import read_sessions, summarize_sessions
from bessemer.recipe import Recipe
from bessemer.recipe.secrets import shareable
from bessemer.report.log_gaps import missing_lines
from bessemer.run.directory import RunDirectory, checkpoint_steps
from bessemer.run.files import read_json, read_json_lines, read_steps
from bessemer.tokens import degenerate_text

Column = NDArray[np.float64]
Json = dict[str, Any]
FileVersion = tuple[int, int, int] | None


# --- Values of a JSON file, whatever its shape ------------------------------------------------------------------------


def value_at(value: Any, *keys: str) -> Any:
    """Return the value under a path of nested keys of a JSON object; None if one is missing or its parent is no object."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_number(value: Any, *keys: str) -> float | None:
    """Return the number under a path of nested keys; None if it is missing, not a number or not finite."""
    value = value_at(value, *keys)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number_or_0(value: Any, *keys: str) -> float:
    """Like `as_number`, but return 0 instead of None."""
    return as_number(value, *keys) or 0.0


def as_object(value: Any, *keys: str) -> Json:
    """Return the JSON object under a path of nested keys, or {} if it is missing or not an object."""
    value = value_at(value, *keys)
    return value if isinstance(value, dict) else {}


def as_objects(value: Any, *keys: str) -> list[Json]:
    """Return the JSON objects in the list under a path of nested keys, or [] if it is missing or not a list."""
    value = value_at(value, *keys)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_text(value: Any, *keys: str) -> str:
    value = value_at(value, *keys)
    return value if isinstance(value, str) else ""


# --- A run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curves:
    """The numbers in all lines of one kind, such as `train`, of metrics.jsonl, NaN where a line lacks the value.

    Attributes:
        step: Step of each line.
        columns: Values by key.
        groups: Values by key and name, for keys that hold one number per source, block or task.
        texts: Texts by "KEY.NAME", for keys that hold one text per block or task; None where a line lacks it.
    """

    step: Column = field(default_factory=lambda: np.empty(0))
    columns: dict[str, Column] = field(default_factory=dict)
    groups: dict[str, dict[str, Column]] = field(default_factory=dict)
    texts: dict[str, list[str | None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str, group: str = "") -> Column | None:
        """Return the column of key `name`, in the object `group` if not empty; None if it has no finite value."""
        values = (self.groups.get(group, {}) if group else self.columns).get(name)
        return values if values is not None and bool(np.isfinite(values).any()) else None

    def last(self, name: str, group: str = "") -> float | None:
        """Return the last finite value of a column."""
        values = self.column(name, group)
        return None if values is None else float(values[np.isfinite(values)][-1])

    def median(self, name: str) -> float | None:
        """Return the median of a column's finite values, without the first tenth of the lines, while the machine warms up."""
        values = self.column(name)
        if values is None:
            return None
        settled = values[len(values) // 10 :]
        return float(np.nanmedian(settled if np.isfinite(settled).any() else values))


@dataclass(frozen=True)
class RunData:
    """Contents of one run directory. Missing files give empty values.

    Fields without a description have the content of the JSON file of their name.

    Attributes:
        recipe: The recipe without its secrets; `recipe_text` is its TOML text.
        train: Lines of kind `train` of metrics.jsonl. `validation`, `inside` (statistics of layers), `ranks` (times of each
            rank) and `tasks` have those of the other kinds.
        gated: Description of the text that the token gate masks; empty if none.
        peak_memory: Peak bytes of the process with the highest peak since the last start that logged any.
        forks: Training lines that each rollback undid.
        times: Summary of the sessions of the run with their stops and restarts.
        samples: Lines of generated text. `last_lines` has the last line of each remaining kind.
        last_time: ISO time of the last line.
        notes: Problems found in the files, as sentences for the reader.
    """

    name: str
    recipe: Json = field(default_factory=dict)
    recipe_text: str = ""
    environment: Json = field(default_factory=dict)
    statistics: Json = field(default_factory=dict)
    quality: Json = field(default_factory=dict)
    manifest: Json = field(default_factory=dict)
    plan: Json = field(default_factory=dict)
    mixture: Json = field(default_factory=dict)
    evaluation: Json = field(default_factory=dict)
    export: Json = field(default_factory=dict)
    train: Curves = field(default_factory=Curves)
    validation: Curves = field(default_factory=Curves)
    inside: Curves = field(default_factory=Curves)
    ranks: Curves = field(default_factory=Curves)
    tasks: Curves = field(default_factory=Curves)
    incidents: list[Json] = field(default_factory=list)
    gated: str = ""
    peak_memory: float | None = None
    forks: list[Curves] = field(default_factory=list)
    times: Json = field(default_factory=dict)
    stages: list[Json] = field(default_factory=list)
    ladder: Json = field(default_factory=dict)
    samples: list[Json] = field(default_factory=list)
    last_time: str = ""
    last_lines: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def objective(self) -> str:
        """Kind of objective that scores held-out text: causal, masked or classify."""
        if self.own_objective:
            return "causal" if as_object(self.plan, "model_config").get("causal", True) else "masked"
        return as_text(self.recipe, "train", "objective") or "causal"

    @property
    def own_objective(self) -> str:
        """Name of the user's objective class; empty for a built-in objective."""
        name = as_text(self.recipe, "train", "objective").rpartition(":")[2]
        return "" if name in ("causal", "masked", "classify") else name

    @property
    def model_size(self) -> str:
        """Number of parameters in words, as `ModelConfig.size` has it; "" if it is unknown."""
        parameters = as_number(self.plan, "parameters") or as_number(self.export, "parameters")
        return as_text(self.plan, "model_size") or (f"{amount(parameters)} parameters" if parameters else "")

    @property
    def planned_steps(self) -> float | None:
        """Total steps of the run by its recipe, else by its plan."""
        return as_number(self.recipe, "train", "steps") or as_number(self.plan, "steps")

    @property
    def loss_unit(self) -> str:
        """Unit of the loss in words, such as "nats per token"."""
        return {"masked": "nats per hidden token", "classify": "nats per text"}.get(self.objective, "nats per token")

    @property
    def has_conversations(self) -> list[bool]:
        """A list with True for each source of conversations and False for each other one, in recipe order."""
        return [source.get("format") == "chat" for source in as_objects(self.recipe, "corpus", "sources")]

    @property
    def scored_text(self) -> str:
        """Phrase for the held-out text that is scored; of conversations these are only the assistant's answers."""
        if not any(self.has_conversations):
            return "held-out text"
        is_mixed = not all(self.has_conversations)
        return "held-out text, of conversations the answers" if is_mixed else "the answers of held-out conversations"

    @property
    def source_names(self) -> list[str]:
        """Names of the sources, first in recipe order, then in data order; the order sets their colours."""
        names = [as_text(source, "name") for source in as_objects(self.recipe, "corpus", "sources")]
        names += [as_text(source, "source") for source in as_objects(self.statistics, "sources")]
        names += [*as_object(self.manifest, "sources"), *as_object(self.mixture, "sources")]
        for curves in (self.train, self.validation):
            names += [name for key, group in curves.groups.items() if key.endswith("_by_source") for name in group]
        return list(dict.fromkeys(names))


def read(run: RunDirectory) -> RunData:
    """Return the data of a run directory for the report. Raises InputError if it holds no file of a run."""
    reader = RunReader(run)
    if not run.path.is_dir():
        raise InputError(f"{run.path}: no such run directory; make one with `bessemer run RECIPE`")
    if not any(reader.versions()):
        raise InputError(f"{run.path}: it holds no file of a run; start one with `bessemer run RECIPE`")
    return reader.read()


class RunReader:
    """A reader of a run directory that reads only appended lines of metrics.jsonl when called again."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._metrics = _MetricsLog(run.metrics)
        self._notes: list[str] = []
        self._files = {  # JSON files, by the field of RunData
            "environment": run.environment, "statistics": run.corpus / "statistics.json", "quality": run.corpus / "quality.json",
            "manifest": run.tokens / "manifest.json", "plan": run.plan, "mixture": run.path / "mixture.json",
            "evaluation": run.evaluation, "export": run.export / "bessemer.json", "ladder": run.path / "ladder" / "ladder.json",
            "stages": run.path / "stages.json",
        }  # fmt: skip

    def versions(self) -> tuple[FileVersion, ...]:
        """Return the version of each file that is read."""
        run = self.run
        logs = (run.recipe, run.metrics, run.forks, run.incidents, run.times, *degenerate_text.list_logs(run.path))
        return tuple(file_version(path) for path in (*logs, *self._files.values()))

    def read(self, *, is_growing: bool = False) -> RunData:
        """Read the run directory.

        `is_growing` means that an incomplete last line is still being written and is not damaged.
        """
        run = self.run
        self._notes = []
        recipe, recipe_text = self._recipe()
        files: dict[str, Any] = {name: self._json_file(path) for name, path in self._files.items()}
        files["stages"] = as_objects(files["stages"], "stages")
        self._metrics = self._metrics.read(is_growing)
        curves: dict[str, Any] = {kind: columns.finish() for kind, columns in self._metrics.columns.items()}
        trained = curves["train"].step.tolist()
        was_trained = bool(trained or files["evaluation"] or checkpoint_steps(run.checkpoints))
        damaged = [path.name for path in (run.times, run.incidents) if not is_growing and _is_damaged(path)]
        log_every = int(number_or_0(recipe, "train", "log_every"))
        lost = missing_lines(trained, int(trained[-1]), log_every) if trained else ""
        scored = number_or_0(files["evaluation"], "step")
        if is_cut := bool(trained) and scored > trained[-1]:
            files["evaluation"] = {}
        self._notes += [
            note
            for applies, note in (
                (self._metrics.num_damaged, f"{counted(self._metrics.num_damaged, 'damaged line')} of metrics.jsonl left out."),
                (was_trained and not trained, "metrics.jsonl is missing or empty, so there are no curves."),
                (was_trained and not recipe_text, "recipe.toml is missing, so the settings of the run are unknown."),
                (is_cut, f"metrics.jsonl ends before step {scored:,.0f} of evaluation.json, so the final scores are left out."),
                (damaged, f"{' and '.join(damaged)} damaged or cut: what is missing there is left out."),
                (lost, f"In metrics.jsonl {lost}: curves, times and scores leave them out."),
            )
            if applies
        ]  # fmt: skip
        logged = (int(trained[-1]), self._metrics.last_time) if trained else None
        return RunData(
            name=as_text(recipe, "run", "name") or run.path.resolve().name, recipe=recipe, recipe_text=recipe_text, **files,
            incidents=read_json_lines(run.incidents), gated=degenerate_text.describe(run.path), forks=_forks(run.forks),
            peak_memory=self._metrics.peak_memory, times=summarize_sessions(read_sessions(run.times), logged) or {},
            samples=self._metrics.samples, last_time=self._metrics.last_time, last_lines=self._metrics.last_lines,
            notes=self._notes, **curves,
        )  # fmt: skip

    def _recipe(self) -> tuple[Json, str]:
        """Return the recipe as values and as text, without its secrets. A damaged recipe has only text."""
        path = self.run.recipe
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        try:
            recipe = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            recipe = {}
        if (without_secrets := shareable(recipe)) != recipe:
            recipe, text = without_secrets, tomli_w.dumps(without_secrets)
        if text and list(Recipe.model_fields)[-1] not in recipe:  # a run writes every section
            self._notes.append("recipe.toml is damaged or cut; it is shown as it is.")
            recipe = {"run": as_object(recipe, "run")}
        return recipe, text

    def _json_file(self, path: Path) -> Json:
        try:
            value = read_json(path, "") if path.exists() else {}
        except BessemerError:
            value = None
        if not isinstance(value, dict):
            self._notes.append(f"{path.relative_to(self.run.path)} is damaged and was left out.")
        return as_object(value)


def _is_damaged(path: Path) -> bool:
    """Return True if a JSON Lines file has invalid lines or an incomplete last line."""
    data = path.read_bytes() if path.exists() else b""
    return bool(data) and (not data.endswith(b"\n") or len(read_json_lines(path)) < data.count(b"\n"))


def file_version(path: Path) -> FileVersion:
    """Return a value that changes whenever the file changes, from its status; None for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


class _MetricsLog:
    """A reader of metrics.jsonl that reads only appended lines when called again.

    The numbers are stored in columns, because the lines of a long run would not fit in memory as objects.
    """

    def __init__(self, path: Path, inode: int | None = None) -> None:
        self.path, self._inode, self._at = path, inode, 0
        self.num_damaged = 0
        self.samples: list[Json] = []
        self.last_time = ""
        self.last_lines: Json = {}
        self.columns = {kind: _LogColumns() for kind in ("train", "validation", "inside", "ranks", "tasks")}
        self._peaks = [0.0]  # peak memory in bytes after each start

    @property
    def peak_memory(self) -> float | None:
        """Peak memory in bytes since the last start that logged any; earlier processes started from another base."""
        return next(filter(None, reversed(self._peaks)), None)

    def read(self, is_growing: bool) -> _MetricsLog:
        """Read the appended lines, and return the log, or a new log if a rollback rewrote the file.

        With `is_growing`, an incomplete last line is left for the next call.
        """
        inode, size, _ = file_version(self.path) or (None, 0, 0)
        if inode != self._inode or size < self._at:
            return _MetricsLog(self.path, inode).read(is_growing)
        if inode is None or size == self._at:
            return self
        with open(self.path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if is_growing and not line.endswith(b"\n"):
                    break
                self._at += len(line)
                if line.strip():
                    try:
                        self._add(as_object(json.loads(line)))
                    except ValueError:
                        self._add({})
        return self

    def _add(self, row: Json) -> None:
        """Store the values of a line that are shown; a line without a step counts as damaged."""
        kind = as_text(row, "kind")
        if as_number(row, "step") is None:
            self.num_damaged += 1
            return
        self.last_time = as_text(row, "time") or self.last_time
        if kind == "resumed":
            self._peaks.append(0.0)
        memory = number_or_0(row, {"train": "memory_bytes", "memory": "measured"}.get(kind, ""))
        self._peaks[-1] = max(self._peaks[-1], memory)
        if kind in self.columns:
            self.columns[kind].add(row)
        elif kind == "sample":
            self.samples.append(row)
        else:
            self.last_lines[kind] = row


def _forks(path: Path) -> list[Curves]:
    """Return the training lines of forks.jsonl that each rollback undid, in order."""
    columns: defaultdict[float, _LogColumns] = defaultdict(_LogColumns)
    for row in read_steps(path):
        if row.get("kind") == "train":
            columns[number_or_0(row, "fork")].add(row)
    return [columns[number].finish() for number in sorted(columns)]


class _LogColumns:
    """A builder of `Curves` from log lines."""

    def __init__(self) -> None:
        self.step = array("d")
        self.values: dict[tuple[str, str | None], array[float]] = {}
        self.texts: dict[str, list[str | None]] = {}

    def add(self, line: Json) -> None:
        numbers: dict[tuple[str, str | None], float] = {}
        texts: dict[str, str] = {}
        for key, value in line.items():
            for name, inner in value.items() if isinstance(value, dict) else ((None, value),):
                if key != "step" and (known := as_number(inner)) is not None:
                    numbers[key, name] = known
                elif name is not None and isinstance(inner, str):
                    texts[f"{key}.{name}"] = inner
        for column in numbers:  # the order within a line is the order in legends
            if column not in self.values:
                self.values[column] = array("d", [math.nan]) * len(self.step)
        for column, values in self.values.items():
            values.append(numbers.get(column, math.nan))
        for group in dict.fromkeys([*self.texts, *texts]):
            self.texts.setdefault(group, [None] * len(self.step)).append(texts.get(group))
        self.step.append(float(line["step"]))

    def finish(self) -> Curves:
        """Return the columns ordered by step. A step that was trained twice, as after a rollback, keeps its last values."""
        step = np.array(self.step)
        _, index = np.unique(step[::-1], return_index=True)
        keep = len(step) - 1 - index
        texts = {group: [logged[line] for line in keep] for group, logged in self.texts.items()}
        curves = Curves(step[keep], texts=texts)
        for (key, name), values in self.values.items():
            by_name = curves.columns if name is None else curves.groups.setdefault(key, {})
            by_name[key if name is None else name] = np.array(values)[keep]
        return curves
