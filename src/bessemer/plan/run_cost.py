"""Device-hours, price and energy of a run, and the bytes that it reads from storage.

Times are in seconds unless a name says otherwise, and prices are in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.common.console import amount

HOUR, DAY = 3_600.0, 86_400.0

POWER_SHARE = 0.85
"""Mean power as a share of a board's power limit. Assumed, at the upper end of the 15% to 85% that Morrison et al. 2025
(abstract) log over a training."""

PUE = 1.2
"""Power usage effectiveness: power of the data centre over that of its machines. This is the larger of OLMo 2's two values,
1.12 and 1.20 (its report, table 19)."""


def dollars(value: float) -> str:
    """Format a price, as in `$1.91M`."""
    return f"${amount(value)}"


@dataclass(frozen=True)
class Bill:
    """The device time, price and energy of a run.

    Attributes:
        device_hours: Hours of all devices, including idle ones.
        cost: Dollars, or None without a price.
        price: Dollars per device-hour.
        price_date: Date of the price.
        megawatt_hours: Energy at the meter of the data centre.
    """

    device_hours: float
    cost: float | None
    price: float | None
    price_date: str | None
    megawatt_hours: float


def bill(
    seconds: float, devices: int, watts: float, *, price: float | None = None, price_date: str | None = None
) -> Bill:
    """Return the device-hours, price and energy of a run.

    Args:
        seconds: Duration of the run.
        devices: Number of devices.
        watts: Power limit of one device, or its power with its part of the host.
        price: Dollars per device-hour.
        price_date: Date of the price.
    """
    hours = seconds / HOUR * devices
    energy = hours * watts * POWER_SHARE / 1e6 * PUE
    return Bill(hours, None if price is None else hours * price, price, price_date, energy)


@dataclass(frozen=True)
class Loading:
    """The storage traffic of a run.

    Attributes:
        rate: Bytes/s that all readers take together.
        bytes: Bytes of the whole run.
        share: Share of the storage bandwidth that the readers use.
    """

    rate: float
    bytes: float
    share: float


def loading(tokens_per_second: float, vocabulary: int, *, tokens: float, storage: float) -> Loading:
    """Return the rate at which storage must deliver tokens.

    Args:
        tokens_per_second: Speed of the whole run.
        vocabulary: Number of tokens in the vocabulary, which determines the bytes of a token on disk.
        tokens: Tokens of the whole run.
        storage: Bytes/s that the storage delivers to all readers together.
    """
    size = 2 if vocabulary <= 1 << 16 else 4  # bytes of a token in a shard
    rate = tokens_per_second * size
    return Loading(rate, float(tokens * size), rate / storage)


def petaflop_days(flops: float) -> float:
    """Convert FLOPs to petaflop/s-days (Brown et al. 2020, table D.1)."""
    return flops / (1e15 * DAY)
