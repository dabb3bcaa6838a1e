"""Days, device-hours, money and energy of a run, and what training reads from storage.

Times are in seconds unless named otherwise, money in dollars.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.terminal import amount

HOUR, DAY = 3_600.0, 86_400.0

POWER_SHARE = 0.85
"""Of a board's power limit that is drawn on average: an assumption, at the upper end of the 15% to 85% that Morrison et al. 2025
(abstract) log over a training. share=1 gives what statements say that take the whole limit (Touvron et al. 2023a, table 15)."""

PUE = 1.2
"""Power of the whole data centre to that of its machines: the larger of OLMo 2's two, 1.12 and 1.20 (its report, table 19)."""


def dollars(value: float) -> str:
    """$1.91M."""
    return f"${amount(value)}"


@dataclass(frozen=True)
class Bill:
    """device_hours: of all devices, idle ones too; cost: None without a price; price: dollars a device-hour; price_date: when it
    was asked; megawatt_hours: at the data centre's meter; device_megawatt_hours: at the devices."""

    days: float
    device_hours: float
    cost: float | None
    price: float | None
    price_date: str | None
    device_megawatt_hours: float
    megawatt_hours: float


def bill(
    seconds: float, devices: int, watts: float, *, price: float | None = None, price_date: str | None = None,
    share: float = POWER_SHARE, pue: float = PUE,
) -> Bill:  # fmt: skip
    """What `seconds` of `devices` devices come to.

    watts: a device's power limit, or what one takes with its part of the host; price: dollars a device-hour; share: of the watts
    that is drawn on average; pue: whole data centre to machines.
    """
    hours = seconds / HOUR * devices
    at_devices = hours * watts * share / 1e6
    return Bill(
        days=seconds / DAY, device_hours=hours, cost=None if price is None else hours * price, price=price, price_date=price_date,
        device_megawatt_hours=at_devices, megawatt_hours=at_devices * pue,
    )  # fmt: skip


@dataclass(frozen=True)
class Loading:
    """rate: bytes/s that all readers take together; per_reader: each of them; bytes: of the whole run; share: of what the storage
    gives; enough: whether it is."""

    rate: float
    per_reader: float
    bytes: float
    share: float
    enough: bool


def loading(tokens_per_second: float, vocabulary: int, *, tokens: float, readers: int, storage: float) -> Loading:
    """The rate at which tokens must come from storage.

    tokens_per_second: of the whole run; tokens: of the whole run; readers: data-parallel ranks, each of which reads its own part
    (the ranks of a tensor, pipeline or context group would read the same); storage: bytes/s it gives to all readers together.
    """
    size = 2 if vocabulary <= 1 << 16 else 4  # bytes of a token on disk, as the token shards are written
    rate = tokens_per_second * size
    return Loading(rate, rate / readers, float(tokens * size), share=rate / storage, enough=rate <= storage)


PETAFLOP_DAY = 1e15 * 86_400


def petaflop_days(flops: float) -> float:
    """FLOPs as days of a petaflop a second (Brown et al. 2020, table D.1)."""
    return flops / PETAFLOP_DAY
