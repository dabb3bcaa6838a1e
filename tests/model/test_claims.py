"""What a folder says beside the computation, and what is done about it: refused in a sentence, or warned of."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.common.errors import InputError
from bessemer.evaluate.chat import Template
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.check import check_metadata

CAUSAL = ModelConfig(vocabulary=50, layers=1, width=8, heads=1, kv_heads=1, head_dim=8, mlp_width=8, sequence_length=8)
CLASSES = CAUSAL.with_changes(labels=3, pooling="last")


def folder_of(folder: Path, **files: Any) -> Path:
    files.setdefault("config", {})
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("config", "files", "wanted"),
    [
        (CAUSAL, {"config": {"eos_token_id": 49, "pad_token_id": -1, "dtype": "bfloat16"}}, None),
        (CAUSAL, {"config": {"eos_token_id": 50}}, "eos_token_id = 50 is beyond the vocabulary of 50 ids: it is ignored"),
        (CAUSAL, {"generation_config": {"eos_token_id": [3, 99]}}, "generation_config.json: eos_token_id = 99 is beyond"),
        (CLASSES, {"config": {"eos_token_id": 50}}, None),  # a classifier writes no text
        (CLASSES, {"config": {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 2, "c": 1}}},
         "label2id and id2label differ for 'b'; id2label is taken"),
        (CAUSAL, {"config": {"id2label": {"0": "a", "1": "a"}}}, None),  # no head that they would be of
        (CAUSAL, {"tokenizer_config": {"chat_template": "{% if %}"}}, r"chat template: line 1: .*; `bessemer chat`"),
        (CAUSAL, {"tokenizer_config": {"chat_template": "{% for m in messages %}{% break %}{% endfor %}"}}, None),
    ],
)  # fmt: skip
def test_what_hinders_nothing_is_warned_of(
    config: ModelConfig, files: dict[str, Any], wanted: str | None, tmp_path: Path
) -> None:
    found = check_metadata(folder_of(tmp_path, **files), config)
    assert len(found) == (wanted is not None)
    if wanted is not None:
        assert re.search(wanted, found[0])


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (CAUSAL, {"config": {"pad_token_id": 50}}, "config.json: pad_token_id = 50 is beyond the vocabulary of 50 ids, so nothing"),
        (CAUSAL, {"config": {"eos_token_id": "x"}}, "config.json: eos_token_id = x must be a token's id"),
        (CAUSAL, {"generation_config": []}, "generation_config.json: is not a table of settings"),
        (CAUSAL, {"special_tokens_map": 3}, "special_tokens_map.json: is not a table of settings"),
        (CAUSAL, {"config": {"torch_dtype": 16}}, "config.json: torch_dtype = 16 is no dtype"),
        (CLASSES, {"config": {"id2label": {"0": "a", "one": "b", "2": "c"}}}, "does not name the classes 0 to 2, each once"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(config: ModelConfig, files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        check_metadata(folder_of(tmp_path, **files), config)


def test_templates_of_others_render_as_transformers_renders_them() -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    source = (
        "{% for message in messages %}{% if message.role == 'tool' %}{% continue %}{% endif %}<{{ message.role }}>"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}{{ {'ü': [1]} | tojson(indent=1) }}"
        "{{ strftime_now('%Y')[:2] }}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [
        {"role": "user", "content": "Hä?"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "!"},
    ]
    theirs = _compile_jinja_template(source).render(messages=messages, add_generation_prompt=True)
    assert Template(source, (), {}).render(messages) == theirs
