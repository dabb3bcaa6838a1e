"""Export of a run in the Hugging Face layout or as a GGUF file, with a model card.

A model that fits in memory is compared with `transformers`; a larger one is streamed. A GGUF file for llama.cpp comes with an
Ollama Modelfile.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bessemer import __version__
from bessemer.checkpoint.format import weight_reader
from bessemer.checkpoint.protocol import trained_checkpoints
from bessemer.common.console import size
from bessemer.common.errors import BessemerError, DamagedFile, InputError
from bessemer.common.hashing import digest, fingerprints, verify_files
from bessemer.export.gguf import TYPES, GgufIds, architecture_of, modelfile, vocabulary_of, write_gguf
from bessemer.export.hugging_face import CARD, DTYPES, DTYPES_FILE, RECORD, ExportFiles, export, stream
from bessemer.export.import_model import gate_inputs
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import dropout_keys, export_dropout, family_of
from bessemer.model.transformer import meta_model
from bessemer.recipe import Model, ResolvedRecipe, Train
from bessemer.run.directory import NEWEST, RunDirectory, Weights
from bessemer.run.files import read_json, read_json_or_none, write_atomic, write_json
from bessemer.run.stage import staging
from bessemer.storage.hub import local_folder
from bessemer.tokens.held_out import held_out, whole_texts
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import chat_template, default_system, template_names
from bessemer.tokens.tokenizer.files import read_table
from bessemer.train.device import available_bytes, choose
from bessemer.train.state import open_trained

MODELS_IN_MEMORY = 2.5  # fp32 copies: the model, that of transformers, and memory to compare them


def export_trained(recipe: ResolvedRecipe, run: RunDirectory, folder: Path, weights: Weights = NEWEST) -> str:
    """Export a run's weights in the Hugging Face layout.

    If the run keeps a moving average of the weights, the average is exported.

    Args:
        recipe: Resolved recipe of the run.
        run: The run directory.
        folder: Folder to write.
        weights: Weights to export.

    Returns:
        A line that describes what was verified.

    Raises:
        InputError: The run has no checkpoint.
        BessemerError: The written files do not represent the same model.
    """
    settings = recipe.train.model_copy(update={"device": "cpu", "precision": "fp32", "compile": "off"})
    device, store = choose(settings), TokenStore.open(run.tokens)
    checkpoints = trained_checkpoints(run, weights)
    config = ModelConfig.from_dict(checkpoints[0].facts["model"])
    files = _export_files(recipe, run, store, config, checkpoints[0].step, weights)
    is_large = MODELS_IN_MEMORY * 4 * config.parameters > available_bytes(device)
    if is_large if recipe.export.stream is None else recipe.export.stream:
        with ExitStack() as stack:
            streamed = stream(meta_model(config), weight_reader(checkpoints, stack), files, folder)
        return f"{streamed} tensors in {folder}, each verified by reading it back; logits were not compared"
    model = open_trained(recipe, run, store, device, weights).trainer.model
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
    if store.sources:
        parts = held_out(store, recipe.tokens.sequence_length, max_tokens=4 * recipe.tokens.sequence_length)
        rows = [tokenizer.decode(row.tolist()) for part in parts for row in part.inputs[:4]]
        classifies = recipe.train.objective == "classify"
        sequences = whole_texts(recipe, store) if classifies else parts[0].inputs[:2]
        sample, texts = torch.from_numpy(sequences), [(text, tokenizer.encode(text)) for text in rows]
    else:
        sample, texts = gate_inputs(model, tokenizer)
    check = export(model, files, folder, sample, texts)
    greedy = f", {check.greedy_tokens_equal} greedy tokens equal" if check.greedy_tokens_equal else ""
    return f"{check.architecture} in {folder}: transformers' logits differ by {check.logits_max_difference:.1e}{greedy}"


def _export_files(
    recipe: ResolvedRecipe, run: RunDirectory, store: TokenStore, config: ModelConfig, step: int, weights: Weights
) -> ExportFiles:
    """Return the files that accompany the weights; an imported model keeps its own."""
    labels, dtype = tuple(store.labels) if config.labels else (), DTYPES.get(recipe.export.dtype or "")
    source, dropout = run.source if _is_imported(run) else None, recipe.train.dropout
    return ExportFiles(
        store.folder / "tokenizer.json", store.end_of_text, store.framing, store.mask_token, labels, source, dtype,
        card=lambda check: model_card(recipe, run, store, config, step, check, weights),
        dropout=export_dropout(config, dropout) if dropout.is_on else _carried_dropout(recipe.model, recipe.train),
        special=store.special, ends=store.ends,
    )  # fmt: skip


def _carried_dropout(model: Model, train: Train) -> dict[str, float]:
    """Return the dropout keys in config.json of the model that a run started from; empty without one."""
    folder = None
    if model.from_ is not None:
        try:
            folder = local_folder(model.from_, weights=False)
        except BessemerError:  # a hub model that cannot be reached
            return {}
    elif train.start is not None:
        folder = RunDirectory(Path(train.start)).source
    return {} if folder is None or not (folder / "config.json").exists() else dropout_keys(folder)


def export_gguf(recipe: ResolvedRecipe, run: RunDirectory, folder: Path, weights: Weights, dtype: str | None) -> str:
    """Export a run's weights as a GGUF file with a Modelfile.

    Args:
        recipe: Resolved recipe of the run.
        run: The run directory.
        folder: Folder to write.
        weights: Weights to export.
        dtype: A key of gguf.TYPES. None: `export.dtype`, else the type of an imported model, else float32.

    Returns:
        A line that describes the file.

    Raises:
        InputError: llama.cpp would compute or tokenize differently, or the gguf package is missing.
    """
    if find_spec("gguf") is None:
        raise InputError('export --to gguf: needs the gguf package; install it with: pip install "bessemer[gguf]"')
    store, checkpoints = TokenStore.open(run.tokens), trained_checkpoints(run, weights)
    config = ModelConfig.from_dict(checkpoints[0].facts["model"])
    architecture = architecture_of(config)
    vocabulary = vocabulary_of(store.folder / "tokenizer.json", config.vocabulary)
    dtype = dtype or recipe.export.dtype or _source_dtype(run)
    name = f"{recipe.run.name}-{TYPES[dtype]}.gguf"
    template = chat_template(store.folder)
    with ExitStack() as stack, staging(folder) as staged:
        read, licence = weight_reader(checkpoints, stack), source_licence(run)
        ids = GgufIds(store.framing, store.ends, _pad(run, store))
        tensors = write_gguf(
            meta_model(config), lambda name, parameter: read(name), vocabulary, ids, recipe.run.name, staged / name, dtype,
            licence, template,
        )  # fmt: skip
        source = run.source if _is_imported(run) else store.folder
        generation = read_table(source / "generation_config.json")
        stops = [vocabulary.tokens[number] for number in store.ends]
        names = template_names(store.folder, recipe.tokenizer.end_of_text)
        system = None if template is None else default_system(template, names)
        settings = modelfile(name, config.positions_length, stops, generation, template, system)
        write_atomic(staged / "Modelfile", settings)
        check: dict[str, Any] = {
            "architecture": architecture, "parameters": config.parameters, "tensors": tensors, "type": TYPES[dtype],
            "pre_tokenizer": vocabulary.pre, "gguf": name,
        }  # fmt: skip
        write_atomic(staged / CARD, model_card(recipe, run, store, config, checkpoints[0].step, check, weights))
        files = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
        write_json(staged / RECORD, {**check, "files": files})
    return f"{architecture} in {folder / name}: {tensors} tensors in {TYPES[dtype]}, each verified by reading it back"


def verify_export(record: Path) -> None:
    """Raise DamagedFile unless the files of an export equal its record, bessemer.json."""
    facts = read_json(record)
    if facts.pop("sha256", None) != digest(facts):
        raise DamagedFile(f"{record}: damaged: the file changed after it was written")
    verify_files(record.parent, facts["files"], "")


def record_export(record: Path, **facts: str) -> None:
    """Add to the record of an export its run and inputs, the size and SHA-256 of its files, and the record's own hash.

    Args:
        record: The export's bessemer.json.
        facts: Values to add, such as the name of the run and the digest of the inputs.
    """
    files = {name: facts for name, facts in fingerprints(record.parent).items() if name != record.name}
    content = {**read_json(record), **facts, "files": files}
    write_json(record, {**content, "sha256": digest(content)})


def _is_imported(run: RunDirectory) -> bool:
    return (run.source / "config.json").exists()


def _source_dtype(run: RunDirectory) -> str:
    """Return the data type of most tensors of an imported model; float32 without one."""
    dtypes = Counter(read_table(run.source / DTYPES_FILE).values())
    return dtypes.most_common(1)[0][0] if dtypes else "float32"


def _pad(run: RunDirectory, store: TokenStore) -> int | None:
    if not _is_imported(run):
        own = Tokenizer.load_any(store.folder / "tokenizer.json").id_of(store.special.get("pad", ""))
        return store.end_of_text if own is None else own
    pad = read_table(run.source / "config.json").get("pad_token_id")
    return None if pad is None else int(pad)


# Pipeline and class of transformers, name of the kind of model, and an example call of the pipeline
_KINDS = {
    "causal": ("text-generation", "AutoModelForCausalLM", "language model",
               'generate("Once upon a time", max_new_tokens=50, do_sample=False)'),
    "chat": ("text-generation", "AutoModelForCausalLM", "chat model",
             'generate([{"role": "user", "content": "What is 2 + 3?"}], max_new_tokens=50, do_sample=False)'),
    "masked": ("fill-mask", "AutoModelForMaskedLM", "masked language model",
               'fill(f"The time {fill.tokenizer.mask_token} come")'),
    "classify": ("text-classification", "AutoModelForSequenceClassification", "classifier",
                 'classify(["a text", "another text"], truncation=True)'),
}  # fmt: skip


def model_card(
    recipe: ResolvedRecipe, run: RunDirectory, store: TokenStore, config: ModelConfig, step: int, check: Mapping[str, Any],
    weights: Weights = NEWEST,
) -> str:  # fmt: skip
    """Return the text of README.md for exported weights.

    Args:
        recipe: Resolved recipe of the run.
        run: The run directory.
        store: Its tokens.
        config: Configuration of the model.
        step: Last training step of the weights.
        check: Results of the export's verification, or the values to show about a GGUF file.
        weights: The exported weights.
    """
    scored = read_json_or_none(run.evaluation_of(weights)) or {}
    task, model_class, kind, call = _KINDS[
        "classify" if config.labels else "chat" if recipe.chat_parts else "causal" if config.causal else "masked"
    ]
    family, start = family_of(config), recipe.model.from_
    return _template().render(  # type: ignore[no-any-return]
        recipe=recipe, name=recipe.run.name, config=config, check=check, step=step, version=__version__, task=task,
        model_class=model_class, kind=kind, call=call, family=family.name, title=family.title, labels=store.labels,
        imported=_is_imported(run), licence=source_licence(run), sources=store.sources,
        around=_framing_words(store), manifest=store.manifest, scored=scored, digest=digest(recipe)[:16],
        scores={key: scored[key] for key in ("bits_per_byte", "accuracy") if scored.get(key) is not None},
        start=None if start is None else Path(start.removeprefix("hf:")).name,
        environment=read_json_or_none(run.environment) or {}, weights=weights,
    )  # fmt: skip


@cache
def _template() -> Any:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {
        "json": json.dumps, "size": size, "number": "{:,}".format,
        "cell": lambda text: str(text).replace("|", "\\|"),
    }  # fmt: skip
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))


def _framing_words(store: TokenStore) -> str:
    """Describe, for the model card, the special tokens before and after a text; empty if there are none."""
    sides = {"before": store.framing.before, "after": store.framing.after}
    return " and ".join(f"the ids {list(ids)} {where}" for where, ids in sides.items() if ids)


def source_licence(run: RunDirectory) -> str | None:
    """Return the licence in the header of an imported model's own card; None if unknown."""
    card = run.source / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.exists() else []
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return None
    header = lines[1 : lines.index("---", 1)]
    licence = next((line.partition(":")[2].strip() for line in header if line.startswith("license:")), "")
    return licence if licence.replace("-", "").replace(".", "").replace("_", "").isalnum() else None
