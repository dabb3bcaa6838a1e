"""`bessemer plan` for a cluster, as text and as JSON, and `parallel.auto`."""

from math import prod
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.plan import devices
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.workflow.choose_layout import with_chosen_layout
from tests.conftest import recipe_text, write_text
from tests.plan.plans import planned


def test_keys_of_a_plan_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(
        capsys, "--model", "llama3-8b", "--tokens", "1T", "--batch", "4194304", "--gpus", "64xH100", "--price", "2"
    )
    assert found["parameters"] == 8_030_261_248
    assert (found["steps"], found["device_memory_bytes"]) == (238_419, 80_000_000_000)
    layout, devices = found["layout"], found["devices"]
    assert prod(layout[axis] for axis in ("replicate", "shard", "tensor", "pipeline", "context")) == devices == 64
    seconds = found["tokens"] / 4_194_304 * found["step_seconds"]
    assert found["days"] == pytest.approx(seconds / 86_400)
    for figures in (found, found["expected"]):
        assert figures["device_hours"] == pytest.approx(figures["days"] * 24 * 64)
        assert figures["cost"] == pytest.approx(2 * figures["device_hours"])
    parts = found["device_hours_by_part"]
    assert 0 < parts["failures"] == pytest.approx(found["failures"]["lost"] / 3600 * 64)
    assert found["tokens_per_second_per_device"] == pytest.approx(4_194_304 / found["step_seconds"] / 64)
    assert found["mfu"] == pytest.approx(found["model_tflops_per_device"] / 989) and found["hfu"] >= found["mfu"]
    assert sum(found["step_seconds_by_part"].values()) == pytest.approx(found["step_seconds"], rel=1e-6)
    assert found["fits"]


LLAMA = "--model llama-2-7b --tokens 1T --gpus 64xH100"


@pytest.mark.parametrize(
    "words",
    [
        "", "--params 7B", "--gpus 8xH100", "--params 7B --gpus 8xH1O0", "--params 7B --gpus H100", "--params 1B --gpus 100",
        "--params 500T --gpus 8xH100", "--params 7B --tokens 1T --days 3 --gpus 8xH100", "--flops 1 --gpus 8xH100",
        "--days 3 --gpus 8xH100 --set train.steps=9", "--days 3 --money 5 --gpus 8xH100", "--days 3", "--money 1M --gpus 8xMI300X",
        "llama-7b --days 3", "llama-7b --price 2", "llama-2-70b",
        "--devices --gpus 4xH100", "--model list --price 2",
        "--params 1B --gpus 10000000xH100 --tokens 20B", "--model deepseek-v3 --gpus 64xH100 --framework bessemer",
        "--model llama-3-8b --gpus 8xH100 --dp 8 --set model.experts=8", "--params 7B --gpus 8xH100 --set cluster.nodes=2",
        "--params 7B --gpus 8xH100 --set tokenizer.path=x", "--params 7B --gpus 64xH100 --set cluster.inter_bandwidth=5e9",
        *(f"--gpus 8xH100 {budget}" for budget in ("--days -5", "--money -5", "--params 7B --days 1e-9")),
        *(f"--params 7B {given}" for given in (
            "--gpus 0xH100", "--gpus eightxH100", "--gpus 64xH100,128xA100", "--gpus 8", "--gpus 8xH100 --price free",
            "--gpus 8xH100 --price 0", "--gpus 8xH100 --tokens -5", "--gpus 8xH100 --tp 3", "--gpus 8xH100 --framework megatron",
            "--gpus 8xH100 --set cluster.devices_per_node=0", "--gpus 8xA100 --precision fp8",
        )),
        "--model lama3-70b --gpus 8xH100", "--params 70B --gpus 2xH100",
        *(f"{LLAMA} {given}" for given in (
            "--zero 2 --set parallel.schedule=zbv", "--pp 1 --set parallel.schedule=interleaved", "--dp 64 --tp 8", "--tp 3",
            "--set parallel.replicate=64 --zero 3", "--zero 0", "--params 7B", "--price 2 --set cluster.price=5",
            "--set cluster.device=A100",
        )),
    ],
)  # fmt: skip
def test_wrong_arguments_give_a_one_line_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_training_options_also_apply_to_a_plan_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    short = planned(capsys, "llama-7b", "--seq", "1k", "--batch", "256k", "--micro-batch", "2", "--recompute", "full")
    keys = "tokens.sequence_length=1000 train.global_batch_tokens=256000 train.micro_batch=2 train.recompute=full"
    long = planned(capsys, "llama-7b", *(word for key in keys.split() for word in ("--set", key)))
    whole = planned(capsys, "llama-7b")
    for name in ("steps", "flops_per_token", "layout", "tokens"):
        assert short[name] == long[name], name
    assert short["flops_per_token"] < whole["flops_per_token"] and short["layout"]["recompute"] == "full"
    assert run_command(["plan", "llama-7b", "--seq", "1k", "--set", "tokens.sequence_length=512"]) == 2
    assert "tokens.sequence_length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words", "batch"),
    [
        ("shard = 96", ("--batch", "4128768"), 4128768),
        ("shard = 96", ("--set", "train.global_batch_tokens=4128768"), 4128768),
        ("shard = 96", ("--gpus", "64xA100"), 4194304),
        ("sequence_length = 3000", ("--seq", "2048"), 4194304),
        ("micro_batch = 5", ("--micro-batch", "4"), 4194304),
        ("heads = 33", ("--set", "model.heads=32"), 4194304),
    ],
)
def test_the_command_line_can_correct_a_recipe(
    changed: str, words: tuple[str, ...], batch: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with keys that do not fit together is an error, unless overrides on the command line correct it."""
    rows = {
        "model": ("layers = 8", "width = 1024", "heads = 32"), "tokenizer": ("vocabulary = 32000",),
        "tokens": ("sequence_length = 2048",), "train": ("tokens = 1e11", "global_batch_tokens = 4194304", "micro_batch = 1"),
        "parallel": ("shard = 64",), "cluster": ('device = "A100"', "devices = 64"),
    }  # fmt: skip
    key, path = changed.partition(" ")[0], tmp_path / "mine.toml"
    text = "".join(
        f"[{table}]\n" + "".join(f"{changed if line.startswith(key + ' ') else line}\n" for line in lines)
        for table, lines in rows.items()
    ).replace("1e11", "100_000_000_000")
    path.write_text(text.replace("devices = 64", "devices = 96") if changed == "shard = 96" else text)
    assert run_command(["plan", str(path)]) == 2
    capsys.readouterr()
    assert planned(capsys, str(path), *words)["batch_tokens"] == batch


def test_a_recipe_with_dimensions_needs_no_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my run.toml"
    path.write_text(
        "[model]\nlayers = 32\nwidth = 4096\nheads = 32\nvocabulary = 50257\n[tokens]\nsequence_length = 2048\n"
        '[train]\nglobal_batch_tokens = 1048576\nprecision = "bf16"\ntokens = 1000000000\n'
        '[parallel]\nshard = 16\nzero = 2\n[cluster]\ndevice = "A100 80GB"\n'
    )
    found = planned(capsys, str(path))
    assert found["devices"] == 16 and found["layout"]["zero"] == 2 and found["layout"]["shard"] == 16
    path.write_text(path.read_text().replace("shard = 16", "shard = 16\n") + "nodes = 4\n")
    assert run_command(["plan", str(path)]) == 0  # 4 nodes with 4 devices each
    path.write_text(path.read_text() + "devices_per_node = 8\n")
    capsys.readouterr()
    assert run_command(["plan", str(path)]) == 2
    assert "16 devices and the cluster has 32" in capsys.readouterr().err


def test_auto_becomes_a_layout_before_anything_starts(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    path = tmp_path / "auto.toml"
    path.write_text(recipe_text(tmp_path) + "\n[parallel]\nauto = true\n")
    here = load(path)
    assert with_chosen_layout(here, RunDirectory(tmp_path / "none")).parallel.world == 1  # a CPU is one process
    planned = load(
        path, ("cluster.device=H100", "cluster.nodes=2", "train.device=auto", "train.global_batch_tokens=4096")
    )
    chosen = with_chosen_layout(planned, RunDirectory(tmp_path / "none"))
    assert not chosen.parallel.auto and chosen.parallel.world == 16
    assert with_chosen_layout(planned, RunDirectory(tmp_path / "none")) == chosen


@pytest.mark.parametrize(("gpus", "params", "used"), [("7xH100", "1B", 7), ("1009xH100", "13B", 992)])
def test_unusual_numbers_of_devices_can_be_planned(
    gpus: str, params: str, used: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--params", params, "--gpus", gpus)
    layout, batch = found["layout"], found["batch_tokens"] // found["sequence_length"]
    assert found["fits"] and found["devices"] == used
    assert batch % (layout["replicate"] * layout["shard"] * layout["micro_batch"]) == 0
    assert any("is proposed" in note for note in found["notes"])
    assert found["batch"]["batch"] <= max(found["batch"]["critical"].values())
    spares = [note for note in found["notes"] if "992 of the 1,009 devices" in note]
    assert len(spares) == (used == 992)


@pytest.mark.parametrize("model", ["--params 7B", "--set model.layers=2 --set model.width=256 --set model.heads=4"])
def test_the_tokenizer_sets_the_vocabulary(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{model} --gpus 8xH100 --dp 8 --set".split()
    by_tokenizer, by_model = (planned(capsys, *words, f"{key}.vocabulary=9000") for key in ("tokenizer", "model"))
    assert by_tokenizer["parameters"] == by_model["parameters"]


def test_a_given_batch_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--params", "7B", "--gpus", "1000xH100", "--batch", "4M")
    assert (found["batch_tokens"], found["devices"]) == (1024 * 4096, 960)
    assert "960 of the 1,000 devices" in found["notes"][0]
    assert planned(capsys, "--params", "7B", "--gpus", "1000xH100", "--batch", "4096000")["notes"] == []


def test_a_device_without_bf16_is_planned_in_fp16_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--params", "1B", "--gpus", "8xV100")
    assert found["precision"] == "fp16" and "V100 SXM 32GB has no bf16" in found["notes"][0]
    wide = planned(capsys, "--params", "1B", "--gpus", "8xV100", "--precision", "fp32")
    assert wide["step_seconds"] > 3 * found["step_seconds"]
    path = tmp_path / "mine.toml"
    path.write_text('[model]\ndepth = 12\nvocabulary = 32000\n[cluster]\ndevice = "V100"\ndevices = 8\n')
    of_recipe = planned(capsys, str(path))
    # As a run with this recipe trains.
    assert of_recipe["precision"] == "fp32" and "fp32 is planned" in of_recipe["notes"][0]


def test_the_plan_of_palm_on_two_pods_matches_its_published_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    """Chowdhery et al. 2022, table 3 and section 4.1: 46.2% MFU on 6,144 TPU v4, two pods of 3,072, with 2,048 sequences per
    step.
    """
    palm = ("--model", "palm-540b", "--tokens", "780B", "--batch", "4194304", "--gpus", "6144xTPU v4")
    found = planned(capsys, *palm)
    assert found["fits"] and found["framework"] == "maxtext" and "does not train on TPU v4" in found["notes"][0]
    assert found["mfu"] == pytest.approx(0.462, rel=0.1) and found["layout"]["tensor"] > 1
    assert run_command(["plan", *palm, "--framework", "bessemer"]) == 2


@pytest.mark.parametrize(
    ("device", "words", "price", "is_noted"),
    [("H100", (), 2.0, False), ("A100", (), None, True), ("A100", ("--price", "3"), 3.0, False)],
)
def test_the_price_of_a_recipe_is_that_of_its_device(
    device: str, words: tuple[str, ...], price: float | None, is_noted: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "mine.toml"
    path.write_text('[model]\ndepth = 12\nvocabulary = 32000\n[cluster]\ndevice = "H100"\ndevices = 8\nprice = 2\n')
    found = planned(capsys, str(path), "--gpus", f"16x{device}", *words)
    assert found["price"]["dollars_per_device_hour"] == (price or devices.find(device).price)
    assert any("price" in note for note in found["notes"]) == is_noted


def test_a_batch_of_more_than_all_tokens_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--params", "1B", "--gpus", "8xH100", "--tokens", "10B", "--batch")
    assert run_command(["plan", *words, "20B"]) == 2
    assert "train.tokens = 10,000,000,000" in capsys.readouterr().err
    assert planned(capsys, "--params", "1B", "--gpus", "8xH100", "--tokens", "4M", "--batch", "4M")["steps"] == 1


def test_flops_alone_are_planned_by_scaling_laws(capsys: pytest.CaptureFixture[str]) -> None:
    """Hoffmann et al. 2022, table 3: 6e23 FLOPs are close to those of 67B parameters (5.76e23: 67B and 1.5T, approach 1)."""
    found = planned(capsys, "--flops", "5.76e23")["optimal"]
    assert found["approach_1"]["parameters"] == pytest.approx(67e9, rel=0.02)
    assert found["approach_1"]["tokens"] == pytest.approx(1.5e12, rel=0.06)
    assert all(6 * one["parameters"] * one["tokens"] == pytest.approx(5.76e23) for one in found.values())
    assert run_command(["plan", "--flops", "5.76e23", "--seq", "8192"]) == 2


CLUSTER = ("--model", "llama3-8b", "--tokens", "1T", "--gpus", "16xH100")
KEYS = {
    "parameters", "flops_per_token", "total_flops", "step_seconds", "tokens_per_second_per_device", "model_tflops_per_device", "mfu",
    "hfu", "bubble", "days", "device_hours", "cost", "fits",
}  # fmt: skip
LAYOUT = {"replicate", "shard", "tensor", "pipeline", "virtual", "context", "micro_batch", "recompute"}
MEMORY = {"weights", "gradients", "optimizer", "activations", "logits", "buffers", "total"}


def test_a_missing_folder_is_reported_before_anything_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(*arguments: Any, **more: Any) -> None:
        raise AssertionError("counted before it looked where to write")

    monkeypatch.setattr("bessemer.plan.plan_result.make_plan", counted)
    assert run_command(["plan", *CLUSTER, "--html", str(tmp_path / "none" / "plan.html")]) == 2
    told = capsys.readouterr()
    assert "--html" in told.err and "none" in told.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [CLUSTER, ("llama-7b",)])
def test_every_plan_has_the_same_keys(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *arguments)
    assert set(found) >= KEYS
    assert set(found["layout"]) >= LAYOUT
    assert set(found["memory_bytes_per_device"]) >= MEMORY
    assert set(found.get("memory_bytes", MEMORY)) >= MEMORY, "the names of parts are the same"
    assert set(found["chinchilla"]) >= {"optimal_tokens", "ratio", "loss"}
    assert isinstance(found["parameters"], int)
    parts = {name: value for name, value in found["memory_bytes_per_device"].items() if name != "total"}
    assert sum(parts.values()) == found["memory_bytes_per_device"]["total"]
    assert found["flops_per_token"] * found["tokens"] == pytest.approx(found["total_flops"])
    assert found["device_hours"] == pytest.approx(24 * found["days"] * found.get("devices", 1))
    assert found["chinchilla"]["ratio"] == pytest.approx(found["tokens"] / (20 * found["parameters"]))
    assert found["mfu"] <= found["hfu"] <= 1


def test_the_bubble_in_a_plan_of_this_machine_equals_that_of_its_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    model = {"layers": 4, "width": 64, "heads": 2, "kv_heads": 2, "mlp_width": 128}
    more = "train.micro_batch=1 parallel.pipeline=4 tokens.sequence_length=512 train.global_batch_tokens=4096"
    keys = (*(f"model.{key}={value}" for key, value in model.items()), *more.split())
    options = [item for key in keys for item in ("--set", key)]
    found = planned(capsys, "llama-7b", *options)
    assert found["layout"]["micro_batches"] == 8
    assert found["bubble"] == pytest.approx(3 / (8 + 3))  # (p - 1) / (m + p - 1)


def test_a_plan_of_this_machine_is_written_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    page = tmp_path / "plan.html"
    assert run_command(["plan", "llama-7b", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert all(f'<section id="{section}">' in html for section in ("facts", "memory"))
