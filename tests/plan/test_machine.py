"""A machine's measured rates: kept and read back, exact where measured, monotone between, refused when damaged."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bessemer.errors import InputError
from bessemer.plan import machine as machines
from bessemer.plan.machine import (
    PAIRS,
    TRANSPOSES,
    WHOLE,
    AllReduce,
    AttentionTime,
    Disk,
    Host,
    Machine,
    Pass,
    Product,
    Timing,
    Way,
)

EDGES = (32, 128, 512)
PASSES = (
    "copy",
    "add",
    "accumulate",
    "square",
    "norm",
    "head_norm",
    "layer_norm",
    "swiglu",
    "gelu",
    "rotate",
    "softmax",
    "adamw",
)


def rate_of(m: int, n: int, k: int, transpose: str) -> float:
    """A made-up machine that gets faster with every edge, in its own way for each transpose."""
    factor = {"nt": 1.0, "nn": 0.9, "tn": 0.8}[transpose]
    return factor * 1e11 * (m / (m + 40)) * (n / (n + 60)) * (k / (k + 20))


def way(slower: float = 1.0, flops: float = 2e10, per_second: float = 1e9, host: Host | None = None) -> Way:
    products = tuple(
        Product("fp32", name, m, n, k, Timing(slower * 2.0 * m * n * k / rate_of(m, n, k, name), 0.02))
        for name in TRANSPOSES
        for m, n, k in itertools.product(EDGES, repeat=3)
    )
    attention = tuple(
        AttentionTime(
            "fp32", 8, length, width, Timing(slower * 8 * machines.attention_flops(length, width) / flops, 0.04)
        )
        for length in (32, 256)
        for width in (32, 64)
    )
    passes = tuple(
        Pass(name, elements, 8, Timing(slower * elements / per_second, 0.1))
        for name in PASSES
        for elements in (1 << 13, 1 << 19)
    )
    return Way(products, attention, passes, host or Host(1e-4, 2e-4, 3e-5, 4e-4), rounds=5)


def machine(threads: int = 1, **changes: object) -> Machine:
    ways = {WHOLE: way()} if threads == 1 else {WHOLE: way(), PAIRS: way(slower=1.5)}
    made = Machine(
        name="a processor", kind="cpu", threads=threads, memory=8e9, date="2026-01-01", torch="2.13.0", seconds=60.0, busy=0.1,
        ways=ways, all_reduce=(AllReduce(2, "gloo", 8, Timing(1e-4)), AllReduce(2, "gloo", 1 << 20, Timing(2e-3))),
        disk=Disk(1e8, 1e9, 2e9),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def test_a_machine_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machine.toml"
    made = machine(threads=2)
    machines.save(made, path)
    found = machines.load(path)
    assert (found.name, found.threads, found.date, found.disk) == (made.name, 2, made.date, made.disk)
    assert found.ways[PAIRS].host == made.ways[PAIRS].host and found.ways[PAIRS].rounds == 5
    for before, after in zip(made.ways[PAIRS].products, found.ways[PAIRS].products, strict=True):
        assert (before.transpose, before.m, before.n, before.k) == (after.transpose, after.m, after.n, after.k)
        assert after.timing.seconds == pytest.approx(before.timing.seconds, rel=1e-4)  # five digits are kept
        assert after.timing.spread == before.timing.spread
    assert found.collective == pytest.approx(made.collective)


def test_rates_are_exact_where_they_were_measured() -> None:
    made = machine()
    for m, n, k in itertools.product(EDGES, repeat=3):
        for name in TRANSPOSES:
            assert made.matmul_rate(m, n, k, transpose=name) == pytest.approx(rate_of(m, n, k, name))
    assert made.attention_seconds(4, 256, 64) == pytest.approx(4 * machines.attention_flops(256, 64) / 2e10)
    assert made.pass_seconds("norm", 1 << 19) == pytest.approx((1 << 19) / 1e9)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rates_rise_between_the_sizes_and_hold_beyond_them(axis: int) -> None:
    made = machine()
    shapes = [[100, 100, 100] for _ in range(60)]
    for place, shape in enumerate(shapes):
        shape[axis] = round(16 * 1.1**place)
    rates = [made.matmul_rate(*shape) for shape in shapes]
    assert rates == sorted(rates)
    low, high = [100, 100, 100], [100, 100, 100]
    low[axis], high[axis] = EDGES[0], EDGES[-1]
    assert rates[0] == pytest.approx(made.matmul_rate(*low)) and rates[-1] == pytest.approx(made.matmul_rate(*high))
    # Midway between sizes four times apart, on all three axes at once, a rate that saturates is met to a tenth.
    assert made.matmul_rate(256, 256, 256, transpose="nt") == pytest.approx(rate_of(256, 256, 256, "nt"), rel=0.1)


def test_without_a_transpose_the_rate_is_of_the_three_one_after_another() -> None:
    made = machine()
    seconds = sum(1.0 / rate_of(128, 512, 32, name) for name in TRANSPOSES)
    assert made.matmul_rate(128, 512, 32) == pytest.approx(3.0 / seconds)


def test_a_pass_takes_no_less_than_the_smallest_that_was_measured() -> None:
    made = machine()
    assert made.pass_seconds("add", 10) == made.pass_seconds("add", 1 << 13)
    assert made.pass_seconds("add", 1 << 21) == pytest.approx((1 << 21) / 1e9)


def test_a_ring_sends_twice_the_tensor_but_for_its_own_part() -> None:
    latency, sent = machine().collective
    assert latency == 1e-4 and sent == pytest.approx((1 << 20) / (2e-3 - 1e-4))  # 2 (p - 1) / p = 1 for two processes
    assert machine(all_reduce=()).collective == (0.0, math.inf)


def test_a_machine_is_a_device_of_the_catalogue() -> None:
    device = machine().device()
    assert device.flops["fp32"] == pytest.approx(max(rate_of(512, 512, 512, name) for name in TRANSPOSES))
    assert device.bandwidth == pytest.approx(8e9) and device.memory == 8e9 and device.per_node == 2
    assert math.isfinite(machine(all_reduce=()).device().intra)


def test_what_was_not_measured_is_said() -> None:
    with pytest.raises(InputError, match="fp8.*fp32"):
        machine().matmul_rate(128, 128, 128, "fp8")
    with pytest.raises(InputError, match="dropout.*swiglu"):
        machine().pass_seconds("dropout", 1000)


def damaged(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("format = 1", "format = 0", "another version"),
        ("format = 1", "", "another version"),
        ('name = "a processor"', 'nam = "a processor"', "damaged"),
        ("[ways.whole.host]", "[ways.whole.host", "cannot be read"),
        ("[ways.whole", "[ways.other", "damaged"),
        ("threads = 1", 'threads = "many"', "damaged"),
        ("block = 0.0001", "block = -1.0", "damaged"),
        ("block = 0.0001", "blocks = 0.0001", "damaged"),
    ],
)
def test_a_file_that_is_not_a_calibration_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "machine.toml"
    machines.save(machine(), path)
    text = path.read_text()
    path.write_text(text.replace(old, new) if "ways.other" in new else damaged(text, old, new))
    with pytest.raises(InputError, match=said) as caught:
        machines.load(path)
    assert "machine.toml" in str(caught.value) and "--calibrate" in str(caught.value)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(tmp_path: Path, seconds: float) -> None:
    whole = way()
    first = replace(whole.attention[0], timing=Timing(seconds))
    path = tmp_path / "machine.toml"
    if seconds == 0.0:  # its rate could not be told
        first = replace(first, timing=Timing(5e-324))
    machines.save(machine(ways={WHOLE: replace(whole, attention=(first, *whole.attention[1:]))}), path)
    with pytest.raises(InputError, match="damaged"):
        machines.load(path)


def test_a_grid_with_a_hole_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    whole = way()
    machines.save(machine(ways={WHOLE: replace(whole, products=whole.products[1:])}), path)
    with pytest.raises(InputError, match="sizes of fp32/nt are missing"):
        machines.load(path)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such calibration"):
        machines.load(tmp_path / "machine.toml")
    (tmp_path / "machine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        machines.load(tmp_path / "machine.toml")


def test_the_users_file_lies_in_the_configuration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert machines.default_path() == tmp_path / "bessemer" / "machine.toml"
    assert machines.load_if_there() is None
    machines.save(machine(), machines.default_path())
    assert machines.load_if_there() is not None
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert machines.default_path() == tmp_path / ".config" / "bessemer" / "machine.toml"
