"""The comparison of imported weights with `transformers`, for `bessemer import` and `model.from`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.cli.chat import Template
from bessemer.common.errors import BessemerError, InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import check as checking
from bessemer.model.huggingface.check import check_metadata, check_read
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import read_model, write_weights
from bessemer.run.files import write_json
from tests.model.samples import config, read_checked, stirred

transformers = pytest.importorskip("transformers")


def example(family: str, name: str) -> ModelConfig:
    return config(**{**FAMILIES[family].options, **FAMILIES[family].examples[name], "family": family})


def written(wanted: ModelConfig, folder: Path, **settings: object) -> Path:
    write_weights(stirred(wanted), folder)
    write_json(folder / "config.json", {**to_hugging_face(wanted, 0), **settings})
    return folder


def test_gemma2_with_both_activation_keys_of_the_hub_is_imported(tmp_path: Path) -> None:
    wanted = example("gemma2", "Gemma 2")
    assert read_checked(written(wanted, tmp_path, hidden_act="gelu_pytorch_tanh"))[1].note == ""


def test_gpt2_without_an_mlp_width_as_on_the_hub_is_imported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(theirs).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {key: value for key, value in settings.items() if key != "n_inner"})
    assert read_checked(tmp_path)[0].config.mlp_width == 128


def test_a_model_that_computes_something_else_is_an_error(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    other = read_model(folder)
    with torch.no_grad():
        other.blocks[1].mlp.down.weight.mul_(1.5)  # type: ignore[union-attr]
    with pytest.raises(BessemerError, match="logits .*Qwen3ForCausalLM"):
        check_read(folder, other)


def test_the_blocks_are_compared_even_with_a_new_head(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    model, check = read_checked(folder, config(labels=3, max_positions=24))
    assert model.config.labels == 3
    assert check.max_difference is not None and check.max_difference < 1e-4
    with torch.no_grad():
        model.norm.weight.mul_(2.0)  # type: ignore[union-attr]
    with pytest.raises(BessemerError, match="hidden states"):
        check_read(folder, model)


def test_a_window_longer_than_the_sample_is_shortened_for_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(**FAMILIES["mistral"].options, window=2048, sequence_length=4096, layers=3)
    folder = written(wanted, tmp_path)
    model, check = read_checked(folder)
    assert "2,048" in check.note and "16" in check.note
    unaware = model.config.with_changes(window=0)  # had the reader ignored the window
    monkeypatch.setattr(checking, "read_config", lambda path: unaware)
    with pytest.raises(BessemerError, match="MistralForCausalLM"):
        check_read(folder, model)


def test_a_model_larger_than_memory_is_compared_by_its_first_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(window=7, global_every=2, layers=6)
    folder = written(wanted, tmp_path)
    room = int(1.5 * 4 * wanted.with_changes(layers=4).parameters)
    monkeypatch.setattr(checking, "available_memory", lambda: room)
    _, check = read_checked(folder)
    assert (check.layers, check.of_layers) == (4, 6)
    assert "the first 4 of 6 layers" in check.line and check.max_difference is not None
    monkeypatch.setattr(checking, "available_memory", lambda: 1000)
    _, check = read_checked(folder)
    assert check.max_difference is None and check.layers == 0 and "1,000" in check.line


def test_a_folder_that_transformers_cannot_read_is_one_error(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "id2label": {"a": "b"}})
    with pytest.raises(InputError, match=str(folder)) as caught:
        read_checked(folder)
    assert "\n" not in str(caught.value)


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
        (CAUSAL, {"config": {"eos_token_id": 50}}, "eos_token_id = 50 "),
        (CAUSAL, {"generation_config": {"eos_token_id": [3, 99]}}, "generation_config.json: eos_token_id = 99 "),
        (CLASSES, {"config": {"eos_token_id": 50}}, None),  # a classifier writes no text
        (CAUSAL, {"config": {"id2label": {"0": "a", "1": "a"}}}, None),  # a head that the model does not have
        (CAUSAL, {"tokenizer_config": {"chat_template": "{% if %}"}}, r"chat template: line 1: .*--template"),
        (CAUSAL, {"tokenizer_config": {"chat_template": "{% for m in messages %}{% break %}{% endfor %}"}}, None),
    ],
)  # fmt: skip
def test_harmless_differences_give_warnings(
    config: ModelConfig, files: dict[str, Any], wanted: str | None, tmp_path: Path
) -> None:
    found = list(check_metadata(folder_of(tmp_path, **files), config))
    assert len(found) == (wanted is not None)
    if wanted is not None:
        assert re.search(wanted, found[0])


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (CAUSAL, {"config": {"pad_token_id": 50}}, "config.json: pad_token_id = 50 "),
        (CAUSAL, {"config": {"eos_token_id": "x"}}, "config.json: eos_token_id"),
        (CAUSAL, {"generation_config": []}, "generation_config.json"),
        (CAUSAL, {"special_tokens_map": 3}, "special_tokens_map.json"),
        (CLASSES, {"config": {"id2label": {"0": "a", "one": "b", "2": "c"}}}, "config.json: id2label "),
    ],
)  # fmt: skip
def test_unusable_models_are_errors(config: ModelConfig, files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        list(check_metadata(folder_of(tmp_path, **files), config))


def test_imported_templates_render_like_transformers() -> None:
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
