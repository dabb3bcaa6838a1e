"""Every key of the recipe changes its plan, changes nothing that a plan counts, is rejected, or is listed as unplanned."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from bessemer.cli import run_command
from bessemer.cli.commands import COMMANDS
from bessemer.plan import plan_result, unplanned
from bessemer.plan.plan_request import PlanRequest
from bessemer.plan.tables import plan_rows
from bessemer.recipe import parse
from bessemer.recipe.keys import keys, section_of
from bessemer.report.plan_page import render
from bessemer.workflow.choose_layout import planned
from tests.conftest import recipe_text, write_text

RECIPE = """
[run]
name = "mine"
[model]
width = 1024
heads = 8
vocabulary = 32000
[tokens]
sequence_length = 2048
[train]
global_batch_tokens = 524288
[cluster]
device = "H100"
"""
DEFAULTS = {"model.layers": "8", "train.tokens": "1000000000", "parallel.shard": "4", "parallel.tensor": "2"}
CATALOGUE = Path(__file__).parents[2] / "src" / "bessemer" / "plan" / "devices.toml"
ONES = json.dumps([1.0] * 64)
MASKED = {"model.family": '"modernbert"', "train.objective": '"masked"'}
CLASSES = {"train.objective": '"classify"', "corpus.sources": '[{ name = "own", paths = ["x"], label = "a" }]'}
AUTO = {"parallel.auto": "true", "parallel.shard": "", "parallel.tensor": ""}
NODES = {"cluster.devices_per_node": "4"}
RAMP = {"train.batch_ramp.start_tokens": "65536", "train.batch_ramp.steps": "100"}
EXPERTS, WINDOW = {"model.experts": "8"}, {"model.window": "256", "model.window_rope_theta": "1000.0"}
# Keys that the example of a key needs, the same on both sides (without a value: removed), and its value in TOML.
EXAMPLES: dict[str, tuple[dict[str, str], str]] = {
    "tokens.chat_template": ({"corpus.sources": '[{ name = "own", paths = ["x"], format = "chat" }]', "tokens.packing": '"document"',
                              "tokens.document_mask": "true"}, '"chatml"'),
    "tokens.sequence_length": ({}, "1024"),
    "model.depth": ({"model.layers": "", "model.width": "", "model.heads": "", "model.depth": "8"}, "4"),
    "model.layers": ({"model.layers": "8"}, "16"),
    "model.width": ({}, "2048"),
    "model.head_dim": ({}, "64"),
    "model.vocabulary": ({}, "16000"),
    "model.activation": ({}, '"gelu_quick"'),
    "model.global_every": (WINDOW, "2"),
    "model.global_last": (WINDOW | {"model.global_every": "3"}, "true"),
    "model.global_layers": (WINDOW, "[0, 1]"),
    "model.unrotated_layers": ({}, "[1]"),
    "model.experts_per_token": (EXPERTS, "4"),
    "model.expert_width": (EXPERTS, "512"),
    "model.shared_experts": (EXPERTS, "1"),
    "model.dense_layers": (EXPERTS, "1"),
    "model.router": (EXPERTS, '"sigmoid"'),
    "model.router_normalised": (EXPERTS, "false"),
    "model.router_scale": (EXPERTS, "0.5"),
    "model.router_z_loss": (EXPERTS, "0.5"),
    "model.balance": (EXPERTS, '"none"'),
    "model.balance_loss": (EXPERTS, "0.5"),
    "model.balance_rate": (EXPERTS | {"model.balance": '"both"'}, "0.5"),
    "train.objective": (CLASSES | {"train.objective": '"causal"'}, '"classify"'),
    "train.masking.share": (MASKED, "0.3"),
    "train.masking.mode": (MASKED, '"all"'),
    "train.masking.whole_words": (MASKED, "true"),
    "train.steps": ({"train.tokens": ""}, "500"),
    "train.minutes": ({"train.tokens": "", "train.steps": "500"}, "30.0"),
    "train.tokens": ({}, "2000000000"),
    "train.global_batch_tokens": ({}, "1048576"),
    "model.rope_theta": ({}, "20000.0"),
    "model.window_rope_theta": (WINDOW, "20000.0"),
    "train.start_step": ({"train.start": '"elsewhere"'}, "2"),
    "train.optimizer.betas": ({}, "[0.8, 0.9]"),
    "train.schedule.kind": ({}, '"linear"'),
    "train.optimizer.kind": ({}, '"muon"'),
    "train.batch_ramp.start_tokens": (RAMP, "131072"),
    "train.batch_ramp.steps": (RAMP, "50"),
    "train.dropout.classifier": (CLASSES, "0.1"),
    "train.memory_budget": ({"train.recompute": '"budget"'}, "0.5"),
    "train.device": ({}, '"cpu"'),
    "train.compile": ({}, '"off"'),
    "cluster.pod": ({}, '{ hostNetwork = true }'),
    "parallel.auto": ({}, "true"),
    "parallel.schedule": ({"parallel.pipeline": "2"}, '"interleaved"'),
    "parallel.virtual": ({"parallel.pipeline": "2", "parallel.schedule": '"interleaved"'}, "4"),
    "parallel.expert": ({"model.experts": "4"}, "2"),
    "parallel.shard": ({}, "8"),
    "parallel.tensor": ({}, "4"),
    "cluster.device": ({}, '"A100"'),
    "cluster.devices": (AUTO | {"cluster.devices": "8"}, "16"),
    "cluster.inter_bandwidth": (NODES, "0.5"),
    "cluster.framework": ({}, '"fsdp"'),
    "cluster.nodes": (AUTO | {"cluster.nodes": "1"}, "2"),
    "cluster.min_nodes": ({"cluster.nodes": "4", "cluster.devices_per_node": "2"}, "2"),
    "cluster.sbatch": ({}, '["--partition=gpu"]'),
    "guard.hang_seconds": ({}, "60.0"),
    "checkpoint.asynchronous": ({}, "false"),
    "checkpoint.mirror": ({}, '"/elsewhere"'),
    "report.webhook": ({}, '"ALERTS_URL"'),
    "evaluate.tasks": ({}, '["arc.yaml"]'),
}  # fmt: skip
for scaling in ("model.rope_scaling", "model.window_rope_scaling"):
    yarn, longrope = (WINDOW | {f"{scaling}.kind": f'"{k}"', f"{scaling}.factor": "4.0"} for k in ("yarn", "longrope"))
    longrope |= {f"{scaling}.{name}_factor": ONES for name in ("short", "long")}
    llama3 = yarn | {f"{scaling}.kind": '"llama3"'}
    EXAMPLES |= {f"{scaling}.{name}": (yarn, value) for name, value in (
        ("kind", '"linear"'), ("factor", "8.0"), ("original_length", "4096"), ("beta_fast", "16.0"), ("beta_slow", "2.0"),
        ("truncate", "false"), ("attention_factor", "0.5"), ("mscale", "0.5"), ("mscale_all_dim", "0.5"),
    )}  # fmt: skip
    EXAMPLES |= {f"{scaling}.{name}_frequency": (llama3, value) for name, value in (("low", "0.5"), ("high", "8.0"))}
    EXAMPLES |= {
        f"{scaling}.{name}_factor": (longrope, ONES.replace("1.0", "2.0", 1).replace("1.0", "1.5"))
        for name in ("short", "long")
    }
# Keys that need a file: its contents are planned, or the file is rejected.
FILES = {"model.from", "tokenizer.path", "cluster.catalogue", "train.objective_settings"}
FILES |= {"train.schedule.settings", "train.optimizer.settings"}
PARTLY = {"train.objective", "train.batch_ramp"}  # classes and the tokens of a growing batch are planned
ALTERNATIVES = {"train.batch_ramp.tokens"}  # either it or its sibling


def tables(overrides: dict[str, str]) -> plan_result.PlanResult:
    """Return the recipe's plan with these values."""
    settings = {key: value for key, value in (DEFAULTS | overrides).items() if value}
    text = RECIPE
    for name in ("width", "heads"):
        if overrides.get(f"model.{name}") == "":
            text = "\n".join(line for line in text.splitlines() if not line.startswith(f"{name} ="))
    return planned(PlanRequest(parse(text, "plan", [f"{key}={value}" for key, value in settings.items()])))


@cache
def figures(settings: tuple[tuple[str, str], ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a plan, and the keys it lists as unplanned."""
    found = plan_result.to_dict(tables(dict(settings)))
    named = found.pop("not_in_the_plan")
    return {name: value for name, value in found.items() if name != "notes"}, named


def example(info: FieldInfo) -> str | None:
    """Return a non-default value as TOML, by type; None if there is none."""

    def of(annotation: Any) -> Any:
        if get_origin(annotation) is Literal:
            return next((value for value in get_args(annotation) if value != info.default), None)
        if annotation is bool:
            return not info.default
        if annotation is int:
            return 2 * info.default if isinstance(info.default, int) and info.default else 2
        if annotation is float:
            return info.default / 2 if isinstance(info.default, float) and info.default else 0.5
        if annotation is str:
            return "other"
        if get_origin(annotation) is tuple:
            return [of(get_args(annotation)[0])]
        return next((value for part in get_args(annotation) if (value := of(part)) is not None), None)

    value = of(info.annotation)
    return None if value is None else json.dumps(value)


LEAVES = [key for key, info in keys().items() if section_of(info.annotation) is None]
IN_ARRAYS = tuple(f"{key}." for key, info in keys().items() if get_origin(info.annotation) is tuple)
UNTRIED = ("corpus.", "tokenizer.", *IN_ARRAYS)
TRIED = [key for key in LEAVES if not key.startswith(UNTRIED) and key not in FILES | ALTERNATIVES]


def test_the_table_has_exactly_the_keys_of_the_recipe() -> None:
    table = unplanned.effects()
    assert [key for key in LEAVES if unplanned.entry_of(key) is None] == []
    of_bessemer = set(table["of_bessemer"]) - set(table["unplanned"])
    listed = [*table["planned"], *table["apart"], *of_bessemer, *table["unplanned"]]
    assert len(listed) == len(set(listed)) and set(listed) <= set(keys())
    assert set(table["of_catalogue"]) <= set(table["planned"])
    assert {unplanned.entry_of(key) for key in LEAVES} == set(listed), "an entry that no key needs"


@pytest.mark.parametrize("key", TRIED)
def test_a_key_affects_a_plan_as_the_table_says(key: str) -> None:
    needed, value = EXAMPLES.get(key, ({}, example(keys()[key])))
    assert value is not None, "give it an example"
    before, named_before = figures(tuple(sorted(needed.items())))
    after, named = figures(tuple(sorted((needed | {key: value}).items())))
    table, entry = unplanned.effects(), unplanned.entry_of(key)
    own = [row for row in named if row.startswith((f"{key} = ", f"{entry}: "))]
    if entry in table["planned"]:
        assert after != before and named == named_before
    elif entry in table["apart"]:
        assert after == before and named == named_before
    else:
        assert own or (entry in table["of_bessemer"] and after != before)
        assert after == before or entry in {*table["of_bessemer"], *PARTLY}
        elsewhere = figures(tuple(sorted((needed | {"cluster.framework": '"megatron-core"', key: value}).items())))
        assert any(row.startswith((f"{key} = ", f"{entry}: ")) for row in elsewhere[1])


def test_unplanned_keys_of_a_corpus_are_listed_once() -> None:
    sources = {"corpus.sources": '[{ name = "own", paths = ["x"] }]', "corpus.dedup.bands": "10"}
    assert [row.partition(":")[0] for row in tables(sources).goal.unplanned] == ["corpus"]


def test_unplanned_keys_are_equal_in_json_and_page() -> None:
    one = tables({"train.dropout.hidden": "0.1", "tokens.document_mask": "true"})
    rows = plan_result.to_dict(one)["not_in_the_plan"]
    assert [row.partition(" = ")[0] for row in rows] == ["tokens.document_mask", "train.dropout.hidden"]
    assert plan_rows(one)["not in the plan"] == "\n".join(rows)
    assert rows[0] in render(one, name="mine")


def test_checkpoints_of_a_plan_follow_the_recipe() -> None:
    plain, often = tables({}), tables({"checkpoint.every": "2"})
    assert often.running.every == 2 < plain.running.every and often.running.saves > plain.running.saves
    waits = tables({"checkpoint.asynchronous": "false"})
    assert waits.save.stall == waits.save.write > plain.save.stall


def test_a_plan_of_this_machine_lists_cluster_keys_as_unplanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe_text(tmp_path), encoding="utf-8")
    overrides = ("--set", "cluster.inter_bandwidth=3", "--set", "cluster.framework=fsdp")
    assert run_command(["plan", "--json", str(recipe), *overrides]) == 0
    rows = json.loads(capsys.readouterr().out)["not_in_the_plan"]
    assert [row.partition(" = ")[0] for row in rows] == ["cluster.inter_bandwidth", "cluster.framework"]


ASKED = {
    "--model": "llama-2-7b",
    "--tokens": "1T",
    "--gpus": "64xH100",
    "--dp": "32",
    "--tp": "2",
    "--micro-batch": "1",
}
OPEN: dict[str, str | None] = {"--tp": None, "--dp": None}
SIZED = {"--model": None, "--tokens": None, "--gpus": "8xH100"} | OPEN
# For each option of `bessemer plan`: the options it needs (None removes one) and its value; the others are flags.
OPTIONS: dict[str, tuple[dict[str, str | None], str | None]] = {
    "--catalogue": ({"--gpus": "64xZ9"}, "OWN"), "--gpus": ({}, "64xA100"), "--price": ({}, "9"),
    "--framework": ({}, "megatron-core"), "--model": ({}, "llama-3-8b"),
    "--params": ({"--model": None} | OPEN, "1B"), "--tokens": ({}, "2T"), "--seq": ({}, "2048"),
    "--batch": ({}, "1M"), "--precision": ({}, "fp8"), "--recompute": ({}, "full"), "--micro-batch": ({}, "2"),
    "--flops": (SIZED, "1e22"), "--days": (SIZED, "2"),
    "--money": (SIZED, "900"), "--dp": ({"--tp": None}, "16"), "--tp": ({"--dp": None}, "4"),
    "--pp": ({"--dp": None}, "2"), "--cp": ({"--dp": None}, "2"),
    "--ep": ({"--model": "mixtral-8x7b", "--tp": None}, "4"), "--zero": ({}, "3"), "--html": ({}, "PAGE"),
    "--search": ({}, None), "--devices": ({}, None),
    "--set": ({}, "train.ema=0.9"),
}  # fmt: skip
OTHER_QUESTIONS = ("--devices",)


def test_every_option_changes_the_plan_or_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(each for each in COMMANDS if each.name == "plan")
    every = (*command.options, *(one for group in command.groups.values() for one in group))
    assert {name for name, _ in every if name.startswith("--")} == {*OPTIONS, "--trust-code"}
    entry = CATALOGUE.read_text(encoding="utf-8").partition("[[device]]")[2].partition("[[device]]")[0]
    (tmp_path / "OWN").write_text(
        '[[device]]\nname = "Z9"\n' + entry.partition("\n")[2].partition("\n")[2], encoding="utf-8"
    )

    @cache
    def answer(*words: str) -> tuple[int, object]:
        return run_command(["plan", *words]), capsys.readouterr()

    for name, (needed, value) in OPTIONS.items():
        settings = {key: text for key, text in (ASKED | needed).items() if text is not None and key != name}
        own = value if value not in ("OWN", "PAGE") else str(tmp_path / value)
        without, with_it = (
            answer(*(word for pair in (settings | more).items() for word in pair if word is not None))
            for more in ({}, {name: own})
        )
        assert without != with_it, name
        assert with_it[0] == (2 if name in OTHER_QUESTIONS else 0), (name, with_it)
    assert "<html" in (tmp_path / "PAGE").read_text(encoding="utf-8")
