"""RoBERTa: BERT whose learned positions begin after the padding token's and pass over it."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.families import bert
from bessemer.model.huggingface.family import Family, Tensors, Values
from bessemer.model.huggingface.settings import Settings

_BLOCK = bert.FAMILY.tensors


def _read(settings: Settings, values: Values) -> Values:
    padding = settings.integer("pad_token_id", 1, least=0)
    positions = values["max_positions"] - padding - 1
    if positions < 1:
        raise settings.wrong("max_position_embeddings", f"leaves no position after pad_token_id = {padding}")
    return {"position_padding": padding, "max_positions": positions}


def _write(config: ModelConfig) -> Values:
    return {"pad_token_id": config.position_padding, "max_position_embeddings": config.position_rows}


def _obstacles(config: ModelConfig) -> list[str]:
    found = bert.obstacles(config)
    if config.position_padding is None:
        found.append("positions that count every token")
    if config.activation != "gelu" and not config.labels:
        found.append(f"activation = {config.activation} in the layer before the output")
    return found


FAMILY = Family(
    name="roberta",
    title="RoBERTa",
    summary=(
        "LayerNorm, after the sum", "learned, after the padding token's", "GELU",
        "both sides, biases, tied, a layer before the output",
    ),
    architecture="RobertaForMaskedLM",
    classifier="RobertaForSequenceClassification",
    options=bert.FAMILY.options | {"position_padding": 0, "token_types": 1},
    keys=bert.FAMILY.keys,
    defaults=bert.FAMILY.defaults,
    tensors=Tensors(
        outer=(
            ("roberta.embeddings.word_embeddings", "embedding"),
            ("roberta.embeddings.position_embeddings", "position_embedding"),
            ("roberta.embeddings.token_type_embeddings", "type_embedding"),
            ("roberta.embeddings.LayerNorm", "embedding_norm"),
            ("classifier.dense", "classifier.transform.dense"),
            ("classifier.out_proj", "classifier"),
            ("lm_head.dense", "head.transform.dense"),
            ("lm_head.layer_norm", "head.transform.norm"),
            ("lm_head.bias", "head.bias"),
            ("lm_head.decoder.weight", "head.weight"),
        ),
        prefix="roberta.encoder.layer.{}",
        block=_BLOCK.block,
        base="roberta.",
        unread=("roberta.pooler.", "lm_head.decoder.bias"),
    ),
    fixed=bert.FAMILY.fixed,
    dropout=bert.FAMILY.dropout,
    free=("position_padding",),
    token_keys=("bos_token_id", "eos_token_id"),
    reads=("pad_token_id",),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    poolings=("first",),
    examples={
        "RoBERTa": {"kv_heads": 4, "head_dim": 8, "position_padding": 1},
        "RoBERTa, padding within the text": {"kv_heads": 4, "head_dim": 8, "position_padding": 5},
        "RoBERTa, classifier": {"kv_heads": 4, "head_dim": 8, "position_padding": 1, "labels": 5, "pooling": "first"},
    },
)  # fmt: skip
