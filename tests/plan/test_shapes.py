"""Models by name against the counts of their checkpoints; models by number against the number and against what can be split."""

import pytest

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.model.flops import flops_per_token
from bessemer.plan.shapes import ALIASES, Shape, count_of, default_vocabulary, find, model, shapes


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_published_shapes_count_what_was_published(shape: Shape) -> None:
    """Where a checkpoint's count is given, to the parameter but for Qwen2.5's biases; elsewhere within what papers round."""
    exact = shape.parameters % 1000 != 0
    assert shape.config.parameters == pytest.approx(shape.parameters, rel=1e-4 if exact else 0.02)
    assert shape.source and shape.config.heads % shape.config.kv_heads == 0


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2-124m", 124_439_808), ("llama-2-70b", 68_976_648_192), ("llama-3-405b", 405_853_388_800),
     ("qwen3-8b", 8_190_735_360), ("pythia-12b", 11_846_072_320), ("bloom-176b", 176_247_271_424), ("opt-30b", 29_974_540_288),
     ("mistral-7b", 7_241_732_096), ("falcon-180b", 179_522_565_120), ("smollm3-3b", 3_075_098_624)],
)  # fmt: skip
def test_checkpoints_to_the_parameter(name: str, parameters: int) -> None:
    assert find(name).config.parameters == parameters


def test_other_names_of_the_same_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(ALIASES) & set(shapes()) and set(ALIASES.values()) <= set(shapes())
    assert find("Llama-3.1-405B") is find("llama-3-405b")
    assert run_command(["plan", "--model", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*shapes(), *ALIASES))


def test_flops_of_a_published_shape() -> None:
    """GPT-3 175B: 3.14e23 FLOPs for 300B tokens (Brown et al. 2020, table D.1, without attention)."""
    gpt3 = find("gpt3-175b").config
    attention = 12 * gpt3.layers * gpt3.width * (gpt3.sequence_length + 1) / 2
    assert (flops_per_token(gpt3) - attention) * 300e9 == pytest.approx(3.14e23, rel=0.005)


@pytest.mark.parametrize(
    "parameters", [1e6, 3e6, 1e7, 5e7, 1.24e8, 1e9, 3e9, 7e9, 13e9, 34e9, 70e9, 175e9, 405e9, 1e12]
)
def test_shapes_by_number(parameters: float) -> None:
    config = model(parameters)
    assert config.parameters == pytest.approx(parameters, rel=0.02)
    assert config.layers % 2 == 0 or config.layers < 12
    assert config.mlp_width % 16 == 0 and config.width == config.heads * config.head_dim
    assert config.heads % config.kv_heads == 0
    if config.width >= 2048:
        assert config.heads % 8 == 0 and 64 <= config.width / config.layers <= 150
    assert config.vocabulary == default_vocabulary(parameters)


def test_numbers_as_people_write_them() -> None:
    texts = ("70B", "70e9", "1.4T", "124M", "70,000,000", "5k", 7e9, "1_500_000", "1,000.5", "12,000B")
    assert [count_of(text) for text in texts] == pytest.approx(
        [70e9, 70e9, 1.4e12, 124e6, 7e7, 5e3, 7e9, 1.5e6, 1000.5, 12e12]
    )
    assert model("70B") == model(70e9)
    for text in ("many", "70 Bananas", "-7B", "0", "", "inf", "nan", "1,5T", "1,00,0B"):
        with pytest.raises(InputError):
            count_of(text)


def test_names() -> None:
    assert find("Llama 3 70B") is find("llama-3-70b") is find("LLAMA3_70b")
    with pytest.raises(InputError, match="llama-3-70b"):
        find("llama-3-71b")
    with pytest.raises(InputError, match="gpt2-1.5b"):
        model("gpt2-xl-1.5b")
    changed = model("opt-175b", vocabulary=1000, sequence_length=4096)
    assert changed.vocabulary == 1000 and changed.sequence_length == changed.max_positions == 4096
    assert model("opt-175b").max_positions == 2050
