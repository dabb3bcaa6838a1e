"""A resolved recipe to the configuration of its model; no torch."""

from __future__ import annotations

from dataclasses import fields

from bessemer.errors import InputError
from bessemer.model.config import SCALINGS, ModelConfig, RopeScaling, default_mlp_width
from bessemer.model.huggingface.families import FAMILIES
from bessemer.recipe import Recipe


def model_config(recipe: Recipe, vocabulary: int, labels: int = 0) -> ModelConfig:
    """The model of a resolved recipe (every dimension given) with a tokenizer's vocabulary.

    labels: classes of a classifier; 0: a language model.
    """
    model = recipe.model
    if model.layers is None or model.width is None or model.heads is None:
        raise InputError("model: the dimensions are not derived yet; resolve the recipe first")
    if model.vocabulary is not None and model.vocabulary < vocabulary:
        raise InputError(
            f"model.vocabulary: {model.vocabulary} rows are too few for the tokenizer's {vocabulary} ids"
            + ("; is tokenizer.path the tokenizer of model.from?" if model.from_ is not None else "")
        )
    chosen = model.model_dump(exclude_none=True)
    options = {field.name for field in fields(ModelConfig)}
    settings = FAMILIES[model.family].options | {key: value for key, value in chosen.items() if key in options}
    settings |= {key: RopeScaling.from_dict(settings[key]) for key in SCALINGS if settings.get(key)}
    config = ModelConfig(
        **{
            "vocabulary": vocabulary,
            "sequence_length": recipe.tokens.sequence_length,
            "kv_heads": model.heads,
            "head_dim": model.width // model.heads,
            "mlp_width": default_mlp_width(model.width, settings.get("gated", True)),
            "labels": labels,
            **settings,
        }
    )
    return config if labels == 0 or config.causal else config.with_changes(pooling="first")
