"""The model card (README.md) of an export: what the model is, how to use it, what it was made from and how well it does.

The header is YAML that the Hugging Face hub reads (huggingface.co/docs/hub/model-cards). No path of this machine stands in
it: sources are given by their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bessemer import __version__
from bessemer.hashing import digest
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import family_of
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, read_json, read_json_again
from bessemer.terminal import amount, size
from bessemer.tokens.shards import TokenStore

# pipeline of transformers, its class, what the model is called, a call of the pipeline
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
    recipe: Recipe, run: RunFolder, store: TokenStore, config: ModelConfig, step: int, check: Mapping[str, Any],
    average: int = 1,
) -> str:  # fmt: skip
    """The text of README.md for the weights of a step, or the mean of so many checkpoints (average). check: what the export's
    gate measured; of a GGUF file, its facts."""
    scored = read_json_again(run.evaluation_of(average)) or {}
    task, model_class, kind, call = _KINDS[
        "classify" if config.labels else "chat" if recipe.chat_parts else "causal" if config.causal else "masked"
    ]
    family, start = family_of(config), recipe.model.from_
    card: str = _template().render(
        recipe=recipe, name=recipe.run.name, config=config, check=check, step=step, version=__version__, task=task,
        model_class=model_class, kind=kind, call=call, family=family, title=FAMILIES[family].title, labels=store.labels,
        imported=(run.source / "config.json").exists(), licence=source_licence(run), sources=store.sources,
        around=_framing_words(store), manifest=store.manifest, scored=scored, digest=digest(recipe)[:16],
        scores={key: scored[key] for key in ("bits_per_byte", "accuracy") if scored.get(key) is not None},
        start=None if start is None else Path(start.removeprefix("hf:")).name,
        environment=read_json_again(run.environment) or {}, average=average,
    )  # fmt: skip
    return card


@cache
def _template() -> Any:
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters |= {
        "json": json.dumps, "size": size, "amount": amount, "number": "{:,}".format,
        "cell": lambda text: str(text).replace("|", "\\|"),
    }  # fmt: skip
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))


def _framing_words(store: TokenStore) -> str:
    """The special tokens before and after a text, in words; empty: none."""
    tokens = read_json(store.folder / "tokenizer.json")["added_tokens"]
    name_of = {token["id"]: f"`{token['content']}` (id {token['id']})" for token in tokens}
    sides = {"before": store.framing.before, "after": store.framing.after}
    return " and ".join(
        f"{', '.join(name_of.get(number, f'id {number}') for number in ids)} {where}" for where, ids in sides.items() if ids
    )  # fmt: skip


def source_licence(run: RunFolder) -> str | None:
    """The licence in the header of an imported model's own card."""
    card = run.source / "README.md"
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.exists() else []
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return None
    header = lines[1 : lines.index("---", 1)]
    licence = next((line.partition(":")[2].strip() for line in header if line.startswith("license:")), "")
    return licence if licence.replace("-", "").replace(".", "").replace("_", "").isalnum() else None
