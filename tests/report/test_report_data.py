"""Reading a run directory that is unfinished or damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from bessemer.common.errors import InputError
from bessemer.report import comparison, curves, data, page, summary
from bessemer.report.log_gaps import missing_lines
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines, write_json
from tests.report.conftest import MakeRun, valid_plotly


def test_a_damaged_metrics_line_is_skipped(make_run: MakeRun) -> None:
    run = make_run(steps=40)
    whole = len(data.read(run).train)
    lines = run.metrics.read_text().splitlines()
    broken = next(index for index, line in enumerate(lines) if '"train", "step": 8,' in line)
    lines[broken] = lines[broken][:40]
    lines.insert(5, '["not an object"]')
    run.metrics.write_text("\n".join(lines) + "\n")
    read = data.read(run)
    assert len(read.train) == whole - 1
    assert any("2 damaged lines" in note for note in read.notes)


def test_a_step_trained_twice_counts_once(make_run: MakeRun) -> None:
    run = make_run(steps=40)
    again = {"kind": "train", "step": 7, "tokens": 1, "loss": 99.0}
    with open(run.metrics, "a") as file:
        file.write(json.dumps(again) + "\n")
    train = data.read(run).train
    assert len(train) == 40
    assert train.columns["loss"][6] == 99.0
    assert list(train.step) == sorted(train.step)


def test_a_source_that_starts_late_has_gaps_before(make_run: MakeRun) -> None:
    run = make_run(steps=4)
    with open(run.metrics, "a") as file:
        file.write(json.dumps({"kind": "train", "step": 5, "loss": 1.0, "loss_by_source": {"late": 2.0}}) + "\n")
    late = data.read(run).train.groups["loss_by_source"]["late"]
    assert [value == value for value in late] == [False] * 4 + [True]


@pytest.mark.parametrize("name", ["plan.json", "corpus/statistics.json", "evaluation.json", "recipe.toml"])
def test_a_damaged_file_is_a_note(make_run: MakeRun, name: str) -> None:
    run = make_run(steps=10)
    (run.path / name).write_text("{ torn")
    assert any(name in note for note in data.read(run).notes)


def test_scores_of_steps_beyond_the_metrics_are_left_out(make_run: MakeRun) -> None:
    """An early step of a partly copied folder must not get the final score."""
    run = make_run(steps=300)
    last = data.read(run)
    assert last.evaluation and not any("metrics.jsonl ends" in note for note in last.notes)
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= 100))
    found = data.read(run)
    assert not found.evaluation
    assert any("metrics.jsonl ends before step 300 of evaluation.json" in note for note in found.notes)


def test_a_truncated_recipe_is_a_note(make_run: MakeRun) -> None:
    run = make_run(steps=10)
    run.recipe.write_text(run.recipe.read_text().replace("export = {}\n", ""))
    found = data.read(run)
    assert any("recipe.toml is damaged or cut" in note for note in found.notes)
    assert set(found.recipe) == {"run"} and found.name == "forge"


@pytest.mark.parametrize(
    "value", ["[]", "null", "3", '{"sources": 3, "parameters": [], "totals": null, "memory_bytes": "x"}']
)
def test_files_of_another_structure_are_no_error(make_run: MakeRun, value: str) -> None:
    run = make_run(steps=10)
    for path in run.path.rglob("*.json"):
        path.write_text(value)
    assert page.write(run).exists()


def test_reporting_on_an_empty_or_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bessemer run RECIPE"):
        page.write(RunDirectory(tmp_path))
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="absent"):
        data.read(RunDirectory(tmp_path / "absent"))


def test_a_model_that_learned_nothing_is_described(make_run: MakeRun) -> None:
    run = make_run()
    found = data.read(run)
    assert summary.learned_nothing(found) == ""
    guess = np.log(found.manifest["tokenizer"]["vocabulary"])
    for loss, trained, says in (
        (0.96, 0.95, ""), (0.98, 0.95, "The model has learned nothing"),
        (1.1, 0.5, "The held-out text is unlike the text that it was trained on"),
    ):  # fmt: skip
        found.validation.columns["loss"][:] = loss * guess
        found.train.columns["loss"] = np.full(len(found.train), trained * guess)
        assert summary.learned_nothing(found).lower().startswith(says.lower()) and says in summary.headline(found)
        assert bool(summary.learned_nothing(found)) == bool(says)
    with open(run.metrics, "a") as file:  # learned and lost it
        file.write(json.dumps({"kind": "validation", "step": 1200, "loss": 1.1 * guess}) + "\n")
    assert summary.learned_nothing(data.read(run)) == ""


def test_an_alert_url_is_not_on_the_page(make_run: MakeRun) -> None:
    run = make_run()
    text = run.recipe.read_text().replace("[report]", "", 1)
    run.recipe.write_text(text + '\n[report]\nwebhook = "https://hooks.example.com/services/T0/secret"\n')
    found = data.read(run)
    assert found.recipe["report"]["webhook"] == "***"
    assert "secret" not in found.recipe_text and "secret" not in page.render(found)
    run.recipe.write_text(run.recipe.read_text().replace("export = {}\n", ""))  # cut
    assert "secret" not in data.read(run).recipe_text


def test_scores_on_different_texts_are_not_ranked(make_run: MakeRun, tmp_path: Path) -> None:
    one, other = (data.read(make_run(folder=tmp_path / name)) for name in ("one", "other"))
    assert "one and other are equal on their held-out text" in comparison.headline({"one": one, "other": other})
    source = next(iter(other.manifest["sources"].values()))
    source["heldout"]["bytes"] += 1
    folder = make_run(folder=tmp_path / "third")
    (folder.tokens / "manifest.json").unlink()
    for rival in (other, data.read(folder)):
        said = comparison.headline({"one": one, "other": rival})
        assert said.endswith("so these do not compare.") and "ahead" not in said


def test_a_truncated_time_log_is_noted(make_run: MakeRun) -> None:
    run = make_run(steps=20)
    row = {"began": 0.0, "at": 10.0, "from": 0, "step": 20, "redone_steps": 0, "steps": 5.0}
    run.times.write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'at': 12.0})}\n")
    assert data.read(run).notes == []
    run.times.write_bytes(run.times.read_bytes()[:-20])
    run.incidents.write_text('{"kind": "rollback", "st\n{"step": 5, "what": "spike"}\n')
    assert ["time.jsonl and incidents.jsonl damaged or cut" in note for note in data.read(run).notes] == [True]


@pytest.mark.parametrize(
    ("logged", "step", "log_every", "says"),
    [
        (range(1, 51), 50, 1, ""),
        (range(1, 51), 60, 1, "the lines of steps 51 to 60 are missing"),
        ([*range(1, 20), *range(21, 51)], 50, 1, "the lines of step 20 are missing"),
        ([*range(1, 10), *range(20, 30), *range(40, 51)], 50, 1, "steps 10 to 19 are missing, and 1 other gap"),
        ([10, 20, 30, 50, 60, 70], 70, 10, "the lines of steps 31 to 49 are missing"),
        ([*range(1, 20), *range(20, 101, 10)], 105, 10, ""),  # another interval from step 20 on
        ([10, 20, 30, 40, *range(41, 60)], 59, 1, ""),
        ([*range(1, 33), 40, 50, 60], 60, 10, ""),
        ([10], 16, 10, ""),  # few lines: after an immediate stop, or a checkpoint between two
        ([], 6, 7, ""),
        ([7], 16, 7, "the lines of steps 8 to 16 are missing"),
        ([7, 14, 20, 21, 28], 30, 7, ""),  # 20 was once the last step
        ([], 12, 10, "the lines of steps 1 to 12 are missing"),
        ([], 0, 1, ""),
    ],
)
def test_steps_without_a_line_are_found_at_any_interval(
    logged: list[int], step: int, log_every: int, says: str
) -> None:
    found = missing_lines(logged, step, log_every)
    assert (says in found) and bool(says) == bool(found)


def test_thinning_keeps_ends_and_extremes() -> None:
    x = np.arange(1, 1_000_001, dtype=np.float64)
    y = np.random.default_rng(0).normal(size=len(x))
    y[123_456], y[987_654] = 40.0, -40.0
    kept_x, kept_y = curves.thin(x, y, 2000)
    assert 1000 < len(kept_x) <= 2000
    assert (kept_x[0], kept_x[-1]) == (1.0, 1_000_000.0)
    assert (kept_y[0], kept_y[-1]) == (y[0], y[-1])
    assert (kept_y.max(), kept_x[kept_y.argmax()]) == (40.0, 123_457.0)
    assert (kept_y.min(), kept_x[kept_y.argmin()]) == (-40.0, 987_655.0)
    assert np.all(np.diff(kept_x) > 0)


@pytest.mark.parametrize("points", [1, 2, 3, 1999, 2000, 2001, 5000])
def test_thinning_works_for_any_length(points: int) -> None:
    x = np.arange(points, dtype=np.float64)
    kept_x, kept_y = curves.thin(x, x**2, 2000)
    assert len(kept_x) <= 2000
    assert (kept_x[0], kept_x[-1], kept_y[-1]) == (0.0, points - 1.0, (points - 1.0) ** 2)


def test_smoothing_is_centred_and_skips_gaps() -> None:
    line = np.arange(200.0)
    assert np.allclose(curves.smooth(line, 21)[:180], line[:180])
    line[50] = np.nan
    assert np.isfinite(curves.smooth(line, 21)).all()
    spike = np.zeros(101)
    spike[50] = 1.0
    smoothed = curves.smooth(spike, 21)
    assert smoothed.argmax() == 50
    assert np.allclose(smoothed[40:50], smoothed[60:50:-1])


def test_figures_are_valid_plotly_without_nan(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows[10:20]:
        row["loss"] = row["grad_norm"] = None
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = curves.curves(data.read(run))
    assert {"loss", "bits"} <= {figure["id"] for figure in figures}
    for figure in figures:
        assert json.dumps(figure, allow_nan=False)
        valid_plotly(figure)


def test_baselines_are_lines_and_missing_ones_have_advice(make_run: MakeRun) -> None:
    run = make_run(steps=60)
    both = next(figure for figure in curves.curves(data.read(run)) if figure["id"] == "bits")
    levels = {trace["name"]: trace["y"][0] for trace in both["traces"][-2:]}
    assert levels == {"a byte 5-gram": 2.042, "PPMd order 10": 1.402} and "pip install" not in both["note"]
    run.evaluation.write_text(json.dumps({**json.loads(run.evaluation.read_text()), "ppmd": None}))
    one = next(figure for figure in curves.curves(data.read(run)) if figure["id"] == "bits")
    assert one["traces"][-1]["name"] == "a byte 5-gram" and "pip install 'bessemer[ppmd]'" in one["note"]


def test_a_long_run_makes_a_small_page() -> None:
    steps = np.arange(1, 300_001, dtype=np.float64)
    values = np.random.default_rng(0).normal(size=len(steps))
    names = "loss grad_norm learning_rate tokens_per_second step_seconds data_wait memory_bytes mfu".split()  # noqa: SIM905
    columns = {**dict.fromkeys(names, values), "tokens": steps}
    long = data.RunData("long", train=data.Curves(steps, columns, {"loss_by_source": {"a": values, "b": values}}))
    assert len(json.dumps(curves.curves(long))) < 1_000_000


def test_the_load_of_experts_is_drawn_for_a_mixture_only(make_run: MakeRun) -> None:
    """The heat map over the steps keeps the largest value of each column."""
    run = make_run()
    ids = {figure["id"] for figure in curves.curves(data.read(run))}
    assert not any(name.startswith("experts") for name in ids) and "balance" not in ids
    rows = read_json_lines(run.metrics)
    for row in rows:
        if row["kind"] == "train":
            row["max_violation"] = {"1": 7.0 if row["step"] == 601 else 0.5, "2": 0.25}
            row |= {"dead_experts": {"1": 1, "2": 2}, "hot_experts": {"1": 0, "2": 3}, "auxiliary_loss": 0.01}
            row["expert_load"] = {"1": "00102030", **({"2": "10101010"} if row["step"] > 5 else {})}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = {"balance": "bias", "router_z_loss": 0.001}
    write_json(run.plan, {"model_size": "8M parameters, 4M active (4 experts, 2 per token)", "model_config": mixture})
    found = {figure["id"]: figure for figure in curves.curves(data.read(run))}
    assert json.loads(json.dumps(list(found.values()), allow_nan=False))
    assert found["balance"]["title"] == "Router z-loss" and "(4 experts, 2 per token)" in summary.headline(
        data.read(run)
    )
    largest, loads = (found[f"experts-{name}"]["traces"][0] for name in ("largest", "load"))
    assert (largest["y"], len(largest["x"]), largest["x"][-1]) == ([1, 2], 240, 1200)
    assert sorted(largest["z"][0])[-2:] == [1.5, 8.0] and set(largest["z"][1]) == {1.25}
    assert (loads["x"], loads["y"], loads["z"]) == ([0, 1, 2, 3], [1, 2], [[0, 1, 2, 3], [1, 1, 1, 1]])
    assert [trace["y"][-1] for trace in found["experts-unbalanced"]["traces"]] == [3, 3]
    assert data.read(run).train.texts["expert_load.2"] == [None] * 5 + ["10101010"] * 1195
    for figure in found.values():
        valid_plotly(figure)


def test_every_statistic_of_the_layers_becomes_a_figure(tmp_path: Path) -> None:
    """Blocks in order, six of twelve; the largest logit of any block; groups of weights by kind, the mean over blocks."""
    run = RunDirectory(tmp_path)
    rows = [
        {
            "kind": "inside", "step": step,
            "activation_rms": {str(block): 1.0 + block for block in range(12)},
            "attention_logit_max": {str(block): float(step + block % 7) for block in range(12)},
            "router_entropy": {str(block): 0.5 * block for block in range(2)},
            "update_ratio": {**{f"{block}.mlp": 1e-3 * (block + 1) for block in range(12)}, "head": 5e-3},
        }
        for step in (50, 100)
    ]  # fmt: skip
    run.recipe.write_text("[run]\n")
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {figure["id"]: figure for figure in curves.curves(data.read(run))}
    activations, logits, updates = (found[name]["traces"] for name in ("activations", "logits", "updates"))
    assert [trace["name"] for trace in activations] == [f"block {number}" for number in (0, 2, 4, 7, 9, 11)]
    assert [trace["y"][0] for trace in activations] == [1, 3, 5, 8, 10, 12]
    assert found["activations"]["note"] == "6 of 12 blocks."
    assert (logits[0]["x"], logits[0]["y"]) == ([50, 100], [56, 106])
    assert {trace["name"]: trace["y"][-1] for trace in updates} == {
        "mlp": 0.0065, "head": 0.005, "usual with Adam": 0.001,
    }  # fmt: skip
    entropy = found["layers-router_entropy"]
    assert entropy["title"] == "Router entropy"
    assert {trace["name"]: trace["y"] for trace in entropy["traces"]} == {"block 0": [0, 0], "block 1": [0.5, 0.5]}
