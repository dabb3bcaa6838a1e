"""Days, hours, money and energy against what reports of real runs state; the loader's rate against its own sums."""

import pytest

from bessemer.plan.run_cost import PUE, bill, loading


@pytest.mark.parametrize(
    ("parameters", "tokens", "measured", "mfu"),
    # OLMo 2 7B and 13B on H100 (OLMo Team 2025, table 19): megawatt-hours at the GPUs. The default share of 700 W
    # must meet them at an MFU that runs of this kind reach, all pauses included.
    [(7.3e9, 4.05e12, 131, (0.20, 0.35)), (13.7e9, 5.6e12, 257, (0.25, 0.40))],
)
def test_energy_of_olmo2(parameters: float, tokens: float, measured: float, mfu: tuple[float, float]) -> None:
    for bound, above in zip(mfu, (True, False), strict=True):
        hours = 6 * parameters * tokens / (989e12 * bound) / 3600
        assert (bill(hours * 3600, 1, 700).megawatt_hours / PUE > measured) is above


def test_money_is_what_reports_state() -> None:
    mpt = bill(9.5 * 86_400, 440, 400, price=2.0)  # MosaicML 2023: 440 A100 for 9.5 days, about $200k
    assert (mpt.device_hours, mpt.cost) == (pytest.approx(100_320), pytest.approx(200e3, rel=0.01))
    deepseek = bill(2_664_000 * 3600 / 2048, 2048, 700, price=2.0)  # DeepSeek-V3, table 1: 2,664K hours, $5.328M
    assert deepseek.cost == pytest.approx(5.328e6) and bill(10, 1, 400).cost is None


def test_loading() -> None:
    found = loading(1e6, 32_000, tokens=1e12, storage=1e7)
    assert (found.rate, found.bytes, found.share) == (2e6, 2e12, 0.2)
    narrow, wider = (loading(1.0, ids, tokens=1.0, storage=1.0).rate for ids in (65_536, 65_537))
    assert (narrow, wider) == (2.0, 4.0)
