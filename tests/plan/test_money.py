"""Days, hours, money and energy against what reports of real runs state; the loader's rate against its own sums."""

from itertools import pairwise

import pytest

from bessemer.errors import InputError
from bessemer.plan.loading import loading
from bessemer.plan.money import bill, device_hours, scaling


def test_textbook_figure() -> None:
    """70B on 2T tokens at 50% of 1,000 TFLOP/s: 467k GPU-hours."""
    assert device_hours(6 * 70e9 * 2e12, 1e15, 0.5) == pytest.approx(467e3, rel=1e-3)


@pytest.mark.parametrize(
    ("hours", "watts", "pue", "grid", "megawatt_hours", "tonnes"),
    [
        # Touvron et al. 2023a, table 15, which takes 400 W, a PUE of 1.1 and 0.385 kg a kWh for every model.
        (809_472, 400, 1.1, 0.385, 356, 137),
        (1_082_880, 400, 1.1, 0.385, 475, 183),
        (82_432, 400, 1.1, 0.385, 36, 14),
        (1_022_362, 400, 1.1, 0.385, 449, 173),
        # Le Scao et al. 2022: 1,082,990 hours of A100, 433 MWh.
        (1_082_990, 400, 1.0, None, 433, None),
    ],
)
def test_energy_is_what_reports_state(
    hours: float, watts: float, pue: float, grid: float | None, megawatt_hours: float, tonnes: float | None
) -> None:
    found = bill(hours * 3600 / 64, 64, watts, share=1.0, pue=pue, grid=grid)
    assert found.device_hours == pytest.approx(hours)
    assert found.megawatt_hours == pytest.approx(megawatt_hours, rel=0.015)
    assert found.tonnes is None if tonnes is None else found.tonnes == pytest.approx(tonnes, rel=0.02)


@pytest.mark.parametrize(
    ("parameters", "tokens", "measured", "mfu"),
    # OLMo 2 7B and 13B on H100 (OLMo Team 2025, table 19): megawatt-hours at the GPUs. The default share of 700 W
    # must meet them at an MFU that runs of this kind reach, all pauses included.
    [(7.3e9, 4.05e12, 131, (0.20, 0.35)), (13.7e9, 5.6e12, 257, (0.25, 0.40))],
)
def test_energy_of_olmo2(parameters: float, tokens: float, measured: float, mfu: tuple[float, float]) -> None:
    for bound, above in zip(mfu, (True, False), strict=True):
        hours = device_hours(6 * parameters * tokens, 989e12, bound)
        assert (bill(hours * 3600, 1, 700).device_megawatt_hours > measured) is above


def test_money_is_what_reports_state() -> None:
    mpt = bill(
        9.5 * 86_400, 440, 400, price=2.0, price_date="2023-05"
    )  # MosaicML 2023: 440 A100 for 9.5 days, about $200k
    assert mpt.device_hours == pytest.approx(100_320)
    assert mpt.cost == pytest.approx(200e3, rel=0.01)
    deepseek = bill(2_664_000 * 3600 / 2048, 2048, 700, price=2.0)  # DeepSeek-V3, table 1: 2,664K hours, $5.328M
    assert deepseek.cost == pytest.approx(5.328e6) and deepseek.days == pytest.approx(54.2, abs=0.05)
    assert bill(10, 1, 400).cost is None and bill(10, 1, 400).tonnes is None


def test_more_devices_take_less_time_and_no_less_money() -> None:
    curve = scaling([8, 16, 32, 64], lambda count: None if count == 8 else 64 / count + 0.1, 86_400, price=2.0)
    assert [point.devices for point in curve] == [16, 32, 64]
    assert curve[0].days == pytest.approx(4.1) and curve[0].cost == pytest.approx(4.1 * 24 * 16 * 2)
    assert all(one.days > two.days and one.cost < two.cost for one, two in pairwise(curve))  # type: ignore[operator]
    with pytest.raises(InputError):
        scaling([8], lambda count: 1.0, 0)


def test_loading() -> None:
    found = loading(1e6, 32_000, tokens=1e12, readers=8, storage=1e7)
    assert (
        found.rate == 2e6 and found.per_reader == 2.5e5 and found.bytes == 2e12 and found.share == 0.2 and found.enough
    )
    wide = loading(1e6, 128_256, packed=0.5, storage=1e6)
    assert wide.rate == 2e6 and wide.enough is False
    assert loading(1.0, 65_536).rate == 2.0 and loading(1.0, 65_537).rate == 4.0
    assert loading(1.0, 65_537).share is None


def test_what_cannot_be_is_refused() -> None:
    for call in (
        lambda: bill(0, 8, 700),
        lambda: bill(10, 0, 700),
        lambda: bill(10, 8, 700, price=-1.0),
        lambda: bill(10, 8, 700, share=1.2),
        lambda: bill(10, 8, 700, pue=0.9),
        lambda: bill(10, 8, 700, grid=-0.1),
        lambda: device_hours(0, 1e15, 0.5),
        lambda: device_hours(1e20, 1e15, 0),
        lambda: device_hours(1e20, 1e15, 1.5),
        lambda: loading(0, 32_000),
        lambda: loading(1, 0),
        lambda: loading(1, 32_000, packed=0),
        lambda: loading(1, 32_000, storage=0),
    ):
        with pytest.raises(InputError):
            call()
