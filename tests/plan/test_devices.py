"""The catalogue of devices: spellings, published figures, and users' own files."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.model.flops import flops_per_token
from bessemer.plan import devices
from bessemer.plan.estimate.job import ClusterSpec
from bessemer.plan.shapes import ALIASES, Shape, count_of, default_vocabulary, find, model, shapes


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("H100", "H100 SXM"), ("NVIDIA H100 80GB HBM3", "H100 SXM"), ("NVIDIA H100 PCIe", "H100 PCIe"),
     ("A100-SXM4-40GB", "A100 SXM 40GB"), ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"), ("AMD Instinct MI300X", "MI300X"),
     ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("5090", "RTX 5090"), ("Tesla V100-SXM2-16GB", "V100 SXM 16GB"), ("h-100", "H100 SXM"),
     ("tpu-v5-e", "TPU v5e"), ("L-40 s", "L40S")],
)  # fmt: skip
def test_devices_are_found_by_other_spellings(spelling: str, name: str) -> None:
    assert devices.find(spelling).name == name


@pytest.mark.parametrize("unknown", ["H1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", "A100-96GB", ""])
def test_an_unknown_device_is_an_error_that_suggests_similar_names(unknown: str) -> None:
    with pytest.raises(InputError, match="not in the catalogue"):
        devices.find(unknown)


def test_devices_are_found_by_name_and_have_plausible_values() -> None:
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
def test_peaks_equal_the_data_sheets(name: str, precision: str, peak: float, memory: float) -> None:
    device = devices.find(name)
    assert device.peak(precision) == pytest.approx(peak)
    assert device.memory == pytest.approx(memory)


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
    own.write_text(
        ENTRY.replace("Z9", "Gaudi 3") + ENTRY.replace("Z9", "H100 SXM").replace("64", "96"), encoding="utf-8"
    )
    assert [devices.find(name, own).flops["bf16"] for name in ("Gaudi3", "gaudi-3", "GAUDI 3")] == [100e12] * 3
    assert devices.find("H100 SXM", own).memory == 96e9
    assert devices.find("H100 SXM").memory == 80e9
    assert devices.find("A100", own).memory == 80e9
    with pytest.raises(InputError, match=r"device 'lab3090': not in the catalogue nor in .*own\.toml"):
        devices.find("lab3090", own)


@pytest.mark.parametrize(
    "change",
    [
        ("memory = 64", "memory = 0"),
        ("memory = 64", "memory = 64e9"),  # bytes, not GB
        ("bandwidth = 1000", "bandwidth = 1e12"),
        ("bf16 = 100", "bf16 = 100e12"),
        ("bf16 = 100", "bf16 = 71_000"),  # more FLOPs per byte than any device has
        ("watts = 300", "watts = 300_000"),
        ("intra_bandwidth = 100\n", ""),
        ('source = "measured here"', 'source = "x"\nmatmull = 0.5'),
        ("bf16 = 100", "bf17 = 100"),
        ("per_node = 4", "per_node = 2.5"),
        ("per_node = 4", "per_node = 4\nscale_up_domain = true"),
        ("[[device]]", ENTRY + "[[device]]"),
        ('source = "measured here"', 'source = "x"\nmatmul = 1.5'),
        ('name = "Z9"\n', ""),
        ("[[device]]", "[[devices]]"),
        ("memory = 64", "memory = "),
        ('source = "measured here"', "source = 3"),
        ('source = "measured here"', 'source = "x"\nprice = 2\nprice_date = 2026-05-20'),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, change: tuple[str, str]) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY.replace(*change), encoding="utf-8")
    with pytest.raises(InputError, match=r"own\.toml"):
        devices.catalogue(own)


# For every key of a file: the other keys that its example needs, and two values.
FILE_KEYS = {
    "name": ("", '"Z9"', '"Z8"'), "flops": ("", "{ bf16 = 100 }", "{ bf16 = 200 }"), "memory": ("", "64", "96"),
    "bandwidth": ("", "1000", "2000"), "intra_bandwidth": ("", "100", "200"), "inter_bandwidth": ("", "10", "20"),
    "per_node": ("", "4", "2"), "watts": ("", "300", "600"), "source": ("", '"a"', '"b"'), "matmul": ("", "0.7", "0.8"),
    "price": ("", "1", "2"), "price_date": ("price = 1", '"2026-01-01"', '"2026-02-01"'),
    "matmul_fp8": ("flops = { bf16 = 100, fp8 = 200 }", "0.5", "0.6"), "scale_up_domain": ("", "4", "8"),
    "torus": ("scale_up_domain = 8", "2", "3"), "framework": ("", '"bessemer"', '"maxtext"'),
    "multiprocessors": ("", "80", "108"), "sustained": ("", "0.8", "0.9"), "storage_bandwidth": ("", "1", "4"),
    "aliases": ("", '["one"]', '["two"]'),
}  # fmt: skip


@pytest.mark.parametrize("key", [each.name for each in fields(devices.DeviceSpec)])  # type: ignore[arg-type]
def test_every_key_of_a_file_is_in_the_plan_or_its_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Plans with two entries that differ in one key differ; aliases and source are in the list of devices."""
    needed, *values = FILE_KEYS[key]
    lines = [
        line
        for line in (ENTRY + "price = 3").splitlines()
        if line.partition(" =")[0] not in (key, needed.partition(" =")[0])
    ]
    found = []
    for number, value in enumerate(values):
        own = tmp_path / f"{number}.toml"
        own.write_text("\n".join([*lines, needed, f"{key} = {value}"]), encoding="utf-8")
        name = next(iter(devices.catalogue(own)))
        words = ["--model", "llama-2-7b", "--tokens", "1B", "--gpus", f"16x{name}", "--tp", "2", "--dp", "8"]
        words += ["--precision", "fp8"] if key == "matmul_fp8" else []
        listed = ["--devices"] if key in ("aliases", "source") else words
        assert run_command(["plan", "--json", "--catalogue", str(own), *listed]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] != found[1]


def test_an_entry_without_a_measured_share_uses_that_of_its_name(tmp_path: Path) -> None:
    own, h100 = tmp_path / "own.toml", devices.find("H100")
    own.write_text(
        ENTRY.replace("Z9", "H100 SXM")
        + ENTRY.replace("Z9", "H100 SXM5 80GB").replace("source", "matmul = 0.5\nsource")
    )
    named, given = (devices.catalogue(own)[name] for name in ("H100 SXM", "H100 SXM5 80GB"))
    assert (named.matmul, named.sustained) == (h100.matmul, h100.sustained)
    assert (given.matmul, given.sustained) == (0.5, 1.0)


def test_domains_are_equal_parts_of_whole_nodes_with_the_links_of_their_axes() -> None:
    gb200, v4, h100 = (devices.find(name) for name in ("GB200", "TPU v4", "H100"))
    assert [ClusterSpec.of(gb200, n).near for n in (64, 128, 144, 2048)] == [64, 64, 72, 64]
    assert ClusterSpec.of(v4, 6144).near == 3072 and ClusterSpec.of(h100, 64).near == 8
    # A pod of 4,096 is 16 x 16 x 16: 16 devices are along one of three axes, 256 in a plane.
    pod = ClusterSpec.of(devices.find("TPU v4"), 4096)
    rates = [pod.intra_rate(size) / 45e9 for size in (2, 16, 256, 4096)]
    assert rates == pytest.approx([2, 2, 4, 6])
    assert ClusterSpec.of(devices.find("GB200"), 72).intra_rate(4) == 900e9


def test_a_replacing_entry_keeps_other_names(tmp_path: Path) -> None:
    shipped, own = devices.find("H100"), tmp_path / "own.toml"
    assert shipped.aliases
    text = ENTRY.replace(re.findall(r'name = "(.*)"', ENTRY)[0], shipped.name) + 'aliases = ["ours"]\n'
    own.write_text(text, encoding="utf-8")
    found = [devices.find(name, own) for name in ("ours", shipped.name, *shipped.aliases)]
    assert all(one.memory != shipped.memory for one in found)
    assert devices.catalogue(own)[shipped.name].aliases == ("ours", *shipped.aliases)


@pytest.mark.parametrize("shape", shapes().values(), ids=shapes())
def test_parameters_of_published_shapes_equal_the_published_counts(shape: Shape) -> None:
    """Compare exactly with a checkpoint's count, up to some biases; elsewhere within the rounding of papers."""
    near = 0.02 if shape.parameters % 1000 == 0 else 1e-4 if shape.name.startswith(("qwen2.5", "falcon-7b")) else 0.0
    assert shape.config.parameters == pytest.approx(shape.parameters, rel=near, abs=0.0)
    assert shape.source and shape.config.heads % shape.config.kv_heads == 0


def test_aliases_name_shapes_with_equal_dimensions(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_shapes_are_found_by_other_spellings() -> None:
    assert find("Llama 3 70B") is find("llama-3-70b") is find("LLAMA3_70b")
    with pytest.raises(InputError, match="llama-3-70b"):
        find("llama-3-71b")
    with pytest.raises(InputError, match="gpt2-1.5b"):
        model("gpt2-xl-1.5b")
    changed = model("opt-175b", vocabulary=1000, sequence_length=4096)
    assert changed.vocabulary == 1000 and changed.sequence_length == changed.max_positions == 4096
    assert model("opt-175b").max_positions == 2050
