"""The catalogue of devices: spellings, published figures, and users' own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.plan.estimate.job import ClusterSpec


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("A100", "A100 SXM 80GB"),
        ("A100-80GB", "A100 SXM 80GB"),
        ("A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA H200", "H200 SXM"),
        ("nvidia b200", "B200 SXM"),
        ("GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("L40S", "L40S"),
        ("TPU v5p", "TPU v5p"),
        ("v5e", "TPU v5e"),
        ("tpu-v4", "TPU v4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"),
    ],
)
def test_a_spelling_finds_its_device(spelling: str, name: str) -> None:
    assert devices.find(spelling).name == name


@pytest.mark.parametrize("unknown", ["H1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", "A100-96GB", ""])
def test_what_is_not_there_is_said_with_near_names(unknown: str) -> None:
    with pytest.raises(InputError, match="not in the catalogue"):
        devices.find(unknown)


def test_near_names_are_the_near_ones() -> None:
    with pytest.raises(InputError, match="did you mean H100"):
        devices.find("H1000")


def test_every_name_finds_itself_and_every_entry_is_plausible() -> None:
    for name, device in devices.catalogue().items():
        assert devices.find(name) is device
        assert device.source
        assert 0.4 <= device.matmul <= 0.95
        assert device.inter_bandwidth <= device.intra_bandwidth
        widest = device.flops.get("bf16") or device.flops["fp16"]
        assert 10 <= widest / device.bandwidth <= 600, "FLOPs a byte of memory"
        assert (device.price is None) == (device.price_date is None)


@pytest.mark.parametrize(
    ("name", "precision", "peak", "memory"),
    [("A100", "bf16", 312e12, 80e9), ("A100", "tf32", 156e12, 80e9), ("H100", "fp8", 1979e12, 80e9), ("H200", "bf16", 989e12, 141e9),
     ("B200", "bf16", 2250e12, 180e9), ("MI300X", "bf16", 1307.4e12, 192e9), ("TPU v5p", "bf16", 459e12, 95e9),
     ("RTX 4090", "bf16", 165.2e12, 24e9)],
)  # fmt: skip
def test_peaks_are_the_data_sheets(name: str, precision: str, peak: float, memory: float) -> None:
    device = devices.find(name)
    assert device.peak(precision) == pytest.approx(peak)
    assert device.memory == pytest.approx(memory)


def test_what_a_device_does_not_compute_in_is_said() -> None:
    with pytest.raises(InputError, match="no peak for fp8.*fp32, tf32, bf16, fp16"):
        devices.find("A100").peak("fp8")


ENTRY = """
[[device]]
name = "Z9"
flops = { bf16 = 100 }
memory = 64
bandwidth = 1000
intra_bandwidth = 100
inter_bandwidth = 10
per_node = 4
watts = 300
source = "measured here"
"""


def test_a_users_file_adds_and_replaces(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY + ENTRY.replace("Z9", "H100 SXM").replace("64", "96"), encoding="utf-8")
    assert devices.find("z9", own).flops["bf16"] == 100e12
    assert devices.find("H100 SXM", own).memory == 96e9
    assert devices.find("H100 SXM").memory == 80e9
    assert devices.find("A100", own).memory == 80e9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("memory = 64", "memory = 0"), "memory = 0"),
        (("bandwidth = 1000", "bandwidth = -5"), "bandwidth = -5"),
        (("intra_bandwidth = 100\n", ""), "lacks intra_bandwidth"),
        (('source = "measured here"', 'source = "x"\nmatmull = 0.5'), "did you mean matmul"),
        (("bf16 = 100", "bf17 = 100"), "flops must be"),
        (("bf16 = 100", "bf16 = 0"), "flops.bf16 = 0"),
        (("per_node = 4", "per_node = 2.5"), "per_node = 2.5"),
        (("per_node = 4", "per_node = 4\nscale_up_domain = true"), "scale_up_domain = True"),
        (("[[device]]", ENTRY + "[[device]]"), "has Z9 2 times"),
        (('source = "measured here"', 'source = "x"\nmatmul = 1.5'), "at most 1"),
        (('name = "Z9"\n', ""), "has no name"),
        (("[[device]]", "[[devices]]"), "should hold"),
        (("memory = 64", "memory = "), "not TOML"),
    ],
)
def test_a_wrong_file_is_said_with_its_entry(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY.replace(*change), encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        devices.catalogue(own)
    assert "own.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        devices.catalogue(tmp_path / "none.toml")


def test_domains_are_equal_parts_of_whole_nodes() -> None:
    gb200, v4, h100 = (devices.find(name) for name in ("GB200", "TPU v4", "H100"))
    assert [ClusterSpec.of(gb200, n).near for n in (64, 128, 144, 2048)] == [64, 64, 72, 64]
    assert ClusterSpec.of(v4, 6144).near == 3072 and ClusterSpec.of(h100, 64).near == 8


def test_a_group_on_a_torus_has_the_links_of_its_axes() -> None:
    """A pod of 4,096 is 16 x 16 x 16: 16 devices lie along one of three axes, 256 in a plane."""
    pod = ClusterSpec.of(devices.find("TPU v4"), 4096)
    rates = [pod.intra_rate(size) / 45e9 for size in (2, 16, 256, 4096)]
    assert rates == pytest.approx([2, 2, 4, 6])
    assert ClusterSpec.of(devices.find("GB200"), 72).intra_rate(4) == 900e9
