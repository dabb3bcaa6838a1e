"""Days, device-hours, money and energy of a run. Times in seconds unless named otherwise, money in dollars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bessemer.errors import InputError

HOUR, DAY = 3_600.0, 86_400.0

POWER_SHARE = 0.85
"""Of a board's power limit that is drawn on average: an assumption, at the upper end of the 15% to 85% that Morrison et al. 2025
(abstract) log over a training. share=1 gives what statements say that take the whole limit (Touvron et al. 2023a, table 15)."""

PUE = 1.2
"""Power of the whole data centre to that of its machines: the larger of OLMo 2's two, 1.12 and 1.20 (its report, table 19)."""


@dataclass(frozen=True)
class Bill:
    """device_hours: of all devices, idle ones too; cost: None without a price; price: dollars a device-hour; price_date: when it
    was asked; megawatt_hours: at the data centre's meter; device_megawatt_hours: at the devices; tonnes: of CO2 equivalent; None
    without the grid's intensity."""

    days: float
    device_hours: float
    cost: float | None
    price: float | None
    price_date: str | None
    device_megawatt_hours: float
    megawatt_hours: float
    pue: float
    tonnes: float | None


def bill(
    seconds: float,
    devices: int,
    watts: float,
    *,
    price: float | None = None,
    price_date: str | None = None,
    share: float = POWER_SHARE,
    pue: float = PUE,
    grid: float | None = None,
) -> Bill:
    """What `seconds` of `devices` devices come to.

    watts: a device's power limit, or what one takes with its part of the host; price: dollars a device-hour; share: of the watts
    that is drawn on average; pue: whole data centre to machines; grid: kg of CO2 equivalent a kWh. Raises InputError on what
    cannot be.
    """
    if not seconds > 0 or devices < 1:
        raise InputError(f"{seconds:g} s of {devices} devices: both must be above zero")
    if price is not None and not price >= 0:
        raise InputError(f"price: {price:g} dollars an hour is below zero")
    if not watts >= 0 or not 0 <= share <= 1 or not pue >= 1:
        raise InputError(
            f"energy: {watts:g} watts, {share:g} of them drawn, PUE {pue:g}; give no watts below 0, a share from 0 to 1, "
            "a PUE of 1 or more"
        )
    if grid is not None and not grid >= 0:
        raise InputError(f"grid: {grid:g} kg of CO2 a kWh is below zero")
    hours = seconds / HOUR * devices
    at_devices = hours * watts * share / 1e6
    return Bill(
        days=seconds / DAY,
        device_hours=hours,
        cost=None if price is None else hours * price,
        price=price,
        price_date=price_date,
        device_megawatt_hours=at_devices,
        megawatt_hours=at_devices * pue,
        pue=pue,
        tonnes=None if grid is None else at_devices * pue * grid,
    )


def device_hours(flops: float, peak: float, mfu: float) -> float:
    """Hours of one device for `flops`, at `mfu` of a peak of `peak` FLOP/s. Raises InputError on what cannot be."""
    if not flops > 0 or not peak > 0:
        raise InputError(f"{flops:g} FLOPs at a peak of {peak:g} FLOP/s: both must be above zero")
    if not 0 < mfu <= 1:
        raise InputError(f"mfu: {mfu:g} is not a share of the peak above 0 and up to 1")
    return flops / (peak * mfu) / HOUR


@dataclass(frozen=True)
class Scaling:
    """One number of devices: the days, the device-hours and the dollars (None without a price) a run takes on it."""

    devices: int
    days: float
    device_hours: float
    cost: float | None


def scaling(
    devices: Iterable[int], step_seconds: Callable[[int], float | None], steps: int, price: float | None = None
) -> list[Scaling]:
    """Time and money against the number of devices, for a picture. step_seconds: of one step on so many devices; None where the
    run does not fit, which is left out."""
    if steps < 1:
        raise InputError(f"{steps} steps: a run has one at least")
    found = []
    for count in devices:
        seconds = step_seconds(count)
        if seconds is None:
            continue
        whole = bill(seconds * steps, count, 0.0, price=price)
        found.append(Scaling(count, whole.days, whole.device_hours, whole.cost))
    return found
