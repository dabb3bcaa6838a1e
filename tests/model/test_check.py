"""What is read is compared with what `transformers` computes: in one way for `bessemer import` and `model.from`."""

import json
from pathlib import Path

import pytest
import torch

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import check as checking
from bessemer.model.huggingface.check import check_read
from bessemer.model.huggingface.config import to_hugging_face
from bessemer.model.huggingface.export import write_weights
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.weights import read_model
from bessemer.run.files import write_json
from tests.model.samples import config, read_checked, stirred

transformers = pytest.importorskip("transformers")
EXAMPLES = [(family.name, name) for family in FAMILIES.values() for name in family.examples]


def example(family: str, name: str) -> ModelConfig:
    return config(**{**FAMILIES[family].options, **FAMILIES[family].examples[name], "family": family})


def written(wanted: ModelConfig, folder: Path, **settings: object) -> Path:
    write_weights(stirred(wanted), folder)
    write_json(folder / "config.json", {**to_hugging_face(wanted, 0), **settings})
    return folder


@pytest.mark.parametrize(("family", "name"), EXAMPLES)
def test_what_is_read_is_what_transformers_computes(family: str, name: str, tmp_path: Path) -> None:
    model, check = read_checked(written(example(family, name), tmp_path))
    assert check.max_difference is not None and check.max_difference < 1e-4
    assert check.layers == check.of_layers == model.config.layers and check.note == ""


def test_gemma2_with_both_names_of_its_activation_as_on_the_hub(tmp_path: Path) -> None:
    wanted = example("gemma2", "Gemma 2")
    assert read_checked(written(wanted, tmp_path, hidden_act="gelu_pytorch_tanh"))[1].note == ""


def test_gpt2_without_a_width_of_its_mlp_as_on_the_hub(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(theirs).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path / "config.json", {key: value for key, value in settings.items() if key != "n_inner"})
    assert read_checked(tmp_path)[0].config.mlp_width == 128


def test_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    other = read_model(folder)
    with torch.no_grad():
        other.blocks[1].mlp.down.weight.mul_(1.5)  # type: ignore[union-attr]
    with pytest.raises(BessemerError, match=r"the logits and those of transformers' Qwen3ForCausalLM differ"):
        check_read(folder, other)


def test_a_new_head_leaves_the_blocks_to_be_compared(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    model, check = read_checked(folder, config(labels=3, max_positions=24))
    assert model.config.labels == 3
    assert check.max_difference is not None and check.max_difference < 1e-4
    with torch.no_grad():
        model.norm.weight.mul_(2.0)  # type: ignore[union-attr]
    with pytest.raises(BessemerError, match="the hidden states and those"):
        check_read(folder, model)


def test_a_window_longer_than_the_sample_is_compared_as_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(**FAMILIES["mistral"].options, window=2048, sequence_length=4096, layers=3)
    folder = written(wanted, tmp_path)
    model, check = read_checked(folder)
    assert check.note == "windows of 2,048 made 16 on both sides"
    unaware = model.config.with_changes(window=0)  # had the reader overlooked the window
    monkeypatch.setattr(checking, "read_config", lambda path: unaware)
    with pytest.raises(BessemerError, match="those of transformers' .* differ"):
        check_read(folder, model)


def test_a_model_too_large_for_memory_is_compared_by_its_first_layers(
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
    assert check.max_difference is None and check.line.startswith("not compared with transformers: one layer takes")


def test_a_folder_that_transformers_does_not_read_is_one_sentence(tmp_path: Path) -> None:
    folder = written(config(), tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "id2label": {"a": "b"}})
    with pytest.raises(InputError, match="transformers does not read it: ") as caught:
        read_checked(folder)
    assert "\n" not in str(caught.value)
