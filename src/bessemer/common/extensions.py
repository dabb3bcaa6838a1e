"""Extension classes of the corpus pipeline and of training, found by name.

A name is that of a built-in class, of an entry point in the group `bessemer.KIND` of an installed distribution, or
FILE.py:CLASS. Code in files runs only after `trust` was called with the file: for files that a recipe on the command line
names, and with --trust-code for files that a run directory or a model names. Child processes trust the same files through an
environment variable, as long as their content is unchanged.

Each module with a base class lists its built-in classes in BUILT_IN, a mapping from name to "module:object".
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from uuid import uuid4

from bessemer.common.errors import BessemerError, InputError, first_line

# Base class of each kind of extension
KINDS = {
    "filters": "bessemer.corpus.filters.base:Filter",
    "readers": "bessemer.corpus.readers.base:Reader",
    "global_steps": "bessemer.corpus.global_steps:GlobalStep",
    "callbacks": "bessemer.train.callback:Callback",
    "schedules": "bessemer.train.schedule:RateSchedule",
    "optimizers": "bessemer.train.update_rule:UpdateRule",
    "objectives": "bessemer.train.objective:Objective",
    "model_families": "bessemer.model.huggingface.families:ModelFamily",
}
TRUSTED = "BESSEMER_TRUSTED_CODE"  # environment variable with the SHA-256 of each trusted file, as JSON
IN_FILE = re.compile(r"(?P<module>[^:]+):(?P<name>[^\W\d]\w*)")
_of_process: dict[str, type[Any]] = {}  # classes that only this process finds
BUILT_IN = "bessemer"  # origin of the classes of this package


@dataclass(frozen=True)
class Extension:
    """An extension, a class that a recipe names, such as a reader or a filter; it may not be imported yet.

    Attributes:
        kind: Kind of the extension, a key of KINDS.
        name: The name in the recipe.
        origin: "bessemer", the "NAME VERSION" of an installed distribution, or the path of a file.
        digest: SHA-256 of the file, else the origin. Results that the class makes depend on it.
        reference: "module:object" or "FILE.py:object".
    """

    kind: str
    name: str
    origin: str
    digest: str
    reference: str

    @property
    def is_built_in(self) -> bool:
        """True if the class belongs to this package."""
        return self.origin == BUILT_IN

    @property
    def target(self) -> type[Any]:
        """The imported class.

        Raises:
            InputError: The class is not trusted, cannot be imported, or lacks the methods of its base class.
        """
        return _load(self)


def find(kind: str, name: str) -> Extension:
    """Find an extension by name, without importing its code.

    Raises:
        InputError: No class has the name, the file cannot be read, or two distributions have the same name.
    """
    if name in _of_process:
        return Extension(kind, name, "this process", name, name)
    if match := IN_FILE.fullmatch(name):
        file = os.path.abspath(match["module"])
        return Extension(kind, name, file, _sha256(_read(file)), f"{file}:{match['name']}")
    built_in, points = built_in_names(kind), _entry_points(kind, tuple(sys.path))
    hits = [Extension(kind, name, BUILT_IN, BUILT_IN, built_in[name])] if name in built_in else []
    for point in points:
        origin = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        if point.name == name:
            hits.append(Extension(kind, name, origin, origin, point.value))
    if len(hits) > 1:
        owners = " and ".join(one.origin for one in hits)
        raise InputError(f"{kind}: {name!r} is defined by {owners}; uninstall one, or name the class as FILE.py:CLASS")
    if not hits:
        known = sorted({*built_in, *(point.name for point in points)})
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of: {', '.join(known) or 'none'}."
        raise InputError(f"{kind}: there is no {name!r}; {hint} Name a class in a file as FILE.py:CLASS")
    return hits[0]


def built_in_names(kind: str) -> Mapping[str, str]:
    """Return a dict from the name of each built-in extension of a kind to its "module:object"."""
    names: Mapping[str, str] = importlib.import_module(KINDS[kind].partition(":")[0]).BUILT_IN
    return names


@cache
def _entry_points(kind: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points for extensions of a kind in installed distributions; cached for each value of `sys.path`."""
    return sorted(entry_points(group=f"bessemer.{kind}"), key=lambda point: (point.name, point.value))


# --- Trust


def anchor(name: str, folder: Path) -> str:
    """Return an extension's name FILE:CLASS with the path, relative to `folder`, made absolute; other names unchanged."""
    if (match := IN_FILE.fullmatch(name)) is None:
        return name
    module = match["module"]
    file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    return f"{os.path.abspath(folder / Path(file).expanduser())}:{match['name']}"


def trust(names: Iterable[str]) -> None:
    """Let this process, and those that it starts, run the files that extension names refer to, with their current code.

    The names must have absolute paths (`anchor`); names without a file are ignored.
    """
    files = {match["module"] for name in names if (match := IN_FILE.fullmatch(name))}
    hashes = {file: _sha256(Path(file).read_bytes()) for file in sorted(files) if Path(file).is_file()}
    if hashes:
        os.environ[TRUSTED] = json.dumps(_trusted() | hashes)


def _trusted() -> dict[str, str]:
    return dict(json.loads(os.environ.get(TRUSTED, "{}")))


def is_importable(target: type[Any]) -> bool:
    """Return True if other processes can import a class, because it is at the top level of a file."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return file is not None and target.__qualname__ == target.__name__


def reference_to(target: type[Any]) -> str:
    """Return the extension name FILE:CLASS by which other processes find a class, and trust the file.

    Raises InputError for a class that other processes cannot import.
    """
    if not is_importable(target):
        raise InputError(f"{target.__qualname__}: workers cannot import this class; move it to the top level of a file")
    name = f"{os.path.abspath(str(sys.modules[target.__module__].__file__))}:{target.__name__}"
    trust([name])
    return name


def keep_in_process(target: type[Any]) -> str:
    """Register a class in this process only, and return a new extension name for it.

    The name is unique, so that results made with the class are never reused: the code may change between processes.
    """
    name = f"{target.__qualname__}@{uuid4().hex[:16]}"
    _of_process[name] = target
    return name


def is_of_process(name: str) -> bool:
    """Return True if an extension name comes from `keep_in_process`, so that only this process finds the class."""
    return name in _of_process


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); put it where all machines see it") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- Import


def base_of(kind: str) -> type[Any]:
    """Return the base class of the extensions of a kind, a key of KINDS."""
    base: type[Any] = resolve_name(KINDS[kind])
    return base


@cache
def _load(extension: Extension) -> type[Any]:
    target = _of_process.get(extension.reference) or _import(extension)
    check_class(target, base_of(extension.kind), extension.origin)
    return target


def _import(extension: Extension) -> type[Any]:
    module, _, name = extension.reference.partition(":")
    try:
        code = run_file(module) if module.endswith(".py") else importlib.import_module(module)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        what = f"importing {module} failed" + _line_in(error, module)
        raise InputError(f"{extension.origin}: {what}: {type(error).__name__}: {first_line(error)}") from error
    target = getattr(code, name, None)
    if not isinstance(target, type):
        raise InputError(f"{extension.origin}: {module} has no class {name}; correct the name")
    return target


def run_file(file: str) -> ModuleType:
    """Import a trusted file under a unique module name, so that files with the same name do not collide."""
    source, trusted = _read(file), _trusted().get(file)
    if trusted is None:
        raise InputError(f"{file}: code named by a run or a model is not trusted; review it, then add --trust-code")
    if trusted != _sha256(source):
        raise InputError(f"{file}: changed since the command started; run the command again")
    name = f"{Path(file).stem}@{_sha256(file.encode() + source)[:16]}"
    if name not in sys.modules:
        module = ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        try:
            exec(compile(source, file, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def check_class(target: type[Any], base: type[Any], origin: str) -> None:
    """Raise InputError unless `target` is a subclass of `base` whose methods accept the same arguments.

    `origin` names the class's file or distribution in the error.
    """
    if not issubclass(target, base):
        raise InputError(f"{origin}: {target.__qualname__} is not a subclass of bessemer.{base.__name__}; make it one")
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        shown = f"{missing[0]}{inspect.signature(getattr(base, missing[0]))}"
        raise InputError(f"{origin}: {target.__qualname__} lacks the method {shown}; define it")
    choice = getattr(base, "one_of", ())
    if choice and not is_own(target) and all(getattr(target, name) is getattr(base, name) for name in choice):
        raise InputError(f"{origin}: {target.__qualname__} has none of the methods {', '.join(choice)}; define one")
    for name, method in vars(base).items():
        own = inspect.getattr_static(target, name)
        if name.startswith("_") or not inspect.isfunction(method) or own is method:
            continue
        expected = inspect.signature(method)
        where = f"{origin}: {target.__qualname__}.{name}"
        if not inspect.isfunction(own) or inspect.iscoroutinefunction(own):
            raise InputError(f"{where} is not a method; define it as def {name}{expected}")
        by_name = [one.name for one in expected.parameters.values() if one.kind is one.KEYWORD_ONLY]
        by_place = [one.name for one in expected.parameters.values() if one.name not in by_name]
        try:
            inspect.signature(own).bind(*by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            raise InputError(f"{where}{inspect.signature(own)}: {error}; define it as def {name}{expected}") from None


# --- Failures of user code


def is_own(target: type[Any]) -> bool:
    """Return True if a class belongs to this package."""
    return target.__module__.partition(".")[0] == BUILT_IN


class UserCodeError(BessemerError):
    """An exception in a method of a user's class."""

    def at_step(self, step: int) -> UserCodeError:
        """Return a copy of the error whose message also names the training step, counted from 1."""
        return UserCodeError(f"{self} in step {step}")


def failure(part: object, method: str, error: BaseException, where: str) -> UserCodeError:
    """Return the error for an exception in a method of `part`, an instance of a user's class.

    It names the file, line, class and method. `where` tells what was being processed.
    """
    target = type(part)
    file = getattr(sys.modules.get(target.__module__), "__file__", None) or target.__module__
    what = f"{type(error).__name__}: {first_line(error)}"
    return UserCodeError(f"{file}{_line_in(error, file)}: {target.__qualname__}.{method}: {what} ({where})")


@contextmanager
def naming_faults(part: object, method: str, where: str, *expected: type[Exception]) -> Iterator[None]:
    """Turn an exception in the block, which calls a method of `part`, into a UserCodeError (`failure`).

    Exceptions pass through if the class of `part` is built in, or if they are `expected` ones.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_own(type(part)) or isinstance(error, (*expected, MemoryError)):
            raise
        raise failure(part, method, error, where) from error


def _line_in(error: BaseException, file: str) -> str:
    """Return ", line N", the innermost line of `file` in the traceback of `error`; empty if the file is not in it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f", line {lines[-1]}" if lines else ""
