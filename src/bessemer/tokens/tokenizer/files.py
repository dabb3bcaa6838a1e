"""The files of a tokenizer's folder, as `transformers` writes them: tokenizer.json, special tokens, ids.

Special tokens are named in tokenizer_config.json or special_tokens_map.json, or listed as ids in generation_config.json
and config.json. Old folders (bert-base-uncased) name none; then only the tokenizer.json has them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError
from bessemer.storage import hub
from bessemer.tokens.tokenizer.tokenizer import Tokenizer

# Files copied with a tokenizer from a folder to a run and to the run's export.
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_SIDE_FILES = (CHAT_TEMPLATE, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
ROLES = ("bos", "eos", "pad", "unk", "cls", "sep", "mask")
USUAL = {
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


def folder_of(path: str) -> Path:
    """Return the folder of a tokenizer, given as its file, its folder, `hf:FOLDER` or `hf:ORG/NAME` (downloaded)."""
    if path.startswith("hf:"):
        return hub.local_folder(path, weights=False)
    return Path(path) if Path(path).is_dir() else Path(path).parent


def tokenizer_file(path: str) -> Path:
    """Return the tokenizer.json of a tokenizer, given as that file, its folder, `hf:FOLDER` or `hf:ORG/NAME` (downloaded)."""
    if not path.startswith("hf:") and not Path(path).is_dir():
        return Path(path)
    return file_in(folder_of(path))


def file_in(folder: Path) -> Path:
    """Return the tokenizer.json of a folder. Raises InputError if there is none."""
    if not (file := hub.foreign_file(folder, "tokenizer.json")).exists():
        raise InputError(
            f"{folder}: tokenizer.json is missing; copy it from the model, or convert older files: "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return file


def read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file is missing. Raises InputError if the file has other content."""
    if not hub.foreign_file(path.parent, path.name).exists():
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: not a JSON object; replace the file")
    return table


def special_tokens(tokenizer: Tokenizer, folders: Sequence[Path]) -> dict[str, str]:
    """Return a model's special tokens by role (bos, eos, pad, unk, cls, sep, mask); roles without a token are left out.

    A role's token is the one that a tokenizer's settings in `folders` name, else the id that a config.json there lists, else
    one with a usual name such as [MASK]. Otherwise sep is the last id that the tokenizer puts after a text, and unk its
    unknown token.
    """
    special, tokens = tokenizer.special, dict[str, str]()
    for role in ROLES:
        names = [settings.get(f"{role}_token") for settings in map(token_settings, folders)]
        named = [name for name in names if isinstance(name, str) and tokenizer.id_of(name) is not None]
        by_id = [special[number] for folder in folders for number in ids_of(folder, role) if number in special]
        usual = [name for name in USUAL.get(role, ()) if name in special.values()]
        if candidates := [*named, *by_id, *usual]:
            tokens[role] = candidates[0]
    around = tokenizer.framing
    if around.after and not {"eos", "sep"} & tokens.keys():
        tokens["sep"] = special.get(around.after[-1], "")
    if tokenizer.unknown_token is not None:
        tokens.setdefault("unk", special.get(tokenizer.unknown_token, ""))
    return {role: content for role, content in tokens.items() if content}


def ids_of(folder: Path, role: str) -> list[int]:
    """Return the ids that the files of a model's folder list for a special token's role, such as eos; empty if none.

    They are those of a manifest.json of this package, else of generation_config.json, else of config.json.
    """
    manifest = read_table(folder / "manifest.json").get("tokenizer", {})  # of a run of Bessemer
    ours = manifest.get({"eos": "end_of_text", "mask": "mask_token"}.get(role, ""))
    if ours is not None:
        return [int(ours)]
    return token_ids(folder / "generation_config.json", role) or token_ids(folder / "config.json", role)


def end_ids(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Return the ids at which `transformers` ends generation by the files of a folder, without ids outside the vocabulary."""
    return [number for number in ids_of(folder, "eos") if 0 <= number < tokenizer.vocabulary]


def token_ids(path: Path, role: str) -> list[int]:
    """Return the ids under ROLE_token_id in a JSON file. Raises InputError for a value that is not an id."""
    value = read_table(path).get(f"{role}_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in ids):
        raise InputError(f"{path}: {role}_token_id = {str(value)[:60]} is not a token id; use a whole number")
    return [int(number) for number in ids]


def token_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a tokenizer's folder, merged as in `transformers`, with special tokens as text; {} if none."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= {key: value for key, value in read_table(folder / file).items() if value}
    return {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}


def end_of_text(tokens: dict[str, str]) -> str | None:
    """Return the token that ends a text, given special tokens by role: eos, else sep; None without both."""
    return tokens.get("eos") or tokens.get("sep")


def side_files(folder: Path) -> list[Path]:
    """Return the files in a folder that are copied along with a tokenizer (TOKENIZER_SIDE_FILES)."""
    return [file for name in TOKENIZER_SIDE_FILES if (file := hub.foreign_file(folder, name)).exists()]
