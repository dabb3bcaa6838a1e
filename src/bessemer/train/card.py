"""The model card (README.md) of an export: what the model is, how to use it, what it was made from and how well it does.

The header is YAML that the Hugging Face hub reads (huggingface.co/docs/hub/model-cards). No path of this machine stands in
it: sources are given by their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bessemer import __version__
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import family_of
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import Recipe, digest
from bessemer.run import RunFolder, read_json
from bessemer.terminal import amount, size
from bessemer.tokens.shards import TokenStore

# pipeline of transformers, its class, what the model is called, a call of the pipeline
_KINDS = {
    "causal": ("text-generation", "AutoModelForCausalLM", "language model",
               'generate("Once upon a time", max_new_tokens=50, do_sample=False)'),
    "masked": ("fill-mask", "AutoModelForMaskedLM", "masked language model",
               'fill(f"The time {fill.tokenizer.mask_token} come")'),
    "classify": ("text-classification", "AutoModelForSequenceClassification", "classifier",
                 'classify(["a text", "another text"], truncation=True)'),
}  # fmt: skip


def model_card(
    recipe: Recipe, run: RunFolder, store: TokenStore, config: ModelConfig, step: int, check: Mapping[str, Any]
) -> str:
    """The text of README.md for the weights of a step. check: what the export's gate measured; of a GGUF file, its facts."""
    scored = read_json(run.evaluation) if run.evaluation.exists() else {}
    task, model_class, kind, call = _KINDS["classify" if config.labels else "causal" if config.causal else "masked"]
    family = family_of(config)
    card: str = _template().render(
        name=recipe.run.name, config=config, check=check, step=step, version=__version__, amount=amount, task=task,
        model_class=model_class, kind=kind, call=call, family=family, title=FAMILIES[family].title, labels=store.labels,
        imported=(run.source / "config.json").exists(), licence=source_licence(run), sources=store.sources,
        around=_framing_words(store), tokenizer=store.manifest["tokenizer"], data_table=_data(store), scored=scored,
        scores={key: scored[key] for key in ("bits_per_byte", "accuracy") if scored.get(key) is not None},
        score_table=_scores(scored), class_table=_classes(scored), training_table=_training(recipe, run, step),
    )  # fmt: skip
    return card


@cache
def _template() -> Any:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters["json"] = json.dumps
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))


def _framing_words(store: TokenStore) -> str:
    """The special tokens before and after a text, in words; empty: none."""
    tokens = json.loads((store.folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    name_of = {token["id"]: f"`{token['content']}` (id {token['id']})" for token in tokens}
    sides = {"before": store.framing.before, "after": store.framing.after}
    return " and ".join(
        f"{', '.join(name_of.get(number, f'id {number}') for number in ids)} {where}" for where, ids in sides.items() if ids
    )  # fmt: skip


def _data(store: TokenStore) -> str:
    rows = [("source", "documents", "tokens", "held-out documents", "held-out tokens", "text to train on")]
    for name, splits in store.manifest["sources"].items():
        counts = [f"{splits[split][kind]:,}" for split in ("train", "heldout") for kind in ("documents", "tokens")]
        rows.append((name, *counts, size(splits["train"]["bytes"])))  # type: ignore[arg-type]
    return _table(rows)


def _scores(scored: Mapping[str, Any]) -> str:
    if not scored:
        return ""
    rows = [("measure", "value"), ("loss (nats a target)", f"{scored['loss']:.4f}")]
    if scored.get("bits_per_byte") is not None:
        rows.append(("bits per byte", f"{scored['bits_per_byte']:.4f}"))
    if ngram := scored.get("ngram"):
        rows.append(
            (f"bits per byte of a byte {ngram['order']}-gram on the same text", f"{ngram['bits_per_byte']:.4f}")
        )
    if scored.get("accuracy") is not None:
        rows.append(("accuracy", f"{scored['accuracy']:.1%}"))
    return _table(rows)


def _classes(scored: Mapping[str, Any]) -> str:
    measures = ("precision", "recall", "f1")
    rows = [
        (row["label"], f"{row['texts']:,}", *("" if row[key] is None else f"{row[key]:.3f}" for key in measures))
        for row in scored.get("classes") or ()
    ]
    return _table([("class", "texts", *measures), *rows]) if rows else ""


def _training(recipe: Recipe, run: RunFolder, step: int) -> str:
    train = recipe.train
    environment = read_json(run.environment) if run.environment.exists() else {}
    base, torch = recipe.model.from_, environment.get("torch")
    return _table([
        ("", ""),
        ("objective", train.objective),
        *([] if base is None else [("started from", f"`{Path(base.removeprefix('hf:')).name}`")]),
        ("steps", f"{step:,}"),
        ("batch", f"{train.global_batch_tokens or 0:,} tokens in sequences of {recipe.tokens.sequence_length:,}"),
        ("optimizer", f"{train.optimizer.kind}, learning rate {train.optimizer.learning_rate}"),
        ("precision", str(environment.get("precision") or train.precision)),
        ("seed", str(recipe.run.seed)),
        ("recipe", f"`{digest(recipe)[:16]}` (digest of the resolved recipe)"),
        ("trained with", f"Bessemer {environment.get('bessemer', __version__)}" + (f", torch {torch}" if torch else "")),
    ])  # fmt: skip


def source_licence(run: RunFolder) -> str | None:
    """The licence in the header of an imported model's own card."""
    card = run.source / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.exists() else []
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return None
    header = lines[1 : lines.index("---", 1)]
    licence = next((line.partition(":")[2].strip() for line in header if line.startswith("license:")), "")
    return licence if licence.replace("-", "").replace(".", "").replace("_", "").isalnum() else None


def _table(rows: Iterable[tuple[Any, ...]]) -> str:
    """A Markdown table. rows: the head first."""
    head, *body = rows
    lines = (head, ("---",) * len(head), *body)
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
