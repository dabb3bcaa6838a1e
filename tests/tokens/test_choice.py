"""The tokenizer of a published folder: its special tokens in any file, and older forms of the file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from bessemer.common.errors import InputError
from bessemer.recipe import parse
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import chat_template
from bessemer.tokens.tokenizer.choice import resolve_tokenizer
from bessemer.tokens.tokenizer.files import end_ids, end_of_text, special_tokens

WORDS = ["a", "b", "c"]


def folder_with(folder: Path, special: list[str], around: tuple[str, str] | None = None, **files: Any) -> Path:
    """Write a folder with a tokenizer.json of a few words and further JSON files."""
    inner = Library(models.WordLevel({token: n for n, token in enumerate([*special, *WORDS])}, unk_token=special[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(special)
    if around is not None:
        first, last = ((name, inner.token_to_id(name)) for name in around)
        inner.post_processor = processors.BertProcessing(last, first)
    folder.mkdir(parents=True)
    inner.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, PAD_BOS = ["<p>", "<e>"], ["<p>", "<b>", "<e>"]
IDS = {"eos_token_id": 2, "bos_token_id": 1}
MAP = {"eos_token": {"content": "<e>"}, "pad_token": "<p>"}
FOLDERS: dict[str, tuple[list[str], tuple[str, str] | None, dict[str, Any], dict[str, str]]] = {
    "a plain BERT": (BERT, ("[CLS]", "[SEP]"), {}, {"mask": "[MASK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]"}),
    "only a post-processor": (["<x>", "<y>"], ("<x>", "<y>"), {}, {"sep": "<y>"}),
    "ids of the model": (PAD_BOS, None, {"config": IDS}, {"bos": "<b>", "eos": "<e>"}),
    "a list of ids": (
        PAD_BOS,
        None,
        {"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 1]}},
        {"eos": "<e>"},
    ),
    "the map of older versions": (PAD, None, {"special_tokens_map": MAP}, {"pad": "<p>", "eos": "<e>"}),
    "names come first": (
        PAD,
        None,
        {"tokenizer_config": {"eos_token": "<e>"}, "config": {"eos_token_id": 0}},
        {"eos": "<e>"},
    ),
    "no such name": (
        PAD,
        None,
        {"tokenizer_config": {"eos_token": "</s>"}, "config": {"eos_token_id": 1}},
        {"eos": "<e>"},
    ),
    "a run of ours": (
        PAD,
        None,
        {"manifest": {"tokenizer": {"end_of_text": 1, "mask_token": 0}}},
        {"mask": "<p>", "eos": "<e>"},
    ),
}


@pytest.mark.parametrize(("special", "around", "files", "wanted"), FOLDERS.values(), ids=FOLDERS)
def test_special_tokens_are_found_in_any_file_of_the_folder(
    special: list[str], around: tuple[str, str] | None, files: dict[str, Any], wanted: dict[str, str], tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "model", special, around, **files)
    tokens = special_tokens(Tokenizer.load_any(folder / "tokenizer.json"), [folder])
    ends = end_of_text(tokens)
    assert wanted.items() <= tokens.items() and ends == wanted.get("eos", wanted.get("sep"))
    # A recipe without special tokens follows the folder; those it names take precedence.
    text = f'[run]\nname = "x"\n[tokenizer]\npath = "{folder / "tokenizer.json"}"\n'
    assert resolve_tokenizer(parse(text, "x")).tokenizer.end_of_text == ends
    own = resolve_tokenizer(parse(text + f'end_of_text = "{special[0]}"\n', "x"))
    assert own.tokenizer.end_of_text == special[0]


def test_model_from_uses_its_tokenizer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", BERT, ("[CLS]", "[SEP]"))
    text = f'[run]\nname = "x"\n[model]\nfrom = "hf:{folder}"\n[train]\nobjective = "masked"\n'
    recipe = resolve_tokenizer(parse(text, "x"))
    found = recipe.tokenizer
    assert (found.path, found.end_of_text, found.mask_token) == (f"hf:{folder}", "[SEP]", "[MASK]")
    assert resolve_tokenizer(recipe) == recipe
    # The tokenizer.json may be elsewhere, alone: the model's folder still defines the roles of its tokens.
    alone = folder_with(tmp_path / "alone", ["<a>", "<b>"]) / "tokenizer.json"
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    both = resolve_tokenizer(parse(text.replace("[train]", f'[tokenizer]\npath = "{alone}"\n[train]'), "x"))
    assert (both.tokenizer.path, both.tokenizer.end_of_text) == (str(alone), "<b>")
    # A recipe that trains a tokenizer must say so; a folder without one is named.
    trained = parse(text.replace("[train]", "[tokenizer]\nvocabulary = 300\n[train]"), "x")
    assert resolve_tokenizer(trained) == trained
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="tokenizer.json"):
        resolve_tokenizer(parse(text, "x"))


def test_ids_equal_those_of_the_vocabulary(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", BERT, generation_config={"eos_token_id": [-1, 3, 4000]})
    tokenizer = Tokenizer.load_any(folder / "tokenizer.json")
    assert end_ids(folder, tokenizer) == [3]
    (folder / "generation_config.json").write_text('{"eos_token_id": "three"}')
    with pytest.raises(InputError, match="generation_config.json: eos_token_id"):
        special_tokens(tokenizer, [folder])


def test_chat_templates_are_found_in_any_file(tmp_path: Path) -> None:
    assert chat_template(tmp_path) is None
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert chat_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert chat_template(tmp_path) == "J"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000_000}, "unk_token": "a"}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"type": "Unigram", "vocab": [], "unk_id": 7}},
    ],
)
def test_a_tokenizer_that_exhausts_memory_or_crashes_the_library_is_one_error(
    changes: dict[str, Any], tmp_path: Path, cold: None
) -> None:
    """Run in a separate process, which the library may end."""
    folder = folder_with(tmp_path / "model", BERT)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    code = (
        "import sys; from pathlib import Path; from bessemer.common.errors import InputError; from bessemer.tokens.tokenizer import Tokenizer\n"
        "try: Tokenizer.load_any(Path(sys.argv[1])).token_bytes()\n"
        "except InputError as error: sys.exit(2 if chr(10) not in str(error) else 3)"
    )
    limit = ["prlimit", f"--as={8 << 30}"] if shutil.which("prlimit") else []
    assert subprocess.run([*limit, sys.executable, "-c", code, str(file)], stderr=subprocess.DEVNULL).returncode == 2
