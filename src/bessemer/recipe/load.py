"""Load recipes, apply overrides, and write recipes."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from bessemer.common import extensions
from bessemer.common.errors import InputError
from bessemer.common.hashing import digest
from bessemer.recipe.corpus import is_data
from bessemer.recipe.keys import complaints
from bessemer.recipe.model import SIZES
from bessemer.recipe.schema import Recipe
from bessemer.recipe.secrets import require_no_credentials, shareable, without_urls
from bessemer.recipe.section import DESCRIPTIONS, Section
from bessemer.recipe.train import HORIZON, Optimizer
from bessemer.recipe.uses import KEYS, anchor_names, item_name, tables_at
from bessemer.storage import hub

LONGEST_TEXT = 20_000_000  # max_characters in the recipe for a folder or file of text, whose books are single documents
SAMPLE_BYTES = 8000  # read from a file to distinguish recipes, text and binary data
TABLE = re.compile(rb"^\[(run|corpus|\[corpus\.sources\]|tokenizer|tokens|model|train)\]", re.MULTILINE)
MIN_TEXT_BYTES = 4_000  # clean text, two pages; less does not support even the smallest vocabulary
SomeSection = TypeVar("SomeSection", bound=Section)
PATHS = [key.split(".") for key in DESCRIPTIONS["paths"]["keys"]]
CHECKSUM = "checksum, by which a change by hand is seen: "
YAML = (".yaml", ".yml")  # recipes of other programs


def shipped() -> dict[str, str]:
    """Return the text of each recipe that comes with the package, by name."""
    files = sorted(Path(__file__).with_name("shipped").glob("*.toml"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def load(
    reference: str | Path, overrides: Sequence[str] = (), *, may_be_unnamed: bool = False, is_draft: bool = False,
    trust_code: bool | None = None,
) -> Recipe:  # fmt: skip
    """Load a recipe and apply overrides.

    Relative paths of sources, tokenizer and starting weights are relative to the recipe file's folder; `run.dir` is
    relative to the working directory.

    Args:
        reference: A recipe file, the name of a shipped recipe, a run directory, or a folder or file of text, which gets
            the shortest recipe for it.
        overrides: Overrides as `key=value`.
        may_be_unnamed: Name a recipe without [run] after its file, for callers that only plan it.
        is_draft: Check only each key by itself, because the caller changes the recipe and validates the result.
        trust_code: None: do not load the extensions that the recipe names. False or True: load them and validate their
            settings. The code that a recipe in a run directory names is loaded only with True; with False its use is an error.

    Raises:
        InputError: When the recipe is missing or invalid; names the file, the line and the key.
    """
    path, is_trusted = Path(reference), True
    name: str | None = None
    folder: Path | None = None
    if path.exists():
        _reject_results(path)
    if is_text(path):
        text, where = recipe_for_text(path.resolve()), f"recipe for {path}"
    elif path.is_dir():
        if not (path / "recipe.toml").exists():
            raise InputError(f"{path}: neither a recipe nor a run directory (it has no recipe.toml)")
        recipe = load(path / "recipe.toml", overrides, is_draft=is_draft, trust_code=trust_code)
        whole = path.resolve()
        is_moved = recipe.run.folder.resolve() != whole
        return recipe.changed(run={"name": whole.name, "dir": str(whole.parent)}) if is_moved else recipe
    elif path.exists():
        try:
            text, where = path.read_text(encoding="utf-8-sig"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read as a recipe ({error}), and is not text to train on") from None
        if not text.strip():
            raise InputError(f"{path}: the file is empty; give a recipe or text to train on")
        name, folder = _name(path) if may_be_unnamed else None, path.resolve().parent
        is_trusted = trust_code is True or not _is_of_run(path, text)
    elif str(reference) in (texts := shipped()):
        text, where = texts[str(reference)], f"recipe {reference}"
    else:
        raise InputError(f"{reference}: no such file or folder, and no shipped recipe; shipped: {', '.join(texts)}")
    loads_code = trust_code is not None
    return parse(text, where, overrides, name, folder, is_draft=is_draft, loads_code=loads_code, is_trusted=is_trusted)


def _is_of_run(path: Path, text: str) -> bool:
    """Return True if a recipe file with content `text` was written by this program or is in a run directory."""
    return CHECKSUM in text or (path.name == "recipe.toml" and next(path.parent.glob("*/stage.json"), None) is not None)


def _reject_results(path: Path) -> None:
    """Raise InputError if a path is a result of a run or the folder of a model, and so neither a recipe nor text."""
    target = path.resolve()
    if target.is_dir() and (target / "config.json").exists() and next(target.glob("*.safetensors"), None) is not None:
        raise InputError(f"{path}: a model, not text; to start from its weights, set model.from in a recipe")
    if target.suffix == ".toml" or (target / "recipe.toml").exists():
        return
    for folder in target.parents:
        is_run = (folder / "recipe.toml").exists() and any(folder.glob("*/stage.json"))
        if is_run and target.relative_to(folder).parts[0] != "corpus":  # documents of its corpus are ordinary text
            raise InputError(f"{path}: a result of the run {folder}; give that folder, a recipe, or text to train on")


def is_text(path: Path) -> bool:
    """Return True if a path is a folder or file of text to train on, and not a recipe, run directory or folder of runs."""
    if path.is_dir():
        is_run = any((path / name).exists() for name in ("recipe.toml", "corpus/stage.json", "corpus.work"))
        return not is_run and next(path.glob("*/recipe.toml"), None) is None
    if not path.is_file() or path.suffix.lower() in (".toml", *YAML):
        return False
    return is_data(path) or _holds_text(path)


def _holds_text(path: Path) -> bool:
    """Return True if a file begins like text, without a NUL (except UTF-16), and not like a recipe."""
    head = b""
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(SAMPLE_BYTES)
    is_plain = head.strip() and 0 not in head and not head.startswith(b"%PDF-")
    return bool(is_plain or head.startswith((b"\xff\xfe", b"\xfe\xff"))) and not TABLE.search(head)


def recipe_for_text(path: Path, overrides: Sequence[str] = ()) -> str:
    """Return the shortest recipe for a folder or file of text, as TOML.

    It has a name, one source and the overrides; all other values are derived from the text.
    """
    source: dict[str, Any] = {"name": "text", "paths": [str(path)]}
    if Path("runs").resolve().is_relative_to(path):
        source["exclude"] = ["runs"]  # the output of this command is not its input
    values: dict[str, Any] = {
        "run": {"name": _name(path)},
        "corpus": {"sources": [source], "rules": {"max_characters": LONGEST_TEXT}},
    }
    for override in overrides:
        _override(values, override)
    return tomli_w.dumps(values)


def _name(path: Path) -> str:
    """Return a valid run name made from a path's file name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-") or "plan"


def parse(
    text: str, where: str, overrides: Sequence[str] = (), name: str | None = None, folder: Path | None = None, *,
    is_draft: bool = False, loads_code: bool = False, is_trusted: bool = False,
) -> Recipe:  # fmt: skip
    """Parse and validate the TOML text of a recipe.

    Args:
        text: The recipe.
        where: Name of the recipe in errors.
        overrides: Overrides as `key=value`.
        name: Name of the run if the text has no [run] table.
        folder: Folder of the recipe's file.
        is_draft: As in `load`.
        loads_code: If the recipe is trusted, load the extensions that it names and validate their settings.
        is_trusted: Trust the files of code that the recipe and the overrides name, but not those of a run that it
            starts from.

    Raises:
        InputError: When the recipe is invalid.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fix = "; a table of a list has two brackets, as [[corpus.sources]]" if "twice" in str(error) else ""
        raise InputError(f"{where}: not valid TOML: {error}{fix}") from None
    if name is not None and isinstance(run := values.setdefault("run", {}), dict):
        run.setdefault("name", name)
    for override in overrides:
        _override(values, override)
    for key, value in leaves(values):
        require_no_credentials(value, f"{where}: {key}")
    _one_horizon(values, overrides)
    base = folder or Path()
    names = anchor_names(values, base)
    if is_trusted:
        extensions.trust(names)
    follow_start(values, base)
    follow_chat(values)
    context = {"is_draft": is_draft, "loaded": names if loads_code and is_trusted else ()}
    try:
        recipe = Recipe.model_validate(values, context=context)
    except ValidationError as error:
        raise InputError(without_urls("\n".join(complaints(error, values, text, where, overrides)))) from None
    return recipe if folder is None else _from_folder(recipe, folder)


def dump(recipe: Recipe, comments: Sequence[str] = ()) -> str:
    """Return a recipe as TOML with a checksum at its end; values that are not set are left out.

    Args:
        recipe: The recipe.
        comments: Lines of comment at the top.
    """
    lines = [f"# {line}\n" for line in comments if not line.startswith(CHECKSUM)]
    text = "".join(lines) + tomli_w.dumps(shareable(recipe))
    return f"{text}\n# {CHECKSUM}{digest(text)}\n"


def comments(path: Path) -> list[str]:
    """Return the comment lines of a recipe file without their "# ", for `dump`; empty if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line.removeprefix("# ") for line in lines if line.startswith("#")]


def is_as_dumped(text: str) -> bool:
    """Return True if the text of a recipe file has a valid checksum, so that it is unchanged since `dump` wrote it."""
    body, mark, checksum = text.rpartition(f"\n# {CHECKSUM}")
    return bool(mark) and checksum.strip() == digest(body)


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Return the keys whose values differ, each as `key: old -> new`."""
    before, after = (dict(leaves(recipe.model_dump(mode="json", by_alias=True))) for recipe in (old, new))

    def shown(value: Any) -> str:
        return "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return [
        f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def _from_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe with its relative paths joined to `folder`, the folder of its file.

    Values of path keys that are not paths, such as URLs, hub models and names of sources or tasks, stay unchanged.
    """
    names = {source.name for source in recipe.corpus.sources}

    def anchored(key: str, path: str) -> str:
        if "://" in path or (key in ("high", "low") and path in names) or (key, path) == ("chat_template", "chatml"):
            return path
        if key == "tasks" and not path.endswith(".yaml"):  # the name of a task of lm-evaluation-harness
            return path
        # hf:FOLDER, or hf:ORG/NAME if there is no such folder
        if key in ("path", "from_") and path.startswith("hf:"):
            name = path.removeprefix("hf:")
            return path if hub.is_name(name, folder) else f"hf:{folder / Path(name).expanduser()}"
        return str(folder / Path(path).expanduser())

    return _with_paths(recipe, PATHS, anchored)


def without_folders(recipe: Recipe) -> Recipe:
    """Return the recipe with its paths of data and code cut to file names, so that a moved project compares equal."""
    keys = [key for key in PATHS if key[0] in ("corpus", "tokens", "tokenizer")] + [key.split(".") for key in KEYS]
    return _with_paths(recipe, keys, lambda _, path: path if "://" in path else Path(path).name)


def _with_paths(section: SomeSection, keys: list[list[str]], anchored: Callable[[str, str], str]) -> SomeSection:
    """Return a section with each path under some keys replaced by `anchored(last part of the key, path)`.

    `keys` are dotted keys, each as a list of its parts. Keys that are not set stay unset.
    """
    changed: dict[str, Any] = {}
    for name in dict.fromkeys(key[0] for key in keys):
        value, inner = getattr(section, name), [key[1:] for key in keys if key[0] == name and len(key) > 1]
        if not value:
            continue
        several = value if isinstance(value, tuple) else (value,)
        items = tuple(_with_paths(item, inner, anchored) if inner else anchored(name, item) for item in several)
        changed[name] = items if isinstance(value, tuple) else items[0]
    return section.model_copy(update=changed)


def _override(values: dict[str, Any], override: str) -> None:
    """Apply an override `key=value` to the values of a recipe, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override}: write it as key=value, for example train.steps=50")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted word is a string
    *tables, last = key.strip().split(".")
    node: Any = values
    for index, table in enumerate(tables):
        node = _entry(node, table, key, ".".join(tables[:index]))
    path = ".".join(tables)
    if isinstance(node, list) and all(isinstance(item, dict) for item in node):
        if len(node) != 1:  # with a single item, its name can be left out
            names = [f"{path}.{item_name(item)}.{last}" for item in node]
            raise InputError(f"--set {override}: name one entry of {path}: {', '.join(names) or 'it has none'}")
        node = node[0]
    if not isinstance(node, dict):
        raise InputError(f"--set {override}: {path} is not a table")
    node[last] = value


def _one_horizon(values: dict[str, Any], overrides: Sequence[str]) -> None:
    """If an override sets train.steps, train.tokens or train.minutes, remove the others of these from `values`, in place."""
    keys = {override.partition("=")[0].strip() for override in overrides}
    chosen = [name for name in HORIZON if f"train.{name}" in keys]
    if chosen and isinstance(train := values.get("train"), dict):
        for name in HORIZON:
            if name not in chosen:
                train.pop(name, None)


def _entry(node: Any, name: str, key: str, path: str) -> Any:
    """Return the entry `name` of `node`: the table under that key, created if missing, or the item of an array of tables.

    `key`, the key of the override, and `path`, its part before `name`, are for errors.
    """
    if isinstance(node, dict):
        return node.setdefault(name, {})
    if not isinstance(node, list):
        raise InputError(f"--set {key}: {path} is not a table")
    named = {str(item_name(item)): item for item in reversed(node) if isinstance(item, dict)}
    if name not in named:
        raise InputError(f"--set {key}: no {path} is named {name!r}; there are: {', '.join(reversed(named))}")
    return named[name]


def _item_key(index: int, inner: Any) -> str:
    return f".{(isinstance(inner, dict) and item_name(inner)) or index}"


def leaves(value: Any, prefix: str = "", entry: Callable[[int, Any], str] = _item_key) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value of a recipe that is not a table.

    Args:
        value: The recipe as plain values.
        prefix: Dotted key of `value`; empty for a whole recipe.
        entry: Function that returns the part of a key for an item of an array of tables, given its index and the item.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else key, entry)
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{prefix}{entry(index, inner)}", entry)
    else:
        yield prefix, value


def follow_chat(values: dict[str, Any]) -> None:
    """Set tokens.packing and document_mask for a recipe with conversations, if the recipe does not set them.

    Args:
        values: The recipe before validation, changed in place.
    """
    formats = [source.get("format") for _, source in tables_at(values, ["corpus", "sources"])]
    if "chat" not in formats or not isinstance(tokens := values.setdefault("tokens", {}), dict):
        return
    if tokens.setdefault("packing", "best-fit") == "best-fit":
        tokens.setdefault("document_mask", True)


CONTINUED_RATE = 0.1


def follow_start(values: dict[str, Any], folder: Path) -> None:
    """Set keys to the values of the run that train.start names: model, tokenizer, sequence length, learning rate.

    Keys that the recipe sets are kept, and all of [model] if it sets the model's size. The learning rate is a tenth of the
    run's, if objective and optimizer are the same.

    Args:
        values: The recipe before validation, changed in place.
        folder: Folder of the recipe's file.

    Raises:
        InputError: When neither the recipe nor the run to start from defines the model.
    """
    train = values.get("train")
    if not isinstance(train, dict) or not isinstance(train.get("start"), str) or not train["start"]:
        return
    start = folder / Path(train["start"]).expanduser()
    theirs, tables = start_recipe(start), [values.setdefault(name, {}) for name in ("model", "tokenizer", "tokens")]
    tables.append(train.setdefault("optimizer", {}))
    if not all(isinstance(table, dict) for table in tables):
        return  # the validation reports it
    model, tokenizer, tokens, optimizer = tables
    has_size = not model.keys().isdisjoint((*SIZES, "from"))
    if theirs is None:
        if not has_size:
            raise InputError(f"train.start: {start} has no recipe.toml; give the directory of a trained run")
        return
    if not has_size:
        values["model"] = {key: value for key, value in theirs["model"].items() if key != "from"} | model
    if not {"path", "vocabulary"} & tokenizer.keys():
        tokenizer["path"] = str((start / "tokens" / "tokenizer.json").absolute())
        named = theirs.get("tokenizer", {})
        values["tokenizer"] = {key: named[key] for key in ("end_of_text", "mask_token") if key in named} | tokenizer
    if "sequence_length" in theirs.get("tokens", {}):
        tokens.setdefault("sequence_length", theirs["tokens"]["sequence_length"])
    # A share of the run's peak rate, if it was trained for the same objective with the same optimizer.
    before, default = theirs["train"].get("optimizer", {}), Optimizer.model_fields["kind"].default
    same = train.get("objective", "causal") == theirs["train"].get("objective", "causal")
    same = same and optimizer.get("kind", default) == before.get("kind", default)
    if same and "learning_rate" in before and not _is_imported(start):
        optimizer.setdefault("learning_rate", float(f"{CONTINUED_RATE * before['learning_rate']:.4g}"))


def start_recipe(start: Path) -> dict[str, Any] | None:
    """Return the resolved recipe of the run to start from, as plain values; None if there is none."""
    try:
        table = tomllib.loads((start / "recipe.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return table if {"model", "train"} <= table.keys() else None


def _is_imported(start: Path) -> bool:
    """Return True if the run was imported and never trained here, so that a run started from it cannot copy its learning rate."""
    latest = start / "checkpoints" / "latest"
    return latest.is_file() and latest.read_text().strip() == "step-00000000"
