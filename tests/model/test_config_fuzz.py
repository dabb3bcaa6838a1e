"""A thousand damaged config.json: each is read, or refused by one sentence; what is read, `transformers` computes too."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.huggingface.check import check_read
from bessemer.model.huggingface.config import recipe_keys, to_hugging_face
from bessemer.model.huggingface.export import write_weights
from bessemer.model.huggingface.families import FAMILIES, FIXED, HARMLESS
from bessemer.model.huggingface.weights import read_model
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
