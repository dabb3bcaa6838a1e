"""What is given of a layout is kept, by an option, --set, a recipe or --what-if; the rest is chosen."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from bessemer.chosen_layout import with_chosen_layout
from bessemer.cli import run_command
from bessemer.layout import devices
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.search import search
from bessemer.recipe import load
from bessemer.run import RunFolder

LLAMA = ("--model", "llama-2-7b", "--tokens", "1T", "--gpus", "64xH100")
RECIPE = """
[run]
name = "mine"
[model]
layers = 32
width = 4096
heads = 32
vocabulary = 50304
[tokens]
sequence_length = 2048
[train]
global_batch_tokens = 1048576
tokens = 1000000000
[cluster]
device = "H100"
devices = 64
"""


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def job(**layout: Any) -> Job:
    model = ModelConfig(
        vocabulary=32_000, layers=8, width=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=12_288, sequence_length=4096
    )  # fmt: skip
    cluster = ClusterSpec.of(devices.find("H100"), 16)
    return Job(model, Layout(**layout), cluster, 64, "bf16", frameworks.find("bessemer"))


@pytest.mark.parametrize(
    "given",
    [{"tensor": 4}, {"pipeline": 4}, {"zero": 3}, {"schedule": "interleaved"}, {"virtual": 2}, {"micro_batch": 2},
     {"recompute": "full"}, {"shard": 4}, {"replicate": 2, "tensor": 2}],
    ids=str,
)  # fmt: skip
def test_a_search_with_something_given_is_the_search_of_the_rest(given: dict[str, Any]) -> None:
    """Every layout has it, and none of the free search that has it is faster."""
    found, free = search(job(**given), frozenset(given)), search(job())

    def has_it(layout: Layout) -> bool:
        return all(getattr(layout, name) == value for name, value in given.items())

    assert found.ranked and all(has_it(one.job.layout) for one in found.ranked)
    fastest = [one.step.seconds for one in free.ranked if has_it(one.job.layout)]
    assert found.ranked[0].step.seconds <= min(fastest, default=float("inf"))


@pytest.mark.parametrize(
    ("option", "change", "key", "value"),
    [
        (("--zero", "3"), "zero=3", "zero", 3),
        (("--tp", "8"), "tp=8", "tensor", 8),
        (("--cp", "8"), "cp=8", "context", 8),
        (("--set", "parallel.schedule=interleaved"), "schedule=interleaved", "schedule", "interleaved"),
    ],
)
def test_options_and_what_ifs_are_the_same_constraint(
    option: tuple[str, str], change: str, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = planned(capsys, *LLAMA, *option)
    free = planned(capsys, *LLAMA, "--what-if", change)
    assert asked["layout"][key] == value and asked["search"]["given"] == [key]
    assert free["layout"][key] != value and free["cost"] < asked["cost"]
    changed = {name: figure for name, figure in free["what_if"][0].items() if name != "changes"}
    assert changed == asked


def test_a_pipeline_alone_has_its_schedule_and_zero_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    by_hand = planned(capsys, *LLAMA, "--pp", "8", "--zero", "1", "--micro-batch", "2", "--recompute", "none")
    assert planned(capsys, *LLAMA, "--pp", "8")["cost"] <= 1.05 * by_hand["cost"]  # near as fast, and leaves headroom
    assert run_command(["plan", *LLAMA, "--pp", "8"]) == 0
    assert "% of the memory free, with pipeline 8 as given" in capsys.readouterr().out


def test_a_schedule_is_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *LLAMA, "--set", "parallel.virtual=4")["layout"]
    assert found["pipeline"] > 1 and found["virtual"] == 4 and found["schedule"] == "interleaved"
    assert run_command(["plan", *LLAMA, "--set", "parallel.virtual=4"]) == 0
    assert f"pipeline {found['pipeline']}, interleaved with virtual 4, zero" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--zero", "2", "--set", "parallel.schedule=zbv"), "schedule zbv runs with zero 1, not 2"),
        (("--pp", "1", "--set", "parallel.schedule=interleaved"), "schedule interleaved needs a pipeline"),
        (("--dp", "64", "--tp", "8"), "shard 64 x tensor 8 = 512 does not divide 64 devices"),
        (
            ("--dp", "4", "--tp", "2", "--pp", "2", "--cp", "1"),
            "shard 4 x tensor 2 x pipeline 2 = 16 is not all of 64 devices",
        ),
        (("--tp", "3"), "tensor 3 does not divide 64 devices"),
        (("--set", "parallel.replicate=64", "--zero", "3"), "zero 3 divides state over shard, and shard is 1"),
        (("--zero", "0"), "zero=0: give 1"),
    ],
)
def test_what_excludes_each_other_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *LLAMA, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--params", "7B"), "model=llama-2-7b and params=7B set the same thing"),
        (("--price", "2", "--set", "cluster.price=5"), "price=2 and --set cluster.price=5 set the same thing"),
        (("--set", "cluster.device=A100"), "gpus=64xH100 and --set cluster.device=A100"),
        (("--what-if", "tp=2,tensor=4"), "tp=2 and tensor=4 set the same thing"),
        (("--what-if", "tp=2,tp=4"), "tp stands there twice"),
    ],
)
def test_two_values_for_one_thing_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *LLAMA, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "64xH100", "--micro-batch", "3"),
        ("--gpus", "60xH100", "--batch", "4M", "--dp", "60"),
    ],
    ids=str,
)
def test_a_batch_that_a_refusal_names_divides(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--params", "7B", *words)
    assert run_command(["plan", *asked]) == 2
    error = capsys.readouterr().err
    named = re.search(r"a batch of ([\d,]+) tokens|global_batch_tokens may be (\d+)", error)
    assert named is not None and "replicate=1" not in error.split(":")[1]
    tokens = (named[1] or named[2]).replace(",", "")
    left = [word for word in asked if word not in ("--batch", "4M")]
    assert planned(capsys, *left, "--batch", tokens)["batch_tokens"] == int(tokens)


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (("--gpus", "256xH100", "--tp", "1", "--pp", "1"), (512, 768)),
        (("--gpus", "64xH100", "--tp", "2", "--pp", "4", "--cp", "1"), (744, 752)),
    ],
    ids=str,
)
def test_the_nearest_batches_on_both_sides_are_named(
    words: tuple[str, ...], sequences: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "--params", "7B", "--batch", str(750 * 4096), *words]) == 2
    named = re.findall(r"a batch of ([\d,]+) tokens", capsys.readouterr().err)
    assert [int(one.replace(",", "")) for one in named] == [each * 4096 for each in sequences]
    for each in sequences:
        layout = planned(capsys, "--params", "7B", "--batch", str(each * 4096), *words)["layout"]
        assert layout["shard"] * layout["replicate"] > 1


@pytest.mark.parametrize(("params", "gpus"), [("7B", "64xH100"), ("70B", "4096xH100")])
def test_a_micro_batch_that_cannot_fit_is_answered_with_one_that_does(
    params: str, gpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--params", params, "--gpus", gpus)
    assert run_command(["plan", *asked, "--micro-batch", "1000"]) == 2
    error = capsys.readouterr().err
    named = re.search(r"; with micro-batch (\d+) it can be$", error.strip())
    assert named is not None and "a batch of 262,144,000" not in error
    assert planned(capsys, *asked, "--micro-batch", named[1])["fits"]
    assert run_command(["plan", *asked, "--micro-batch", str(2 * int(named[1]))]) == 2, "the largest power of two"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--dp", "64"), "shard 64 does not divide 96 devices"),
        (("--tp", "5"), "tensor 5 does not divide 96 devices"),
        (("--tp", "16"), "model.kv_heads = 8 does not divide over tensor"),
        (("--pp", "5"), "pipeline 5 does not divide 96 devices"),
        (("--cp", "3"), "the sequences do not divide over context x tensor"),
    ],
    ids=str,
)
def test_no_batch_is_named_where_none_would_divide(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """256 sequences divide badly over 96 devices, which is not what is in the way."""
    asked = ("--model", "llama-3-8b", "--tokens", "1T", "--gpus", "96xH100", "--batch", "2097152", *words)
    assert run_command(["plan", *asked]) == 2
    error = capsys.readouterr().err
    assert reason in error and "a batch of 2," not in error


def test_a_recipe_gives_some_of_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    free = planned(capsys, str(path))
    assert free["search"]["given"] == [] and free["layout"]["tensor"] == 1
    for table in ("tensor = 4", "auto = true\ntensor = 4"):
        path.write_text(f"{RECIPE}[parallel]\n{table}\n")
        found = planned(capsys, str(path))
        assert found["layout"]["tensor"] == 4 and found["search"]["given"] == ["tensor"]
        assert planned(capsys, str(path), "--zero", "3")["search"]["given"] == ["tensor", "zero"]
    path.write_text(f"{RECIPE}[parallel]\nshard = 16\ntensor = 4\n")
    assert "search" not in planned(capsys, str(path)), "a layout of its own, as a run has it"


SHARDED = f"{RECIPE.replace('devices = 64', '')}[parallel]\nshard = 16\n"


@pytest.mark.parametrize(
    ("words", "ways", "note"),
    [
        (
            ("--gpus", "64xH100"),
            (1, 64, 1),
            "shard 64 in place of the recipe's 16, so that the layout fills 64 devices",
        ),
        (("--set", "cluster.devices=64"), (1, 64, 1), "shard 64 in place of the recipe's 16"),
        (("--gpus", "64xH100", "--set", "parallel.shard=8"), (8, 8, 1), "replicate 8, so that"),
        (("--gpus", "64xH100", "--set", "parallel.replicate=2"), (2, 32, 1), "shard 32 in place of the recipe's 16"),
        (("--gpus", "64xH100", "--tp", "8"), (1, 8, 8), "shard 8 in place of the recipe's 16"),
        (("--gpus", "64xH100", "--set", "parallel.replicate=4"), (4, 16, 1), None),
        (("--gpus", "32xH100", "--dp", "32"), (1, 32, 1), None),
        (
            ("--set", "parallel.shard=8"),
            (1, 8, 1),
            "8 devices, as many as the layout's ways multiply to; by the recipe's they are 16",
        ),
    ],
    ids=str,
)
def test_devices_scale_what_the_recipe_gives_and_keep_what_the_command_line_gives(
    words: tuple[str, ...], ways: tuple[int, ...], note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout stays one as a run has it, whichever way the devices were given; what was scaled is noted."""
    path = tmp_path / "mine.toml"
    path.write_text(SHARDED)
    found = planned(capsys, str(path), *words)
    assert tuple(found["layout"][way] for way in ("replicate", "shard", "tensor")) == ways and "search" not in found
    assert [note in one for one in found["notes"]] == [True] if note else found["notes"] == []
    assert run_command(["plan", str(path), *words]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows.get("note") == (found["notes"][0] if note else None)
    assert ("replicate 8" in rows["layout"]) == (ways[0] == 8)


@pytest.mark.parametrize(
    "how", [("--batch", "983040"), ("--set", "train.global_batch_tokens=983040")], ids=("batch", "set")
)
def test_a_batch_that_only_the_new_devices_divide(
    how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """480 sequences divide over 96 ranks, and not over the 64 of the recipe; in what-ifs too."""
    path = tmp_path / "mine.toml"
    path.write_text(SHARDED.replace("shard = 16", "shard = 64"))
    found = planned(capsys, str(path), "--gpus", "96xH100", *how)
    assert found["layout"]["shard"] == 96 and found["batch_tokens"] == 983040
    assert run_command(["plan", str(path), "--gpus", "96xH100", *how, "--what-if", "seq=1024"]) == 0
    assert run_command(["plan", str(path), "--gpus", "64xH100", "--what-if", "gpus=96,batch=983040"]) == 0
    assert "gpus=96,batch=983040: shard 96 in place of the recipe's 64" in capsys.readouterr().out
    assert run_command(["plan", str(path), *how]) == 2
    assert "64 parts of the batch (replicate x shard) do not divide the 480 sequences" in capsys.readouterr().err


def test_what_ifs_scale_the_layout_of_the_recipe_and_keep_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "mine.toml", tmp_path / "plan.html"
    path.write_text(SHARDED)

    def changed(*words: str) -> list[tuple[int, int, list[str]]]:
        rows = planned(capsys, str(path), *words)["what_if"]
        return [(row["layout"]["replicate"], row["layout"]["shard"], row["notes"]) for row in rows]

    note = "shard 128 in place of the recipe's 16, so that the layout fills 128 devices"
    words = ("--gpus", "64xH100", "--what-if", "gpus=128", "--what-if", "gpus=128,parallel.shard=8")
    filled = "replicate 16, so that the layout fills 128 devices"
    assert changed(*words) == [(1, 128, [note]), (16, 8, [filled])]
    assert changed("--set", "parallel.shard=8", "--what-if", "gpus=128") == [(16, 8, [filled])]
    assert run_command(["plan", str(path), *words, "--html", str(page)]) == 0
    assert f"gpus=128: {note}" in capsys.readouterr().out
    assert "shard 64 in place of the recipe" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "100xH100", "--set", "parallel.shard=8"), "parallel: shard 8 does not divide 100 devices"),
        (("--gpus", "100xH100", "--tp", "8", "--pp", "2"), "= 16 does not divide 100 devices; take 64 or 128, or"),
        (
            ("--gpus", "64xH100", "--dp", "8"),
            "= 8 processes, but [cluster] has 64 devices (8 nodes); shard = 64 would fill",
        ),
        (
            ("--gpus", "96xH100", "--dp", "8", "--tp", "4", "--batch", "3145728"),
            "but [cluster] has 96 devices (12 nodes); replicate = 3 and shard = 8 would fill them",
        ),
        (
            ("--gpus", "96xH100", "--dp", "8", "--tp", "4"),
            "no shard and replicate that fill them divide both weights and batch",
        ),
    ],
    ids=str,
)
def test_what_the_command_line_gives_and_cannot_be_filled_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(SHARDED)
    assert run_command(["plan", str(path), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "works"),
    [
        (("--tp", "6"), "tensor 1, 2, 4, 8"),
        (("--tp", "16"), "tensor 1, 2, 4, 8"),
        (("--pp", "3"), "pipeline 1, 2, 4, 8, 16, 32"),
        (("--cp", "3"), "context 1, 2, 4, 8, 16, 32, 64"),
        (("--dp", "48"), "shard 1, 2, 4, 8, 16, 32, 64"),
        (("--tp", "8", "--pp", "6"), "pipeline 1, 2, 4, 8"),
        (("--tp", "3", "--pp", "5"), "tensor 4 x pipeline 4"),
    ],
    ids=str,
)
def test_sizes_that_a_refusal_names_can_be(
    words: tuple[str, ...], works: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", "llama-3-8b", "--tokens", "1T", "--gpus", "64xH100")
    assert run_command(["plan", *asked, *words]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f" can be: {works}\n") and "(1)" not in error
    options = {"tensor": "--tp", "pipeline": "--pp", "context": "--cp", "shard": "--dp"}
    named = [one.split(" ", 1) for one in works.split(" x ")]
    for sizes in zip(*(sizes.split(", ") for _, sizes in named), strict=True):
        typed = dict(zip(words[::2], words[1::2], strict=True))
        typed |= {options[axis]: size for (axis, _), size in zip(named, sizes, strict=True)}
        layout = planned(capsys, *asked, *(word for pair in typed.items() for word in pair))["layout"]
        assert [layout[axis] for axis, _ in named] == [int(size) for size in sizes]


def test_ways_that_no_number_of_devices_was_given_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN_LAYOUT)
    assert run_command(["plan", str(path), "--set", "parallel.auto=true"]) == 2
    error = capsys.readouterr().err
    assert "shard 16 x tensor 4 = 64 does not divide 8 devices, one node of H100 SXM, which is planned where" in error
    assert "add --gpus '64xH100 SXM', or cluster.devices = 64" in error
    for words in (("--gpus", "64xH100 SXM"), ("--set", "cluster.devices=64")):
        assert planned(capsys, str(path), "--set", "parallel.auto=true", *words)["layout"]["shard"] == 16


def test_an_option_and_set_leave_the_same_of_a_layout_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    found = [planned(capsys, str(path), *words) for words in (("--tp", "8"), ("--set", "parallel.tensor=8"))]
    assert found[0] == found[1] and found[0]["search"]["given"] == ["tensor"]


def test_auto_keeps_what_the_recipe_gives(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{RECIPE}[parallel]\nauto = true\npipeline = 2\nrestarts = 5\n")
    chosen = with_chosen_layout(load(path), RunFolder(tmp_path / "none")).parallel
    assert not chosen.auto and chosen.pipeline == 2 and chosen.world == 64 and chosen.restarts == 5


def test_a_layout_given_in_part_that_does_not_fit_is_worked_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", "llama-3-70b", "--gpus", "16xH100", "--zero", "1", "--tp", "1", "--pp", "1")
    assert not found["fits"] and found["layout"]["zero"] == 1 and found["search"]["fitting"] == 0


OWN_LAYOUT = f"{RECIPE.replace('devices = 64', '').replace('1048576', '4194304')}[parallel]\nshard = 16\ntensor = 4\n"


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "96xH100"),
        ("--gpus", "96xH100", "--batch", "3145728"),
        ("--gpus", "88xH100", "--set", "parallel.tensor=1"),
        ("--gpus", "72xH100", "--set", "parallel.pipeline=2"),
    ],
    ids=str,
)
def test_what_a_refusal_of_a_layout_names_can_be(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its width of 4,096 divides over powers of two alone where there are tensor ranks: no batch is named there."""
    path = tmp_path / "mine.toml"
    path.write_text(OWN_LAYOUT)
    assert run_command(["plan", str(path), *words]) == 2
    advice = capsys.readouterr().err.partition("with the rest as it is these divide: ")[2].split("; or ")
    assert len(advice) == 3
    for one in advice:
        options = re.search(r"\((--.*)\)$", one.strip())
        assert options is not None
        typed = shlex.split(options[1])
        kept = [
            word
            for pair in zip(words[::2], words[1::2], strict=True)
            if pair[0] not in {*typed} - {"--set"}
            for word in pair
        ]
        ways = {axis: int(size) for axis, size in re.findall(r"(replicate|shard) (\d+)", one)}
        layout = planned(capsys, str(path), *kept, *typed)["layout"]
        assert {axis: layout[axis] for axis in ways} == ways


def test_a_batch_goes_with_the_ways_that_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN_LAYOUT)
    words = ("--set", "parallel.shard=24", "--set", "parallel.tensor=1", "--batch", "3145728")
    assert planned(capsys, str(path), *words)["layout"]["shard"] == 24


def test_a_layout_that_was_not_chosen_is_not_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dp", "32", "--tp", "2", "--pp", "1", "--cp", "1", "--zero", "1", "--micro-batch", "1", "--recompute")
    for mode, more in (("full", "; with replicate 1, shard 32"), ("none", "; it does not leave")):
        headroom = ("--headroom", "60%") if mode == "none" else ()
        assert run_command(["plan", *LLAMA, *words, mode, *headroom]) == 0
        rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert more in rows["layout"] and "chosen" not in rows["layout"] and "of 1 " not in rows["layout"]


def test_the_advice_of_a_product_that_divides_no_devices_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{SHARDED}tensor = 2\npipeline = 2\n")
    assert run_command(["plan", str(path), "--gpus", "50xH100"]) == 2
    error = capsys.readouterr().err
    assert "or auto = true alone in [parallel], and the planner chooses" in error
    numbers = re.search(r"take (\d+) or (\d+),", error)
    assert numbers is not None
    for number in numbers.groups():  # of which the batch has whole parts too
        assert planned(capsys, str(path), "--gpus", f"{number}xH100")["devices"] == int(number)
    path.write_text(SHARDED.replace("shard = 16", "auto = true"))
    assert planned(capsys, str(path), "--gpus", "50xH100", "--batch", "1024000")["fits"]
