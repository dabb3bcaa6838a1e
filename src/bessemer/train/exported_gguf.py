"""A trained or imported run as a GGUF file for llama.cpp, with an Ollama Modelfile and a model card beside it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.gguf.modelfile import modelfile
from bessemer.model.gguf.vocabulary import vocabulary_of
from bessemer.model.gguf.write import TYPES, Described, Ids, architecture_of, write
from bessemer.model.huggingface.files import CARD, DTYPES_FILE, RECORD
from bessemer.model.initialisation import shell
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, staging, write_atomic, write_json
from bessemer.tokens.pretrained import chat_template, read_table
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.card import model_card, source_licence
from bessemer.train.exported import checkpoints_of, reader


@torch.no_grad()
def export_gguf(recipe: Recipe, run: RunFolder, folder: Path, average: int = 1, dtype: str | None = None) -> str:
    """Write the newest checkpoint's weights, or the mean of so many, as `export_trained` does. Returns a line about it.

    dtype: of gguf.write.TYPES; None: the recipe's, or what an imported model came in, or float32. Raises InputError, with
    the reason, for a model or a tokenizer that llama.cpp would use another way.
    """
    if find_spec("gguf") is None:
        raise InputError('export --to gguf: needs the gguf package; install it with: pip install "bessemer[gguf]"')
    store, checkpoints = TokenStore.open(run.tokens), checkpoints_of(run, average)
    config = ModelConfig.from_dict(checkpoints[0].facts["model"])
    architecture = architecture_of(config)
    vocabulary = vocabulary_of(store.folder / "tokenizer.json", config.vocabulary)
    dtype = dtype or recipe.export.dtype or _source_dtype(run)
    name = f"{recipe.run.name}-{TYPES[dtype]}.gguf"
    template = chat_template(store.folder)
    settings = {"license": source_licence(run), "chat_template": template}
    described = Described(recipe.run.name, {key: value for key, value in settings.items() if value})
    model = shell(config)
    name_of = {parameter: key for key, parameter in model.named_parameters()}
    with ExitStack() as stack, staging(folder) as staged:
        read = reader(checkpoints, stack)

        def value(parameter: Tensor) -> Tensor:
            return read(name_of[parameter])  # type: ignore[index]

        ids = Ids(store.framing, store.ends, _pad(run, store))
        tensors = write(model, value, vocabulary, ids, described, staged / name, dtype)
        kept = run.source if (run.source / "config.json").exists() else store.folder
        generation = read_table(kept / "generation_config.json")
        stops = [vocabulary.tokens[number] for number in store.ends]
        write_atomic(staged / "Modelfile", modelfile(name, config.positions_length, stops, generation, template))
        check: dict[str, Any] = {
            "architecture": architecture, "parameters": config.parameters, "tensors": tensors, "type": TYPES[dtype],
            "pre_tokenizer": vocabulary.pre, "gguf": name,
        }  # fmt: skip
        write_atomic(staged / CARD, model_card(recipe, run, store, config, checkpoints[0].step, check))
        files = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
        write_json(staged / RECORD, {**check, "files": files})
    return f"{architecture} in {folder / name}: {tensors} tensors in {TYPES[dtype]}, each read back and equal"


def _source_dtype(run: RunFolder) -> str:
    """What most tensors of an imported model are in."""
    found = Counter(read_table(run.source / DTYPES_FILE).values())
    return found.most_common(1)[0][0] if found else "float32"


def _pad(run: RunFolder, store: TokenStore) -> int | None:
    if not (run.source / "config.json").exists():
        own = Tokenizer.load_any(store.folder / "tokenizer.json").id_of(store.special.get("pad", ""))
        return store.end_of_text if own is None else own
    found = read_table(run.source / "config.json").get("pad_token_id")
    return None if found is None else int(found)
