"""Folders whose contents contradict their configuration are errors that name the fault."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.huggingface.check import check_read
from bessemer.model.huggingface.config import model_config, read_config, recipe_keys, to_hugging_face
from bessemer.model.huggingface.families import FAMILIES, FIXED, HARMLESS
from bessemer.model.huggingface.weights import read_model, write_weights
from bessemer.model.recipe_defaults import dimensions
from bessemer.recipe import Model, parse
from bessemer.recipe.model import idle_keys
from bessemer.run.files import write_json
from tests.model.samples import config, stirred

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = stirred(config())
    write_weights(model, tmp_path)
    write_json(tmp_path / "config.json", to_hugging_face(model.config, 0))
    return tmp_path


def change_tensors(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **changes})


Q = "model.layers.1.self_attn.q_proj.weight"


def test_a_tied_matrix_may_be_stored_twice_but_must_be_equal(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"lm_head\.weight .*tie_word_embeddings"):
        read_model(folder)
    change_tensors(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert read_model(folder).config.tie_embeddings


def test_an_encoder_without_a_head_is_reported(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"BertForMaskedLM\.from_pretrained"):
        read_model(tmp_path)


CHANGES: dict[str, Callable[[Tensors], object]] = {
    "missing": lambda tensors: tensors.update({"model.layers.1.self_attn.query.weight": tensors.pop(Q)}),
    "extra": lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}),
    "shape": lambda tensors: tensors.update({Q: tensors[Q][:-1]}),
    "fp8": lambda tensors: tensors.update({Q: tensors[Q].to(torch.float8_e4m3fn)}),
    "int8": lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}),
    "nan": lambda tensors: tensors[Q].view(-1)[3:5].fill_(torch.nan),
    "infinite": lambda tensors: tensors[Q].view(-1)[3:5].fill_(torch.inf),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_that_does_not_fit_is_named(folder: Path, name: str) -> None:
    change_tensors(folder, CHANGES[name])
    with pytest.raises(InputError, match="model.layers.2.mlp.up_proj.weight" if name == "extra" else Q):
        read_model(folder)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "mamba"}, "model_type"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "mish"}, "hidden_act"), ({"attention_bias": True}, "q_proj.bias"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type"), ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "beta_fast": 2}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1], "long_factor": [1]}}, "short"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0, "short_factor": "x", "long_factor": [1]}}, "short_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers"), ({"num_hidden_layers": 10**8}, "num_hidden_layers"),
        ({"num_hidden_layers": 9000}, "layers"), ({"num_labels": 2**31 - 1}, "num_labels"), ({"vocab_size": "97"}, "vocab_size"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"), ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"is_causal": False}, "is_causal"), ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"), ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 2, "num_attention_heads": 2**30}, ""),
    ],
)  # fmt: skip
def test_an_unsupported_configuration_is_an_error(folder: Path, changes: dict[str, object], key: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(InputError, match=key or None):
        read_model(folder)


@pytest.mark.fault(30)
def test_a_pickle_is_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        read_model(folder)


def test_an_index_cannot_name_files_outside_its_folder(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {Q: "../other.safetensors"}})
    with pytest.raises(InputError, match=r"\.\./other\.safetensors"):
        read_model(folder)


def test_half_precision_files_are_widened(folder: Path) -> None:
    before = {name: tensor.clone() for name, tensor in read_model(folder).state_dict().items()}
    change_tensors(folder, lambda tensors: tensors.update({n: t.to(torch.bfloat16) for n, t in tensors.items()}))
    for name, tensor in read_model(folder).state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, before[name].bfloat16().float(), rtol=0, atol=0)


def test_a_new_classifier_takes_the_blocks_and_leaves_the_head(folder: Path) -> None:
    language = read_model(folder)
    classifier = read_model(folder, language.config.with_changes(labels=3), seed=4)
    assert torch.equal(classifier.blocks[1].attention.qkv, language.blocks[1].attention.qkv)  # type: ignore[union-attr]
    assert classifier.classifier.weight.shape == (3, 32)
    assert classifier.classifier.weight.std() > 0


@pytest.mark.parametrize(
    ("family", "example"), [(family, example) for family in FAMILIES for example in FAMILIES[family].examples]
)
def test_a_recipe_can_express_every_configuration(family: str, example: str, tmp_path: Path) -> None:
    """Go from config.json to the keys of [model], through TOML, to the same configuration."""
    wanted = config(**FAMILIES[family].options | FAMILIES[family].examples[example])
    write_json(tmp_path / "config.json", to_hugging_face(wanted.with_changes(family=family), 0))
    read = read_config(tmp_path)
    assert read.family == family and read == wanted.with_changes(max_positions=wanted.sequence_length)
    keys = {key: value for key, value in recipe_keys(tmp_path).items() if value is not None}
    text = tomli_w.dumps({"run": {"name": "x"}, "tokens": {"sequence_length": 24}, "model": keys})
    objective = [] if wanted.causal else ["train.objective=masked"]
    again = model_config(parse(text, "a test", objective), wanted.vocabulary, wanted.labels)
    assert again.with_changes(pooling=wanted.pooling) == read
    for key in idle_keys(vars(read)).keys() & {"experts_per_token", "mlp_width", "balance_loss", "balance_rate"}:
        with pytest.raises(InputError, match=rf"model\.{key}: "):
            dimensions(Model.model_validate({"from": f"hf:{tmp_path}", key: 1}))
    if read.experts:
        resolved = dimensions(Model.model_validate({"from": f"hf:{tmp_path}", "balance": "none"}))
        assert resolved.balance_loss is None and dimensions(resolved) == resolved


pytest.importorskip("transformers")
MUTATIONS = 1000
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.5, 1e30, float("nan"), float("inf"), 2**31, 10**30, "", "8", "gelu", [], [1],
    ["full_attention"], ["full_attention", "sliding_attention"], ["mamba", "attention"], {}, {"a": 1}, {"rope_type": "linear"},
    {"rope_type": "llama3", "factor": 2.0}, {"type": "yarn"}, {"rope_type": None}, {"factor": 0}, {"rope_type": 3},
    {"full_attention": {"rope_theta": 0}}, {"full_attention": []}, {"rope_type": "linear", "factor": "2"}, {"0": "a", "x": 3},
]  # fmt: skip


def mutated(settings: dict[str, Any], keys: list[str], draw: random.Random) -> dict[str, Any]:
    """Return the configuration with one to three changes: a key missing, with a strange value, renamed, or added."""
    changed = copy.deepcopy(settings)
    for _ in range(draw.choice((1, 1, 2, 3))):
        key = draw.choice(keys)
        action = draw.random()
        if action < 0.15:
            changed.pop(key, None)
        elif action < 0.2:
            changed[key + draw.choice("_x2")] = changed.pop(key, 1)
        else:
            changed[key] = copy.deepcopy(draw.choice(VALUES))
    return changed


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_config_ends_in_a_traceback_or_in_another_model(family: str, tmp_path: Path) -> None:
    draw, description = random.Random(family), FAMILIES[family]
    example = next(iter(description.examples.values()))
    wanted = config(**{**description.options, **example, "vocabulary": 41, "family": family})
    write_weights(stirred(wanted), tmp_path)
    settings = to_hugging_face(wanted, 0)
    keys = sorted(
        {*settings, *description.understood, *description.harmless, *FIXED, *draw.sample(sorted(HARMLESS), 8)}
    )
    keys += ["quantization_config", "num_labels", "id2label", "unheard_of"]
    read = 0
    for number in range(-(-MUTATIONS // len(FAMILIES))):
        text = json.dumps(mutated(settings, keys, draw))
        (tmp_path / "config.json").write_text(text)
        try:
            recipe_keys(tmp_path)
            model = read_model(tmp_path)
            if number % 4 == 0:
                check_read(tmp_path, model)
            read += 1
        except InputError as error:
            if "\n" in str(error) or not str(error).startswith(str(tmp_path)):
                raise AssertionError(f"not one sentence about the file: {error}: {text}") from None
        except BessemerError as error:
            raise AssertionError(f"{error}: {text}") from None
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {text}") from error
    assert read > 5  # some changes have no effect


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '"x"', "3", "null", "true", "{", "", "\x00", "[" * 100_000, '{"model_type": []}',
                                  '{"model_type": "qwen3", "hidden_size": 1' + "0" * 5000 + "}"])  # fmt: skip
def test_an_invalid_configuration_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config.json") as caught:
        recipe_keys(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))
