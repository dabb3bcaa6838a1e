"""Device-hours, dollars and energy of a run, and the bytes that it reads from storage.

Times are in seconds unless named otherwise, money in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.common.console import amount

HOUR, DAY = 3_600.0, 86_400.0

POWER_SHARE = 0.85
"""Of a board's power limit that is drawn on average: an assumption, at the upper end of the 15% to 85% that Morrison et al. 2025
(abstract) log over a training."""

PUE = 1.2
"""Power of the whole data centre to that of its machines: the larger of OLMo 2's two, 1.12 and 1.20 (its report, table 19)."""


def dollars(value: float) -> str:
    """$1.91M."""
    return f"${amount(value)}"


@dataclass(frozen=True)
class Bill:
    """device_hours: of all devices, idle ones too; cost: None without a price; price: dollars a device-hour; price_date: when it
    was asked; megawatt_hours: at the data centre's meter."""

    device_hours: float
    cost: float | None
    price: float | None
    price_date: str | None
    megawatt_hours: float


def bill(
    seconds: float, devices: int, watts: float, *, price: float | None = None, price_date: str | None = None
) -> Bill:
    """What `seconds` of `devices` devices come to.

    watts: a device's power limit, or what one takes with its part of the host; price: dollars a device-hour.
    """
    hours = seconds / HOUR * devices
    energy = hours * watts * POWER_SHARE / 1e6 * PUE
    return Bill(hours, None if price is None else hours * price, price, price_date, energy)


@dataclass(frozen=True)
class Loading:
    """rate: bytes/s that all readers take together; bytes: of the whole run; share: of what the storage gives."""

    rate: float
    bytes: float
    share: float


def loading(tokens_per_second: float, vocabulary: int, *, tokens: float, storage: float) -> Loading:
    """The rate at which tokens must come from storage.

    tokens_per_second, tokens: of the whole run; storage: bytes/s it gives to all readers together.
    """
    size = 2 if vocabulary <= 1 << 16 else 4  # bytes of a token on disk, as the token shards are written
    rate = tokens_per_second * size
    return Loading(rate, float(tokens * size), rate / storage)


def petaflop_days(flops: float) -> float:
    """FLOPs as days of a petaflop a second (Brown et al. 2020, table D.1)."""
    return flops / (1e15 * DAY)
