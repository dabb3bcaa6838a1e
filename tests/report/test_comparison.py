"""Runs side by side."""

import json
from pathlib import Path

from bessemer.report import comparison
from bessemer.report import data as run_data
from bessemer.report.curves import curves
from bessemer.run.directory import RunDirectory
from tests.report.conftest import MakeRun


def read(runs: list[RunDirectory]) -> dict[str, run_data.RunData]:
    return {run.path.name: run_data.read(run) for run in runs}


def test_runs_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run(steps=300), make_run(steps=200, folder=tmp_path / "b", seed=1)
    second.recipe.write_text(
        second.recipe.read_text().replace('"forge"', '"anvil"').replace("clip_norm = 1.0", "clip_norm = 0.5")
    )
    runs = {"forge": run_data.read(first), "anvil": run_data.read(second)}
    columns, rows = comparison.differences(runs)
    assert (columns, rows) == (["Key", "forge", "anvil"], [["train.optimizer.clip_norm", "1", "0.5"]])
    outcome = {row[0]: row[1:] for row in comparison.results(runs)[1]}
    assert outcome["Steps"] == ["300", "200"]
    page = comparison.write(tmp_path / "comparison.html", [first, second]).read_text()
    assert "train.optimizer.clip_norm" in page
    figures = comparison.overlay_figures(runs)
    assert all(len(figure["traces"]) == 2 for figure in figures)


def test_a_source_of_one_run_alone_differs_by_what_is_not_default(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    text = runs[1].recipe.read_text()
    source = (
        '[[corpus.sources]]\nname = "extra"\nformat = "jsonl"\ntext_key = "text"\npaths = ["more"]\nanonymous = false\n'
    )
    runs[1].recipe.write_text(text + source)
    for run, scores in zip(runs, ({"prose": 2.0}, {"prose": 1.9, "extra": 3.0}), strict=True):
        found = {"bits_per_byte": 2.0, "bits_per_byte_by_source": scores, "ngram": {"order": 5, "bits_per_byte": 2.5}}
        found["ppmd"] = {"order": 10, "bits_per_byte": 1.5}
        run.evaluation.write_text(json.dumps(found))
    named = read(runs)
    rows = {row[0]: row[1:] for row in comparison.differences(named)[1]}
    more = {"name": "extra", "format": "jsonl", "paths": '["more"]'}
    assert rows == {f"corpus.sources[extra].{key}": ["–", value] for key, value in more.items()}
    outcome = {row[0]: row[1:] for row in comparison.results(named)[1]}
    assert outcome["Held-out bits per byte of prose"] == ["2.0000", "1.9000"]
    assert outcome["Held-out bits per byte of extra"] == ["–", "3.0000"]
    assert outcome["Bits per byte of a byte 5-gram on the same text"] == ["2.5000", "2.5000"]
    assert outcome["Bits per byte of PPMd order 10 on the same text"] == ["1.5000", "1.5000"]


def test_runs_of_one_name_are_named_by_their_folders(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5), make_run(steps=5, folder=tmp_path / "b")]
    named = comparison.name_runs([run_data.read(run) for run in runs], [run.path for run in runs])
    assert list(named) == [str(run.path) for run in runs]
    assert comparison.differences(named)[1] == []


def test_scores_of_other_data_are_other_rows(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    for run, data, items in zip(runs, ("x.jsonl", "y.jsonl"), (8, 1), strict=True):
        tasks = [
            {
                "name": name,
                "items": items,
                "data": f"data/{data}",
                "content": content,
                "scores": {"acc": {"value": 1 / items} | ({"low": 0.0, "high": 0.5} if items == 8 else {})},
            }
            for name, content in (("quiz", data), ("same", "equal"))
        ]
        found = json.loads(run.evaluation.read_text()) if run.evaluation.exists() else {}
        run.evaluation.write_text(json.dumps({**found, "tasks": tasks}))
    outcome = {row[0]: row[1:] for row in comparison.results(read(runs))[1]}
    assert outcome["quiz of x.jsonl (8 items), acc"] == ["0.1250 (0.0000 to 0.5000)", "–"]
    assert outcome["quiz of y.jsonl (1 item), acc"] == ["–", "1.0000"]
    assert outcome["same, acc"] == ["0.1250 (0.0000 to 0.5000)", "1.0000"]


def test_losses_of_different_objectives_are_in_no_common_figure_or_row(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    runs[1].recipe.write_text(runs[1].recipe.read_text().replace("[train]\n", '[train]\nobjective = "masked"\n'))
    named = read(runs)
    assert named["b"].objective == "masked"
    figures = {figure["id"]: figure for figure in comparison.overlay_figures(named)}
    for id, name, unit in (("loss", "a", "nats per token"), ("loss-2", "b", "nats per hidden token")):
        assert [trace["name"] for trace in figures[id]["traces"]] == [name]
        assert figures[id]["layout"]["yaxis"]["title"]["text"] == unit
    rows = {row[0]: row[1:] for row in comparison.results(named)[1]}
    assert rows["Training loss, the last, nats per token"][1] == "–"
    assert rows["Training loss, the last, nats per hidden token"][0] == "–"


def test_scores_of_other_data_are_another_curve(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=20, folder=tmp_path / name) for name in "ab"]
    for run, later in zip(runs, (7, 8), strict=True):
        with open(run.metrics, "a") as file:
            for step, content in ((5, 7), (10, 7), (15, later), (20, later)):
                row = {"kind": "tasks", "step": step, "content": {"quiz": content}, "acc": {"quiz": step / 20}}
                file.write(json.dumps(row) + "\n")
    same, changed = (run_data.read(run) for run in runs)

    def shown(data: run_data.RunData) -> dict[str, list[float]]:
        figure = next(one for one in curves(data) if one["id"] == "tasks-acc")
        return {trace["name"]: list(trace["x"]) for trace in figure["traces"]}

    assert shown(same) == {"quiz": [5, 10, 15, 20]}
    assert shown(changed) == {"quiz, as it was up to step 10": [5, 10], "quiz": [15, 20]}
    ids = [figure["id"] for figure in comparison.overlay_figures({"a": same, "b": same})]
    assert "tasks-acc-quiz" in ids
    assert "tasks-acc-quiz" not in [figure["id"] for figure in comparison.overlay_figures({"a": same, "b": changed})]


def test_a_recipe_that_cannot_be_read_is_named_and_differs_in_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "abc"]
    runs[1].recipe.write_text(runs[1].recipe.read_text().replace("clip_norm = 1.0", "clip_norm = 0.5"))
    runs[2].recipe.write_text("[run")
    unread = ["recipe.toml", "read", "read", "cannot be read"]
    found = comparison.differences(read(runs))[1]
    assert found == [unread, ["train.optimizer.clip_norm", "1", "0.5", "?"]]
