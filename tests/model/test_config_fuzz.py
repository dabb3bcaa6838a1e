"""A thousand damaged config.json: each is read, or refused by one sentence; what is read, `transformers` computes too."""

from __future__ import annotations

import copy
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from bessemer.errors import BessemerError, InputError
from bessemer.model.huggingface.check import check_read
from bessemer.model.huggingface.config import read_config, recipe_keys, to_hugging_face
from bessemer.model.huggingface.export import write_weights
from bessemer.model.huggingface.families import FAMILIES, FIXED, HARMLESS
from bessemer.model.huggingface.weights import read_model
from bessemer.model.transformer import build_model
from bessemer.recipe import parse
from tests.model.samples import config, stirred

pytest.importorskip("transformers")
MUTATIONS = 1000
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.5, 1e30, float("nan"), float("inf"), 2**31, 10**30, "", "8", "gelu", [], [1],
    ["full_attention"], ["full_attention", "sliding_attention"], ["mamba", "attention"], {}, {"a": 1}, {"rope_type": "linear"},
    {"rope_type": "llama3", "factor": 2.0}, {"type": "yarn"}, {"rope_type": None}, {"factor": 0}, {"rope_type": 3},
    {"full_attention": {"rope_theta": 0}}, {"full_attention": []}, {"rope_type": "linear", "factor": "2"}, {"0": "a", "x": 3},
]  # fmt: skip


def mutated(settings: dict[str, Any], keys: list[str], draw: random.Random) -> dict[str, Any]:
    """One to three changes: a key gone, with a strange value, under another name, or one more."""
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
    assert read > 5  # some changes do nothing


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '"x"', "3", "null", "true", "{", "", "\x00", "[" * 100_000, '{"model_type": []}',
                                  '{"model_type": "qwen3", "hidden_size": 1' + "0" * 5000 + "}"])  # fmt: skip
def test_what_is_no_table_of_settings_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config.json") as caught:
        recipe_keys(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


ODD = [0, -1, 5e-324, 1e-308, 1e-46, 1e-10, 1, 1.0000001, 1e10, 1e39, 1e308, 10**400, float("nan"), float("inf"), "2", True, [1.0]]  # fmt: skip
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 12},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 12, "attention_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
             "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 12, "attention_factor": 1.0, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", list(STRETCHED))
def test_odd_values_of_rotary_positions_are_one_sentence_or_computed(kind: str, tmp_path: Path) -> None:
    plain, read, refused = (
        to_hugging_face(config(family="llama", **FAMILIES["llama"].options, head_dim=8), 0),
        0,
        list[str](),
    )
    for key, value in itertools.product((*STRETCHED[kind], "rope_theta", "head_dim"), ODD):
        table: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, **STRETCHED[kind]}
        settings = {key_: value_ for key_, value_ in plain.items() if key_ not in ("rope_scaling", "rope_theta")}
        if key == "head_dim":
            settings["head_dim"] = 2 if value == 1 else value
        else:
            table[key] = [value] * 4 if key.endswith(("short_factor", "long_factor")) else value
        (tmp_path / "config.json").write_text(json.dumps({**settings, "rope_parameters": table}))
        try:
            model = build_model(read_config(tmp_path)[1].with_changes(sequence_length=24), 0)
        except InputError as error:
            refused.append(str(error))
            continue
        with torch.no_grad():
            assert torch.isfinite(model.logits(torch.zeros(1, 24, dtype=torch.long))).all(), (key, value)
        # What is read is also a recipe.
        keys = {key_: value_ for key_, value_ in recipe_keys(tmp_path).items() if value_ is not None}
        parse(tomli_w.dumps({"run": {"name": "x"}, "model": keys}), "a test")
        read += 1
    assert read > 0 and len(refused) > 10
    assert all("\n" not in error and len(error) < 400 + len(str(tmp_path)) for error in refused)
