"""The statistics, the ledger and the verdict of paired trainings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bessemer.common.errors import InputError
from bessemer.ladder import paired
from bessemer.recipe import load, parse
from bessemer.tokens.shards import TokenStore

A, B = [1.452, 1.448, 1.455, 1.449, 1.453], [1.431, 1.434, 1.440, 1.425, 1.436]


def side(name: str, scores: list[float], **budget: Any) -> dict[str, Any]:
    numbers = {"seconds": 60.0, "minutes": None, "steps": 100, "tokens": 10_000, "parameters": 1000, "model_size": "1k"}
    return {"name": name, "recipe": f"{name}.toml", "scores": scores, **numbers, **budget}


def judge(folder: Path, a: dict[str, Any], b: dict[str, Any], **how: bool) -> dict[str, Any]:
    return paired.judge(folder, a, b, **{"same_order": True, **how})


def test_a_key_set_to_its_default_changes_the_digest() -> None:
    """A key that is not set may get a derived value, such as Muon for the optimizer."""
    text = '[run]\nname = "x"\n[[corpus.sources]]\npaths = ["text"]\nname = "a"\nformat = "text"\n'
    default, given, other_name = (
        paired.identity(parse(part, "x"))
        for part in (text, text + '[train.optimizer]\nkind = "adamw"\n', text.replace('"x"', '"y"'))
    )
    assert paired.digest_of(default) == paired.digest_of(other_name) != paired.digest_of(given)


def test_the_interval_equals_that_of_a_paired_t_test() -> None:
    differences = np.subtract(B, A)
    found, test = paired.summarize(differences.tolist()), stats.ttest_rel(B, A)
    low, high = test.confidence_interval(0.95)
    assert found == pytest.approx({"mean": differences.mean(), "low": low, "high": high, "p": test.pvalue})
    assert paired.summarize([0.0, 0.0]) == {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    assert paired.summarize([0.5]) == {"mean": 0.5, "low": None, "high": None, "p": None}


def test_the_seeds_needed_are_the_first_that_decide() -> None:
    differences, error = [-0.01, 0.002, -0.012, 0.004], 0.02

    def p_value(count: int) -> float:
        """Return the p-value of `count` differences with the same mean and spread."""
        shape = stats.zscore(np.arange(count), ddof=1)
        return float(paired.summarize(np.mean(differences) + shape * np.std(differences, ddof=1))["p"])

    needed = paired.seeds_needed(differences, error)
    assert needed is not None and p_value(needed) < error < p_value(needed - 1)
    assert paired.seeds_needed([0.1, -0.1], error) is None


def test_the_ledger_corrects_for_looks_and_comparisons_of_a_baseline(tmp_path: Path) -> None:
    assert sum(map(paired.level, range(1, 10_000))) < paired.ERROR
    looks = [
        judge(tmp_path, side("a", A[:count]), side("b", B[:count]))["look"] for count in (1, 3, 4, 4)
    ]  # one pair decides nothing, and the same data again is the same look
    assert looks == [0, 1, 2, 2]
    assert judge(tmp_path, side("a", A), side("c", B))["look"] == 3, "another rival of the baseline"
    assert judge(tmp_path, side("b", B), side("a", A))["look"] == 3, "b took part in two"
    assert judge(tmp_path, side("new-a", A), side("b", B))["look"] == 3, "the sides swapped, and another name"
    assert judge(tmp_path, side("d", A), side("e", B))["look"] == 1, "another baseline"
    ledger = tmp_path / "comparisons.jsonl"
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [len(row["differences"]) for row in rows] == [1, 3, 4, 5, 5, 5]
    with ledger.open("a") as file:
        file.write('{"a": ')
    with pytest.raises(InputError):
        judge(tmp_path, side("a", A[:2]), side("b", B[:2]))


def test_a_verdict_needs_a_p_value_below_the_level_of_its_look(tmp_path: Path) -> None:
    found = judge(tmp_path, side("a", A), side("b", B))
    assert found["better"] == "B" and found["p"] < found["level"] and found["seeds_needed"] is None
    assert judge(tmp_path, side("b2", B), side("a2", A))["better"] == "A"
    noise = [1.4531, 1.4462, 1.4519]
    found = judge(tmp_path, side("x", A[:3]), side("y", noise))
    assert found["better"] is None and found["low"] < 0 < found["high"] and found["seeds_needed"] > 3
    assert "more seeds" in found["answers"]
    alone = judge(tmp_path, side("f", A[:1]), side("g", B[:1]))
    assert alone["better"] is None and alone["low"] is None and alone["level"] is None
    assert "more seeds" not in alone["answers"]


def test_what_the_numbers_cannot_say_is_named(tmp_path: Path) -> None:
    found = judge(tmp_path, side("a", A), side("b", B, steps=200, tokens=20_000), same_order=False)
    assert {"budgets", "order"} <= found["answers"].keys()
    assert not {"budgets", "order"} & judge(tmp_path, side("a", A), side("b", B))["answers"].keys()
    table = paired.table(found)
    assert all(text in table for text in ("seed 5", "a.toml", *found["answers"].values()))


def test_recipes_compare_only_on_the_same_text(prepared: Path) -> None:
    recipe, store = load(prepared / "small.toml"), TokenStore.open(prepared / "runs" / "small" / "tokens")
    longer = recipe.changed(tokens={"sequence_length": 64})
    assert paired.trial(recipe.changed(train={"steps": 9, "minutes": 1.0}), prepared, "a", 2).train.steps is None
    assert paired.require_comparable([(recipe, store), (recipe.changed(model={"width": 64}), store)])
    assert not paired.require_comparable([(recipe, store), (longer, store)]), "other samples of the same text"
    tokenizer = {**store.manifest["tokenizer"], "counts_bytes": False}
    for other in (
        (recipe.changed(train={"objective": "classify"}), store),
        (recipe, TokenStore(store.folder, {**store.manifest, "tokenizer": tokenizer})),
        (
            recipe,
            TokenStore(store.folder, {**store.manifest, "sources": {"prose": store.manifest["sources"]["prose"]}}),
        ),
    ):
        with pytest.raises(InputError):
            paired.require_comparable([(recipe, store), other])
