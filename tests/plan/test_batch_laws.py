"""Batch and learning-rate laws against published settings, and each other where the same paper fits the same thing twice."""

import math

import pytest

from bessemer.plan import scaling_laws

# Liu et al. 2025 (Moonlight), table 2: parameters, tokens, learning rate, sequences of 8,192.
MOONLIGHT = [
    (399e6, 8.92e9, 9.503e-4, 96), (545e6, 14.04e9, 9.143e-4, 128), (822e6, 20.76e9, 8.825e-4, 160),
    (1.1e9, 28.54e9, 8.561e-4, 192), (1.5e9, 38.91e9, 8.305e-4, 256),
]  # fmt: skip


@pytest.mark.parametrize("row", MOONLIGHT)
def test_moonlight_is_its_table(row: tuple[float, float, float, int]) -> None:
    parameters, tokens, rate, sequences = row
    assert scaling_laws.learning_rates(parameters, tokens)["moonlight"] == pytest.approx(rate, rel=0.06)
    assert scaling_laws.optimal_batches(parameters, tokens)["moonlight"] == pytest.approx(sequences * 8192, rel=0.2)


def test_zhang_in_millions_of_tokens_meets_its_other_fits() -> None:
    """Zhang et al. 2024: 93.20 N^0.47 at 20 tokens a parameter, 621.341 N^0.087 at 3.072B tokens; N in millions, sequences."""
    for millions in (85, 151, 302, 604, 1200):
        along = scaling_laws.critical_batches(millions * 1e6, 20e6 * millions)["zhang"]
        assert along / 512 == pytest.approx(93.20 * millions**0.47, rel=0.01)
    fixed = scaling_laws.critical_batches(151e6, 3.072e9)["zhang"]
    assert fixed / 512 == pytest.approx(621.341 * 151**0.087, rel=0.05)


def test_deepseek_and_steplaw_are_their_formulas() -> None:
    """DeepSeek LLM 7B and 67B were trained with 2,304 and 4,608 sequences of 4,096 at 4.2e-4 and 3.2e-4 (Bi et al. 2024, table 2):
    the law, made before, lies within its own band of them."""
    for parameters, sequences, rate in ((6.1e9, 2304, 4.2e-4), (66e9, 4608, 3.2e-4)):
        assert scaling_laws.optimal_batches(parameters, 2e12)["deepseek"] == pytest.approx(sequences * 4096, rel=0.25)
        assert scaling_laws.learning_rates(parameters, 2e12)["deepseek"] == pytest.approx(rate, rel=0.1)
    step = scaling_laws.learning_rates(1e9, 1e11)["steplaw"]
    assert math.log(step) == pytest.approx(math.log(1.79) - 0.713 * math.log(1e9) + 0.307 * math.log(1e11))
    for law in (scaling_laws.optimal_batches, scaling_laws.learning_rates, scaling_laws.critical_batches):
        values = law(1e9, 2e10).values()
        assert 1 < max(values) / min(values) < 10
