"""The inverse question: the model or tokens that a budget of FLOPs, days or money allows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan import budget, plan_request, plan_result
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.goal import goal_of
from bessemer.plan.plan_request import PlanRequest, with_changes
from bessemer.plan.search import search
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory
from bessemer.workflow.choose_layout import with_chosen_layout
from tests.plan.plans import job_of, planned


def share(found: dict[str, Any]) -> float:
    spent: float = found["budget"]["spent"] / found["budget"]["amount"]
    return spent


@pytest.mark.parametrize(("good", "bad"), [(1.0, 2.0), (300.0, 500.0), (1e-6, 1e-5)])
def test_the_bisection_ends_at_the_last_value_within_the_budget(good: float, bad: float) -> None:
    up = budget.bisect(good, bad, lambda value: value <= 137.0)
    assert up is not None and 137 * (1 - 1.1 * budget.PRECISION) <= up <= 137
    down = budget.bisect(bad, good, lambda value: value >= 137.0)
    assert down is not None and 137 <= down <= 137 * (1 + 1.1 * budget.PRECISION)
    assert budget.bisect(good, bad, lambda value: False) is None


@pytest.mark.parametrize("words", [("--flops", "6e20"), ("--days", "14")], ids=str)
def test_a_budget_proposes_a_model_and_its_tokens(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *words, "--gpus", "1xH100")
    assert found["tokens"] == pytest.approx(20 * found["parameters"], rel=0.06)  # shapes come in steps
    assert found["fits"] and found["budget"]["is_kept"] and 0.97 <= share(found) <= 1
    expected = {"--flops": found["total_flops"], "--days": found["expected"]["days"]}
    assert found["budget"]["spent"] == pytest.approx(expected[words[0]])


def test_a_model_that_does_not_fit_is_replaced_by_a_smaller_one_with_more_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """400 days of one A100 allow 6B parameters, whose state alone is 96 GB."""
    found = planned(capsys, "--days", "400", "--gpus", "1xA100")
    assert found["fits"] and 0.97 <= share(found) <= 1 and found["chinchilla"]["ratio"] > 1.5


def test_a_budget_with_tokens_proposes_the_model_that_spends_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--days", "14", "--gpus", "1xA100", "--tokens", "6B")
    assert found["tokens"] == pytest.approx(6e9, rel=1e-3) and 0.95 <= share(found) <= 1


@pytest.mark.parametrize("of", ["params", "recipe"])
def test_a_budget_of_a_model_pays_for_tokens(of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("[model]\ndepth = 12\nvocabulary = 32000\n[train]\ntokens = 1_000_000_000\n")
    model = ("--params", "1B") if of == "params" else (str(tmp_path / "mine.toml"),)
    found = planned(capsys, *model, "--money", "2k", "--gpus", "2xH100")
    assert 0.98 <= share(found) <= 1 and found["tokens"] == found["steps"] * found["batch_tokens"]


def test_days_without_a_number_of_devices_determine_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--params", "3B", "--tokens", "60B")
    found = planned(capsys, *asked, "--gpus", "H100", "--days", "3")
    assert found["devices"] % 8 == 0 and found["expected"]["days"] <= 3
    fewer = planned(capsys, *asked, "--gpus", f"{found['devices'] - 8}xH100")
    assert fewer["expected"]["days"] > 3


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


def job(**layout: Any) -> Job:
    model = ModelConfig(
        vocabulary=32_000, layers=8, width=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=12_288, sequence_length=4096
    )  # fmt: skip
    return replace(job_of(model, Layout(shard=16), 64), layout=Layout(**layout))


@pytest.mark.parametrize(
    "given",
    [{"tensor": 4}, {"pipeline": 4}, {"zero": 3}, {"schedule": "interleaved"}, {"virtual": 2}, {"micro_batch": 2},
     {"recompute": "full"}, {"shard": 4}, {"replicate": 2, "tensor": 2}],
    ids=str,
)  # fmt: skip
def test_a_search_with_given_values_equals_the_restricted_free_search(given: dict[str, Any]) -> None:
    """Every layout has the given values, and no faster layout of the free search has them."""
    found, free = search(job(**given), frozenset(given)), search(job())

    def has_it(layout: Layout) -> bool:
        return all(getattr(layout, name) == value for name, value in given.items())

    assert found.ranked and all(has_it(one.job.layout) for one in found.ranked)
    fastest = [one.step.seconds for one in free.ranked if has_it(one.job.layout)]
    assert found.ranked[0].step.seconds <= min(fastest, default=float("inf"))


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        (("--zero", "3"), "zero", 3), (("--tp", "8"), "tensor", 8), (("--cp", "8"), "context", 8),
        (("--set", "parallel.schedule=interleaved"), "schedule", "interleaved"),
    ],
)  # fmt: skip
def test_a_given_part_of_a_layout_is_kept(
    option: tuple[str, str], key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, free = planned(capsys, *LLAMA, *option), planned(capsys, *LLAMA)
    assert kept["layout"][key] == value and kept["search"]["given"] == [key]
    assert free["layout"][key] != value and free["cost"] < kept["cost"]


def test_a_schedule_needs_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *LLAMA, "--set", "parallel.virtual=4")["layout"]
    assert found["pipeline"] > 1 and found["virtual"] == 4 and found["schedule"] == "interleaved"


def test_a_recipe_may_give_a_part_of_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_batch_must_divide_over_the_new_devices_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """480 sequences divide over 96 ranks, and not over the 64 of the recipe."""
    path = tmp_path / "mine.toml"
    path.write_text(SHARDED.replace("shard = 16", "shard = 64"))
    how = ("--batch", "983040")
    found = planned(capsys, str(path), "--gpus", "96xH100", *how)
    assert found["devices"] == 96 and found["batch_tokens"] == 983040
    assert run_command(["plan", str(path), *how]) == 2
    assert "64 parts of the batch (replicate x shard) do not divide the 480 sequences" in capsys.readouterr().err


def test_auto_keeps_what_the_recipe_gives(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"{RECIPE}[parallel]\nauto = true\npipeline = 2\nrestarts = 5\n")
    chosen = with_chosen_layout(load(path), RunDirectory(tmp_path / "none")).parallel
    assert not chosen.auto and chosen.pipeline == 2 and chosen.world == 64 and chosen.restarts == 5


def test_a_partial_layout_that_does_not_fit_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3-70b", "--gpus", "16xH100", "--zero", "1", "--tp", "1", "--pp", "1")
    assert run_command(["plan", "--json", *words]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["layout"]["zero"] == 1 and found["search"]["fitting"] == 0


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (("--gpus", "64xH100"), {}),
        (("--set", "cluster.devices=64"), {}),
        (("--gpus", "64xH100", "--set", "parallel.shard=8"), {"shard": 8}),
        (("--gpus", "64xH100", "--tp", "8"), {"tensor": 8}),
        (("--gpus", "64xH100", "--set", "parallel.replicate=4"), {"replicate": 4, "shard": 16}),
        (("--set", "parallel.shard=8"), {"shard": 8}),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fill_the_given_devices_is_replaced(
    words: tuple[str, ...], ways: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values from the command line are kept; a layout that fills the devices is that of a run."""
    path = tmp_path / "mine.toml"
    path.write_text(SHARDED)
    found = planned(capsys, str(path), *words)
    assert ways.items() <= found["layout"].items() and found["fits"]
    assert ("search" in found) == (found["devices"] == 64 and "parallel.replicate=4" not in words)


def goal(asked: PlanRequest):  # type: ignore[no-untyped-def]
    return goal_of(asked.recipe, asked.recipe.model.vocabulary or 32_768, model=asked.model)


def test_a_published_shape_on_a_cluster() -> None:
    found = goal(
        plan_request.from_options({"model": "llama-3-70b", "tokens": "2T", "gpus": "2048xH100", "tp": "8", "pp": "4"})
    )
    assert found.job.model.parameters == 70_553_706_496  # of the published checkpoint
    assert (found.job.layout.tensor, found.job.layout.pipeline) == (8, 4)
    assert found.fixed == {"tensor", "pipeline"} and found.chooses_layout, "what is left out is chosen"
    assert found.job.cluster.device.name == "H100 SXM" and found.job.cluster.devices == 2048
    assert abs(found.tokens - 2e12) < found.job.tokens


def test_changes_keep_other_values() -> None:
    asked = plan_request.from_options({"params": "7B", "gpus": "64xH100", "tp": "2", "batch": "2M"})
    more = with_changes(asked, {"gpus": "128", "precision": "fp8"})
    assert more.recipe.cluster.devices == 128 and more.recipe.parallel.given_layout == {"tensor"}
    assert more.recipe.parallel.tensor == 2 and plan_result.make_plan(goal(more)).job.layout.tensor == 2
    assert more.recipe.train.precision == "fp8" and more.recipe.train.global_batch_tokens == 2_097_152
    assert with_changes(asked, {"train.micro_batch": "2"}).recipe.train.micro_batch == 2
    assert with_changes(asked, {"seq": "8192"}).model.sequence_length == 8192  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "tokens"), [("4M", 1 << 22), ("16M", 1 << 24), ("6M", 1465 * 4096), ("8192", 8192), ("1k", 4096)]
)
def test_a_rounded_batch_is_whole_sequences(text: str, tokens: int) -> None:
    assert (
        plan_request.from_options({"params": "1B", "gpus": "8xH100", "batch": text}).recipe.train.global_batch_tokens
        == tokens
    )


def test_fp8_with_a_scale_for_each_row_is_planned_as_such() -> None:
    """torchtitan's commit 7a04053 and torchao's training benchmarks: 0.88 to 0.89 of the tokens/s of a scale per tensor, for
    Llama 3 8B on H100s.
    """
    asked = plan_request.from_options(
        {"model": "llama-3-8b", "gpus": "8xH100", "dp": "8", "zero": "3", "micro_batch": "1"}
    )
    tensor, row = (
        plan_result.make_plan(goal(with_changes(asked, {"precision": name}))) for name in ("fp8", "fp8-rowwise")
    )
    assert row.step.tokens_per_second / tensor.step.tokens_per_second == pytest.approx(0.886, abs=0.02)
    assert row.step.matmuls > tensor.step.matmuls and row.step.elementwise > tensor.step.elementwise
    assert (tensor.precision, row.precision) == ("fp8", "fp8-rowwise")
    assert plan_result.to_dict(row)["precision"] == "fp8-rowwise"


SEVEN = {"model": "llama-2-7b", "gpus": "8xH100", "tokens": "1B", "dp": "8", "zero": "3", "micro_batch": "1"}


@pytest.mark.parametrize(
    ("setting", "bytes_a_parameter"), [("train.ema=0.999", 4.0), ("train.optimizer.kind=lion", -4.0)]
)
def test_the_memory_of_a_plan_includes_all_state_of_a_run(setting: str, bytes_a_parameter: float) -> None:
    plain, other = (
        plan_result.make_plan(goal(plan_request.from_options(SEVEN, overrides))) for overrides in ((), (setting,))
    )
    share = plain.job.model.parameters / 8
    assert other.memory.optimizer - plain.memory.optimizer == pytest.approx(bytes_a_parameter * share, rel=0.01)
    assert other.memory.total - plain.memory.total == other.memory.optimizer - plain.memory.optimizer
    assert other.save.bytes - plain.save.bytes == pytest.approx(8 * share * bytes_a_parameter, rel=0.01)
    noted = [] if "ema" in setting else [setting.replace("=", " = ")]
    assert [note.partition(":")[0] for note in other.goal.unplanned] == noted
    elsewhere = plan_result.make_plan(goal(plan_request.from_options({**SEVEN, "framework": "fsdp"}, (setting,))))
    assert "the plan is of fsdp" in elsewhere.goal.unplanned[0]


def test_options_of_the_block_change_a_known_shape() -> None:
    asked = {"model": "llama-3-8b", "gpus": "64xH100", "tokens": "1B", "seq": "32768", "dp": "64"}
    whole = goal(plan_request.from_options(asked)).job.model
    for seen in (
        plan_request.from_options(asked, ("model.window=1024",)),
        with_changes(plan_request.from_options(asked), {"model.window": "1024"}),
    ):
        windowed = goal(seen).job.model
        assert windowed.window == 1024 and windowed.parameters == whole.parameters
        assert flops_per_token(windowed) < 0.7 * flops_per_token(whole)
        assert goal(with_changes(seen, {"gpus": "32"})).job.model.window == 1024
    tied = goal(plan_request.from_options(asked, ("model.tie_embeddings=true",))).job.model
    assert tied.parameters == whole.parameters - whole.vocabulary * whole.width
    for overrides in (("model.family=gpt2",), ("model.window=1024", "model.family=gpt2")):
        with pytest.raises(InputError, match=r"^model.family"):
            plan_request.from_options(asked, overrides)
