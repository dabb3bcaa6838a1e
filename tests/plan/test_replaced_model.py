"""A recipe with --model or --params: the command line wins over the model, the model over the recipe's [model], and the recipe's
sequences stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bessemer.chosen_layout import planned
from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.plan import ask, outcome, unplanned
from bessemer.plan.request import PlanRequest
from bessemer.recipe import Recipe, keys, parse
from tests.plan.test_unplanned import EXAMPLES, LEAVES, example

RECIPE = """
[model]
layers = 32
width = 4096
heads = 12
head_dim = 64
vocabulary = 50257
window = 256
rope_theta = 5000.0
[tokens]
sequence_length = 2048
[train]
global_batch_tokens = 524288
tokens = 1000000000
[parallel]
auto = true
replicate = 1
shard = 4
tensor = 2
[cluster]
device = "H100"
devices = 8
"""
ALONE = {"gpus": "8xH100", "batch": "524288", "tokens": "1000000000", "dp": "4", "tp": "2"}
SET = ("tokens.sequence_length=2048", "parallel.auto=true")
# Other values than those that a Llama has; a family is refused.
OWN_EXAMPLES = {
    "model.qk_norm": ({}, '"head"'),
    "model.family": ({}, '"gpt2"'),
    "model.global_last": ({"model.window": "256", "model.global_every": "7"}, "true"),
}


def read(overrides: Sequence[str], is_draft: bool) -> Recipe:
    return parse(RECIPE, "mine.toml", overrides, name="mine", is_draft=is_draft)


def requested(model: dict[str, str], overrides: tuple[str, ...], *, of_recipe: bool) -> PlanRequest:
    if of_recipe:
        return ask.of_recipe(read, model, overrides)
    return ask.alone({**ALONE, **model}, (*SET, *overrides))


@cache
def figures(
    model: tuple[str, str], overrides: tuple[str, ...], of_recipe: bool
) -> tuple[dict[str, Any], list[str]] | None:
    """What a plan comes to but for its notes, and what it names as not in it; None: it is refused."""
    try:
        found = outcome.to_dict(planned(requested(dict([model]), overrides, of_recipe=of_recipe)))
    except InputError:
        return None
    named = found.pop("not_in_the_plan")
    return {name: value for name, value in found.items() if name not in ("notes", "replicas")}, named


@pytest.mark.parametrize("model", [("model", "llama-3-8b"), ("params", "7B")], ids="=".join)
@pytest.mark.parametrize("key", [key for key in LEAVES if key.startswith(("model.", "tokens."))])
def test_a_key_that_is_set_is_as_without_a_recipe(key: str, model: tuple[str, str]) -> None:
    needed, value = (EXAMPLES | OWN_EXAMPLES).get(key, ({}, example(keys()[key])))
    before = tuple(f"{name}={text}" for name, text in needed.items() if text)
    alone, found = (figures(model, (*before, f"{key}={value}"), of_recipe) for of_recipe in (False, True))
    assert found == alone
    assert figures(model, (), True) is not None
    table, entry = unplanned.effects(), unplanned.entry_of(key)
    if found is not None and entry in table["planned"]:
        assert found != figures(model, before, True)


def test_the_dimensions_of_the_command_line_need_not_go_with_those_of_the_recipe() -> None:
    """The recipe's 12 heads have no 8 pairs of keys and values; those of Llama 3 8B have."""
    found = ask.of_recipe(read, {"model": "llama-3-8b"}, ("model.kv_heads=16", "model.layers=16"))
    assert found.model is not None and (found.model.kv_heads, found.model.layers, found.model.heads) == (16, 16, 32)
    with pytest.raises(InputError, match=r"^model.family: --model and --params have a block of their own"):
        ask.of_recipe(read, {"model": "llama-3-8b"}, ("model.family=gpt2",))


REPLACED = (
    "the model is {} in place of the recipe's [model] (layers, width, heads, head_dim, vocabulary, window, rope_theta)"
)


@pytest.mark.parametrize(
    ("words", "what_if", "length", "layers", "notes"),
    [
        ((), "model=llama-3-8b", 2048, 32, [f"{REPLACED.format('llama-3-8b')}, with the recipe's sequences of 2,048"]),
        ((), "params=7B", 2048, 30, [f"{REPLACED.format('7B by rule')}, with the recipe's sequences of 2,048"]),
        (("--seq", "1024"), "model=llama-3-8b", 1024, 32, [REPLACED.format("llama-3-8b")]),
        (("--set", "tokens.sequence_length=1024"), "model=llama-3-8b", 1024, 32, [REPLACED.format("llama-3-8b")]),
        ((), "model=llama-3-8b,seq=4096", 4096, 32, [REPLACED.format("llama-3-8b")]),
        (
            ("--set", "model.layers=16"), "model=llama-3-8b", 2048, 16,
            [f"{REPLACED.format('llama-3-8b').replace('layers, ', '')}, with the recipe's sequences of 2,048",
             "model.layers of the command line stays"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_what_if_of_another_model_keeps_what_is_set(
    words: tuple[str, ...], what_if: str, length: int, layers: int, notes: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    assert run_command(["plan", "--json", str(path), *words, "--what-if", what_if]) == 0
    changed = json.loads(capsys.readouterr().out)["what_if"][0]
    assert changed["notes"][: len(notes)] == notes
    options = [word for part in what_if.split(",") for word in (f"--{part.split('=')[0]}", part.split("=")[1])]
    assert run_command(["plan", "--json", str(path), *words, *options]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert {**changed, "changes": 0, "notes": 0} == {**asked, "changes": 0, "notes": 0}, "the same by options"
    request = ask.with_changes(
        ask.of_recipe(read, {}, [f"tokens.sequence_length={words[1]}"] if words[:1] == ("--seq",) else words[1:]),
        dict(part.split("=") for part in what_if.split(",")),
    )
    assert request.model is not None and (request.model.sequence_length, request.model.layers) == (length, layers)


def test_a_what_if_of_another_model_names_its_own_sequences() -> None:
    plain = ask.alone({**ALONE, "model": "llama-2-7b"})
    changed = ask.with_changes(plain, {"model": "llama-3-8b"})
    assert changed.recipe.tokens.sequence_length == 8192
    assert changed.notes == ("sequences of 8,192, as llama-3-8b has them, in place of 4,096",)
    set_to = ask.with_changes(ask.alone({**ALONE, "model": "llama-2-7b", "seq": "2048"}), {"model": "gpt2-xl"})
    assert set_to.model == ask.alone({**ALONE, "model": "gpt2-xl"}, ("tokens.sequence_length=2048",)).model
    assert set_to.model is not None and set_to.model.sequence_length == 2048
